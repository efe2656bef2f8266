"""The step that the doctor examines."""

import pytest

from grpo.doctor import checks
from grpo.doctor.checks import part_of
from tests.grpo.evaluation.patients import completing, examined
from tests.tiny import grpo_step, same

pytestmark = pytest.mark.slow  # it is the number of them that takes the time


def test_the_examined_step_is_the_first_of_the_run_and_changes_no_weight(tmp_path):
    patient, twin = completing(tmp_path), completing(tmp_path)
    x = examined(patient)
    assert same(patient.models.policy.model, twin.models.policy.model)
    metrics = grpo_step(twin.models.policy, twin.models.reference, twin.rewards, twin.data, twin.config)
    assert float(x.scored.reward.mean()) == pytest.approx(metrics["mean_reward"], rel=1e-6)
    assert 0 < patient.config.grad_clip < metrics["grad_norm"], "the run cuts it"
    assert list(x.gradient) == ["embed", "layer 0", "layer 1", "layer 2", "layer 3", "norm", "head"]
    total = sum(size**2 for size in x.gradient.values()) ** 0.5
    assert total == pytest.approx(metrics["grad_norm"], rel=1e-4)


def test_a_large_step_is_examined_in_part(tmp_path, monkeypatch):
    monkeypatch.setattr(checks, "MOST", 3)
    x = examined(completing(tmp_path, gradient_accumulation_steps=2, ppo_epochs=2, minibatches=2))
    assert x.rollouts.problems == len(x.problems["number"]) == 3


@pytest.mark.parametrize(("name", "part"), [
    ("blocks.3.attention.qkv.weight", "layer 3"), ("embed.weight", "embed"), ("net.lm_head.bias", "lm_head"),
    ("net.base_model.model.model.layers.11.self_attn.q_proj.lora_A.policy.weight", "layer 11")])
def test_a_parameter_belongs_to_its_layer_or_module(name, part):
    assert part_of(name) == part
