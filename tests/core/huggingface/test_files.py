"""Folders in Hugging Face format that cannot be used: one line each, and no code of theirs is run."""

import json
import os
import sys
from types import SimpleNamespace

import pytest
import torch
from safetensors.torch import load_file, save_file

transformers = pytest.importorskip("transformers")

from core.huggingface import files as huggingface_files
from core.huggingface.files import base_of, check_weights, found_mode, four_bits, is_adapter, model_mode, replace_files
from core.huggingface.settings import LoraConfig
from core.huggingface.tokenizer import load_huggingface_tokenizer
from core.model import LANGUAGE_MODEL, MASKED_FILL, SEQUENCE_SCORER
from tests.families import (
    CAUSAL_FAMILIES,
    FILL_FAMILIES,
    adapter_folder,
    architecture,
    folder_maker,
    refused,
    spoiled,
    tokenizer_of,
)


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """family -> the folder of a small random model."""
    return folder_maker(tmp_path_factory.mktemp("families"))


def test_a_folder_of_pickled_weights_is_refused(folder, tmp_path):
    path = spoiled(tmp_path / "pickled", folder("llama"))
    os.remove(os.path.join(path, "model.safetensors"))
    torch.save({}, os.path.join(path, "pytorch_model.bin"))
    refused(path, "pytorch_model.bin", "safetensors")


def test_a_folder_without_weights_is_refused(folder, tmp_path):
    path = spoiled(tmp_path / "empty", folder("llama"))
    os.remove(os.path.join(path, "model.safetensors"))
    refused(path, "safetensors")


