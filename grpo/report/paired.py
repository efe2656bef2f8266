"""The mean difference of paired numbers, with its interval by Student's t."""

import math
import statistics

import numpy as np

PIECES = 10**5  # of the integral; the quantile is then exact to seven digits


def paired(after_a, after_b, level=0.95):
    """Returns the mean of A - B over the pairs, and the ends of its interval, which are None for a single pair.

    after_a, after_b: a number for each seed, in the same order of seeds
    level: the probability that the interval contains the true mean, if the differences are normal. For all of k
        comparisons together: 1 - .05 / k (Bonferroni)
    """
    differences = [a - b for a, b in zip(after_a, after_b, strict=True)]
    mean = statistics.fmean(differences)
    pairs = len(differences)
    if pairs == 1:
        return mean, None, None
    error = statistics.stdev(differences) / math.sqrt(pairs)
    reach = student_quantile(level, pairs - 1) * error
    return mean, mean - reach, mean + reach


def student_quantile(level, freedom):
    """Returns the t for which Student's t lies between -t and t with probability `level`.

    With t = sqrt(freedom) * tan(angle), the density of the angle is proportional to cos(angle) ** (freedom - 1).
    freedom: the degrees of freedom
    """
    edges = np.linspace(0, math.pi / 2, PIECES + 1)
    middles = (edges[1:] + edges[:-1]) / 2
    shares = np.cumsum(np.cos(middles) ** (freedom - 1))
    angle = np.interp(level, shares / shares[-1], edges[1:])
    return math.sqrt(freedom) * math.tan(angle)
