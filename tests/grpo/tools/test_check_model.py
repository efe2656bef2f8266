"""The check of a model: small numbers for every family, and large ones for a model that is wrong."""

import pytest
import torch

transformers = pytest.importorskip("transformers")

from core.models import save_model
from grpo.tools import check_model
from tests.families import CAUSAL_FAMILIES, FILL_FAMILIES, folder_maker
from tests.tiny import CAUSAL, causal_model, model, one_process, run_here, run_script, save

pytestmark = pytest.mark.slow  # it is the number of them that takes the time

CPU = "--device=cpu"


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """family -> the folder of a small random model."""
    return folder_maker(tmp_path_factory.mktemp("families"))


def table(capsys, *argv):
    """The rows that the script prints, as lists of cells."""
    capsys.readouterr()
    check_model.main([CPU, *map(str, argv)])
    lines = [[cell.strip() for cell in line.split("|")[1:-1]] for line in capsys.readouterr().out.strip().split("\n")]
    assert lines[0] == ["model", "kind", *check_model.COLUMNS] and set(lines[1]) == {"---"}
    return lines[2:]


@pytest.mark.slow
@pytest.mark.parametrize("family", CAUSAL_FAMILIES)
def test_a_causal_family_computes_the_same_in_every_way(family, folder, capsys):
    (path, kind, *cells), = table(capsys, folder(family))
    row = dict(zip(check_model.COLUMNS, map(float, cells), strict=True))
    assert (path, kind) == (folder(family), "causal")
    assert all(x < 1e-5 for x in row.values()), row
    assert row["first ratio"] == row["first KL"] == 0.0
    assert row["shared"] > 0 and row["padding"] > 0 and row["sampler"] > 0, "two ways that round differently"


@pytest.mark.parametrize("family", FILL_FAMILIES)
def test_a_fill_in_family_computes_the_same_in_every_way(family, folder, capsys):
    (_, kind, *cells), = table(capsys, folder(family))
    row = dict(zip(check_model.COLUMNS, cells, strict=True))
    assert kind == "fill-in" and row.pop("cache") == row.pop("padding") == "-"
    assert all(float(x) < 1e-5 for x in row.values()) and float(row["shared"]) > 0, row
    assert float(row["first ratio"]) == float(row["first KL"]) == 0.0


def test_models_of_ours_are_checked_too(tmp_path, capsys):
    save_model(str(tmp_path / "causal.safetensors"), causal_model(), CAUSAL)
    rows = table(capsys, tmp_path / "causal.safetensors", save(tmp_path / "fill.safetensors", model()),
                 "--prompt_length=9")
    assert [row[1] for row in rows] == ["causal", "fill-in"]
    assert all(float(cell) < 2e-5 for row in rows for cell in row[2:] if cell != "-")


WRONG = ("a model that reads its padding", "a cache that forgets", "activations computed again with other weights",
         "a sampler of other weights")


@pytest.mark.parametrize("wrong", WRONG)
def test_a_model_that_is_wrong_is_found_out(wrong, folder, monkeypatch):
    load = check_model.load_model

    def load_wrong(*arguments, **settings):
        net, facts = load(*arguments, **settings)
        states = net.states

        def changed(tokens, position=None, past=None, padding=None):
            if wrong == WRONG[0]:
                padding = None
            if wrong == WRONG[1] and past is not None and past.length and tokens.shape[1] == 1:
                past.keep(torch.arange(len(tokens)))
                for layer in past.content.layers:
                    layer.keys.zero_()
            h = states(tokens, position, past, padding)
            odd = wrong == WRONG[2] and net.grad_checkpoint or wrong == WRONG[3] and not torch.is_grad_enabled()
            return h * 1.01 if odd else h

        net.states = changed
        return net, facts

    monkeypatch.setattr(check_model, "load_model", load_wrong)
    row, _ = check_model.check(folder("llama"), check_model.CheckConfig(device="cpu"), one_process())
    found = {WRONG[0]: ("padding",), WRONG[1]: ("cache", "sampler"), WRONG[2]: ("recomputed",),
             WRONG[3]: ("sampler", "first ratio")}[wrong]
    assert all(row[column] > 1e-3 for column in found), row


def test_the_check_loads_what_transformers_loads(folder):
    """The logits that are compared with each other are those of transformers on whole texts."""
    c = check_model.CheckConfig(device="cpu")
    for family in ("qwen3", "gemma3"):
        path = folder(family)
        tokenizer = check_model.load_tokenizer(path)
        tokens = torch.from_numpy(check_model.random_tokens(tokenizer, c))
        with torch.no_grad():
            ours = check_model.load_model(path, tokenizer=tokenizer)[0](tokens)
            theirs = transformers.AutoModelForCausalLM.from_pretrained(path)(tokens).logits[..., : ours.shape[-1]]
        torch.testing.assert_close(ours, theirs, rtol=0, atol=1e-5)


def test_the_random_texts_hold_no_end_and_no_special_token(folder):
    c = check_model.CheckConfig(batch_size=40, prompt_length=40)
    for family in ("qwen3", "bert"):
        tokenizer = check_model.load_tokenizer(folder(family))
        found = set(check_model.random_tokens(tokenizer, c).flatten().tolist())
        assert not found & {*tokenizer.stop_token_ids, *tokenizer.banned_token_ids}
        assert len(found) > 0.9 * (tokenizer.base_vocab_size - len(tokenizer.banned_token_ids))


@pytest.mark.parametrize("settings", [["--prompt_length=1"], ["--group_size=1"], ["--masked=0.0"]])
def test_sizes_that_cannot_be_are_refused(settings):
    with pytest.raises(ValueError, match=settings[0][2:].split("=")[0]):
        check_model.main(["folder", *settings])


def test_no_folder_is_a_usage_error_and_a_judge_is_refused(folder):
    with pytest.raises(ValueError, match="check_model.py FOLDER"):
        check_model.main([CPU])
    with pytest.raises(ValueError, match="sequence_scorer.*generator"):
        check_model.main([CPU, folder("electra_judge")])


def test_bfloat16_shows_that_sampler_and_scorer_round_differently(folder, capsys):
    (*_, sampler), = table(capsys, folder("llama"), "--dtype=bfloat16")
    assert 1e-4 < float(sampler) < 1


@pytest.mark.slow
def test_the_script_as_a_user_runs_it(folder):
    done = run_script("grpo/tools/check_model.py", folder("qwen3"), folder("bert"), CPU)
    assert done.returncode == 0 and done.stderr == "", done.stderr
    assert done.stdout.count("|\n") == 4 and folder("qwen3") in done.stdout
    done = run_here("grpo/tools/check_model.py", "--help")
    assert done.returncode == 0 and "sampler " in done.stdout and "--prompt_length=12" in done.stdout
    done = run_here("grpo/tools/check_model.py", "no_such_folder")
    assert done.returncode == 1 and done.stderr.count("\n") == 1 and "no_such_folder" in done.stderr
