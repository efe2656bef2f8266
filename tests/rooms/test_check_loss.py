"""The checker names right losses, and what is wrong with others: one loss with a line changed at a time."""

import pytest

from grpo.tools import check_loss
from tests.tiny import ROOT

pytestmark = pytest.mark.slow  # it is the number of them that takes the time

MINE = """
import torch

def mine(logp, old_logp, ref_logp, advantage, mask, total_tokens, total_completions, max_tokens):
    A = advantage[:, None]
    length = mask.sum(1, keepdim=True).clamp(min=1)
    r = (logp - old_logp).exp()
    s = (((logp - old_logp) * mask).sum(1, keepdim=True) / length).exp()
    u = r
    x = ref_logp - logp
    kl = r * (x.exp() - x - 1)
    term = torch.min(u * A, u.clamp(0.8, 1.2) * A)
    loss = -(term - 0.04 * kl) * mask
    return loss.sum() / total_tokens
"""
K2, NO_KL = {"kl = r": "kl = r.detach() * x ** 2 / 2 #"}, {"0.04": "0"}
BY_SEQUENCE = {"loss.sum() / total_tokens": "(loss / length).sum() / total_completions"}
BY_COMPLETION = {"/ total_tokens": "/ total_completions"}
BY_LIMIT = {"/ total_tokens": "/ (total_completions * max_tokens)"}
S = {"u = r": "u = s"}
UNAWARE = {", total_tokens, total_completions, max_tokens": ""}
TV = {"term = torch": "d = A.sign() * (logp.exp() - old_logp.exp()); term = u * A * (d <= 0.2) # torch"}


def term(text):
    return {"torch.min(u * A, u.clamp(0.8, 1.2) * A)": text}


RIGHT = [("grpo", "k3", BY_SEQUENCE),
         ("dr_grpo", "k2", BY_LIMIT | K2), ("rloo", "none", BY_COMPLETION | NO_KL), ("gspo", "k3", BY_SEQUENCE | S),
         ("luspo", "k3", BY_COMPLETION | S), ("dppo", "k3", BY_LIMIT | TV),
         ("cispo", "none", NO_KL | term("u.clamp(0.8, 1.2).detach() * A * logp")),
         ("dapo", "k3", {"import torch": "import torch, beside", "/ total_tokens\n": "/ total_tokens\n"
                         "class Loss(torch.nn.Module): forward = staticmethod(mine)\nmine = Loss()\n"}),
         ("plain", "k3", BY_COMPLETION | {"logp - old_logp).exp": "logp.float() - old_logp.float()).exp"})]
MIRRORED = term("torch.where(A >= 0, torch.min(u * A, u.clamp(0.8, 1.2) * A), torch.max(u * A, u.clamp(0.8, 1.2) * A))")
TO_REFERENCE = NO_KL | {"(logp - old_logp)": "(logp - ref_logp)"}
K1 = {"kl = r": "kl = -x #"}
MEANS = UNAWARE | {"/ total_tokens": "/ mask.sum()"}
WRONG = [
    ("mirrored clip", "gspo", BY_SEQUENCE | S | MIRRORED),
    ("ratio to the reference", "grpo", BY_SEQUENCE | TO_REFERENCE),
    ("ratio to the reference", "gspo", BY_SEQUENCE | S | TO_REFERENCE),
    ("no clip", "grpo", BY_SEQUENCE | term("u * A")), ("no ratio", "dapo", NO_KL | term("logp * A")),
    ("k1 as a loss", "grpo", BY_SEQUENCE | K1), ("k3 without ratio", "dapo", {"kl = r *": "kl ="}),
    ("k2 without ratio", "dr_grpo", BY_LIMIT | {"kl = r": "kl = x ** 2 / 2 #"}),
    ("k3 with a detached ratio", "dapo", {"kl = r": "kl = r.detach()"}),
    ("reversed KL", "dapo", {"kl = r": "kl = (-x).exp() + x - 1 #"}),
    ("sequence ratio in the KL", "gspo", BY_SEQUENCE | S | {"kl = r": "kl = s"}),
    ("wrong sign of the KL", "rloo", BY_COMPLETION | {"- 0.04": "+ 0.04"}),
    ("kl_beta is 0.08", "dapo", {"0.04": "0.08"}),
    ("wrong sign, wrong sign of the KL", "dapo", {"loss = -": "loss = "}),
    ("not finite", "grpo", {"loss.sum() /": "(loss + 0 * (logp - logp.detach()).sqrt()).sum() /"}),
    ("no policy gradient", "grpo", {"loss.sum()": "(0 * logp).sum()"}),
    ("1 / G of the right gradient", "dapo", {"return ": "return 1 / 4 * "}),
    ("the gradient is 3 times the right one", "grpo", BY_SEQUENCE | {"return ": "return 3 * "}),
    ("mean of means", "dapo", MEANS),
    ("a sum", "grpo", UNAWARE | {" / total_tokens": ""}),
    ("padding", "luspo", BY_COMPLETION | S | {") * mask\n": ")\n"}),
    ("masked completions", "grpo", UNAWARE | {"loss.sum() / total_tokens": "(loss / length).sum(1).mean()"}),
    ("divided by the size of the padded tensor", "grpo", UNAWARE | {"loss.sum() / total_tokens": "loss.mean()"}),
    ("k1 as a loss, mean of means, mirrored clip", "dapo", MEANS | K1 | MIRRORED),
    ("no known fault explains it", "dapo", term("torch.min(u * A, u.clamp(0.9, 1.1) * A)"))]


