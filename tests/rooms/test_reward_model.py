"""The reward of a reward model: its scores are those of transformers' own forward on each text alone."""

import random
from types import SimpleNamespace

import pytest
import torch

transformers = pytest.importorskip("transformers")

from core.errors import Mistake
from grpo.reward_functions.reward_model import BATCH, load_reward_model
from tests.families import base_model, model_folder, spoiled
from tests.tiny import TEXT

WORDS = TEXT.split()
CHAT_TEMPLATE = "{% for m in messages %}<s>{{ m['role'] }}: {{ m['content'] }}</s>{% endfor %}"
PAD = {"pad_token_id": 0}
QUESTION = [{"role": "system", "content": "be brief"}, {"role": "user", "content": "the quick brown"}]


def folder_of(path, family, template=None, **changes):
    """Writes a small random reward model and its tokenizer; changes: of its config. Returns the folder."""
    model_folder(f"{path}-made", f"{family}_reward", longest=128, scale=8.0)
    folder = spoiled(path, f"{path}-made", **changes)
    tokenizer = transformers.AutoTokenizer.from_pretrained(folder)
    tokenizer.chat_template = template
    tokenizer.save_pretrained(folder)
    return folder


def written(prompt="the quick brown ", times=1):
    """Texts of many lengths, as answers to this prompt of the records."""
    rng, count = random.Random(0), BATCH + 5
    completions = [" ".join(rng.choices(WORDS, k=rng.choice([1, 2, 2, 5, 9, 14]))) for _ in range(count)] * times
    return SimpleNamespace(prompts=["rendered: the "] * len(completions), completions=completions,
                           columns={"prompt": [prompt] * len(completions)})


def alone(folder, texts, special_tokens=True):
    """The score of each text by itself, without padding, by transformers."""
    model, tokenizer, scores = base_model(folder), transformers.AutoTokenizer.from_pretrained(folder), []
    for text in texts:
        ids = tokenizer(text, add_special_tokens=special_tokens, return_tensors="pt")["input_ids"]
        with torch.no_grad():
            scores.append(float(model(input_ids=ids).logits[0, 0]))
    assert max(scores) - min(scores) > 1e-2, "the texts have different scores"
    return torch.tensor(scores)


@pytest.mark.parametrize("family, changes", [("bert", {}), ("roberta", {}), ("llama", PAD), ("llama", {})], ids=str)
def test_every_text_has_the_score_that_it_has_alone(tmp_path, family, changes):
    folder, texts, rows = folder_of(tmp_path / "m", family, **changes), written(), []
    scorer = load_reward_model(folder)
    expected = alone(folder, ["rendered: the " + text for text in texts.completions])
    torch.testing.assert_close(scorer.scores(texts), expected, rtol=0, atol=1e-4)
    scorer.model.register_forward_pre_hook(lambda m, a, given: rows.append(len(given["input_ids"])), with_kwargs=True)
    assert torch.equal(scorer.scores(written(times=3)), scorer.scores(texts).repeat(3)), "equal to the last bit"
    assert sum(rows) == 2 * len(set(texts.completions)), "and equal texts are read once"


@pytest.mark.parametrize("prompt, changes", [("the quick brown", PAD), (QUESTION, {})], ids=str)
def test_a_chat_template_is_applied_to_the_prompt_of_the_record_and_adds_all_special_tokens(tmp_path, prompt, changes):
    folder, texts = folder_of(tmp_path / "m", "llama", CHAT_TEMPLATE, **changes), written(prompt)
    messages = prompt if prompt is QUESTION else [{"role": "user", "content": prompt}]
    before = "".join(f"<s>{m['role']}: {m['content']}</s>" for m in messages)
    expected = alone(folder, [f"{before}<s>assistant: {text}</s>" for text in texts.completions], special_tokens=False)
    torch.testing.assert_close(load_reward_model(folder).scores(texts), expected, rtol=0, atol=1e-4)


def test_what_is_no_reward_model_is_refused(tmp_path):
    model_folder(tmp_path / "causal", "llama")
    spoiled(tmp_path / "no head", tmp_path / "causal", num_labels=1)
    for name, words in (("causal", "2 labels"), ("no head", "score.weight"), ("none", "folder")):
        with pytest.raises(Mistake, match=f"^reward_model_checkpoint=.*{name}.*{words}"):
            load_reward_model(str(tmp_path / name))
