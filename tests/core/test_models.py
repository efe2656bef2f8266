"""Models of every kind, loaded and saved by their path."""

import os

import pytest
import torch

transformers = pytest.importorskip("transformers")

from core.models import load_model, load_tokenizer, save_model
from tests.families import folder_maker, random_ids


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """family -> the folder of a small random model."""
    return folder_maker(tmp_path_factory.mktemp("families"))


@pytest.mark.parametrize("family", ["llama", "bert"])
def test_a_saved_model_is_a_folder_that_transformers_opens_with_equal_logits(family, folder, tmp_path):
    tokenizer = load_tokenizer(folder(family))
    model, facts = load_model(folder(family), tokenizer=tokenizer)
    kind = "AutoModelForMaskedLM" if family == "bert" else "AutoModelForCausalLM"
    with torch.no_grad():
        for p in model.parameters():
            p.mul_(1.1)
    path = str(tmp_path / "model")
    for step in (1, 2):  # also over an older one
        save_model(path, model, tokenizer, step=step)
    assert facts == {}
    again, tokens = getattr(transformers, kind).from_pretrained(path).eval(), random_ids(tokenizer, 2, 9)
    with torch.no_grad():
        assert torch.equal(again(tokens).logits, model.net(tokens).logits)
        assert torch.equal(load_model(path, tokenizer=tokenizer)[0](tokens), model(tokens))
    back = transformers.AutoTokenizer.from_pretrained(path)
    assert back("7+8= the fox").input_ids == tokenizer.backend("7+8= the fox").input_ids
    assert load_tokenizer(path).stop_token_ids == tokenizer.stop_token_ids
    assert sorted(os.listdir(tmp_path)) == ["model"] and not any(name.endswith(".bin") for name in os.listdir(path))


def test_the_folder_of_a_run_is_refused_with_the_name_of_its_model(tmp_path):
    """It has a config.json of its own, with the settings of the run."""
    (tmp_path / "config.json").write_text('{"batch_size": 4}')
    for call in (load_tokenizer, lambda path, key: load_model(path, key=key)):
        with pytest.raises(ValueError, match=f"^init_from={tmp_path} is a folder without a Hugging Face config.json; .*"
                                             f"name the model in it: {tmp_path}/model or"):
            call(str(tmp_path), "init_from")
