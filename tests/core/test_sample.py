"""core/sample.py: fills or completes a text of the user's."""

import pytest
import torch

from core import sample
from core.checkpoint_manager import save_model
from tests.tiny import CAUSAL, TOKENIZER, causal_model, judge, model, run_script, save


@pytest.fixture(scope="module")
def paths(tmp_path_factory):
    """{name: file} of a fill-in model, a judge and a causal model."""
    folder = tmp_path_factory.mktemp("models")
    save_model(str(folder / "causal.safetensors"), causal_model(scale=3.0), CAUSAL)
    return {"causal": str(folder / "causal.safetensors"), "generator": save(folder / "generator.safetensors", model()),
            "judge": save(folder / "judge.safetensors", judge())}


def printed(capsys, *arguments):
    sample.main([*arguments, "--device=cpu"])
    return capsys.readouterr().out.split("\n")[:-1]


@pytest.mark.slow
def test_the_script_fills_your_text(paths):
    done = run_script("core/sample.py", f"--checkpoint={paths['generator']}", "--text=the qu__k = fox",
                      "--num_samples=3")
    assert done.returncode == 0, done.stderr
    lines = done.stdout.split("\n")[:-1]
    assert len(lines) == 3 and all(len(x) == 15 and x.startswith("the qu") and x.endswith("k = fox") for x in lines)
    done = run_script("core/sample.py", f"--checkpoint={paths['judge']}", "--text=a_b")
    assert done.returncode == 1 and "masked_fill or language_model is needed" in done.stderr
    assert len(done.stderr.strip().split("\n")) == 1
    done = run_script("core/sample.py", f"--checkpoint={paths['causal']}", "--text=")
    assert done.returncode == 1 and len(done.stderr.strip().split("\n")) == 1


@pytest.mark.parametrize("text, message", [
    ("no gaps", "nothing to fill in"), ("____", "no usable characters"), ("", "no usable characters"),
    ("a" * 40 + "_", "does not fit")])
def test_a_text_that_cannot_be_filled_is_refused(paths, text, message):
    with pytest.raises(ValueError, match=message):
        sample.main([f"--checkpoint={paths['generator']}", f"--text={text}", "--device=cpu"])


@pytest.mark.parametrize("unmask_steps", [1, 3])
def test_the_hidden_characters_alone_change(paths, capsys, unmask_steps):
    arguments = (f"--checkpoint={paths['generator']}", "--text=the qu**k = f*x", "--mask_character=*",
                 "--num_samples=4", f"--unmask_steps={unmask_steps}", "--top_p=1.0", "--temperature=2.0")
    lines = printed(capsys, *arguments)
    assert len(lines) == 4 == len(set(lines))
    for line in lines:
        assert len(line) == 15 and line[:6] + line[8:13] + line[14:] == "the quk = fx"
    assert lines == printed(capsys, *arguments), "the same noise for the same seed"
    assert lines != printed(capsys, *arguments, "--seed=2")


def test_the_mask_is_where_the_mask_character_is():
    ids, mask = sample.encode_with_masks("_ab__c", "_", TOKENIZER)
    assert mask.tolist() == [[True, False, False, True, True, False]]
    assert torch.equal(ids[mask], torch.full((3,), TOKENIZER.mask_token_id))
    assert TOKENIZER.decode(ids[~mask].tolist()) == "abc"


def test_a_text_is_completed(paths, capsys):
    lines = "\n".join(printed(capsys, f"--checkpoint={paths['causal']}", "--text=7+8=", "--num_samples=3",
                              "--max_new_tokens=20")).strip("\n").split("\n")
    assert len(lines) == 3 and all(x.startswith("7+8=") and 4 < len(x) <= 24 for x in lines)
    for text in ("", "a" * 64):
        with pytest.raises(ValueError, match="must have 1 to 63 tokens"):
            sample.main([f"--checkpoint={paths['causal']}", f"--text={text}", "--device=cpu"])


@pytest.mark.parametrize("setting", [
    {"mask_character": "__"}, {"mask_character": ""}, {"max_new_tokens": 0}, {"unmask_steps": 0}, {"num_samples": 0},
    {"temperature": 0.0}, {"top_p": 0.0}, {"top_p": 1.5}])
def test_settings_that_cannot_work_are_refused(setting):
    ((key, value),) = setting.items()
    with pytest.raises(ValueError, match=f"{key}={value!r}( |,)"):
        sample.SampleConfig(**setting)
