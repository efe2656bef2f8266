"""Model files of ours: whole or not at all, each enough to use the model, and clear about what is wrong with them."""

import json
import os
import re

import pytest
import safetensors
import torch
from safetensors.torch import save_file

from core.files import model_file
from core.files.model_file import read_header, read_model_file, read_tokenizer, write_model_file
from core.model import MASKED_FILL, SEQUENCE_SCORER
from core.tokenizer import CharTokenizer
from tests.tiny import ROOT, TOKENIZER, judge, model, same, save, small_bpe


def test_a_model_file_is_all_that_is_needed_to_use_the_model(tmp_path):
    net, tokens = model(), torch.randint(0, 96, (2, 9))
    path = str(tmp_path / "deep" / "m.safetensors")
    write_model_file(path, net, TOKENIZER, step=7)
    loaded, facts = read_model_file(path, mode=MASKED_FILL, tokenizer=TOKENIZER)
    assert torch.equal(net(tokens), loaded(tokens)) and facts == {"step": 7} and not loaded.training
    assert read_tokenizer(path).description() == TOKENIZER.description()
    assert os.listdir(tmp_path / "deep") == ["m.safetensors"]


def test_a_half_file_takes_half_the_space_and_is_read_in_float32(tmp_path):
    net, tokens, sizes = model(n_embd=64), torch.randint(0, 96, (2, 9)), []
    for dtype in (torch.float32, torch.float16):
        path = str(tmp_path / "m")
        write_model_file(path, net, TOKENIZER, dtype)
        sizes.append(os.path.getsize(path))
        loaded, _ = read_model_file(path)
        assert next(loaded.parameters()).dtype == torch.float32
        torch.testing.assert_close(loaded(tokens), net(tokens), rtol=0.05, atol=0.05)
    assert 1.8 < sizes[0] / sizes[1] < 2.2


def test_a_write_that_was_interrupted_leaves_the_file_before_it(tmp_path, monkeypatch):
    path, net = save(tmp_path / "m.safetensors", model()), model(seed=1)

    def cut(weights, path, metadata):
        (tmp_path / "m.safetensors.tmp").write_bytes(b"half")
        raise KeyboardInterrupt

    with monkeypatch.context() as patch, pytest.raises(KeyboardInterrupt):
        patch.setattr(model_file, "save_file", cut)
        write_model_file(path, net, TOKENIZER)
    assert same(read_model_file(path)[0], model())
    write_model_file(path, net, TOKENIZER)
    assert same(read_model_file(path)[0], net) and os.listdir(tmp_path) == ["m.safetensors"]


def test_a_tokenizer_of_byte_pairs_comes_back_with_its_model(tmp_path, monkeypatch):
    tokenizer, path = small_bpe(monkeypatch, "gpt2", b"th", b"the"), str(tmp_path / "m.safetensors")
    write_model_file(path, model(tokenizer=tokenizer), tokenizer)
    assert read_tokenizer(path).encode("the other") == tokenizer.encode("the other")
    read_model_file(path, tokenizer=tokenizer)
    with pytest.raises(ValueError, match="has another vocabulary"):
        read_model_file(path, tokenizer=TOKENIZER)


