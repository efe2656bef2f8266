"""On-policy distillation: the KL to a teacher against loops and enumeration, and runs in which a teacher teaches."""

import itertools
import os
import re

import pytest
import torch
from torch.nn import functional as F

from core.model import LANGUAGE_MODEL
from core.models import save_model
from core.settings.script import exit_code
from grpo import train_grpo
from grpo.losses import (
    KL_ESTIMATORS, OBJECTIVES, compute_advantages, kl_as_reward, kl_penalty, kl_per_token, policy_loss)
from grpo.rewards import Rewards
from grpo.rollout import Scores
from tests.trainers import prompt_trainer, records, run
from tests.tiny import (
    CAUSAL,
    Catcher,
    causal_model,
    causal_policy,
    clear_gradient,
    config,
    flat_gradient,
    grpo_step,
    model,
    prompt_consumer,
    same,
    sampled,
    save,
    step_gradient,
)

# For tests that hand a policy over as the teacher
TAUGHT = {"teacher_checkpoint": "a teacher", "kl_beta": 0.0, "distill_beta": 0.7}


@pytest.fixture(scope="module")
def teachers(tmp_path_factory):
    """{name: path}. The causal teacher has more layers than its student."""
    folder = tmp_path_factory.mktemp("teachers")
    paths = {"other": save(folder / "other", model(LANGUAGE_MODEL))}
    for name, net in {"causal": causal_model(seed=9, n_layer=2), "short": causal_model(block_size=16)}.items():
        paths[name] = str(folder / name)
        save_model(paths[name], net, CAUSAL)
    return paths


def taught(**settings):
    return config(**{"max_new_tokens": 6} | TAUGHT | settings)


# The gradient

