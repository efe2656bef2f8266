"""The checker names right losses, and what is wrong with others: one loss with a line changed at a time."""

import pytest

from core.errors import Mistake
from grpo.losses import KL_ESTIMATORS, OBJECTIVES
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


GATE = {"term = torch": "tau = torch.where(A > 0, 1.0, 1.05); term = (tau * (r - 1)).sigmoid() * 4 / tau * A # torch"}
RIGHT = [("grpo", "k3", BY_SEQUENCE),
         ("dr_grpo", "k2", BY_LIMIT | K2), ("rloo", "none", BY_COMPLETION | NO_KL), ("gspo", "k3", BY_SEQUENCE | S),
         ("luspo", "k3", BY_COMPLETION | S), ("dppo", "k3", BY_LIMIT | TV),
         ("cispo", "none", NO_KL | term("u.clamp(0.8, 1.2).detach() * A * logp")),
         ("cispo", "k3", term("u.clamp(0, 5).detach() * A * logp")),
         ("sapo", "k3", BY_SEQUENCE | GATE),
         ("dro", "none", NO_KL | term("A * logp - 0.025 * (logp - old_logp) ** 2")),
         ("dapo", "k3", {"1.2": "1.28"}),
         ("gspo", "none", BY_SEQUENCE | S | NO_KL | {"0.8, 1.2": "1 - 3e-4, 1 + 4e-4"}),
         ("dapo", "k3", {"import torch": "import torch, beside", "/ total_tokens\n": "/ total_tokens\n"
                         "class Loss(torch.nn.Module): forward = staticmethod(mine)\nmine = Loss()\n"}),
         ("plain", "k3", BY_COMPLETION | {"logp - old_logp).exp": "logp.float() - old_logp.float()).exp"})]
MIRRORED = term("torch.where(A >= 0, torch.min(u * A, u.clamp(0.8, 1.2) * A), torch.max(u * A, u.clamp(0.8, 1.2) * A))")
TO_REFERENCE = NO_KL | {"(logp - old_logp)": "(logp - ref_logp)"}
K1 = {"kl = r": "kl = -x #"}
MEANS = UNAWARE | {"/ total_tokens": "/ mask.sum()"}
ROWS = UNAWARE | {"loss.sum() / total_tokens": "(loss / length).sum(1).mean()"}  # those without a token count too
CONVENTIONS = [("masked completions", "grpo", ROWS), ("k1 times the ratio", "dapo", {"kl = r": "kl = r * -x #"})]
NO_CLAMP = {".clamp(min=1)": ""}


def sums(text):
    return {"((logp - old_logp) * mask).sum(1, keepdim=True) / length": text}


