"""The plan of a run, in lines for the user: settings, batch, models, data, rewards."""

import os

from core.config import describe
from core.errors import ROOT, is_own_function, shortest
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
        print(f"no config file, generator_checkpoint, dataset or resume is named: {example} sets what the command line "
              "does not", flush=True)
    return [example, *argv]


def plan(config, origin, models, rewards, data, dist):
    """Yields the lines of the plan."""
    yield from plan_of_settings(config, origin, dist)
    yield from describe_models(config, models)
    yield f"data: {data.folder}, {data.size()}"
    if data.has_prompts:
        yield from data.describe_prompts(config.problems * dist.world)
    yield from describe_rewards(config, rewards)
    if data.has_prompts:
        from grpo.template import unnamed_tags
        yield from unnamed_tags(rewards, data)
    yield f"on {dist.device} in {dist.dtype}"


def plan_of_settings(config, origin, dist):
    """Yields the lines of the plan that need no model and no data."""
    yield from describe(config, origin)
    completions = config.problems * dist.world * config.group_size
    yield (f"effective batch: {config.batch_size} problems x {config.group_size} completions x "
           f"{config.gradient_accumulation_steps} accumulation x {dist.world} ranks = {completions} "
           f"completions; an evaluation every {config.eval_interval} steps, of at most {config.eval_problems} problems "
           f"x {config.eval_completions} completions")


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
        yield "rewards: none, only the teacher teaches"
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
        yield ("a completion is left out of its group if a reward skips it (None, NaN) but scores others of the group; "
               "TRL adds up its other rewards")
    yield "a loss near 0 is normal: advantages cancel within a group, their gradients do not; watch mean_reward"
    if any("sandbox" in REWARDS[name].settings for name in rewards.names):
        from grpo.sandbox.run import describe_sandbox
        yield describe_sandbox(**config.reward_settings or {})
