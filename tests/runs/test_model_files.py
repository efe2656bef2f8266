"""A saved model is whole or not at all, and enough to use it: a file of ours, or a folder that transformers opens."""

import os

import pytest
import torch
from safetensors.torch import save_file

from core.model import MASKED_FILL, SEQUENCE_SCORER
from core.models import load_model, load_tokenizer, read_header, read_model_file, save_model
from core.tokenizer import CharTokenizer
from tests.families import base_model, model_folder, random_ids
from tests.tiny import TOKENIZER, judge, model, save


def test_a_model_file_is_all_that_is_needed_to_use_the_model(tmp_path):
    net, tokens = model(), torch.randint(0, 96, (2, 9))
    path = str(tmp_path / "deep" / "m.safetensors")
    save_model(path, net, TOKENIZER, step=7)
    loaded, facts = read_model_file(path, mode=MASKED_FILL, tokenizer=TOKENIZER)
    assert torch.equal(net(tokens), loaded(tokens)) and facts == {"step": 7} and not loaded.training
    assert load_tokenizer(path).description() == TOKENIZER.description()
    assert os.listdir(tmp_path / "deep") == ["m.safetensors"]


def test_a_half_file_takes_half_the_space_and_is_read_in_float32(tmp_path):
    net, path = model(n_embd=64), str(tmp_path / "m")
    save_model(path, net, TOKENIZER, torch.float16)
    loaded, _ = read_model_file(path)
    assert os.path.getsize(path) < 2.2 * net.num_parameters()
    for x, half in zip(net.parameters(), loaded.parameters(), strict=True):
        assert half.dtype == torch.float32 and torch.equal(half, x.half().float())


def test_a_wrong_or_damaged_file_is_named(tmp_path):
    net = model()
    generator, scorer = save(tmp_path / "g.safetensors", net), save(tmp_path / "j.safetensors", judge())
    whole = open(generator, "rb").read()
    for cut in (0, 5, len(whole) // 2, len(whole) - 1):
        (tmp_path / f"cut{cut}").write_bytes(whole[:cut])
    save_file({"x": torch.zeros(1)}, tmp_path / "foreign")
    with torch.no_grad():
        list(net.parameters())[-1].view(-1)[2] = torch.nan
    save(tmp_path / "nan", net)
    rows = [(generator, {"mode": SEQUENCE_SCORER}), (scorer, {"tokenizer": CharTokenizer("abc")})]
    rows += [(str(tmp_path / name), {}) for name in os.listdir(tmp_path) if "safetensors" not in name]
    for path, settings in rows:
        with pytest.raises(ValueError, match=f"^judge_checkpoint={path}"):
            read_model_file(path, key="judge_checkpoint", **settings)
    with pytest.raises(FileNotFoundError, match="^init_from=nowhere"):
        read_header("nowhere", "init_from")


@pytest.mark.parametrize("family", ["llama", "bert"])
def test_a_saved_model_is_a_folder_that_transformers_opens_with_equal_logits(family, tmp_path):
    transformers = pytest.importorskip("transformers")
    first, path = model_folder(tmp_path / "first", family), str(tmp_path / "model")
    tokenizer, (net, _) = load_tokenizer(first), load_model(first)
    with torch.no_grad():
        for p in net.parameters():
            p.mul_(1.1)
    for step in (1, 2):  # also over an older one
        save_model(path, net, tokenizer, step=step)
    tokens = random_ids(tokenizer, 2, 9)
    with torch.no_grad():
        assert torch.equal(base_model(path)(tokens).logits, net.net(tokens).logits)
        assert torch.equal(load_model(path, tokenizer=tokenizer)[0](tokens), net(tokens))
    back = transformers.AutoTokenizer.from_pretrained(path)
    assert back("7+8= the fox").input_ids == tokenizer.backend("7+8= the fox").input_ids
    assert load_tokenizer(path).stop_token_ids == tokenizer.stop_token_ids
    assert sorted(os.listdir(tmp_path)) == ["first", "model"] and not any(".bin" in name for name in os.listdir(path))
