"""doctor=True: one step of the user's own run, then a page: what is as it should be, what is not, what to change."""

import textwrap

from grpo.doctor import checks, environments
from grpo.doctor import rewards as reward_checks
from grpo.doctor.step import examine

CHECKS = {"prompt": checks.lost_characters, "end": checks.ends_of_completions, "cut": checks.cut_completions,
          "sampler and scorer": checks.first_ratio, "order": checks.order_of_passes, "KL": checks.first_kl,
          "gradient": checks.gradient,
          "groups": reward_checks.groups_differ, "judge": reward_checks.judge_on_true_texts,
          "time": checks.duration}
OF_ENVIRONMENT = {"equal starts": environments.equal_starts, "answers": environments.answers_in_loss,
                  "template": environments.glue, "turns": environments.endless_turns}
OF_EACH_REWARD = {"reward": reward_checks.values_seen, "right answers": reward_checks.own_answers,
                  "empty completion": reward_checks.empty_completions}
VERDICTS = {True: "fine", False: "WRONG", None: "look"}


def check_up(config, models, rewards, data, dist):
    """Takes one step of a run, in memory alone, and checks it. Returns (whether nothing is wrong, lines to print)."""
    try:
        x = examine(config, models, rewards, data, dist)
        found = results(x)
    finally:
        rewards.close()
    wrong = sum(verdict is False for _, (verdict, *_) in found)
    end = "nothing is wrong: start the run without doctor=True"
    if wrong:
        end = f"{wrong} of {len(found)} checks found something wrong: change what the arrows say, and ask again"
    size = f"{x.rollouts.problems} problems x {x.rollouts.group_size} completions"
    start = f"doctor: one step of this run on {size}, in memory alone; out_dir stays as it is"
    return not wrong, ["", start, "", *page(found), "", end]


def results(x):
    """[(title, (verdict, sentence, remedy))] of all checks that apply to this run."""
    found = [(title, check(x)) for title, check in CHECKS.items()]
    if x.config.environment is not None:
        found += [(title, check(x)) for title, check in OF_ENVIRONMENT.items()]
    for name in x.rewards.names:
        found += [(title, check(x, name)) for title, check in OF_EACH_REWARD.items()]
    return [(title, result) for title, result in found if result is not None]


def page(found):
    """The lines of the page: a sentence for each check and, where it is not fine, what to do."""
    lines = []
    for title, (verdict, sentence, remedy) in found:
        start = f"  {VERDICTS[verdict]:<6} {title:<18}  "
        lines += wrapped(sentence, start, len(start))
        if verdict is not True:
            lines += wrapped(f"-> {remedy}", " " * len(start), len(start) + 3)
    return lines


def wrapped(text, start, indent):
    """The text in lines of 120 characters at most."""
    return textwrap.wrap(text, 120, initial_indent=start, subsequent_indent=" " * indent, break_long_words=False)
