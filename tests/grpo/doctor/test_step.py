"""The step that the doctor examines."""

from types import SimpleNamespace

import pytest

from grpo.doctor import step as doctor_step
from grpo.doctor.step import examine, part_of, step_share
from tests.grpo.evaluation.patients import completing, examined
from tests.tiny import grpo_step

pytestmark = pytest.mark.slow  # it is the number of them that takes the time


def test_the_examined_step_is_the_first_of_the_run(tmp_path):
    patient, twin = completing(tmp_path), completing(tmp_path)
    x = examined(patient)
    metrics = grpo_step(twin.models.policy, twin.models.reference, twin.rewards, twin.data, twin.config)
    for name in ("mean_reward", "grad_norm", "mean_kl", "entropy", "mismatch_max"):
        assert x.metrics[name] == metrics[name], name
    assert x.sampled[0][0].problems == 4 and len(x.sampled) == 2, "and a problem before it"
    assert 0 < patient.config.grad_clip < x.metrics["grad_norm"], "it is cut"
    assert list(x.gradient) == ["the embedding", "layer 0", "layer 1", "layer 2", "layer 3", "the last normalization",
                                "the output layer"]
    total = sum(size**2 for size in x.gradient.values()) ** 0.5
    assert total == pytest.approx(x.metrics["grad_norm"], rel=1e-4), "the parts add up to the norm before clipping"


def test_a_large_step_is_examined_in_part(tmp_path, monkeypatch):
    monkeypatch.setattr(doctor_step, "MOST", 3)
    x = examined(completing(tmp_path, gradient_accumulation_steps=2, ppo_epochs=2, minibatches=2))
    assert x.sampled[0][0].problems == len(x.problems["number"]) == 3 and x.metrics["mismatch_max"] < 1e-3
    spent = sum(seconds for name, seconds in x.metrics.items() if name.startswith("time/"))
    assert spent / 4 < x.step_seconds and x.evaluation_seconds > 0


def test_only_a_step_that_fits_into_memory_is_taken(tmp_path, monkeypatch):
    patient = completing(tmp_path, batch_size=12)
    monkeypatch.setattr(doctor_step, "memory_limit", lambda device: 1.0)
    with pytest.raises(ValueError, match="a step on 12 problems needs about .* MB, but cpu has 1; set grad_checkpoint"):
        examined(patient)
    needed = doctor_step.besides_weights(patient.config, patient.models, patient.data, patient.dist)
    monkeypatch.setattr(doctor_step, "memory_in_use", lambda device: 100.0)
    monkeypatch.setattr(doctor_step, "memory_limit", lambda device: 101 + needed)
    assert examined(patient).memory.needed == pytest.approx(100 + needed)


def test_several_ranks_are_refused():
    with pytest.raises(ValueError, match="in one process, not in 2: start it without torchrun"):
        examine(None, None, None, None, SimpleNamespace(world=2))


def test_steps_on_the_same_rollouts_share_the_time_of_sampling():
    seconds = {"collect": 6.0, "train": 2.0}
    once, shared = (SimpleNamespace(ppo_epochs=e, minibatches=m) for e, m in ((1, 1), (2, 2)))
    assert step_share(once, seconds) == pytest.approx(8.0)
    assert step_share(shared, seconds) == pytest.approx((6 + 2 / 3) / 4 + 2 / 2), "and score them once more"


@pytest.mark.parametrize(("name", "part"), [
    ("blocks.3.attention.qkv.weight", "layer 3"), ("embed.weight", "the embedding"),
    ("norm.weight", "the last normalization"),
    ("net.base_model.model.model.layers.11.self_attn.q_proj.lora_A.policy.weight", "layer 11"),
    ("net.lm_head.bias", "lm_head"), ("net.transformer.wte.weight", "wte")])
def test_a_parameter_belongs_to_its_layer_or_module(name, part):
    assert part_of(name) == part
