"""The reward of a reward model: its scores are those of transformers' own forward on each text alone."""

import json
import os
import random
from types import SimpleNamespace

import pytest
import torch

pytest.importorskip("transformers")

from core.huggingface.tokenizer import load_huggingface_tokenizer
from grpo.reward_functions.reward_model import BATCH, load_reward_model
from grpo.rewards import Rewards
from tests.families import spoiled
from tests.tiny import TEXT, config

WORDS = TEXT.split()
CHAT_TEMPLATE = "{% for m in messages %}<s>{{ m['role'] }}: {{ m['content'] }}</s>{% endfor %}"
QUESTION = [{"role": "system", "content": "be brief"}, {"role": "user", "content": "the quick brown"}]


def tokenizer_of(frame, pad, template=None):
    """A tokenizer of words. frame: what it puts around a text; pad: its pad token or None."""
    from tokenizers import Tokenizer, models, pre_tokenizers, processors
    from transformers import PreTrainedTokenizerFast
    vocabulary = ["[PAD]", "[UNK]", "<s>", "</s>", ":", *dict.fromkeys([*WORDS, "user", "assistant", "system"])]
    tokenizer = Tokenizer(models.WordLevel({word: i for i, word in enumerate(vocabulary)}, unk_token="[UNK]"))
    tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
    tokenizer.post_processor = processors.TemplateProcessing(
        single=frame, pair=f"{frame} $B", special_tokens=[("<s>", 2), ("</s>", 3)])
    out = PreTrainedTokenizerFast(tokenizer_object=tokenizer, unk_token="[UNK]", bos_token="<s>", eos_token="</s>",
                                  **({"pad_token": pad} if pad else {}))
    out.chat_template = template
    return out


def folder_of(path, family, longest=64, num_labels=1, pad=True, template=None, **changes):
    """Writes a small random classifier and its tokenizer. Returns the folder as a string."""
    import transformers as t
    tokenizer = tokenizer_of("<s> $A" if family == "Llama" else "<s> $A </s>", "[PAD]" if pad else None, template)
    shape = {"vocab_size": len(tokenizer), "hidden_size": 16, "num_hidden_layers": 2, "num_attention_heads": 2,
             "intermediate_size": 32, "max_position_embeddings": longest, "num_labels": num_labels,
             "pad_token_id": 0 if pad else None} | changes
    torch.manual_seed(0)
    model = getattr(t, f"{family}ForSequenceClassification")(getattr(t, f"{family}Config")(**shape))
    with torch.no_grad():
        for p in model.parameters():
            p.copy_(0.3 * torch.randn(p.shape) if p.dim() > 1 else p)
    model.save_pretrained(str(path))
    tokenizer.save_pretrained(str(path))
    return str(path)


def texts_of(prompts, completions, columns=None):
    return SimpleNamespace(prompts=prompts, completions=completions, columns=columns or {}, tokens=None)


def written(count=BATCH + 5, prompt="the quick brown "):
    """Texts of many lengths, as answers to this prompt of the records."""
    rng = random.Random(0)
    completions = [" ".join(rng.choices(WORDS, k=rng.choice([1, 2, 2, 5, 9, 14]))) for _ in range(count)]
    return texts_of(["rendered: the "] * count, completions, {"prompt": [prompt] * count})


def alone(folder, texts, special_tokens=True):
    """The score of each text by itself, without padding, by transformers."""
    import transformers as t
    model = t.AutoModelForSequenceClassification.from_pretrained(folder).eval()
    tokenizer = t.AutoTokenizer.from_pretrained(folder)
    scores = []
    for text in texts:
        ids = tokenizer(text, add_special_tokens=special_tokens, return_tensors="pt")["input_ids"]
        with torch.no_grad():
            scores.append(float(model(input_ids=ids).logits[0, 0]))
    assert max(scores) - min(scores) > 1e-2, "the texts have different scores"
    return torch.tensor(scores)


@pytest.mark.parametrize(("family", "pad"), [("Bert", True), ("Roberta", True), ("Llama", True), ("Llama", False)])
def test_every_text_has_the_score_that_it_has_alone(tmp_path, family, pad):
    folder, texts = folder_of(tmp_path, family, pad=pad), written(prompt=QUESTION)
    scores = load_reward_model(folder).scores(texts)
    assert scores.dtype == torch.float32
    expected = alone(folder, ["rendered: the " + text for text in texts.completions])
    torch.testing.assert_close(scores, expected, rtol=0, atol=1e-5)


@pytest.mark.parametrize("prompt, pad", [("the quick brown", True), (QUESTION, False)])
def test_a_chat_template_is_applied_to_the_prompt_of_the_record_and_adds_all_special_tokens(tmp_path, prompt, pad):
    folder, texts = folder_of(tmp_path, "Llama", pad=pad, template=CHAT_TEMPLATE), written(9, prompt)
    messages = prompt if prompt is QUESTION else [{"role": "user", "content": prompt}]
    before = "".join(f"<s>{m['role']}: {m['content']}</s>" for m in messages)
    chats = [f"{before}<s>assistant: {text}</s>" for text in texts.completions]
    expected = alone(folder, chats, special_tokens=False)
    torch.testing.assert_close(load_reward_model(folder).scores(texts), expected, rtol=0, atol=1e-5)


