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
    tokenizer = tokenizer_of("<s> $A" if family == "llama" else "<s> $A </s>", "[PAD]" if pad else None, template)
    shape = {"vocab_size": len(tokenizer), "hidden_size": 16, "num_hidden_layers": 2, "num_attention_heads": 2,
             "intermediate_size": 32, "max_position_embeddings": longest, "num_labels": num_labels,
             "pad_token_id": 0 if pad else None} | changes
    kinds = {"bert": (t.BertForSequenceClassification, t.BertConfig), "llama": (t.LlamaForSequenceClassification,
             t.LlamaConfig), "roberta": (t.RobertaForSequenceClassification, t.RobertaConfig)}
    torch.manual_seed(0)
    model = kinds[family][0](kinds[family][1](**shape))
    with torch.no_grad():
        for p in model.parameters():
            p.copy_(0.3 * torch.randn(p.shape) if p.dim() > 1 else p)
    model.save_pretrained(str(path))
    tokenizer.save_pretrained(str(path))
    return str(path)


def written(count=BATCH + 5, prompts=None, seed=0):
    """Texts of many lengths."""
    rng = random.Random(seed)
    completions = [" ".join(rng.choices(WORDS, k=rng.choice([1, 2, 2, 5, 9, 14]))) for _ in range(count)]
    own = prompts or ["the quick brown "] * count
    return SimpleNamespace(prompts=["rendered: the "] * count if prompts else own, completions=completions,
                           columns={"prompt": own}, tokens=None)


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


@pytest.mark.parametrize(("family", "pad"), [("bert", True), ("roberta", True), ("llama", True), ("llama", False)])
def test_every_text_has_the_score_that_it_has_alone(tmp_path, family, pad):
    folder, texts = folder_of(tmp_path, family, pad=pad), written()
    scores = load_reward_model(folder).scores(texts)
    whole = [prompt + text for prompt, text in zip(texts.prompts, texts.completions, strict=True)]
    assert scores.dtype == torch.float32
    torch.testing.assert_close(scores, alone(folder, whole), rtol=0, atol=1e-5)


@pytest.mark.parametrize("pad", [True, False])
@pytest.mark.parametrize("prompt", ["the quick brown", QUESTION])
def test_a_chat_template_is_applied_to_the_prompt_of_the_record_and_adds_all_special_tokens(tmp_path, prompt, pad):
    folder, texts = folder_of(tmp_path, "llama", pad=pad, template=CHAT_TEMPLATE), written(9, [prompt] * 9)
    messages = prompt if prompt is QUESTION else [{"role": "user", "content": prompt}]
    before = "".join(f"<s>{m['role']}: {m['content']}</s>" for m in messages)
    chats = [f"{before}<s>assistant: {text}</s>" for text in texts.completions]
    expected = alone(folder, chats, special_tokens=False)
    torch.testing.assert_close(load_reward_model(folder).scores(texts), expected, rtol=0, atol=1e-5)


def test_messages_without_a_chat_template_are_read_as_the_generator_reads_them(tmp_path):
    folder, texts = folder_of(tmp_path, "bert"), written(9, [QUESTION] * 9)
    expected = alone(folder, ["rendered: the " + text for text in texts.completions])
    torch.testing.assert_close(load_reward_model(folder).scores(texts), expected, rtol=0, atol=1e-5)


def test_texts_of_like_length_are_read_together_where_there_is_a_pad_token(tmp_path):
    texts = written(40)
    number = len(set(zip(texts.prompts, texts.completions)))
    for pad, counts in ((True, [BATCH, BATCH, number - 2 * BATCH]), (False, [1] * number)):
        rows = []
        scorer = load_reward_model(folder_of(tmp_path / str(pad), "llama", pad=pad))
        scorer.model.register_forward_pre_hook(
            lambda m, a, given, rows=rows: rows.append(tuple(given["input_ids"].shape)), with_kwargs=True)
        scorer.scores(texts)
        assert [n for n, _ in rows] == counts and rows == sorted(rows, key=lambda r: r[1])


def test_equal_texts_are_read_once_and_have_equal_scores_to_the_last_bit(tmp_path):
    texts = written(6)
    again = SimpleNamespace(prompts=texts.prompts * BATCH, completions=texts.completions * BATCH, columns={})
    model = load_reward_model(folder_of(tmp_path / "m", "bert"))
    rows, expected = [], model.scores(texts)
    model.model.register_forward_pre_hook(lambda _, args, kwargs: rows.append(len(kwargs["input_ids"])),
                                          with_kwargs=True)
    assert torch.equal(model.scores(again), expected.repeat(BATCH)) and sum(rows) == len(set(texts.completions))


def test_a_reward_model_is_frozen_and_its_config_stays(tmp_path):
    scorer = load_reward_model(folder_of(tmp_path, "llama", pad=False))
    scores = scorer.scores(written())
    assert not scores.requires_grad and not any(p.requires_grad for p in scorer.model.parameters())
    assert not scorer.model.training and scorer.model.config.pad_token_id is None
    assert torch.equal(scores, scorer.scores(written()))


@pytest.mark.parametrize(("family", "room"), [("bert", 20), ("roberta", 19), ("llama", 20)])
def test_a_text_that_is_too_long_is_a_clear_error(tmp_path, family, room):
    scorer = load_reward_model(folder_of(tmp_path, family, longest=20))
    frame = 1 if family == "llama" else 2
    text = lambda words: SimpleNamespace(prompts=["the "], completions=[" ".join(["fox"] * (words - 1))], columns={})
    assert scorer.scores(text(room - frame)).shape == (1,)
    with pytest.raises(ValueError, match=f"reward_model_checkpoint reads {room} tokens, but a prompt with its completion "
                                         f"has {room + 1}: lower max_new_tokens"):
        scorer.scores(text(room - frame + 1))


