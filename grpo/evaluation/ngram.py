"""An n-gram model of the training text: a grader that has nothing in common with the judges."""

import numpy as np

ORDER = 7                 # tokens of an n-gram, with the one that is predicted
MOST_TOKENS = 1_500_000   # of the training text that are counted: a bound on time and memory


class NGramModel:
    """Probability of each token given the six before it, by interpolation with Witten and Bell's weights
    (Chen and Goodman 1998, section 2.7): with c(h, x) the count of token x after context h, c(h) of all tokens and T(h)
    of the different tokens there, and h' the context without its first token,

        p(x | h) = (c(h, x) + T(h) p(x | h')) / (c(h) + T(h)),    p(x | h') below the empty context: 1 / vocabulary

    tokens: the ids of a text, in order; vocabulary: the number of different ids
    """

    def __init__(self, tokens, vocabulary, order=ORDER):
        self.vocabulary, self.order, self.levels = vocabulary, order, []
        here = np.asarray(tokens[:MOST_TOKENS], dtype=np.int64)  # (n,) the last token of each n-gram
        context = np.zeros_like(here)                                                # (n,) which tokens precede it
        contexts = 1
        for _ in range(min(order, len(here))):
            grams, which, count = np.unique(context * vocabulary + here, return_inverse=True, return_counts=True)
            before = grams // vocabulary                                             # the context of each n-gram
            total, kinds = np.bincount(before, count, contexts), np.bincount(before, minlength=contexts)
            self.levels.append((grams, count, total, kinds))
            context, here, contexts = which[:-1], here[1:], len(grams)

    def bits(self, text):
        """-log2 of the probability of each token. text: (N, T) ids below the vocabulary. Returns (N, T) float64; a
        token near the start of its row has as much context as there is."""
        p = np.full(text.shape, 1 / self.vocabulary)                                 # (N, T)
        context = np.zeros(text.shape, dtype=np.int64)                               # (N, T) -1: never seen
        for grams, count, total, kinds in self.levels:
            code = context * self.vocabulary + text
            at = np.searchsorted(grams, code).clip(max=len(grams) - 1)
            found = (context >= 0) & (grams[at] == code)                             # (N, T)
            seen, different = (np.where(context >= 0, x[context], 0) for x in (total, kinds))
            mixed = (np.where(found, count[at], 0) + different * p) / np.maximum(1, seen + different)
            p = np.where(seen > 0, mixed, p)
            context = np.concatenate((np.full((len(text), 1), -1), np.where(found, at, -1)[:, :-1]), axis=1)
        return -np.log2(p)

    def bits_near(self, text, mask):
        """(sum, count) of the bits of the tokens whose n-gram has a masked token. text, mask: (N, T)."""
        near = np.zeros(mask.shape, dtype=bool)
        for back in range(min(self.order, mask.shape[1])):
            near[:, back:] |= mask[:, : mask.shape[1] - back]
        return float(self.bits(text)[near].sum()), int(near.sum())
