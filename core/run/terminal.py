"""Text that models and users wrote, shown on a terminal or a page without obeying it."""

import itertools
import unicodedata

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


def highlight(text, sampled, color):
    """A text on one line, newlines as arrows. With `color` the characters where `sampled` is true are green."""
    out = ""
    for green, run in itertools.groupby(zip(text, sampled, strict=True), key=lambda pair: color and bool(pair[1])):
        part = "".join(character for character, _ in run).translate(ON_ONE_LINE)
        out += f"{GREEN}{part}{PLAIN}" if green else part
    return out
