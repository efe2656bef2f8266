"""Text on a terminal or a page: in lines that fit, and that of models and users without obeying it."""

import itertools
import textwrap
import unicodedata

WIDTH = 100  # columns of the console

HIDDEN = ("Cc", "Cf", "Cs")  # Unicode's categories of what a terminal or browser obeys (control, direction of writing),
                             # does not show (no width), or cannot be encoded
GREEN, PLAIN = "\033[1;32m", "\033[0m"


class Visible(dict):
    """A table for str.translate that replaces the HIDDEN characters by U+FFFD, except those that it is made with."""

    def __missing__(self, code):
        character = chr(code)
        self[code] = "\ufffd" if unicodedata.category(character) in HIDDEN else character
        return self[code]


ON_ONE_LINE = Visible({ord("\n"): "\u21b5"})


def folded(lines):
    """The lines of a text, each in as many lines of at most WIDTH characters as it needs."""
    wrapper = textwrap.TextWrapper(WIDTH, subsequent_indent="    ", break_long_words=False, break_on_hyphens=False)
    return [part for line in lines for part in wrapper.wrap(line)]


def highlight(text, sampled, color):
    """A text on one line, newlines as arrows. With `color` the characters where `sampled` is true are green."""
    out = ""
    for green, run in itertools.groupby(zip(text, sampled, strict=True), key=lambda pair: color and bool(pair[1])):
        part = "".join(character for character, _ in run).translate(ON_ONE_LINE)
        out += f"{GREEN}{part}{PLAIN}" if green else part
    return out
