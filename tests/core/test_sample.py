"""core/sample.py: fills or completes a text of the user's."""

import pytest
import torch

from core import sample
from core.logger import highlight
from core.models import save_model
from tests.families import model_folder
from tests.tiny import (
    CAUSAL, causal_model, judge, model, prompt_config, prompt_consumer, prompt_fill_policy, save)


@pytest.fixture(scope="module")
def paths(tmp_path_factory):
    """{name: file} of a fill-in model, a judge and a causal model."""
    folder = tmp_path_factory.mktemp("models")
    save_model(str(folder / "causal.safetensors"), causal_model(scale=3.0), CAUSAL)
    return {"causal": str(folder / "causal.safetensors"), "generator": save(folder / "generator.safetensors", model()),
            "judge": save(folder / "judge.safetensors", judge())}


def printed(capsys, path, text, *arguments):
    """The lines that a call prints."""
    sample.main([f"--checkpoint={path}", f"--text={text}", *arguments, "--device=cpu"])
    return capsys.readouterr().out.split("\n")[:-1]


@pytest.mark.parametrize("name, text, words", [
    ("generator", "____", "characters to go by"), ("generator", "a" * 40 + "_", "does not fit"),
    ("judge", "a_b", "scores texts"), ("causal", "a" * 64, "must have 1 to 63 tokens")])
def test_a_text_or_a_model_that_does_not_fit_is_refused(paths, capsys, name, text, words):
    with pytest.raises(ValueError, match=words) as error:
        printed(capsys, paths[name], text)
    assert "\n" not in str(error.value)


@pytest.mark.parametrize("unmask_steps", [1, 3])
def test_the_hidden_characters_alone_change(paths, capsys, unmask_steps):
    arguments = (paths["generator"], "the qu__k = f_x", "--num_samples=4",
                 f"--unmask_steps={unmask_steps}", "--top_p=1.0", "--temperature=2.0")
    lines = printed(capsys, *arguments)
    assert len(lines) == 4 == len(set(lines))
    for line in lines:
        assert len(line) == 15 and line[:6] + line[8:13] + line[14:] == "the quk = fx"
    assert lines == printed(capsys, *arguments), "the same noise for the same seed"
    assert lines != printed(capsys, *arguments, "--seed=2")


@pytest.mark.parametrize("more", [{"block_length": 1, "unmask_steps": 1}, {"unmask_order": "left_to_right"},
                                  {"unmask_order": "confidence", "block_length": 5}], ids=str)
def test_blocks_and_orders_are_those_of_training(tmp_path, capsys, prompts, more):
    """The likeliest tokens depend on the order alone, which is not random here."""
    path = str(tmp_path / "any_order.safetensors")
    policy = prompt_fill_policy(seed=1, n_layer=2)
    save_model(path, policy.model, CAUSAL)
    c = prompt_config(**{"max_new_tokens": 9, "unmask_steps": 3, "seed": 0, "group_size": 2, "top_k": 1} | more)
    problems = prompt_consumer(prompts, c).problems("train", 0)
    with torch.no_grad():
        rollouts = policy.sample(problems, 0, c)
    found = []
    for text in rollouts.texts.prompts[::2]:
        arguments = [f"--{key}={value}" for key, value in ({"unmask_steps": 3} | more).items()]
        found += printed(capsys, path, text, "--num_samples=1", "--max_new_tokens=9", "--temperature=1e-5", *arguments)
    expected = map(str.__add__, rollouts.texts.prompts[::2], rollouts.texts.completions[::2])
    assert found == [highlight(text, [], False) for text in expected]


@pytest.mark.parametrize("family", ["llama", "qwen3"])
def test_a_hugging_face_model_completes_a_text_as_transformers_does(tmp_path, capsys, family):
    transformers = pytest.importorskip("transformers")
    path = model_folder(tmp_path, family)
    arguments = (path, "the quick", "--max_new_tokens=8", "--temperature=1e-4", "--num_samples=1")
    net = transformers.AutoModelForCausalLM.from_pretrained(path)
    tokenizer = transformers.AutoTokenizer.from_pretrained(path)

    def greedy(**inputs):
        start = inputs["input_ids"].shape[1]
        out = net.generate(**inputs, do_sample=False, max_new_tokens=8, pad_token_id=0)[0, start:]
        text = tokenizer.decode(out, skip_special_tokens=True).replace("\n", "\u21b5")
        return "".join("\ufffd" if ord(c) < 32 or 127 <= ord(c) < 160 else c for c in text)  # as a terminal is shown it

    inputs = tokenizer("the quick", return_tensors="pt", return_token_type_ids=False)
    assert printed(capsys, *arguments, "--template=plain") == ["the quick" + greedy(**inputs)]
    if family == "llama":  # which has no chat template
        assert printed(capsys, *arguments) == ["the quick" + greedy(**inputs)]
    else:
        inputs = tokenizer.apply_chat_template([{"role": "user", "content": "the quick"}], add_generation_prompt=True,
                                               return_dict=True, return_tensors="pt")
        for more in ((), ("--template=model",)):
            assert printed(capsys, *arguments, *more) == ["the quick\u21b5" + greedy(**inputs)]
