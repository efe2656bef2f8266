"""The same tensors into TRL's GRPOTrainer give the same loss. Runs where trl is installed: pip install trl==1.16.0."""

import collections
import types

import pytest
import torch

from grpo.grpo_training_step import rollout_loss
from grpo.objectives import OBJECTIVES, token_weights
from tests.tiny_objectives import MAX_TOKENS, M, N, objective_config, table_rollouts, with_advantage

trl = pytest.importorskip("trl")
if trl.__version__ != "1.16.0":  # their loss is called by its private name, with what that version reads
    pytest.skip(f"written for trl==1.16.0, not {trl.__version__}", allow_module_level=True)


def their_loss(loss_type, logp, rollouts, reference, advantage, kl_beta, low, high, delta, importance, level):
    """TRL's _compute_loss on given log-probabilities, on one process, one micro-batch."""
    args = types.SimpleNamespace(delta=delta, use_bias_correction_kl=importance, steps_per_generation=1)
    identity = lambda x, **_: x
    accelerator = types.SimpleNamespace(num_processes=1, gather=identity, reduce=identity, gather_for_metrics=identity,
                                        sync_gradients=True)
    trainer = types.SimpleNamespace(
        args=args, accelerator=accelerator, model=types.SimpleNamespace(training=True), loss_type=loss_type,
        beta=kl_beta, epsilon_low=low, epsilon_high=high, importance_sampling_level=level, top_entropy_quantile=1.0,
        off_policy_mask_threshold=None, use_vllm=False, vllm_importance_sampling_correction=False,
        aux_loss_enabled=False, _entropy_bonus_enabled=False, current_gradient_accumulation_steps=1,
        max_completion_length=MAX_TOKENS, _metrics=collections.defaultdict(lambda: collections.defaultdict(list)),
        _get_per_token_logps_and_entropies=lambda *_, **__: (logp, torch.zeros_like(logp), None))
    ids = torch.zeros(N, M, dtype=torch.long)
    inputs = {"prompt_ids": ids[:, :1], "prompt_mask": ids[:, :1] + 1, "completion_ids": ids,
              "completion_mask": rollouts.mask, "advantages": advantage, "old_per_token_logps": rollouts.old_logp,
              "ref_per_token_logps": reference.gather(-1, rollouts.target[..., None])[..., 0],
              "num_items_in_batch": rollouts.mask.sum()}
    return trl.GRPOTrainer._compute_loss(trainer, trainer.model, inputs)


@pytest.mark.parametrize("name, loss_type, level", [
    ("grpo", "grpo", "token"), ("dr_grpo", "dr_grpo", "token"), ("dapo", "dapo", "token"), ("bnpo", "bnpo", "token"),
    ("gspo", "grpo", "sequence"), ("cispo", "cispo", "token")])
@pytest.mark.parametrize("estimator, cap, high", [
    ("none", None, None), ("k3", None, None), ("k3 importance", None, None), ("k3", 1.5, None), ("none", None, 0.1)])
def test_loss_and_gradient_equal_trls(name, loss_type, level, estimator, cap, high):
    if cap and name == "cispo" or level == "sequence" and "importance" in estimator:
        pytest.skip("not the same loss: cispo has no unclipped branch; TRL weighs gspo's KL by the sequence's ratio")
    policy, rollouts, reference, reward = table_rollouts()
    c, row = objective_config(name, estimator, clip_cap=cap, clip_high=high), OBJECTIVES[name]
    rollouts = with_advantage(estimator, rollouts, reference, reward, c)
    weight = token_weights(rollouts.train_mask, row.average, MAX_TOKENS)
    our_loss, _ = rollout_loss(policy, rollouts, weight, c, c.kl_beta, on_policy=False)
    our_loss.backward()
    twin = policy.logits.detach().clone().requires_grad_()
    logp = twin.log_softmax(-1).gather(-1, rollouts.target[..., None])[..., 0]
    high = row.clip_high if high is None else high
    high = 1 + high if name == "cispo" else high  # TRL's epsilon_high is cispo's bound itself
    loss = their_loss(loss_type, logp, rollouts, reference, rollouts.advantage.flatten(), c.kl_beta, row.clip_low, high,
                      cap, c.kl_importance, level)
    loss.backward()
    torch.testing.assert_close(our_loss, loss)
    torch.testing.assert_close(policy.logits.grad, twin.grad)
