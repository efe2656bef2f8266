"""The plan of a run, in lines for the user: settings, batch, models, data, rewards."""

import math
import os

from core.config import describe
from core.errors import ROOT, is_own_function, shortest
from core.settings.setting import changed
from grpo.rewards import REWARDS

EXAMPLE = os.path.join(ROOT, "config", "grpo_example.py")


def with_example(argv):
    """Returns the arguments of the command. If they name no config file, model, dataset or run to resume, puts the
    example config first and prints a line about it."""
    values = {}
    for argument in argv:
        if not argument.startswith("--"):
            return argv  # a config file
        key, _, value = argument[2:].partition("=")
        values[key] = value
    resumes = values.get("resume", "False") != "False"
    if resumes or values.keys() & {"generator_checkpoint", "dataset", "help"}:
        return argv
    example = shortest(EXAMPLE)
    if os.environ.get("RANK", "0") == "0":
        print(f"no config file, generator_checkpoint, dataset or resume was given: {example} sets everything that the "
              "command line does not", flush=True)
    return [example, *argv]


def plan(config, origin, models, rewards, data, dist):
    """Yields the lines of the plan."""
    yield from plan_of_settings(config, origin, dist)
    yield from describe_models(config, models)
    yield f"data: {data.folder}, {data.size()}"
    yield from plan_of_data(config, data, rewards, dist.world)
    if data.has_prompts:
        yield from data.describe_prompts(config.problems * dist.world)
    yield from describe_rewards(config, rewards)
    if data.has_prompts:
        from grpo.template import unnamed_tags, unread_arguments
        yield from unnamed_tags(rewards, data)
        yield from unread_arguments(data)
    yield f"on {dist.device} in {dist.dtype}"


def plan_of_settings(config, origin, dist):
    """Yields the lines of the plan that need no model and no data."""
    yield from describe(config, origin)
    completions = config.problems * dist.world * config.group_size
    ranks = "rank" if dist.world == 1 else "ranks"
    yield (f"effective batch: {config.batch_size} problems x {config.group_size} completions x "
           f"{config.gradient_accumulation_steps} accumulation x {dist.world} {ranks} = {completions} completions")
    completions, evaluations = sizes(config, dist.world)
    yield f"steps: {config.max_iters}, with {completions:,} completions; evaluations: {evaluations}"


def plan_of_data(config, data, rewards, world):
    """Yields a line about the tokens of all steps, and one about the completions of an evaluation."""
    completions, _ = sizes(config, world)
    most = config.block_size
    passes = ""
    if data.has_prompts:
        most = config.max_new_tokens
        times = completions / config.group_size / len(data.records["train"])
        passes = f", {times:.3g} passes over the training prompts"
    yield f"tokens: at most {completions * most:,}{passes}"
    problems, each = size_of_evaluation(config, data, rewards)
    greedy = ""
    if each > config.eval_completions:
        greedy = ", one of them greedy"
    yield f"an evaluation: {problems:,} problems x {each} completions{greedy}"


def sizes(config, world):
    """The completions of all steps, and the number of evaluations."""
    rounds = math.ceil(config.max_iters / config.steps_of_an_iteration)
    completions = rounds * config.problems * world * config.group_size
    evaluations = config.evaluations(config.max_iters - 1) + 2  # with those before the first step and after the last
    return completions, evaluations


def size_of_evaluation(config, data, rewards):
    """The problems of an evaluation, and the completions of each."""
    problems = config.eval_problems
    each = config.eval_completions
    if data.has_prompts:
        problems = min(problems, len(data.records["val"]))
        each += bool(rewards.success)  # the greedy one
    return problems, each


def describe_models(config, models):
    """Yields a line for each model."""
    generator = models.policy.model
    trained = sum(p.numel() for p in generator.parameters() if p.requires_grad)
    share = ""
    if trained != generator.num_parameters():
        share = f", {trained / 1e6:.3g} M of them trained"
    yield f"generator  {size_of(generator)}{share}"
    reference = "teacher" if config.teacher_checkpoint else "reference"
    frozen = {
        reference: models.reference,
        "judge": models.judge,
        "gold judge": models.gold_judge}
    for title, part in frozen.items():
        if part is not None:
            yield f"{title:<10} {size_of(part.model)}, frozen"


def size_of(model):
    """A model's mode, layers and number of parameters, in words."""
    millions = model.num_parameters() / 1e6
    return f"{model.mode}, {len(model.layers)} layers, {millions:.2f} M parameters"


def describe_rewards(config, rewards):
    """Yields a line with each reward's weight and range, and a line about the sandbox if a reward runs code."""
    if not rewards.names:
        yield "rewards: none; the model learns only from the teacher"
        return
    terms = []
    weighted = []
    for name, weight in zip(rewards.names, rewards.weights, strict=True):
        terms.append(f"{weight:g} x {name} {REWARDS[name].range}")
        if weight:
            weighted.append(name)
    yield f"rewards: {', '.join(terms)}"
    all_are_ours = all(is_own_function(REWARDS[name].fn) for name in weighted)
    if len(weighted) > 1 and not all_are_ours:
        yield ("if a reward skips a completion (None, NaN) but scores others of its group, the completion is left out; "
               "TRL would add up its other rewards")
    if changed(config, "reward_workers") and not rewards.slow:
        yield (f"reward_workers={config.reward_workers} has no effect: no reward of this run is slow; name those that "
               "should run there in slow_rewards")
    yield "a loss near 0 is normal: advantages cancel within a group, their gradients do not; watch mean_reward"
    if any("sandbox" in REWARDS[name].settings for name in rewards.names):
        from grpo.sandbox.run import describe_sandbox
        yield describe_sandbox(**config.reward_settings or {})
