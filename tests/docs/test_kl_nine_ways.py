"""docs/kl_nine_ways.py: which ways to write the KL have its gradient, by listing every completion."""

import math
import re

import pytest
import torch

from tests.docs.test_grpo_in_one_file import loaded
from tests.tiny import read_records, run_script

ENDS = slice(5, 9)  # entropy and KL on-policy, the same with a colder sampler


@pytest.fixture(scope="module")
def script():
    return loaded("kl_nine_ways")


def tables(L, V, count, seed):
    return torch.randn(count, L, V, V, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


@pytest.mark.parametrize("seed", range(3))
def test_which_losses_have_the_gradient_of_the_kl(script, seed):
    policy, old, reference = tables(3, 4, 3, seed)
    errors = {name: [script.compare(way, policy, sampler, reference)[1] for sampler in (policy, old)]
              for name, way in script.WAYS.items()}
    for name, (on_policy, off_policy) in errors.items():
        assert (on_policy < 1e-12) == (name in ("exact", "r k3", "sg(r) k2", "k2", "k1 in the reward")), name
        assert (off_policy < 1e-12) == (name in ("exact", "r k3", "sg(r) k2")), name
    assert script.expected_gradient(script.k1, policy, policy, reference).norm() < 1e-12


@pytest.mark.parametrize("seed", range(3))
def test_gradients_of_one_token_are_those_of_their_formulas(script, seed):
    """In the logits: p (log p - log q - KL) of KL(p, q), p - q of KL(q, p)."""
    policy, reference = tables(1, 5, 2, seed)
    p, q = (table[0, 0].softmax(-1) for table in (policy, reference))
    log_ratio = (p / q).log()
    forward = p * (log_ratio - (p * log_ratio).sum())
    expected = {"exact": forward, "s k3": forward, "k1 in the reward": forward, "k3": p - q, "-k3": q - p}
    for name, gradient in expected.items():
        found = script.expected_gradient(script.WAYS[name], policy, policy, reference)[0, 0]
        torch.testing.assert_close(found, gradient)


@pytest.mark.slow
def test_k1_ends_at_the_uniform_distribution_and_the_others_at_the_reference():
    lines = run_script("docs/kl_nine_ways.py").stdout.strip().split("\n")
    start, reference, uniform = ([float(x) for x in re.findall(r"\d+\.\d+", line)] for line in lines[-3:])
    assert uniform[0] == pytest.approx(math.log(50), abs=1e-3) and reference[1] == 0
    rows = [[cell.strip() for cell in line.split("|")[1:-1]] for line in lines[2:-3]]
    found = {name: [float(x) for x in numbers[ENDS]] for name, *numbers in rows}
    k1, reverse = found.pop("k1"), found.pop("-k3")
    assert k1[:2] == start and k1[2] > uniform[0] - 0.03 and k1[3] > 10 * start[1]
    assert reverse[1] > 10 * start[1] and reverse[0] < 0.01
    for name, (entropy, kl, colder_entropy, colder_kl) in found.items():
        assert kl < 1e-3 and abs(entropy - reference[0]) < 0.01, name
        assert colder_kl < 0.1 * start[1] and abs(colder_entropy - reference[0]) < 0.05, name


@pytest.mark.slow
@pytest.mark.parametrize("changes", ["k1", "k1,colder"])
def test_a_run_with_another_term_trains(changes, tmp_path):
    """The ratio to the sampler is 1 only where the loss knows of it."""
    argv = ["docs/kl_on_a_model.py", changes, "config/grpo_arithmetic.py", "--kl_beta=0.1", "--kl_estimator=k2",
            "--max_iters=2", "--warmup_iters=0", "--batch_size=4", "--eval_problems=2", f"--out_dir={tmp_path}"]
    assert run_script(*argv).returncode == 0
    *_, last = (record for record in read_records(tmp_path / "metrics.jsonl") if "mean_kl" in record)
    assert last["mean_kl"] != 0 and (last["ratio_minus_one"] < 1e-4) == (changes == "k1")