def test_weights_that_are_cut_short_are_refused(folder, tmp_path):
    path = spoiled(tmp_path / "short", folder("llama"))
    file = os.path.join(path, "model.safetensors")
    os.truncate(file, os.path.getsize(file) // 2)
    refused(path)


def test_weights_that_are_missing_are_refused(folder, tmp_path):
    refused(spoiled(tmp_path / "deep", folder("llama"), num_hidden_layers=3), "layers.2")


def test_a_model_with_code_of_its_own_is_refused(folder, tmp_path):
    own = {"model_type": "mine", "auto_map": {"AutoConfig": "mine.Mine", "AutoModelForCausalLM": "mine.Model"}}
    path = spoiled(tmp_path / "code", folder("llama"), **own)
    with open(os.path.join(path, "mine.py"), "w") as f:
        f.write(f"open({str(tmp_path / 'it_ran')!r}, 'w')\n")
    refused(path, "code")
    assert not os.path.exists(tmp_path / "it_ran")


def test_a_model_of_another_kind_is_refused(folder):
    tokenizer = load_huggingface_tokenizer(folder("bert"))
    refused(folder("llama"), LANGUAGE_MODEL, MASKED_FILL, mode=MASKED_FILL)
    refused(folder("bert"), LANGUAGE_MODEL, MASKED_FILL, mode=LANGUAGE_MODEL)
    refused(folder("bert"), SEQUENCE_SCORER, tokenizer=tokenizer, mode=SEQUENCE_SCORER)
    refused(folder("bert_reward"), "reward_model")


def test_a_detector_without_its_head_is_refused(folder, tmp_path):
    path = spoiled(tmp_path / "headless", folder("deberta_judge"))
    file = os.path.join(path, "model.safetensors")
    weights = {name: p for name, p in load_file(file).items() if not name.startswith("mask_predictions")}
    save_file(weights, file, metadata={"format": "pt"})
    refused(path, "mask_predictions", "discriminator", mode=SEQUENCE_SCORER)


def test_a_hub_name_without_a_network_is_one_line(monkeypatch):
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    refused("hf:nobody/no-such-model", "network")


@pytest.mark.parametrize("name", ["weights.pt", "flax_model.msgpack", "tf_model.h5", "last.ckpt", "pytorch_model.bin"])
def test_no_format_that_runs_code_is_read(name, tmp_path):
    for first in ("config.json", name):
        (tmp_path / first).write_text("{}")
    with pytest.raises(ValueError, match=f"^key={tmp_path} holds pickled weights .{name}.*convert them to safetensors"):
        check_weights(str(tmp_path), "key", SimpleNamespace())
    (tmp_path / "model-00001-of-00002.safetensors").write_bytes(b"")
    assert check_weights(str(tmp_path), "key", SimpleNamespace()) is None, "the safetensors beside it are what is read"


# --- what a model is for


@pytest.mark.parametrize("family", [*CAUSAL_FAMILIES, *FILL_FAMILIES, "electra_judge"])
def test_the_mode_is_known_from_the_config_alone(family, folder, tmp_path):
    expected = LANGUAGE_MODEL if family in CAUSAL_FAMILIES else MASKED_FILL
    path = spoiled(tmp_path / "config only", folder(family))
    os.remove(os.path.join(path, "model.safetensors"))
    assert model_mode(path, "key") == (SEQUENCE_SCORER if family == "electra_judge" else expected)


@pytest.mark.parametrize("family", [*CAUSAL_FAMILIES, *FILL_FAMILIES])
def test_a_config_that_names_no_class_has_the_mode_of_its_family(family):
    config = architecture(family, tokenizer_of("words" if family in FILL_FAMILIES else "start"))[1]
    assert config.architectures is None
    assert found_mode(config, "path", "key") == (LANGUAGE_MODEL if family in CAUSAL_FAMILIES else MASKED_FILL)


@pytest.mark.parametrize("kind, written_by, mode", [
    ("Bert", "BertLMHeadModel", LANGUAGE_MODEL), ("Bert", "BertForPreTraining", MASKED_FILL),
    ("Bert", "BertModel", MASKED_FILL), ("Electra", "ElectraForMaskedLM", MASKED_FILL),
    ("Electra", "ElectraForPreTraining", SEQUENCE_SCORER), ("DebertaV2", "DebertaV2ForMaskedLM", MASKED_FILL),
    ("Roberta", "RobertaForCausalLM", LANGUAGE_MODEL), ("GPT2", "GPT2Model", LANGUAGE_MODEL)])
def test_the_class_that_wrote_a_model_decides_before_its_family(kind, written_by, mode):
    config = getattr(transformers, f"{kind}Config")(architectures=[written_by])
    assert found_mode(config, "path", "key") == mode


def test_the_body_of_deberta_is_a_detector_only_where_one_is_needed():
    config = transformers.DebertaV2Config(architectures=["DebertaV2ForMaskedLM"])
    assert found_mode(config, "path", "key", SEQUENCE_SCORER) == SEQUENCE_SCORER
    assert found_mode(config, "path", "key", MASKED_FILL) == found_mode(config, "path", "key") == MASKED_FILL


@pytest.mark.parametrize("kind, written_by, words", [
    ("Llama", "LlamaForSequenceClassification", "LlamaForSequenceClassification.*name it in reward_model_checkpoint"),
    ("ViT", "ViTForImageClassification", "model_type vit .ViTForImageClassification.*neither a causal nor a masked"),
    ("ViT", None, "model_type vit .no architecture"), ("T5", "T5ForConditionalGeneration", "an encoder and a decoder"),
    ("Bart", "BartForConditionalGeneration", "an encoder and a decoder"), ("Bart", None, "a decoder .bart.")])
def test_a_model_for_something_else_is_refused(kind, written_by, words):
    config = getattr(transformers, f"{kind}Config")(architectures=written_by and [written_by])
    with pytest.raises(ValueError, match=f"^key=path .*{words}") as error:
        found_mode(config, "path", "key")
    assert "\n" not in str(error.value)


@pytest.mark.parametrize("config", ["{", "[]", '{"model_type": "no_such_model"}', '{"model_type": 7}'])
def test_a_config_that_makes_no_sense_is_one_line(config, folder, tmp_path):
    path = spoiled(tmp_path / "odd", folder("llama"))
    with open(os.path.join(path, "config.json"), "w") as f:
        f.write(config)
    refused(path)


# --- adapters


def test_the_base_of_an_adapter_is_a_folder_or_a_name_of_the_hub(folder, tmp_path):
    pytest.importorskip("peft")
    path = adapter_folder(tmp_path / "adapter", folder("llama"))
    assert is_adapter(path) and not is_adapter(folder("llama")) and base_of(path, "key") == folder("llama")
    assert model_mode(path, "key") == LANGUAGE_MODEL
    file = os.path.join(path, "adapter_config.json")
    settings = json.load(open(file))

    def renamed(base):
        json.dump(settings | {"base_model_name_or_path": base}, open(file, "w"))
        return base_of(path, "key")

    assert renamed("owner/name") == "hf:owner/name"
    for gone in (str(tmp_path / "gone"), "gone", None):
        with pytest.raises(ValueError, match=f"^key={path} is an adapter whose base model .*is not there"):
            renamed(gone)
    for content in ("{", "[]", '{"peft_type": "NO_SUCH"}'):
        with open(file, "w") as f:
            f.write(content)
        with pytest.raises(ValueError, match=f"^key={path}: the adapter could not be read") as error:
            base_of(path, "key")
        assert "\n" not in str(error.value)


# --- weights in 4 bits


def test_weights_in_4_bits_need_a_gpu_and_their_package(folder, monkeypatch):
    pytest.importorskip("peft")
    refused_lines = []
    for device, missing in (("cpu", False), ("cuda:0", True)):
        if missing:
            monkeypatch.setitem(sys.modules, "bitsandbytes", None)
        with pytest.raises(ValueError) as error:
            four_bits(transformers, torch.bfloat16, device)
        refused_lines.append(str(error.value))
    assert refused_lines == ["load_in_4bit=True needs a CUDA GPU, but the device is cpu; set load_in_4bit=False",
                             "load_in_4bit=True needs the package bitsandbytes: pip install bitsandbytes"]
    with pytest.raises(ValueError, match="needs a CUDA GPU"):
        huggingface_files.open_transformer(folder("llama"), "key", None, LoraConfig(lora_rank=4, load_in_4bit=True))


# --- files


def fill(folder, **files):
    folder.mkdir(exist_ok=True)
    for name, text in files.items():
        (folder / name.replace("_", ".")).write_text(text)


def texts(folder):
    return {name: (folder / name).read_text() for name in os.listdir(folder)}


def test_files_take_the_place_of_older_ones_and_others_stay(tmp_path):
    fill(tmp_path / "new", config_json="2", model_safetensors="2")
    fill(tmp_path / "old", config_json="1", model_safetensors="1", notes_txt="mine")
    replace_files(str(tmp_path / "new"), str(tmp_path / "old"))
    assert texts(tmp_path / "old") == {"config.json": "2", "model.safetensors": "2", "notes.txt": "mine"}
    assert os.listdir(tmp_path) == ["old"], "nothing is left over"
    fill(tmp_path / "new", config_json="3", model_safetensors="3")
    replace_files(str(tmp_path / "new"), str(tmp_path / "deep" / "folder"))
    assert texts(tmp_path / "deep" / "folder") == {"config.json": "3", "model.safetensors": "3"}


@pytest.mark.parametrize("count", range(4))
def test_weights_change_last_so_that_an_interrupted_change_leaves_the_old_ones_whole(tmp_path, monkeypatch, count):
    names = {"tokenizer_json": "2", "config_json": "2", "model_safetensors": "2"}
    fill(tmp_path / "new", **names)
    fill(tmp_path / "old", **dict.fromkeys(names, "1"))
    real, left = os.replace, [count]

    def limited(*paths):
        if left[0] == 0:
            raise KeyboardInterrupt
        left[0] -= 1
        real(*paths)

    with monkeypatch.context() as patch:
        patch.setattr(huggingface_files.os, "replace", limited)
        try:
            replace_files(str(tmp_path / "new"), str(tmp_path / "old"))
            assert count == 3
            return
        except KeyboardInterrupt:
            assert texts(tmp_path / "old")["model.safetensors"] == "1"
    replace_files(str(tmp_path / "new"), str(tmp_path / "old"))
    assert set(texts(tmp_path / "old").values()) == {"2"}
