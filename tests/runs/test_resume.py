"""A resumed run has the bits of the uninterrupted one; what a run writes; states of other runs are refused."""

import os
import signal

import pytest
import torch

from core.models import load_model
from tests.tiny import same, same_momentum, without_clock
from tests.trainers import evaluated_trainer, logged_keys, prompt_trainer, records, run, trainer, training_records

pytestmark = pytest.mark.usefixtures("without_pictures")


def expect_whole(whole, resumed):
    """A resumed run has the weights, the momentum and the records of the uninterrupted one, to the last bit."""
    assert same(whole.policy, resumed.policy) and same_momentum(whole.optimizers, resumed.optimizers)
    assert whole.reference is None or same(whole.reference, resumed.reference)
    for name in ("step", "kl_beta", "iteration", "before", "after", "empty_steps", "skipped_steps"):
        assert getattr(whole, name) == getattr(resumed, name), name
    assert (whole.buffer.stored, whole.buffer.evaluations) == (resumed.buffer.stored, resumed.buffer.evaluations)
    one, two = (without_clock(records(t.config.out_dir)) for t in (whole, resumed))
    assert one == two


MOVING = [{"ppo_epochs": 2, "minibatches": 2, "top_p": 0.9},
          {"reference_mode": "ema", "ema_alpha": 0.8, "kl_target": 1e-3},
          {"reference_mode": "periodic", "reference_update_freq": 2, "kl_in_reward": True},
          {"reference_mode": "none", "kl_beta": 0.0, "ppo_epochs": 3}]


@pytest.mark.parametrize("settings", MOVING, ids=lambda s: "-".join(map(str, s.values())))
def test_a_resumed_run_equals_the_uninterrupted_one(dataset, tmp_path, settings):
    settings = settings | {"lr_decay_iters": 8}
    whole = run(trainer(dataset, tmp_path / "whole", max_iters=8, **settings))
    cut = run(trainer(dataset, tmp_path / "cut", max_iters=5, **settings))
    assert cut.buffer.queue or "ppo_epochs" not in settings, "it was cut within an iteration"
    resumed = run(trainer(dataset, tmp_path / "cut", max_iters=8, resume=True, **settings))
    assert same(whole.policy, resumed.policy) and same_momentum(whole.optimizers, resumed.optimizers)
    assert whole.reference is None or same(whole.reference, resumed.reference)
    assert (whole.kl_beta, whole.iteration) == (resumed.kl_beta, resumed.iteration)


def test_a_resumed_causal_run_with_evaluations_equals_the_uninterrupted_one(prompts, tmp_path):
    settings = {"success_reward": "length_penalty", "overlong_buffer": 4, "ppo_epochs": 2, "top_p": 0.9}
    whole = run(prompt_trainer(prompts, tmp_path / "whole", max_iters=6, **settings))
    run(prompt_trainer(prompts, tmp_path / "cut", max_iters=3, **settings))
    expect_whole(whole, run(prompt_trainer(prompts, tmp_path / "cut", max_iters=6, **settings), resume=True))


@pytest.mark.parametrize("place, step, evaluated", [("reward", 1, True), ("reward", 3, False), ("evaluation", 3, True),
                                                    ("evaluation", 6, True)])
def test_after_a_signal_the_run_is_saved_at_once_and_the_resumed_one_has_the_same_bits(dataset, tmp_path, capsys, place,
                                                                                     step, evaluated):
    """An evaluation that the signal came before is the resumed run's; who was at the last step has finished."""
    def signalling(t, name, function):
        def called(*arguments):
            if name == place and t.step == (step if name == "evaluation" else step - 1):
                os.kill(os.getpid(), signal.SIGTERM)
            return function(*arguments)
        return called

    settings = {"max_iters": 6, "ppo_epochs": 2, "reference_mode": "ema", "kl_target": 1e-3}
    whole = run(evaluated_trainer(dataset, tmp_path / "whole", **settings))
    cut = evaluated_trainer(dataset, tmp_path / "cut", **settings)
    cut.rewards, cut.evaluation = signalling(cut, "reward", cut.rewards), signalling(cut, "evaluation", cut.evaluation)
    cut.run()
    assert (cut.step, cut.evaluated) == (step, evaluated)
    stopped = "--resume=True" in capsys.readouterr().out
    assert stopped == bool(cut.stopped_by) == (step < 6)
    expect_whole(whole, run(evaluated_trainer(dataset, tmp_path / "cut", **settings), resume=True))


def test_max_iters_is_the_number_of_optimizer_steps_and_everything_is_written(dataset, tmp_path, monkeypatch):
    monkeypatch.undo()  # with the picture
    t = run(evaluated_trainer(dataset, tmp_path, max_iters=5))
    counts = {int(s["step"]) for o in t.optimizers for s in o.state_dict()["state"].values()}
    assert counts == {5}
    written = "console.log curves.png metrics.jsonl model.safetensors report.html samples.jsonl state.pt"
    assert set(written.split()) <= set(os.listdir(tmp_path))
    final, facts = load_model(str(tmp_path / "model.safetensors"))
    assert same(final, t.policy) and facts["step"] == 5 and "eval/judge" in facts
    assert [r["step"] for r in training_records(tmp_path)] == [1, 2, 3, 4, 5]
    expected = ("loss pg_loss kl_penalty mean_reward std_reward mean_advantage mean_kl mean_log_prob entropy "
                "clip_fraction grad_norm lr frac_reward_zero_std unique_completions mean_token_accuracy reward/judge "
                "tokens_per_second time/train skipped_steps eval/judge eval/kl")
    assert set(expected.split()) <= logged_keys(tmp_path)


@pytest.mark.parametrize("change, word", [
    (lambda state: state["identity"].update(kind="CausalPolicy"), "kind"),
    (lambda state: state["buffers"].append({}), "2 ranks"),
    (lambda state: state["identity"].pop("reference"), "reference")], ids=["kind", "ranks", "reference"])
def test_a_state_of_another_run_is_refused_in_one_line(dataset, tmp_path, change, word):
    settings = {"ppo_epochs": 2, "save_interval": 1}
    run(trainer(dataset, tmp_path, max_iters=1, **settings))
    state = torch.load(tmp_path / "state.pt", weights_only=True)
    change(state)
    torch.save(state, tmp_path / "state.pt")
    with pytest.raises(ValueError, match=f"state.pt .*{word}") as error:
        trainer(dataset, tmp_path, max_iters=2, resume=True, **settings)
    assert "\n" not in str(error.value)
