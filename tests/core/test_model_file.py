"""Model files of ours: whole or not at all, each enough to use the model, and clear about what is wrong with them."""

import os

import pytest
import torch
from safetensors.torch import save_file

from core.model import MASKED_FILL, SEQUENCE_SCORER
from core.models import load_tokenizer, read_header, read_model_file, save_model
from core.tokenizer import CharTokenizer
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
    with pytest.raises(FileNotFoundError, match="^init_from=nowhere does not exist; "):
        read_header("nowhere", "init_from")
    save_file({"x": torch.zeros(1)}, tmp_path / "foreign")
    with pytest.raises(ValueError, match="was not written by this project"):
        read_header(str(tmp_path / "foreign"))


def test_a_model_with_numbers_that_are_not_finite_is_refused(tmp_path):
    net = model()
    with torch.no_grad():
        list(net.parameters())[-1].view(-1)[2] = float("nan")
    save_model(str(tmp_path / "m"), net, TOKENIZER)
    with pytest.raises(ValueError, match="^judge_checkpoint=.*/m: .* holds numbers that are not finite[^\n]*$"):
        read_model_file(str(tmp_path / "m"), key="judge_checkpoint")
