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


def check_up(config, models, rewards, data, evaluation, dist):
    """Takes one step of a run, in memory alone, and checks it. Returns (whether nothing is wrong, lines to print)."""
    try:
        x = examine(config, models, rewards, data, evaluation, dist)
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
    wide, told = max(len(title) for title, _ in found), set()
    for title, (verdict, sentence, remedy) in found:
        start = f"  {VERDICTS[verdict]:<6} {title:<{wide}}  "
        lines += textwrap.wrap(sentence, WIDTH, initial_indent=start, subsequent_indent=" " * len(start),
                               break_long_words=False, break_on_hyphens=False)
        if verdict is not True:
            arrow = f"-> {'as above' if remedy in told else remedy}"
            lines += textwrap.wrap(arrow, WIDTH, initial_indent=" " * len(start),
                                   subsequent_indent=" " * (len(start) + 3), break_long_words=False,
                                   break_on_hyphens=False)
            told.add(remedy)
    wrong = sum(verdict is False for _, (verdict, *_) in found)
    end = ("nothing is wrong: start the run without doctor=True" if not wrong else
           f"{wrong} of {len(found)} checks found something wrong: change what the arrows say, and ask again")
    return [*lines, "", end]
