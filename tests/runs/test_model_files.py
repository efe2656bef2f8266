"""A saved model is whole or not at all, and enough to use it: a file of ours, or a folder that transformers opens."""

import os

import pytest
import torch

from core.errors import Mistake
from core.model import MASKED_FILL
from core.models import load_model, load_tokenizer, save_model
from tests.tiny import TOKENIZER, model


def test_a_model_file_is_all_that_is_needed_to_use_the_model(tmp_path):
    net, tokens = model(), torch.randint(0, 96, (2, 9))
    path = str(tmp_path / "deep" / "m.safetensors")
    save_model(path, net, TOKENIZER, step=7)
    loaded, facts = load_model(path, mode=MASKED_FILL, tokenizer=TOKENIZER)
    assert torch.equal(net(tokens), loaded(tokens)) and facts == {"step": 7} and not loaded.training
    assert load_tokenizer(path).description() == TOKENIZER.description()
    assert os.listdir(tmp_path / "deep") == ["m.safetensors"]


@torch.no_grad()
@pytest.mark.parametrize("bad", [float("nan"), float("inf")])
def test_a_model_with_numbers_that_are_not_finite_is_refused(tmp_path, bad):
    net = model()
    list(net.parameters())[-1].view(-1)[2] = bad
    save_model(str(tmp_path / "m"), net, TOKENIZER)
    with pytest.raises(Mistake, match="judge_checkpoint=.*/m"):
        load_model(str(tmp_path / "m"), key="judge_checkpoint")
