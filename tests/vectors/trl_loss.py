"""The losses of TRL 1.16.0 as functions for the checker: its GRPOTrainer._compute_loss, called through a stub.

python grpo/tools/check_loss.py tests/vectors/trl_loss.py:gspo
"""

import collections
import types

import torch
import trl


def trl_loss(loss_type, logp, old_logp, ref_logp, advantage, mask, total_tokens=None, level="token", kl_beta=0.04,
             low=0.2, high=0.2, max_tokens=8):
    """TRL's _compute_loss on given log-probabilities, in one process without gradient accumulation."""
    args = types.SimpleNamespace(delta=None, use_bias_correction_kl=True, steps_per_generation=1,
                                 sapo_temperature_pos=1.0, sapo_temperature_neg=1.05)

    def identity(x, **_):
        return x

    accelerator = types.SimpleNamespace(num_processes=1, gather=identity, reduce=identity, gather_for_metrics=identity,
                                        sync_gradients=True)
    trainer = types.SimpleNamespace(
        args=args, accelerator=accelerator, model=types.SimpleNamespace(training=True), loss_type=loss_type,
        beta=kl_beta, epsilon_low=low, epsilon_high=high, importance_sampling_level=level, top_entropy_quantile=1.0,
        off_policy_mask_threshold=None, use_vllm=False, vllm_importance_sampling_correction=False,
        aux_loss_enabled=False, _entropy_bonus_enabled=False, current_gradient_accumulation_steps=1,
        max_completion_length=max_tokens, _metrics=collections.defaultdict(lambda: collections.defaultdict(list)),
        _get_per_token_logps_and_entropies=lambda *_, **__: (logp, torch.zeros_like(logp), None))
    ids = torch.zeros(logp.shape, dtype=torch.long)
    inputs = {"prompt_ids": ids[:, :1], "prompt_mask": ids[:, :1] + 1, "completion_ids": ids, "completion_mask": mask,
              "advantages": advantage, "old_per_token_logps": old_logp, "ref_per_token_logps": ref_logp,
              "num_items_in_batch": total_tokens}
    return trl.GRPOTrainer._compute_loss(trainer, trainer.model, inputs)


def grpo(*tensors):
    return trl_loss("grpo", *tensors)


def bnpo(*tensors):
    return trl_loss("bnpo", *tensors)


def dr_grpo(*tensors):
    return trl_loss("dr_grpo", *tensors)


def dapo(*tensors, total_tokens):
    return trl_loss("dapo", *tensors, total_tokens)


def gspo(*tensors):
    return trl_loss("grpo", *tensors, level="sequence")


def sapo(*tensors):
    return trl_loss("sapo", *tensors)