def test_a_wrong_file_is_named_with_what_was_found(tmp_path):
    generator, scorer = save(tmp_path / "g.safetensors", model()), save(tmp_path / "j.safetensors", judge())
    with pytest.raises(ValueError, match=f"judge_checkpoint={generator} has mode masked_fill, but sequence_scorer"):
        read_model_file(generator, mode=SEQUENCE_SCORER, key="judge_checkpoint")
    with pytest.raises(ValueError, match="has another vocabulary"):
        read_model_file(scorer, tokenizer=CharTokenizer("abc"))
    whole = open(generator, "rb").read()
    for cut in (0, 5, len(whole) // 2, len(whole) - 1):
        (tmp_path / "cut").write_bytes(whole[:cut])
        with pytest.raises(ValueError, match="cut is damaged or cut short"):
            read_model_file(str(tmp_path / "cut"))
    for metadata in (None, {"format": "pt"}):
        save_file({"x": torch.zeros(1)}, tmp_path / "foreign", metadata=metadata)
        with pytest.raises(ValueError, match="not one that this project wrote"):
            read_header(str(tmp_path / "foreign"))
    os.mkfifo(tmp_path / "pipe")
    with pytest.raises(ValueError, match="/pipe is no file; copy or train it again"):
        read_header(str(tmp_path / "pipe"))


@pytest.mark.parametrize("key, config", [("generator_checkpoint", "generator"), ("judge_checkpoint", "judge"),
                                         ("gold_judge_checkpoint", "gold_judge"), ("init_from", "trunk")])
def test_a_missing_file_is_one_line_with_the_command_that_makes_it(key, config):
    with pytest.raises(FileNotFoundError, match=f"^{key}=nowhere does not exist") as error:
        read_header("nowhere", key)
    found = re.search(r"python core/pretrain.py (config/\w+.py) --export=nowhere$", str(error.value))[1]
    assert found == f"config/pretrain_{config}.py" and os.path.exists(os.path.join(ROOT, found))
    if key != "init_from":
        with pytest.raises(FileNotFoundError, match=f"config/adapt_{config.removeprefix('gold_')}.py"):
            read_header("data/mine/adapted_one.safetensors", key)
    with pytest.raises(FileNotFoundError, match=f"{key}=owner/a-1B does not exist here; .*=hf:owner/a-1B$"):
        read_header("owner/a-1B", key)


def rewritten(path, change):
    """The file with another header, or other tensors. change(header, weights): changes them in place, or returns the
    text of another header"""
    with safetensors.safe_open(path, "pt") as f:
        header, weights = json.loads(f.metadata()["nano_grpo"]), {name: f.get_tensor(name) for name in f.keys()}
    text = change(header, weights)
    save_file(weights, path, {"nano_grpo": text if isinstance(text, str) else json.dumps(header)})


def config_with(**settings):
    return lambda header, weights: header["config"].update(settings)


@pytest.mark.parametrize(("change", "message"), [
    (config_with(n_layer=100_000), "config in its header is damaged: n_layer=100000 must be at most 1e3"),
    (config_with(n_layer=900), r"tensor blocks.1.attention.out.weight has shape \[16, 16\], but in the file None"),
    (config_with(n_embd=2**16), r"tensor blocks.0.attention.out.weight has shape \[65536, 65536\], but .*\[16, 16\]"),
    (config_with(n_layer="4"), "n_layer='4' must be int, not str"),
    (config_with(n_head=0), "n_head=0 must be at lea"),
    (config_with(judge_head="told"), "judge_head='told' is not one of realness, cls"),  # an earlier version's
    (config_with(width=3), "has the unknown key width"),
    (config_with(vocab_size=150), "but its tokenizer 99"),
    (lambda header, weights: header["config"].__delitem__("tied"), "the config in its header lacks tied"),
    (lambda header, weights: header.__delitem__("facts"), "its header has no object 'facts'"),
    (lambda header, weights: header.update(config=[1]), "its header has no object 'config'"),
    (lambda header, weights: "[]", "its header must be an object {...}, not list"),
    (lambda header, weights: "[" * 100_000, "its header is not JSON .nested too deeply."),
    (lambda header, weights: weights.__delitem__("norm.weight"), r"norm.weight has shape \[16\], but .* None"),
    (lambda header, weights: weights.clear(), "but in the file None"),
    (lambda header, weights: weights.update(other=torch.zeros(2)), r"other has shape None, but in the file \[2\]")])
def test_a_hostile_header_is_one_line_before_a_model_is_built(tmp_path, monkeypatch, change, message):
    path = save(tmp_path / "m.safetensors", model())
    rewritten(path, change)
    built = []
    monkeypatch.setattr(model_file.GPT, "load_state_dict", lambda *arguments: built.append(arguments))
    with pytest.raises(ValueError, match=f"^judge_checkpoint={path}:? .*{message}.*; copy or train it again$") as error:
        read_model_file(path, key="judge_checkpoint")
    assert "\n" not in str(error.value) and not built


@pytest.mark.parametrize("wrong", [float("nan"), float("inf")])
def test_a_model_with_numbers_that_are_not_finite_is_refused(tmp_path, wrong):
    net = model()
    with torch.no_grad():
        list(net.parameters())[-1].view(-1)[2] = wrong
    write_model_file(str(tmp_path / "m"), net, TOKENIZER)
    with pytest.raises(ValueError, match="^judge_checkpoint=.*/m: .* holds numbers that are not finite[^\n]*$"):
        read_model_file(str(tmp_path / "m"), key="judge_checkpoint")
