"""The four models of a run, checked against each other before the first step."""

from core.checkpoint_manager import freeze, load_model
from core.model import LANGUAGE_MODEL, MASKED_FILL, SEQUENCE_SCORER
from grpo.reference import build_reference


def load_models(config, tokenizer, device):
    """(policy, reference, judge, gold judge), each of the last three None if it is not asked for."""
    if config.generator_checkpoint is None:
        raise ValueError("generator_checkpoint is not set; name a checkpoint in the config or with "
                         "--generator_checkpoint=FILE")
    policy, _ = load_model(config.generator_checkpoint, device, None, tokenizer, "generator_checkpoint")
    if policy.config.mode == SEQUENCE_SCORER:
        raise ValueError(f"generator_checkpoint={config.generator_checkpoint} has mode {policy.config.mode}, but "
                         f"{MASKED_FILL} or {LANGUAGE_MODEL} is needed here")
    fills = policy.config.mode == MASKED_FILL
    if fills and config.block_size > policy.config.block_size:
        raise ValueError(f"block_size={config.block_size} is larger than the {policy.config.block_size} of "
                         f"generator_checkpoint={config.generator_checkpoint}")
    judges = [load_judge(config, key, tokenizer if fills else None, device)
              for key in ("judge_checkpoint", "gold_judge_checkpoint")]
    for key, kind, default in (("unmask_steps", True, 1), ("fill_estimator", True, "trajectory"),
                               ("overlong_buffer", False, 0), ("mask_truncated", False, False)):
        if getattr(config, key) != default and fills != kind:
            raise ValueError(f"{key}={getattr(config, key)} is for {'fill-in' if kind else 'prompts'}, which "
                             f"generator_checkpoint={config.generator_checkpoint} does not do; use {key}={default}")
    if config.credit_window is not None:
        if not fills:
            raise ValueError(f"credit_window={config.credit_window} is for fill-in, where a judge speaks of every "
                             "token; use credit_window=None")
        if judges[0] is not None and judges[0].config.judge_head != "realness":
            raise ValueError(f"credit_window={config.credit_window} needs a judge that speaks of every position, but "
                             f"judge_checkpoint={config.judge_checkpoint} has judge_head="
                             f"{judges[0].config.judge_head}; use credit_window=None")
    reference = build_reference(policy, config, tokenizer, device)
    if fills and reference is not None and config.block_size > reference.config.block_size:
        raise ValueError(f"block_size={config.block_size} is larger than the {reference.config.block_size} of "
                         f"reference_checkpoint={config.reference_checkpoint}")
    return policy, reference, *judges


def load_judge(config, key, tokenizer, device):
    """The frozen judge that the setting `key` names, or None. tokenizer: of fill-in, whose tokens it reads as they are;
    None: texts are encoded for it."""
    path = getattr(config, key)
    if path is None:
        return None
    judge = freeze(load_model(path, device, SEQUENCE_SCORER, tokenizer, key)[0])
    needed = config.block_size + (judge.config.judge_head == "cls")
    if tokenizer is not None and judge.config.block_size < needed:
        raise ValueError(f"{key}={path} has block_size={judge.config.block_size}, but needs {needed} for texts "
                         f"of block_size={config.block_size}" + (" and CLS" if needed > config.block_size else ""))
    return judge
