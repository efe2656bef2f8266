"""Text on a terminal or a page: in lines that fit, and that of models and users without obeying it."""

import itertools
import textwrap
import unicodedata

WIDTH = 100  # columns of the console
HIDDEN = ("Cc", "Cf", "Cs")  # Unicode's categories of control characters, of those without width, of half pairs
GREEN, PLAIN = "\033[1;32m", "\033[0m"


def visible(text, kept=""):
    """A text whose characters that a terminal or browser obeys or does not show are U+FFFD, except those in `kept`."""
    return "".join("\ufffd" if unicodedata.category(c) in HIDDEN and c not in kept else c for c in text)


def folded(lines):
    """The lines of a text, each in as many lines of at most WIDTH characters as it needs."""
    wrapper = textwrap.TextWrapper(WIDTH, subsequent_indent="    ", break_long_words=False, break_on_hyphens=False)
    return [part for line in lines for part in wrapper.wrap(line)]


def highlight(text, sampled, color):
    """A text on one line, newlines as arrows. With `color` the characters where `sampled` is true are green."""
    out = ""
    for green, run in itertools.groupby(zip(text, sampled, strict=True), key=lambda pair: color and bool(pair[1])):
        part = visible("".join(character for character, _ in run).replace("\n", "\u21b5"))
        out += f"{GREEN}{part}{PLAIN}" if green else part
    return out
