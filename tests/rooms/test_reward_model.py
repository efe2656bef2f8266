"""The reward of a reward model: its scores are those of transformers' own forward on each text alone."""

import random
from types import SimpleNamespace

import pytest
import torch

transformers = pytest.importorskip("transformers")

from grpo.reward_functions.reward_model import BATCH, load_reward_model
from tests.families import base_model, model_folder, spoiled
from tests.tiny import TEXT

WORDS = TEXT.split()
CHAT_TEMPLATE = "{% for m in messages %}<s>{{ m['role'] }}: {{ m['content'] }}</s>{% endfor %}"
PAD = {"pad_token_id": 0}
QUESTION = [{"role": "system", "content": "be brief"}, {"role": "user", "content": "the quick brown"}]


def folder_of(path, family, template=None, longest=128, **changes):
    """Writes a small random reward model and its tokenizer; changes: of its config. Returns the folder."""
    model_folder(f"{path}-made", f"{family}_reward", longest=longest, scale=8.0)
    folder = spoiled(path, f"{path}-made", **changes)
    tokenizer = transformers.AutoTokenizer.from_pretrained(folder)
    tokenizer.chat_template = template
    tokenizer.save_pretrained(folder)
    return folder


def texts_of(prompts, completions, columns=None):
    return SimpleNamespace(prompts=prompts, completions=completions, columns=columns or {}, tokens=None,
                           completion_ids=[[]] * len(prompts))


def written(count=BATCH + 5, prompt="the quick brown "):
    """Texts of many lengths, as answers to this prompt of the records."""
    rng = random.Random(0)
    completions = [" ".join(rng.choices(WORDS, k=rng.choice([1, 2, 2, 5, 9, 14]))) for _ in range(count)]
    return texts_of(["rendered: the "] * count, completions, {"prompt": [prompt] * count})


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
    folder, texts = folder_of(tmp_path / "m", family, **changes), written(prompt=QUESTION)
    scores = load_reward_model(folder).scores(texts)
    assert scores.dtype == torch.float32
    expected = alone(folder, ["rendered: the " + text for text in texts.completions])
    torch.testing.assert_close(scores, expected, rtol=0, atol=1e-4)


@pytest.mark.parametrize("prompt, changes", [("the quick brown", PAD), (QUESTION, {})], ids=str)
def test_a_chat_template_is_applied_to_the_prompt_of_the_record_and_adds_all_special_tokens(tmp_path, prompt, changes):
    folder, texts = folder_of(tmp_path / "m", "llama", CHAT_TEMPLATE, **changes), written(9, prompt)
    messages = prompt if prompt is QUESTION else [{"role": "user", "content": prompt}]
    before = "".join(f"<s>{m['role']}: {m['content']}</s>" for m in messages)
    chats = [f"{before}<s>assistant: {text}</s>" for text in texts.completions]
    expected = alone(folder, chats, special_tokens=False)
    torch.testing.assert_close(load_reward_model(folder).scores(texts), expected, rtol=0, atol=1e-4)


def test_equal_texts_are_read_once_and_have_equal_scores(tmp_path):
    texts, rows = written(40), []
    scorer = load_reward_model(folder_of(tmp_path / "m", "llama", **PAD))
    scorer.model.register_forward_pre_hook(lambda m, a, given: rows.append(len(given["input_ids"])), with_kwargs=True)
    scores = scorer.scores(texts_of(texts.prompts * 3, texts.completions * 3))
    assert sum(rows) == len(set(texts.completions)) and max(rows) == BATCH
    assert torch.equal(scores, scorer.scores(texts).repeat(3)) and not scores.requires_grad
    assert not scorer.model.training and not any(p.requires_grad for p in scorer.model.parameters())


def test_what_is_no_reward_model_is_refused(tmp_path):
    model_folder(tmp_path / "causal", "llama")
    spoiled(tmp_path / "no head", tmp_path / "causal", num_labels=1)
    for name, words in (("causal", "2 labels"), ("no head", "score.weight"), ("none", "folder")):
        path = str(tmp_path / name)
        with pytest.raises((ValueError, FileNotFoundError), match=f"^reward_model_checkpoint={path}.*{words}"):
            load_reward_model(path)