WRONG = [
    ("not finite", "rloo", {"loss.sum()": "(loss / 0).sum()"}),
    ("a mean for each micro-batch, added up, masked completions", "grpo",
     {"loss.sum() / total_tokens": "(loss / length).sum(1).mean()"}),
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
    ("its kl_beta is 0.08", "dapo", {"0.04": "0.08"}),
    ("wrong sign, wrong sign of the KL", "dapo", {"loss = -": "loss = "}),
    ("not finite", "rloo", {"loss.sum() /": "(loss + 0 * (logp - logp.detach()).sqrt()).sum() /"}),
    ("no policy gradient", "rloo", {"loss.sum()": "(0 * logp).sum()"}),
    ("1 / G of the right gradient", "dapo", {"return ": "return 1 / 4 * "}),
    ("the gradient is 3 times the right one", "grpo", BY_SEQUENCE | {"return ": "return 3 * "}),
    ("mean of means", "dapo", MEANS),
    ("a mean for each micro-batch, added up", "dapo", {"/ total_tokens": "/ mask.sum()"}),
    ("a sum", "grpo", {" / total_tokens": ""}),
    ("the mask is shifted", "dapo", {") * mask": ") * torch.cat([0 * mask[:, :1], mask[:, :-1]], 1)"}),
    ("the last token is left out", "dapo", {") * mask": ") * torch.cat([mask[:, 1:], 0 * mask[:, :1]], 1)"}),
    ("the first token is left out", "dapo", {") * mask": ") * mask * (torch.arange(mask.shape[1]) > 0)"}),
    ("no clip", "dapo", NO_KL | term("u.detach() * A * logp")),  # cispo without its clamp
    ("dual clip", "dapo", term("torch.where(A < 0, torch.max(torch.min(u * A, u.clamp(0.8, 1.2) * A), 3 * A), "
                               "torch.min(u * A, u.clamp(0.8, 1.2) * A))")),
    ("dual clip", "dapo", term("torch.min(u.clamp(max=4) * A, u.clamp(0.8, 1.2) * A)")),  # TRL's delta
    ("dual clip", "dapo", term("torch.min(u * A, u.clamp(0.8, 1.2) * A).clamp(-5, 5)")),
    ("a cap in place of the clip", "grpo", BY_SEQUENCE | term("u.clamp(max=5) * A")),
    ("no min", "dapo", term("u.clamp(0.8, 1.2) * A")),
    ("max in place of min", "dapo", term("torch.max(u * A, u.clamp(0.8, 1.2) * A)")),
    ("gradient through the weight", "cispo", term("u.clamp(0, 5) * A * logp")),
    ("inverted ratio", "grpo", BY_SEQUENCE | NO_KL | {"(logp - old_logp)": "(old_logp - logp)"}),
    ("product of the ratios", "gspo", BY_SEQUENCE | S | sums("((logp - old_logp) * mask).sum(1, keepdim=True)")),
    ("mean of the ratios", "gspo", BY_SEQUENCE | S | {"s = ((": "s = (r * mask).sum(1, keepdim=True) / length # (("}),
    ("padding in the ratio of the sequence", "gspo", BY_SEQUENCE | S | sums("(logp - old_logp).mean(1, keepdim=True)")),
    ("no 4 / tau", "sapo", BY_SEQUENCE | GATE | {" * 4 / tau": ""}),
    ("masked on both sides", "dppo", BY_LIMIT | TV | {"d <= 0.2": "d.abs() <= 0.2"}),
    ("only positive advantages", "rloo", BY_COMPLETION | {"advantage[:, None]": "advantage[:, None].clamp(min=0)"}),
    ("k2 with the gradient of the ratio", "dapo", {"kl = r": "kl = r * x ** 2 / 2 #"}),
    ("absolute KL", "grpo", BY_SEQUENCE | {"kl = r": "kl = x.abs() #"}),
    ("entropy of the sampled tokens", "dapo", {"0.04 * kl": "0.01 * logp.exp() * logp"}),
    ("KL to the policy that sampled", "dapo", {"x = ref_logp": "x = old_logp", "kl = r *": "kl ="}),
    ("the average is 'token'", "sapo", GATE),
    ("k1 as a loss, the average of the KL is 'sum'", "bnpo",
     K1 | {"(term - 0.04 * kl) * mask": "(term / total_tokens - 0.04 * kl / total_completions) * mask",
           "loss.sum() / total_tokens": "loss.sum()"}),
    ("clip_low 0.1, clip_high 0.1", "dapo", term("torch.min(u * A, u.clamp(0.9, 1.1) * A)")),
    ("beta 0.1", "dro", NO_KL | term("A * logp - 0.05 * (logp - old_logp) ** 2")),
    ("k3 without ratio, masked completions, not finite", "grpo", ROWS | NO_CLAMP | {"kl = r *": "kl ="}),
    ("a sum", "grpo", UNAWARE | {" / total_tokens": ""}),
    ("padding", "luspo", BY_COMPLETION | S | {") * mask\n": ")\n"}),
    ("divided by the size of the padded tensor", "grpo", UNAWARE | {"loss.sum() / total_tokens": "loss.mean()"}),
    ("k1 as a loss, mean of means, mirrored clip", "dapo", MEANS | K1 | MIRRORED),
    ("no known fault explains it", "dapo", term("torch.min(u * A, u.clamp(0.6, 1.3) * A)"))]


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
    return stop.value.code, objectives.split(" (")[0].split(", "), kl.removeprefix("KL: "), ", ".join(faults)


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
    code, objectives, kl, faults = verdict([mine(changes)], capsys)
    assert (code, faults) == (1, fault) and objective in objectives
    assert (kl == "unknown") == (fault == "no known fault explains it" or fault == "not finite")


@pytest.mark.parametrize("fault, objective, changes", CONVENTIONS)
def test_a_convention_is_named_and_right(fault, objective, changes, mine, capsys):
    code, objectives, kl, faults = verdict([mine(changes)], capsys)
    assert (code, kl, faults) == (0, "k2, k3", fault) and objective in objectives


def test_settings_ask_for_one_objective_with_its_numbers(mine, capsys):
    asked = ["--objective=dapo", "--kl=k3", "--clip_high=0.28", "--kl_beta=0.1"]
    path = mine({"1.2": "1.28", "0.04": "0.1"})
    assert verdict([path, *asked], capsys)[0] == 0
    assert verdict([path], capsys)[0] == 1
    assert verdict([path, "--objective=grpo", *asked[1:]], capsys)[:2] == (1, ["grpo"])