def test_the_gradient_is_that_of_a_loop_over_completions_and_tokens(prompts):
    policy, teacher, c = causal_policy(seed=1), causal_policy(seed=2).frozen(), taught(temperature=0.7)
    gradient = step_gradient(policy, teacher, Rewards(c), prompt_consumer(prompts, c), c)
    batch, rollouts, total = prompt_consumer(prompts, c).problems("train", 0), sampled(policy, prompts, c), 0.0
    for n in range(16):
        prompt, length = batch["record"][n // 4]["tokens"], int(rollouts.mask[n].sum())
        text = torch.tensor([prompt + rollouts.target[n, :length].tolist()])
        p, q = ((x.model(text)[0] / c.temperature).log_softmax(-1) for x in (policy, teacher))
        for t in range(length):
            at = len(prompt) - 1 + t
            kl = sum(torch.exp(p[at, v]) * (p[at, v] - q[at, v]) for v in range(p.shape[1]))
            total = total + 0.7 * kl / length / 16
    clear_gradient(policy)
    total.backward()
    loop = flat_gradient(policy)
    assert loop.norm() > 0.01 and (gradient - loop).norm() / loop.norm() < 1e-5


class Table:
    """Every completion of two tokens out of three: a policy, which is a table of logits, and a teacher."""

    def __init__(self, seed=0):
        torch.manual_seed(seed)
        self.logits = torch.randn(4, 3, dtype=torch.float64).requires_grad_()  # of the first token, and after each one
        self.teacher = torch.randn(4, 3, dtype=torch.float64).log_softmax(-1)
        self.target = torch.tensor(list(itertools.product(range(3), repeat=2)))      # (9, 2)
        self.state = torch.stack((torch.zeros(9, dtype=torch.long), self.target[:, 0] + 1), 1)  # (9, 2)

    def logp(self):
        """(9, 2) of the tokens under the policy, and under the teacher."""
        own = self.logits.log_softmax(-1)
        return tuple(x[self.state].gather(-1, self.target[..., None])[..., 0] for x in (own, self.teacher))

    def exact(self):
        """(9, 2) the KL of the distribution that each token is drawn from."""
        own = self.logits.log_softmax(-1)
        return F.kl_div(self.teacher, own, log_target=True, reduction="none").sum(-1)[self.state]

    def gradient(self, loss):
        return torch.autograd.grad(loss, self.logits, retain_graph=True)[0]


class Rolled:
    """The fields of rollouts that the KL reads."""
    mask = torch.ones(9, 2, dtype=torch.float64)

    def __init__(self, logp, teacher):
        self.old_logp, self.ref_logp = logp.detach(), teacher


def test_in_the_reward_the_expected_gradient_is_that_of_the_kl_of_whole_completions():
    """It counts what a token changes later, which the KL of each token does not. Groups of two, by enumeration."""
    table = Table()
    logp, teacher = table.logp()
    p = logp.detach().sum(1).exp()
    pairs = torch.tensor(list(itertools.product(range(9), repeat=2)))                # (81, 2)
    reward = kl_as_reward(Rolled(logp, teacher), 0.7).sum(1)                         # (9,)
    credit = reward[pairs][..., None]                                                # (81, 2, 1)
    advantage = compute_advantages(credit, "leave_one_out", torch.ones_like(credit))
    weight = (p[pairs].prod(1) / 2)[:, None].expand(81, 2).reshape(-1, 1).expand(162, 2)
    rows = logp[pairs.flatten()]                                                     # (162, 2)
    loss, _, _ = policy_loss(rows, rows.detach(), advantage.flatten(0, 1), weight, OBJECTIVES["rloo"])
    whole = table.gradient(0.7 * (logp.sum(1).exp() * (logp - teacher).sum(1)).sum())
    torch.testing.assert_close(table.gradient(loss), whole)
    of_tokens = table.gradient(0.7 * (table.exact() * p[:, None]).sum())
    assert (whole - of_tokens).norm() > 0.01


@pytest.mark.parametrize("on_policy", [True, False])
@pytest.mark.parametrize("name", ["grpo", "gspo"])
@pytest.mark.parametrize("estimator", KL_ESTIMATORS)
def test_in_the_loss_the_expected_gradient_is_that_of_the_kl_of_each_token(name, estimator, on_policy):
    """Over all that the sampler can write, also where the ratio of the surrogate is that of the sequence."""
    table = Table()
    logp, teacher = table.logp()
    old = logp.detach() if on_policy else Table(seed=1).logp()[0].detach()
    p = old.sum(1, keepdim=True).exp()                                               # (9, 1)
    _, ratio, _ = policy_loss(logp, old, 0 * p, p.expand(9, 2), OBJECTIVES[name])
    kl = kl_per_token(Scores(logp, None), Rolled(old, teacher), estimator, ratio)
    torch.testing.assert_close(table.gradient(kl_penalty(kl, p, 0.7)), table.gradient((0.7 * table.exact() * p).sum()))


@pytest.mark.parametrize("objective", ["grpo", "bnpo"])
def test_the_gradient_does_not_depend_on_how_a_taught_step_is_cut(prompts, objective):
    found = []
    for batch_size, cut in ((4, {}), (1, {"gradient_accumulation_steps": 4}), (4, {"micro_batch_tokens": 60})):
        c = taught(objective=objective, batch_size=batch_size, max_new_tokens=12, **cut)
        teacher = causal_policy(seed=2).frozen()
        found.append(step_gradient(causal_policy(seed=1), teacher, Rewards(c), prompt_consumer(prompts, c), c))
    for other in found[1:]:
        assert (other - found[0]).norm() < 2e-5 * found[0].norm()


@pytest.mark.parametrize("size", [1, 4])
def test_without_rewards_the_teacher_alone_teaches(prompts, size):
    policy, teacher, c = causal_policy(seed=1), causal_policy(seed=2).frozen(), taught(group_size=size)
    metrics = grpo_step(policy, teacher, Rewards(c), prompt_consumer(prompts, c), c)
    assert metrics["mean_kl"] > 0.01 and metrics["grad_norm"] > 0 and metrics["empty_steps"] == 0
    assert metrics["loss"] == metrics["kl_penalty"] == pytest.approx(0.7 * metrics["mean_kl"], rel=0.2)
    assert metrics["mean_reward"] == metrics["pg_loss"] == 0


def test_rewards_of_a_weight_are_added_and_those_of_weight_0_are_measured_alone(prompts):
    def step(**settings):
        policy, c = causal_policy(seed=1), taught(**settings)
        catcher = Catcher(policy)
        metrics = grpo_step(policy, causal_policy(seed=2).frozen(), Rewards(c), prompt_consumer(prompts, c), c,
                            optimizers=[catcher])
        return metrics, catcher.gradient

    scored = {"reward_functions": ("length_penalty",), "reward_settings": {"length_min": 1, "length_max": 4}}
    none, alone = step()
    zero, measured = step(**scored, reward_weights=(0.0,), task_type="fill_in")
    _, both = step(**scored)
    assert torch.equal(alone, measured) and not torch.allclose(alone, both, rtol=1e-2)
    assert "reward/length_penalty" in zero and "reward/length_penalty" not in none


# Runs

def test_the_teacher_stays_and_the_student_comes_nearer(prompts, teachers, tmp_path):
    t = prompt_trainer(prompts, tmp_path, teacher_checkpoint=teachers["causal"], kl_beta=0.0, task_type="fill_in",
                       group_size=1, batch_size=8, max_iters=30, learning_rate=1e-2, min_lr=1e-2, eval_interval=30)
    run(t)
    assert same(t.reference, causal_policy(seed=9, n_layer=2)) and t.reference.model.config.n_layer == 2
    kl = [record["eval/kl"] for record in records(tmp_path) if "eval/kl" in record]
    assert 0.1 < kl[0] and 0 < kl[-1] < 0.5 * kl[0]
    assert not any(name.startswith("eval/reward") for record in records(tmp_path) for name in record)


# A user's commands

@pytest.fixture
def ask(prompts, teachers, tmp_path, capsys, monkeypatch):
    """train_grpo.py with these settings for a causal student: (exit code, stdout, stderr)."""
    student = str(tmp_path / "student")
    save_model(student, causal_model(seed=1), CAUSAL)

    def asked(**settings):
        settings = {"dataset": prompts, "generator_checkpoint": student, "teacher_checkpoint": teachers["causal"],
                    "kl_beta": 0.0, "max_new_tokens": 6, "batch_size": 4, "device": "cpu", "eval_problems": 4,
                    "out_dir": tmp_path / "out"} | settings
        monkeypatch.setattr("sys.argv", ["train", *(f"--{key}={x}" for key, x in settings.items())])
        capsys.readouterr()
        code = exit_code(train_grpo.main)
        return code or 0, *capsys.readouterr()
    return asked


def test_plan_doctor_run_and_report_without_rewards(ask, tmp_path):
    code, out, err = ask(dry_run=True)
    assert code == 0 and err == "" and "rewards: none, the teacher alone teaches" in out
    assert "teacher    causal" in out or "teacher    language_model, 2 layers" in out, out
    code, out, err = ask(doctor=True)
    assert err == "" and "nothing is wrong" in out and "reward" not in out.split("doctor:")[1], out
    code, out, err = ask(max_iters=2, group_size=1)
    assert code == 0 and err == "", err
    assert {"report.html", "curves.png"} <= set(os.listdir(tmp_path / "out"))


@pytest.mark.parametrize("settings, words", [
    ({"teacher_checkpoint": "other"}, "teacher_checkpoint=.* has another vocabulary"),
    ({"teacher_checkpoint": "short", "max_new_tokens": 20}, "max_new_tokens=20 .*do not fit the 16 tokens")], ids=str)
def test_a_teacher_that_does_not_suit_is_refused_in_one_line(ask, teachers, settings, words):
    settings = settings | {"teacher_checkpoint": teachers[settings["teacher_checkpoint"]]}
    code, _, err = ask(dry_run=True, **settings)
    assert code and len(err.strip().split("\n")) == 1
    assert re.search(words, err), err
