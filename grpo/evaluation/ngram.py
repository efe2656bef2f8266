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
        self.vocabulary, self.order = vocabulary, order
        self.levels = []  # tables of n-grams of one length; the last number of each is 0, for what was never seen
        here = np.asarray(tokens[:MOST_TOKENS], dtype=np.int64)  # (n,) the last token of each n-gram
        context = np.zeros_like(here)                            # (n,) the number of the context before it
        contexts = 1
        for _ in range(min(order, len(here))):
            code = context * vocabulary + here
            grams, number, count = np.unique(code, return_inverse=True, return_counts=True)
            before = grams // vocabulary                         # the context of each different n-gram
            total = np.bincount(before, count, contexts + 1)
            different = np.bincount(before, minlength=contexts + 1)
            count = np.append(count, 0)
            self.levels.append((grams, count, total, different))
            context = number[:-1]                                # an n-gram is a context of the next level
            here = here[1:]
            contexts = len(grams)

    def bits(self, text):
        """-log2 of the probability of each token. text: (N, T) ids below the vocabulary. Returns (N, T) float64; a
        token near the start of its row has as much context as there is."""
        p = np.full(text.shape, 1 / self.vocabulary)                                 # (N, T)
        context = np.zeros(text.shape, dtype=np.int64)                               # (N, T) -1: never seen
        for grams, count, total, different in self.levels:
            code = context * self.vocabulary + text
            at = np.searchsorted(grams, code)
            at = at.clip(max=len(grams) - 1)
            at[grams[at] != code] = -1
            seen = total[context]
            kinds = different[context]
            mixed = count[at] + kinds * p
            mixed = mixed / np.maximum(1, seen + kinds)
            p = np.where(seen > 0, mixed, p)
            context = np.full_like(at, -1)                                           # of the token behind
            context[:, 1:] = at[:, :-1]
        return -np.log2(p)

    def bits_near(self, text, mask):
        """(sum, count) of the bits of the tokens whose n-gram has a masked token. text, mask: (N, T)."""
        near = mask.copy()
        for back in range(1, min(self.order, mask.shape[1])):
            near[:, back:] |= mask[:, :-back]
        bits = self.bits(text)[near]
        return float(bits.sum()), bits.size