def test_a_kl_that_is_asked_for_or_not_is_told(mine, capsys):
    assert verdict([mine(NO_KL), "--kl=k3"], capsys)[2:] == ("none", "no KL")
    assert verdict([mine({}), "--kl=none"], capsys)[2:] == ("k2, k3", "a KL (k2, k3)")


@pytest.mark.parametrize("settings, changes", [
    ("--objective=dapo", {"1.2": "1.25"}), ("--objective=dapo --clip_high=0.2", {"1.2": "1.28"}),
    ("--objective=dapo --clip_high=0.28", {}),
    ("--objective=cispo --clip_low=1 --clip_high=4", term("u.detach() * A * logp")),
    ("--objective=cispo --clip_low=1 --clip_high=4", {}),
    ("--objective=gspo", BY_SEQUENCE | S | {"0.8, 1.2": "1 - 2e-4, 1 + 4e-4"})])
def test_a_loss_with_other_bounds_is_not_right(settings, changes, mine, capsys):
    assert verdict([mine(changes), *settings.split()], capsys)[0] == 1


def test_a_config_gives_an_objective_its_numbers(mine, capsys, tmp_path, monkeypatch):
    config = tmp_path / "beta.py"
    config.write_text("import dataclasses\nfrom grpo import losses\nlosses.OBJECTIVES['dro'] = dataclasses.replace("
                      "losses.OBJECTIVES['dro'], constants={'beta': 0.3})\n")
    monkeypatch.setitem(OBJECTIVES, "dro", OBJECTIVES["dro"])
    path = mine(NO_KL | term("A * logp - 0.15 * (logp - old_logp) ** 2"))
    assert verdict([path, "--objective=dro"], capsys)[0] == 1
    assert verdict([path, str(config), "--objective=dro", "--kl_beta=0.05"], capsys)[:2] == (0, ["dro"])


def test_a_config_adds_an_estimator_of_the_kl(mine, capsys, tmp_path, monkeypatch):
    config = tmp_path / "fourth.py"
    config.write_text("from grpo.losses import KL_ESTIMATORS\n"
                      "KL_ESTIMATORS['fourth'] = lambda logp, ref_logp, ratio: (logp - ref_logp) ** 4\n")
    monkeypatch.setitem(KL_ESTIMATORS, "fourth", None)
    del KL_ESTIMATORS["fourth"]
    path = mine(BY_SEQUENCE | {"kl = r": "kl = x ** 4 #"})
    assert verdict([path, "--objective=grpo"], capsys)[0] == 1
    with pytest.raises(Mistake, match="fourth"):
        check_loss.main([path, "--kl=fourth"])
    code, objectives, kl, faults = verdict([path, str(config), "--objective=grpo", "--kl=fourth"], capsys)
    assert (code, objectives, kl, faults) == (0, ["grpo"], "fourth", "")
    assert verdict([path, str(config), "--objective=grpo", "--kl=k3"], capsys)[2:] == ("fourth", "a KL (fourth)")


@pytest.mark.parametrize("name, fault", [
    ("verl", "k3 without ratio"), ("dr_grpo", "masked completions"), ("nanochat", "mean of means, no ratio"),
    ("minimind", "k3 without ratio, masked completions"), ("book", "k1 as a loss, masked completions, mirrored clip")])
def test_published_formulas(name, fault, capsys):
    code = 0 if fault == "masked completions" else 1
    assert verdict([f"{ROOT}/tests/vectors/published.py:{name}"], capsys)[::3] == (code, fault)


@pytest.mark.parametrize("name, objective, kl, fault", [
    ("grpo", "grpo", "k3", "masked completions"), ("dr_grpo", "dr_grpo", "k3", "masked completions"),
    ("sapo", "sapo", "k3", "masked completions"), ("dapo", "dapo", "k3", ""), ("bnpo", "bnpo", "k3", "mean of means"),
    ("gspo", "gspo", "k3", "masked completions, sequence ratio in the KL")])
def test_trl(name, objective, kl, fault, capsys):
    trl = pytest.importorskip("trl")
    if trl.__version__ != "1.16.0":
        pytest.skip(f"written for trl==1.16.0, not {trl.__version__}")
    code, objectives, found, faults = verdict([f"{ROOT}/tests/vectors/trl_loss.py:{name}"], capsys)
    assert code == (0 if fault in ("", "masked completions") else 1)
    assert faults == fault and kl in found and objective in objectives
