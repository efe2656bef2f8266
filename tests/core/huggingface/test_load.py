"""Loading models in Hugging Face format: what they are for, and one line where they cannot be used."""

import os
import subprocess
import sys

import pytest
import torch
from safetensors.torch import load_file

transformers = pytest.importorskip("transformers")

from core.huggingface.load import mode_of
from core.huggingface.tokenizer import load_huggingface_tokenizer
from core.model import LANGUAGE_MODEL, MASKED_FILL, SEQUENCE_SCORER
from tests.families import folder_maker, refused, spoiled


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """family -> the folder of a small random model."""
    return folder_maker(tmp_path_factory.mktemp("families"))


# --- what a model is for


@pytest.mark.parametrize("kind, written_by, mode", [
    ("Bert", "BertLMHeadModel", LANGUAGE_MODEL), ("Bert", "BertForPreTraining", MASKED_FILL),
    ("Bert", "BertModel", MASKED_FILL), ("Electra", "ElectraForMaskedLM", MASKED_FILL),
    ("Roberta", "RobertaForCausalLM", LANGUAGE_MODEL), ("GPT2", "GPT2Model", LANGUAGE_MODEL)])
def test_the_class_that_wrote_a_model_decides_before_its_family(kind, written_by, mode):
    config = getattr(transformers, f"{kind}Config")(architectures=[written_by])
    assert mode_of(config, "path", "key") == mode


@pytest.mark.parametrize("kind, written_by, words", [
    ("Llama", "LlamaForSequenceClassification", "LlamaForSequenceClassification.*name it in reward_model_checkpoint"),
    ("ViT", "ViTForImageClassification", "model_type vit .ViTForImageClassification.*neither a causal nor a masked"),
    ("T5", "T5ForConditionalGeneration", "model_type t5"), ("Bart", None, "model_type bart")])
def test_a_model_for_something_else_is_refused(kind, written_by, words):
    config = getattr(transformers, f"{kind}Config")(architectures=written_by and [written_by])
    with pytest.raises(ValueError, match=f"^key=path [^\n]*{words}[^\n]*$"):
        mode_of(config, "path", "key")


# --- what cannot be used: one line that names the setting and the path


def without(name):
    return lambda path: os.remove(os.path.join(path, name))


def cut_short(path):
    file = os.path.join(path, "model.safetensors")
    os.truncate(file, os.path.getsize(file) // 2)


def pickled(path):
    weights = load_file(os.path.join(path, "model.safetensors"))
    torch.save(weights, os.path.join(path, "pytorch_model.bin"))
    without("model.safetensors")(path)


def without_tokenizer(path):
    for name in ("tokenizer.json", "tokenizer_config.json"):
        without(name)(path)


def narrow(path):
    """Its weights are those of a model that reads fewer tokens than its tokenizer has."""
    config = transformers.LlamaConfig.from_pretrained(path)
    config.vocab_size = 200
    transformers.LlamaForCausalLM(config).save_pretrained(path)


@pytest.mark.parametrize("spoil, words", [
    (pickled, ("safetensors",)),
    (cut_short, ()),
    (without_tokenizer, ("has no tokenizer",)),
    (narrow, ("200", "290", "copy the tokenizer files"))])
def test_a_damaged_folder_is_one_line(spoil, words, folder, tmp_path):
    path = spoiled(tmp_path / "spoiled", folder("llama"))
    spoil(path)
    refused(path, *words)


def test_a_deeper_config_than_its_weights_and_code_of_its_own_are_refused(folder, tmp_path):
    refused(spoiled(tmp_path / "deep", folder("llama"), num_hidden_layers=3), "layers.2")
    own = {"model_type": "mine", "auto_map": {"AutoConfig": "mine.Mine", "AutoModelForCausalLM": "mine.Model"}}
    path = spoiled(tmp_path / "code", folder("llama"), **own)
    with open(os.path.join(path, "mine.py"), "w") as f:
        f.write(f"open({str(tmp_path / 'it_ran')!r}, 'w')\n")
    refused(path, "code")
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
def test_a_kernel_of_the_hub_is_never_fetched(who, folder, tmp_path):
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
    return get_kernel if name.startswith("get") else type(name, (), {{}}) if name[0].isupper() else lambda *a: lambda f: f
""")
    path = spoiled(tmp_path / "model", folder("llama"), attn_implementation="kernels-community/flash-attn2")
    arguments = (path, str(tmp_path / "packages"), who)
    done = subprocess.run((sys.executable, "-c", KERNELS, *arguments), capture_output=True, text=True)
    assert done.returncode != 0
    assert os.path.exists(tmp_path / "fetched") == (who == "transformers"), done.stderr
    if who == "ours":
        assert "needs code of its own, which is never run here" in done.stderr


def test_a_model_of_another_kind_or_vocabulary_is_refused(folder):
    tokenizer = load_huggingface_tokenizer(folder("bert"))
    refused(folder("llama"), LANGUAGE_MODEL, MASKED_FILL, mode=MASKED_FILL)
    refused(folder("bert"), SEQUENCE_SCORER, tokenizer=tokenizer, mode=SEQUENCE_SCORER)
    refused(folder("bert_reward"), "reward_model")
    refused(folder("llama"), "vocabulary", tokenizer=tokenizer)
