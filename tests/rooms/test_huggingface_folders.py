"""Folders in Hugging Face format: what a model is for, code that is never run, and files that change whole."""

import os
import subprocess
import sys

import pytest

transformers = pytest.importorskip("transformers")

from core.errors import Mistake
from core.huggingface.files import writing_folder
from core.huggingface.load import mode_of
from core.model import LANGUAGE_MODEL, MASKED_FILL
from core.models import load_model
from tests.families import model_folder, spoiled
from tests.tiny import Cut, contents, cut_after


@pytest.fixture(scope="module")
def llama(tmp_path_factory):
    return model_folder(tmp_path_factory.mktemp("families") / "llama", "llama")


@pytest.mark.parametrize("kind, written_by, mode", [
    ("Bert", "BertLMHeadModel", LANGUAGE_MODEL), ("Bert", "BertForPreTraining", MASKED_FILL),
    ("Bert", "BertModel", MASKED_FILL), ("Electra", "ElectraForMaskedLM", MASKED_FILL),
    ("Roberta", "RobertaForCausalLM", LANGUAGE_MODEL), ("GPT2", "GPT2Model", LANGUAGE_MODEL),
    ("Llama", "LlamaForSequenceClassification", None), ("ViT", "ViTForImageClassification", None),
    ("T5", "T5ForConditionalGeneration", None), ("Bart", None, None)])
def test_the_class_that_wrote_a_model_decides_what_it_is_for_before_its_family(kind, written_by, mode):
    config = getattr(transformers, f"{kind}Config")(architectures=written_by and [written_by])
    if mode is None:
        with pytest.raises(Mistake, match="key=path"):
            mode_of(config, "path", "key")
    else:
        assert mode_of(config, "path", "key") == mode


def test_code_of_a_folder_is_never_run(llama, tmp_path):
    own = {"model_type": "mine", "auto_map": {"AutoConfig": "mine.Mine", "AutoModelForCausalLM": "mine.Model"}}
    path = spoiled(tmp_path / "code", llama, **own)
    with open(os.path.join(path, "mine.py"), "w") as f:
        f.write(f"open({str(tmp_path / 'it_ran')!r}, 'w')\n")
    with pytest.raises(Mistake, match="code"):
        load_model(path)
    assert not os.path.exists(tmp_path / "it_ran")


KERNELS = """
import subprocess
import sys
sys.path.insert(0, sys.argv[2])  # where the package kernels is installed
if sys.argv[3] == "ours":
    from core.models import load_model
    load_model(sys.argv[1], key="generator_checkpoint")
else:
    import transformers
    transformers.AutoModelForCausalLM.from_pretrained(sys.argv[1])
"""


@pytest.mark.slow
@pytest.mark.parametrize("who", ["ours", "transformers"])
def test_a_kernel_of_the_hub_is_never_fetched(who, llama, tmp_path):
    """The package that fetches them leaves a trace here. transformers alone asks it for what the config names."""
    package = tmp_path / "packages" / "kernels"
    (tmp_path / "packages" / "kernels-0.18.2.dist-info").mkdir(parents=True)
    (tmp_path / "packages" / "kernels-0.18.2.dist-info" / "METADATA").write_text("Name: kernels\nVersion: 0.18.2\n")
    package.mkdir()
    (package / "__init__.py").write_text(f"""
def get_kernel(*args, **settings):
    open({str(tmp_path / 'fetched')!r}, "w")
    raise RuntimeError("fetched")

def __getattr__(name):
    if name.startswith("get"):
        return get_kernel
    return type(name, (), {{}}) if name[0].isupper() else lambda *a: lambda f: f
""")
    path = spoiled(tmp_path / "model", llama, attn_implementation="kernels-community/flash-attn2")
    arguments = (path, str(tmp_path / "packages"), who)
    done = subprocess.run((sys.executable, "-c", KERNELS, *arguments), capture_output=True, text=True)
    assert done.returncode != 0
    assert os.path.exists(tmp_path / "fetched") == (who == "transformers"), done.stderr


def fill(folder, text, *names):
    folder.mkdir(exist_ok=True)
    for name in names:
        (folder / name).write_text(text)


@pytest.mark.parametrize("count", range(7))
def test_weights_change_last_so_that_an_interrupted_change_leaves_the_old_ones_whole(tmp_path, monkeypatch, count):
    names = ("tokenizer.json", "config.json", "model.safetensors")
    fill(tmp_path / "old", "1", *names, "notes.txt")
    cut_after(monkeypatch, count)
    for _ in range(2):
        try:
            with writing_folder(str(tmp_path / "old")):
                fill(tmp_path / "old.tmp", "2", *names)
        except Cut:
            assert contents(tmp_path / "old")["model.safetensors"] == "1" and count < 6
        monkeypatch.undo()
    assert contents(tmp_path / "old") == dict.fromkeys(names, "2") | {"notes.txt": "1"}