@pytest.mark.parametrize("pad", [True, False])
def test_equal_texts_are_read_once_and_those_of_like_length_together_where_there_is_a_pad_token(tmp_path, pad):
    texts, rows = written(40), []
    number = len(set(texts.completions))
    scorer = load_reward_model(folder_of(tmp_path, "Llama", pad=pad))
    scorer.model.register_forward_pre_hook(
        lambda m, a, given: rows.append(tuple(given["input_ids"].shape)), with_kwargs=True)
    scores = scorer.scores(texts_of(texts.prompts * 3, texts.completions * 3))
    assert [n for n, _ in rows] == ([BATCH, BATCH, number - 2 * BATCH] if pad else [1] * number)
    assert rows == sorted(rows, key=lambda r: r[1])
    assert torch.equal(scores, scorer.scores(texts).repeat(3)) and not scores.requires_grad
    assert not scorer.model.training and not any(p.requires_grad for p in scorer.model.parameters())


@pytest.mark.parametrize(("family", "room", "frame"), [("Bert", 20, 2), ("Roberta", 19, 2), ("Llama", 20, 1)])
def test_a_text_that_is_too_long_is_a_clear_error(tmp_path, family, room, frame):
    scorer = load_reward_model(folder_of(tmp_path, family, longest=20))
    fits = "fox " * (room - frame - 1)
    assert scorer.scores(texts_of(["the "], [fits])).shape == (1,)
    with pytest.raises(ValueError, match=f"reward_model_checkpoint reads {room} tokens, but a prompt with its completion "
                                         f"has {room + 1}: lower max_new_tokens"):
        scorer.scores(texts_of(["the "], [fits + "fox"]))


def rewards_with(scorer, **settings):
    settings = {"reward_functions": ("reward_model",), "task_type": "general"} | settings
    return Rewards(config(**settings), reward_scorer=scorer)


def asked(prompt):
    return {"prompt": prompt, "text": "the quick", "tokens": [1, 2], "where": "f.jsonl, line 1"}


def test_a_prompt_that_the_chat_template_refuses_is_one_line_before_the_first_step(tmp_path):
    no_system = ("{% if messages[0]['role'] == 'system' %}{{ raise_exception('System role not supported') }}{% endif %}"
                 + CHAT_TEMPLATE)
    rewards = rewards_with(load_reward_model(folder_of(tmp_path, "Llama", template=no_system)))
    rewards.check([asked("the quick brown")])
    with pytest.raises(ValueError, match="^f.jsonl, line 1: the chat template of reward_model_checkpoint refuses a "
                                         r"prompt \(System role not supported\); change the prompt"):
        rewards.check([asked(QUESTION)])


def test_prompt_and_completion_must_fit_a_reward_model_with_the_tokens_of_the_generator(tmp_path):
    folder = folder_of(tmp_path, "Bert", longest=20)               # [CLS] the quick [SEP]: 4 tokens
    tokenizer, scorer = load_huggingface_tokenizer(folder), load_reward_model(folder)
    rewards_with(scorer, max_new_tokens=16).check([asked("the quick")], tokenizer)
    longer = rewards_with(scorer, max_new_tokens=17)
    with pytest.raises(ValueError, match="f.jsonl, line 1: reward_model_checkpoint reads 20 tokens, but this prompt "
                                         "has 4 and its completion up to 17: lower max_new_tokens"):
        longer.check([asked("the quick")], tokenizer)
    longer.check([asked("the quick")])                             # other tokens: the length is not known


def test_it_is_a_reward_like_the_others(tmp_path):
    scorer, texts = load_reward_model(folder_of(tmp_path, "Bert")), written(4)
    rewards = rewards_with(scorer, reward_functions=("reward_model", "contains"), reward_weights=(2.0, 1.0))
    texts.columns["answer"] = ["fox"] * 4
    rollouts = SimpleNamespace(texts=texts, target=torch.zeros(4, 1, dtype=torch.long), group_size=2)
    contains = torch.tensor([float("fox" in text) for text in texts.completions])
    torch.testing.assert_close(rewards(rollouts).reward.flatten(), 2 * scorer.scores(texts) + contains)
    assert rewards_with(scorer).success is None, "it has no highest value"
    with pytest.raises(ValueError, match="reward_model_checkpoint is not set, but reward reward_model is asked for"):
        rewards_with(None)


def test_what_is_no_reward_model_is_refused_in_one_line(tmp_path):
    def refused(path, words):
        with pytest.raises((ValueError, FileNotFoundError), match=f"^reward_model_checkpoint={path}[^\n]*{words}[^\n]*$"):
            load_reward_model(str(path))

    good = folder_of(tmp_path / "good", "Bert")
    refused(folder_of(tmp_path / "several", "Bert", num_labels=3), "has 3 labels, but a reward model has 1")
    refused(folder_of(tmp_path / "small", "Bert", vocab_size=9), "its tokenizer has .* tokens, but the model reads 9")
    pickled = spoiled(tmp_path / "pickled", good)
    os.rename(f"{pickled}/model.safetensors", f"{pickled}/pytorch_model.bin")
    refused(pickled, "no .*safetensors file")
    foreign = spoiled(tmp_path / "foreign", good, model_type="mine", auto_map={"AutoConfig": "mine.Config"})
    with open(os.path.join(foreign, "mine.py"), "w") as f:
        f.write("raise SystemExit('code of the folder was run')\n")
    refused(foreign, "it needs code of its own")
    import transformers as t
    causal = spoiled(tmp_path / "causal", folder_of(tmp_path / "llama", "Llama"))
    t.LlamaForCausalLM(t.LlamaConfig.from_pretrained(causal)).save_pretrained(causal)
    refused(causal, "lacks 1 weights that LlamaForSequenceClassification needs.* such as score.weight")
    refused(tmp_path / "none", "is no folder")
    (tmp_path / "adapter").mkdir()
    refused(tmp_path / "adapter", "without a Hugging Face config.json")
    (tmp_path / "adapter" / "adapter_config.json").write_text(json.dumps({}))
    refused(tmp_path / "adapter", "is an adapter; merge it")