def test_a_prompt_that_the_chat_template_refuses_is_one_line_before_the_first_step(tmp_path):
    no_system = ("{% if messages[0]['role'] == 'system' %}{{ raise_exception('System role not supported') }}{% endif %}"
                 + CHAT_TEMPLATE)
    scorer = load_reward_model(folder_of(tmp_path, "llama", template=no_system))
    rewards = Rewards(config(reward_functions=("reward_model",), task_type="general"), reward_scorer=scorer)
    rewards.check([asked("the quick brown")])
    with pytest.raises(ValueError, match="^f.jsonl, line 1: the chat template of reward_model_checkpoint refuses a "
                                         r"prompt \(System role not supported\); change the prompt"):
        rewards.check([asked(QUESTION)])
    with pytest.raises(ValueError, match="the chat template of reward_model_checkpoint refuses a prompt"):
        scorer.scores(written(1, [QUESTION]))


def asked(prompt):
    return {"prompt": prompt, "text": "the quick", "tokens": [1, 2], "where": "f.jsonl, line 1"}


def test_prompt_and_completion_must_fit_a_reward_model_with_the_tokens_of_the_generator(tmp_path):
    folder = folder_of(tmp_path, "bert", longest=20)               # [CLS] the quick [SEP]: 4 tokens
    tokenizer, scorer = load_huggingface_tokenizer(folder), load_reward_model(folder)
    run = lambda most: Rewards(config(reward_functions=("reward_model",), task_type="general", max_new_tokens=most),
                               reward_scorer=scorer)
    run(16).check([asked("the quick")], tokenizer)
    with pytest.raises(ValueError, match="f.jsonl, line 1: reward_model_checkpoint reads 20 tokens, but this prompt "
                                         "has 4 and its completion up to 17: lower max_new_tokens"):
        run(17).check([asked("the quick")], tokenizer)
    run(17).check([asked("the quick")])                            # other tokens: the length is not known


def test_it_is_a_reward_like_the_others(tmp_path):
    scorer, texts = load_reward_model(folder_of(tmp_path, "bert")), written(4)
    c = config(reward_functions=("reward_model", "contains"), reward_weights=(2.0, 1.0), task_type="general")
    texts.columns["answer"] = ["fox"] * 4
    rollouts = SimpleNamespace(texts=texts, target=torch.zeros(4, 1, dtype=torch.long), group_size=2)
    scored = Rewards(c, reward_scorer=scorer)(rollouts)
    contains = torch.tensor([float("fox" in text) for text in texts.completions])
    torch.testing.assert_close(scored.reward.flatten(), 2 * scorer.scores(texts) + contains)
    assert Rewards(c, reward_scorer=scorer).success is None, "it has no highest value"
    with pytest.raises(ValueError, match="reward_model_checkpoint is not set, but reward reward_model is asked for"):
        Rewards(c)


# what is refused

def rewrite(folder, **changes):
    path = os.path.join(folder, "config.json")
    with open(path) as f:
        values = json.load(f)
    with open(path, "w") as f:
        json.dump(values | changes, f)


def test_other_models_are_refused_in_one_line(tmp_path):
    import transformers as t
    several = folder_of(tmp_path / "several", "bert", num_labels=3)
    with pytest.raises(ValueError, match="several has 3 labels, but a reward model has 1") as found:
        load_reward_model(several)
    assert "\n" not in str(found.value)

    base = folder_of(tmp_path / "base", "llama")
    t.LlamaForCausalLM(t.LlamaConfig.from_pretrained(base)).save_pretrained(base)
    with pytest.raises(ValueError, match=r"base is a language model or detector \(LlamaForCausalLM\); take a reward"):
        load_reward_model(base)
    rewrite(base, architectures=["LlamaForSequenceClassification"])
    with pytest.raises(ValueError, match="base has no weights for score.weight, which LlamaForSequenceClassification needs"):
        load_reward_model(base)

    small = folder_of(tmp_path / "small", "bert", vocab_size=9)
    with pytest.raises(ValueError, match=r"small: its tokenizer has \d+ tokens, but the model reads 9; copy the tok"):
        load_reward_model(small)

    pickled = folder_of(tmp_path / "pickled", "bert")
    weights = t.AutoModelForSequenceClassification.from_pretrained(pickled).state_dict()
    torch.save(weights, os.path.join(pickled, "pytorch_model.bin"))
    os.remove(os.path.join(pickled, "model.safetensors"))
    with pytest.raises(ValueError, match="reward_model_checkpoint=.*pickled holds pickled weights"):
        load_reward_model(pickled)

    foreign = folder_of(tmp_path / "foreign", "bert")
    rewrite(foreign, model_type="mine", auto_map={"AutoConfig": "mine.Config"})
    with open(os.path.join(foreign, "mine.py"), "w") as f:
        f.write("raise SystemExit('code of the folder was run')\n")
    with pytest.raises(ValueError, match="reward_model_checkpoint=.*foreign could not be read .*; it needs code of its own"):
        load_reward_model(foreign)


def test_a_path_that_is_no_model_is_refused_in_one_line(tmp_path):
    with pytest.raises(FileNotFoundError, match="reward_model_checkpoint=.*none is no folder"):
        load_reward_model(str(tmp_path / "none"))
    with pytest.raises(ValueError, match="reward_model_checkpoint=.* without a Hugging Face config.json"):
        load_reward_model(str(tmp_path))
    (tmp_path / "adapter_config.json").write_text("{}")
    with pytest.raises(ValueError, match="reward_model_checkpoint=.* is an adapter; merge it"):
        load_reward_model(str(tmp_path))
