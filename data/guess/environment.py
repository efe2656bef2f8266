"""Guess the number: the answer to a guess is + (the number is larger), - (it is smaller), or the end of the game."""

import random

from grpo.environments import environment


def needed(count):
    """Guesses that find one of `count` numbers at worst, by halving."""
    return count.bit_length()


@environment
class Guess:
    """A number of the range in the prompt, such as "12-74:". A guess ends with a newline.

    The reward is 1 for a game with no more guesses than halving needs at worst, and falls to 0 at twice as many.
    """

    metrics = ("optimal",)

    def __init__(self, seed):
        self.random = random.Random(seed)
        self.guesses = self.best = 0

    def reset(self, record):
        self.low, self.high = map(int, record["prompt"].rstrip(":").split("-"))
        self.allowed = needed(self.high - self.low + 1)
        self.number = self.random.randint(self.low, self.high)

    def step(self, text):
        self.guesses += 1
        digits = text.strip()
        if not (digits.isascii() and digits.isdigit() and self.low <= int(digits) <= self.high):
            return None, 0.0  # not a number, or one that the answers have ruled out
        guess = int(digits)
        self.best += self.is_optimal(guess)
        if guess == self.number:
            return None, max(0.0, 1 - max(0, self.guesses - self.allowed) / self.allowed)
        if guess < self.number:
            self.low = guess + 1
            return "+", 0.0
        self.high = guess - 1
        return "-", 0.0

    def is_optimal(self, guess):
        """Tells whether the guess leaves as few further guesses at worst as any."""
        rest = max(needed(guess - self.low), needed(self.high - guess))
        return rest < needed(self.high - self.low + 1)

    @property
    def optimal(self):
        return self.best, self.guesses
