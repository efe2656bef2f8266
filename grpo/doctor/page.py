"""doctor=True: one step of the user's own run, then a page: what is as it should be, what is not, what to change."""

import textwrap

from grpo.doctor.checks import (
    duration,
    ends_of_completions,
    first_kl,
    first_ratio,
    gradient,
    left_out_prompts,
    memory,
    prompt,
    stop_token,
)
from grpo.doctor.rewards import OF_EACH, expected_equal_groups, groups_differ, judge_on_true_texts
from grpo.doctor.step import examine

CHECKS = {"prompt": prompt, "long prompts": left_out_prompts, "end": ends_of_completions, "stop token": stop_token,
          "sampler and scorer": first_ratio, "KL": first_kl, "gradient": gradient, "groups": groups_differ,
          "expected groups": expected_equal_groups, "judge": judge_on_true_texts, "memory": memory, "time": duration}
VERDICTS = {True: "fine", False: "WRONG", None: "look"}
WIDTH = 120


def check_up(config, models, rewards, data, dist):
    """Takes one step of a run, in memory alone, and checks it. Returns (whether nothing is wrong, lines to print)."""
    try:
        x = examine(config, models, rewards, data, dist)
        found = results(x)
    finally:
        rewards.close()
    return all(verdict is not False for _, (verdict, *_) in found), page(x, found)


def results(x):
    """[(title, (verdict, sentence, remedy))] of all checks that apply to this run."""
    found = [(title, check(x)) for title, check in CHECKS.items()]
    found += [(title, check(x, name)) for name in x.rewards.names for title, check in OF_EACH.items()]
    return [(title, result) for title, result in found if result is not None]


def page(x, found):
    """The lines of the page: a sentence for each check and, where it is not fine, what to do."""
    rollouts = x.sampled[0][0]
    size = f"{rollouts.problems} problems x {rollouts.group_size} completions"
    lines = ["", f"doctor: one step of this run on {size}, in memory alone; out_dir stays as it is", ""]
    wide = max(len(title) for title, _ in found)
    shown = set()  # a remedy is told once
    for title, (verdict, sentence, remedy) in found:
        start = f"  {VERDICTS[verdict]:<6} {title:<{wide}}  "
        lines += wrapped(sentence, start, len(start))
        if verdict is not True:
            arrow = f"-> {'as above' if remedy in shown else remedy}"
            lines += wrapped(arrow, " " * len(start), len(start) + 3)
            shown.add(remedy)
    wrong = sum(verdict is False for _, (verdict, *_) in found)
    if wrong:
        end = f"{wrong} of {len(found)} checks found something wrong: change what the arrows say, and ask again"
    else:
        end = "nothing is wrong: start the run without doctor=True"
    return [*lines, "", end]


def wrapped(text, start, indent):
    """A text in lines of WIDTH; the first one has `start` before it."""
    return textwrap.wrap(text, WIDTH, initial_indent=start, subsequent_indent=" " * indent, break_long_words=False,
                         break_on_hyphens=False)
