"""core/export.py: a folder that transformers opens, or one line."""

import pytest

pytest.importorskip("transformers")

import torch
import transformers

from core.model import LANGUAGE_MODEL
from core.models import save_model
from tests.families import model_folder
from tests.tiny import CAUSAL, judge, model, run_here, save


@pytest.fixture(scope="module")
def paths(tmp_path_factory):
    """{name: file or folder} of models of every kind."""
    folder = tmp_path_factory.mktemp("models")
    causal = str(folder / "causal.safetensors")
    save_model(causal, model(LANGUAGE_MODEL, tokenizer=CAUSAL, tied=True), CAUSAL)
    return {"causal": causal, "judge": save(folder / "judge.safetensors", judge()),
            "folder": model_folder(folder / "llama", "llama")}


def test_the_script_writes_a_folder_that_transformers_opens_or_one_line(paths, tmp_path):
    done = run_here("core/export.py", f"--checkpoint={paths['causal']}", f"--out={tmp_path}/hf", "--dtype=bfloat16")
    assert done.returncode == 0 and done.stdout == f"wrote {tmp_path}/hf (bfloat16)\n", done.stderr
    assert transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "hf").dtype == torch.bfloat16
    for arguments, words in (((), "--out=FOLDER"), ((f"--out={tmp_path}/hf",), "exists"),
                             ((f"--checkpoint={paths['judge']}", f"--out={tmp_path}/x"), "mode sequence_scorer")):
        done = run_here("core/export.py", *arguments)
        assert done.returncode == 1 and words in done.stderr and len(done.stderr.strip().split("\n")) == 1
