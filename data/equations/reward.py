"""The reward of lines of sums, 3+9=12, that are filled in: every true sum is right."""

import re

from grpo.rewards import reward


@reward(0, 1)
def equations(prompts, completions, answer, **columns):
    """Fill-in: of the lines like 12+34=46 of the true text that a mask touches, the share that are true sums.

    Only lines with a line break at both ends count, and a masked line break touches its line. A text in which no line
    is masked is skipped.
    """
    scores = []
    for prompt, text, truth in zip(prompts, completions, answer, strict=True):
        touched = []
        for line in re.finditer(r"(?<=\n)[^\n]*=[^\n]*(?=\n)", truth):
            place = slice(line.start() - 1, line.end() + 1)
            if prompt[place] != truth[place]:
                touched.append(is_sum(text[place]))
        scores.append(sum(touched) / len(touched) if touched else None)
    return scores


def is_sum(line):
    """True if a line between its two line breaks is a+b=c, in plain digits, and true."""
    digits = "(0|[1-9][0-9]{0,17})"
    found = re.fullmatch(rf"\n{digits}\+{digits}={digits}\n", line)
    return found is not None and int(found[1]) + int(found[2]) == int(found[3])
