"""The four models of a run, checked against each other before the first step."""

import copy

from core.checkpoint_manager import freeze, load_model
from core.model import MASKED_FILL, SEQUENCE_SCORER


def load_models(config, tokenizer, device):
    """(policy, reference, judge, gold judge), checked against each other."""
    for key in ("generator_checkpoint", "judge_checkpoint"):
        if getattr(config, key) is None:
            raise ValueError(f"{key} is not set; name a checkpoint in the config or with --{key}=FILE")
    policy, _ = load_model(config.generator_checkpoint, device, MASKED_FILL, tokenizer, "generator_checkpoint")
    if config.block_size > policy.config.block_size:
        raise ValueError(f"block_size={config.block_size} is larger than the {policy.config.block_size} of "
                         f"generator_checkpoint={config.generator_checkpoint}")
    judges = []
    for key in ("judge_checkpoint", "gold_judge_checkpoint"):
        path, judge = getattr(config, key), None
        if path is not None:
            judge = freeze(load_model(path, device, SEQUENCE_SCORER, tokenizer, key)[0])
            needed = config.block_size + (judge.config.judge_head == "cls")
            if judge.config.block_size < needed:
                raise ValueError(f"{key}={path} has block_size={judge.config.block_size}, but needs {needed} for texts "
                                 f"of block_size={config.block_size}"
                                 + (" and CLS" if needed > config.block_size else ""))
        judges.append(judge)
    if config.credit_window is not None and judges[0].config.judge_head != "realness":
        raise ValueError(f"credit_window={config.credit_window} needs a judge that speaks of every position, but "
                         f"judge_checkpoint={config.judge_checkpoint} has judge_head={judges[0].config.judge_head}; "
                         "use credit_window=None")
    reference = build_reference(policy, config, tokenizer, device)
    if reference is not None and config.block_size > reference.config.block_size:
        raise ValueError(f"block_size={config.block_size} is larger than the {reference.config.block_size} of "
                         f"reference_checkpoint={config.reference_checkpoint}")
    return policy, reference, *judges


def build_reference(policy, config, tokenizer, device):
    """A frozen copy of the policy at step 0, or reference_checkpoint; None if kl_beta is 0 and none was named."""
    if config.reference_checkpoint is not None:
        path = config.reference_checkpoint
        return freeze(load_model(path, device, MASKED_FILL, tokenizer, "reference_checkpoint")[0])
    return freeze(copy.deepcopy(policy)) if config.kl_beta > 0 else None