def changed(changes):
    """The text of the loss with these changes."""
    text = MINE
    for old, new in changes.items():
        assert old in text, old
        text = text.replace(old, new)
    return text


def verdict(argv, capsys):
    """The exit code, the objectives, the KL and the faults that the checker prints."""
    with pytest.raises(SystemExit) as stop:
        check_loss.main(argv)
    first, *rest = capsys.readouterr().out.splitlines()
    objectives, kl = first.split(": ", 1)[1].split("; ")[:2]
    faults = [line[2:].split(": ")[0] for line in rest if line.startswith("- ")]
    return stop.value.code, objectives.split(", "), kl.removeprefix("KL: "), ", ".join(faults)


@pytest.fixture
def mine(tmp_path):
    def write(changes):
        (tmp_path / "mine.py").write_text(changed(changes))
        (tmp_path / "beside.py").touch()
        return f"{tmp_path}/mine.py:mine"
    return write


@pytest.mark.parametrize("objective, kl, changes", RIGHT)
def test_a_right_loss_is_named(objective, kl, changes, mine, capsys):
    code, objectives, found, faults = verdict([mine(changes)], capsys)
    assert (code, faults) == (0, "") and kl in found and objective in objectives


@pytest.mark.parametrize("fault, objective, changes", WRONG)
def test_a_planted_fault_is_named(fault, objective, changes, mine, capsys):
    code, objectives, _, faults = verdict([mine(changes)], capsys)
    assert (code, faults) == (1, fault) and objective in objectives


def test_settings_ask_for_one_objective_with_its_numbers(mine, capsys):
    asked = ["--objective=dapo", "--kl=k3", "--clip_high=0.28", "--kl_beta=0.1"]
    path = mine({"1.2": "1.28", "0.04": "0.1"})
    assert verdict([path, *asked], capsys)[0] == 0
    assert verdict([path], capsys)[0] == 1
    assert verdict([path, "--objective=grpo", *asked[1:]], capsys)[:2] == (1, ["grpo"])


@pytest.mark.parametrize("name, fault", [
    ("verl", "k3 without ratio"), ("dr_grpo", "masked completions"), ("nanochat", "mean of means, no ratio"),
    ("minimind", "k3 without ratio, masked completions"), ("book", "k1 as a loss, masked completions, mirrored clip")])
def test_published_formulas(name, fault, capsys):
    assert verdict([f"{ROOT}/tests/vectors/published.py:{name}"], capsys)[::3] == (1, fault)


@pytest.mark.parametrize("name, objective, kl, fault", [
    ("grpo", "grpo", "k3", "masked completions"), ("dr_grpo", "dr_grpo", "k3", "masked completions"),
    ("dapo", "dapo", "k3", ""), ("bnpo", "bnpo", "k3", "mean of means"),
    ("gspo", "gspo", "k3", "masked completions, sequence ratio in the KL")])
def test_trl(name, objective, kl, fault, capsys):
    trl = pytest.importorskip("trl")
    if trl.__version__ != "1.16.0":
        pytest.skip(f"written for trl==1.16.0, not {trl.__version__}")
    code, objectives, found, faults = verdict([f"{ROOT}/tests/vectors/trl_loss.py:{name}"], capsys)
    assert (code, faults) == (int(fault != ""), fault) and kl in found and objective in objectives
