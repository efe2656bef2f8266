"""core/export.py: a folder that transformers opens, or one line."""

import pytest

pytest.importorskip("transformers")

import torch
import transformers

from core import export
from core.model import LANGUAGE_MODEL
from core.models import save_model
from tests.families import adapter_folder, model_folder
from tests.tiny import CAUSAL, judge, model, run_here, save


@pytest.fixture(scope="module")
def paths(tmp_path_factory):
    """{name: file or folder} of models of every kind."""
    folder = tmp_path_factory.mktemp("models")
    causal = str(folder / "causal.safetensors")
    save_model(causal, model(LANGUAGE_MODEL, tokenizer=CAUSAL, tied=True), CAUSAL)
    return {"causal": causal, "judge": save(folder / "judge.safetensors", judge()),
            "folder": model_folder(folder / "llama", "llama")}


def test_an_adapter_is_merged_and_a_folder_copied(paths, tmp_path):
    pytest.importorskip("peft")
    adapter = adapter_folder(tmp_path / "adapter", paths["folder"])
    for name, path in (("merged", adapter), ("copied", paths["folder"])):
        export.main([f"--checkpoint={path}", f"--out={tmp_path / name}"])
    merged, copied = (transformers.AutoModelForCausalLM.from_pretrained(tmp_path / x) for x in ("merged", "copied"))
    plain = transformers.AutoModelForCausalLM.from_pretrained(paths["folder"])
    modes = {(tmp_path / "merged" / name).stat().st_mode for name in ("model.safetensors", "config.json")}
    assert len(modes) == 1, "whoever can read one can read the other"
    weights = [net.model.layers[0].mlp.up_proj.weight for net in (plain, copied, merged)]
    assert torch.equal(weights[0], weights[1]) and not torch.equal(weights[0], weights[2])


def test_the_script_writes_a_folder_that_transformers_opens_or_one_line(paths, tmp_path):
    done = run_here("core/export.py", f"--checkpoint={paths['causal']}", f"--out={tmp_path}/hf", "--dtype=bfloat16")
    assert done.returncode == 0 and done.stdout == f"wrote {tmp_path}/hf (bfloat16)\n", done.stderr
    assert transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "hf").dtype == torch.bfloat16
    for arguments, words in (((), "--out=FOLDER"), ((f"--out={tmp_path}/hf",), "exists"),
                             ((f"--checkpoint={paths['judge']}", f"--out={tmp_path}/x"), "mode sequence_scorer")):
        done = run_here("core/export.py", *arguments)
        assert done.returncode == 1 and words in done.stderr and len(done.stderr.strip().split("\n")) == 1
