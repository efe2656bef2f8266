"""The check of a model: small numbers for every family, and large ones for a model that is wrong."""

import pytest

pytest.importorskip("transformers")

from core.models import save_model
from grpo import build
from grpo.tools import check_model
from tests.families import CAUSAL_FAMILIES, FILL_FAMILIES, folder_maker
from tests.tiny import CAUSAL, causal_model, model, one_process, run_here, run_script, save

pytestmark = pytest.mark.slow  # it is the number of them that takes the time

CPU = "--device=cpu"


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """family -> the folder of a small random model."""
    return folder_maker(tmp_path_factory.mktemp("families"))


def table(*argv):
    """The rows that the script prints, (kind, numbers)."""
    done = run_here("grpo/tools/check_model.py", CPU, *argv)
    assert done.returncode == 0, done.stderr
    rows = [[cell.strip() for cell in line.split("|")[2:-1]] for line in done.stdout.strip().split("\n")]
    return [(kind, list(map(float, numbers))) for kind, *numbers in rows[2:]]


def test_every_family_and_models_of_ours_compute_the_same_in_every_way(folder, tmp_path):
    save_model(str(tmp_path / "ours.safetensors"), causal_model(), CAUSAL)
    for kind, models in (("causal", [*map(folder, CAUSAL_FAMILIES), tmp_path / "ours.safetensors"]),
                         ("fill-in", [*map(folder, FILL_FAMILIES), save(tmp_path / "fill.safetensors", model())])):
        for found, numbers in table(*models, "--prompt_length=9"):
            assert found == kind and len(numbers) == 3 and max(numbers) < 1e-4 and numbers[1] > 0


@pytest.mark.parametrize("wrong", ["padding", "cache", "recomputed"])
def test_a_model_that_is_wrong_is_found_out(wrong, folder, monkeypatch):
    load = build.load_model

    def load_wrong(*arguments, **settings):
        net, facts = load(*arguments, **settings)
        states = net.states

        def changed(tokens, position=None, past=None, padding=None):
            if wrong == "padding":
                padding = None
            if wrong == "cache" and past is not None and past.length:
                for layer in past.content.layers:
                    layer.keys = 0 * layer.keys
            h = states(tokens, position, past, padding)
            return h * 1.01 if wrong == "recomputed" and net.grad_checkpoint else h

        net.states = changed
        return net, facts

    monkeypatch.setattr(build, "load_model", load_wrong)
    numbers, _ = check_model.check(folder("llama"), check_model.CheckConfig(device="cpu"), one_process())
    assert numbers[["padding", "cache", "recomputed"].index(wrong)] > 1e-3, numbers
    assert (numbers[1] < 1e-4) == (wrong == "recomputed"), numbers


def test_in_bfloat16_sampler_and_scorer_differ_by_rounding_at_most(folder):
    (_, numbers), = table(folder("llama"), "--dtype=bfloat16")
    assert numbers[0] < 1


def test_what_cannot_be_checked_is_one_line(folder):
    for arguments, words in ((["folder", "--prompt_length=1"], "prompt_length"), ([], "check_model.py FOLDER"),
                             ([folder("electra_judge")], "sequence_scorer"), (["no_such_folder"], "no_such_folder")):
        done = run_here("grpo/tools/check_model.py", CPU, *arguments)
        assert done.returncode and done.stderr.count("\n") == 1 and words in done.stderr


def test_the_script_as_a_user_runs_it(folder):
    done = run_script("grpo/tools/check_model.py", folder("bert"), CPU)
    assert done.returncode == 0 and done.stderr == "" and folder("bert") in done.stdout, done.stderr
