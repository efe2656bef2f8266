"""doctor=True: one step of the user's own run, then a page of what no metric shows: what is wrong, what to change."""

import textwrap

from grpo.doctor import checks
from grpo.doctor.step import examine

CHECKS = {"prompt": checks.lost_characters, "end": checks.ends_of_completions, "gradient": checks.gradient,
          "judge": checks.judge_on_true_texts, "equal starts": checks.equal_starts}
OF_EACH_REWARD = {"range": checks.values_in_range, "right answers": checks.own_answers,
                  "empty completion": checks.empty_completions}


def check_up(config, models, rewards, data, dist):
    """Takes one step of a run, in memory alone, and checks it. Returns (whether nothing is wrong, lines to print)."""
    try:
        x = examine(config, models, rewards, data, dist)
        found = [(title, check(x)) for title, check in CHECKS.items()]
        for name in rewards.names:
            found += [(title, check(x, name)) for title, check in OF_EACH_REWARD.items()]
    finally:
        rewards.close()
    found = [(title, result) for title, result in found if result is not None]
    wrong = sum(not fine for _, (fine, *_) in found)
    end = "nothing is wrong: start the run without doctor=True"
    if wrong:
        end = f"{wrong} of {len(found)} checks found something wrong: change what the arrows say, and ask again"
    size = f"{x.rollouts.problems} problems x {x.rollouts.group_size} completions"
    start = f"doctor: one step of this run on {size}, in memory alone; out_dir stays as it is"
    return not wrong, ["", start, "", *page(found), "", end]


def page(found):
    """The lines of the page: a sentence for each check and, where it is not fine, what to do."""
    lines = []
    for title, (fine, sentence, remedy) in found:
        text = sentence if fine else f"{sentence} -> {remedy}"
        start = f"  {'fine' if fine else 'WRONG':<6} {title:<16}  "
        lines += textwrap.wrap(text, 120, initial_indent=start, subsequent_indent=" " * len(start))
    return lines
