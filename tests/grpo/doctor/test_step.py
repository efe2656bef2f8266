"""The step that the doctor examines."""

from types import SimpleNamespace

import pytest

from grpo.doctor import step as doctor_step
from grpo.doctor.step import examine, part_of, step_share
from tests.grpo.evaluation.patients import completing, examined
from tests.tiny import grpo_step

pytestmark = pytest.mark.slow  # it is the number of them that takes the time


@pytest.fixture
def patient(tmp_path, monkeypatch):
    monkeypatch.setattr(doctor_step, "CHEAP_SECONDS", 1e9)
    return completing(tmp_path)


def test_the_examined_step_is_the_first_of_the_run(patient, tmp_path):
    x, twin = examined(patient), completing(tmp_path)
    metrics = grpo_step(twin.models.policy, twin.models.reference, twin.rewards, twin.data, twin.config)
    for name in ("mean_reward", "grad_norm", "mean_kl", "entropy", "mismatch_max"):
        assert x.metrics[name] == metrics[name], name
    assert x.sampled[0][0].problems == 4 and len(x.sampled) == 3, "and two rounds before it"


def test_the_parts_of_the_gradient_add_up_to_its_norm_before_clipping(patient):
    x = examined(patient)
    assert 0 < patient.config.grad_clip < x.metrics["grad_norm"], "it is cut"
    assert list(x.gradient) == ["the embedding", "layer 0", "layer 1", "layer 2", "layer 3", "the last normalization",
                                "the output layer"]
    assert sum(size**2 for size in x.gradient.values()) ** 0.5 == pytest.approx(x.metrics["grad_norm"], rel=1e-4)


def test_an_expensive_step_and_evaluation_are_not_done_whole(tmp_path, monkeypatch):
    monkeypatch.setattr(doctor_step, "CHEAP_SECONDS", 0.0)
    patient = completing(tmp_path, batch_size=6, gradient_accumulation_steps=2)
    x = examine(patient.config, patient.models, patient.rewards, patient.data, None, patient.dist)
    assert x.sampled[0][0].problems == len(x.problems["number"]) == 4
    assert x.evaluation_seconds > 0 and x.step_seconds > sum(
        seconds for name, seconds in x.metrics.items() if name.startswith("time/")), "scaled to 12 problems"


def test_a_cheap_evaluation_is_measured(patient):
    asked = []
    x = examine(patient.config, patient.models, patient.rewards, patient.data,
                lambda policy, temperature: asked.append((policy, temperature)), patient.dist)
    assert asked == [(patient.models.policy, 1.0)] and x.evaluation_seconds > 0


def test_a_cheap_step_has_all_micro_batches(tmp_path, monkeypatch):
    monkeypatch.setattr(doctor_step, "CHEAP_SECONDS", 1e9)
    x = examined(completing(tmp_path, gradient_accumulation_steps=2, ppo_epochs=2, minibatches=2))
    assert x.sampled[0][0].problems == 8 and x.metrics["mismatch_max"] < 1e-3


def test_only_a_step_that_fits_into_memory_is_taken(patient, monkeypatch, tmp_path):
    monkeypatch.setattr(doctor_step, "memory_limit", lambda device: 1.0)
    with pytest.raises(ValueError, match="a step on 4 problems needs about .* MB, but cpu has 1; set grad_checkpoint"):
        examined(patient)
    patient = completing(tmp_path, batch_size=12)
    for_12, for_4 = (doctor_step.beside_weights(doctor_step.replace(patient.config, batch_size=n), patient.models,
                                          patient.data, patient.dist) for n in (12, 4))
    monkeypatch.setattr(doctor_step, "memory_in_use", lambda device: 100.0)
    monkeypatch.setattr(doctor_step, "memory_limit", lambda device: 100 + (for_12 + for_4) / 2)
    x = examined(patient)
    assert x.sampled[0][0].problems == 4 and x.memory.needed == pytest.approx(100 + for_12)


def test_several_ranks_are_refused(patient):
    with pytest.raises(ValueError, match="in one process, not in 2: start it without torchrun"):
        examine(patient.config, None, None, None, None, SimpleNamespace(world=2))


def test_steps_on_the_same_rollouts_share_the_time_of_sampling():
    metrics = {"time/collect": 6.0, "time/train": 2.0, "loss": 5.0}
    once, shared = (SimpleNamespace(ppo_epochs=e, minibatches=m) for e, m in ((1, 1), (2, 2)))
    assert step_share(once, 8.0, metrics) == pytest.approx(8.0)
    assert step_share(shared, 8.0, metrics) == pytest.approx((6 + 2 / 3) / 4 + 2 / 2), "and score them once more"


@pytest.mark.parametrize(("name", "part"), [
    ("blocks.3.attention.qkv.weight", "layer 3"), ("embed.weight", "the embedding"),
    ("norm.weight", "the last normalization"),
    ("net.base_model.model.model.layers.11.self_attn.q_proj.lora_A.policy.weight", "layer 11"),
    ("net.lm_head.bias", "lm_head"), ("net.transformer.wte.weight", "wte")])
def test_a_parameter_belongs_to_its_layer_or_module(name, part):
    assert part_of(name) == part
