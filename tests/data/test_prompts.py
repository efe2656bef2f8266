"""Prompts: templates, splits, and batches of problems and of training examples."""

import numpy as np
import pytest

from core.huggingface.tokenizer import load_huggingface_tokenizer
from core.prompts import PromptConsumer, PromptFormat
from core.records import side, write_prompts
from tests.families import tokenizer_of
from tests.tiny import CAUSAL

RECORDS = [{"prompt": f"{i}+{i * i}=", "completion": str(i + i * i), "split": "train" if i % 5 else "val"}
           for i in range(60)]
TURNS = [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}, {"role": "user", "content": "c"}]


def prepared(folder, records=RECORDS, tokenizer=CAUSAL):
    write_prompts(str(folder), records, tokenizer)
    return str(folder)


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """A folder with RECORDS."""
    return prepared(tmp_path_factory.mktemp("prompts"))


def huggingface_tokenizer(path, kind):
    pytest.importorskip("transformers")
    tokenizer_of(kind).save_pretrained(str(path))
    return load_huggingface_tokenizer(str(path))


@pytest.mark.parametrize(("prompt", "settings", "text"), [
    (TURNS, {}, "a\n\nb\n\nc"),
    ("Hi", {"template": "chat", "system_prompt": "Be kind."}, "System: Be kind.\n\nUser: Hi\n\nAssistant: "),
    ("3+4=", {"prompt_format": "{x}: {prompt}\n"}, "{x}: 3+4=\n"),
    (TURNS, {"template": "chat", "prompt_format": "-{prompt}-"},
     "User: a\n\nAssistant: b\n\nUser: -c-\n\nAssistant: ")])
def test_a_template_ends_where_the_answer_begins(prompt, settings, text):
    assert PromptFormat(**settings).encode(prompt, CAUSAL) == (text, CAUSAL.encode(text))
    assert PromptFormat(**settings, response_prefix="so ").encode(prompt, CAUSAL) == (text, CAUSAL.encode(text + "so "))


def test_a_prompt_has_one_split_unless_its_record_gives_another(tmp_path):
    sides = [side(f"prompt {i}") for i in range(3000)]
    assert 0.07 < sides.count("val") / 3000 < 0.13
    assert side(TURNS) == side([dict(reversed(turn.items())) for turn in TURNS])
    data = PromptConsumer(prepared(tmp_path, [{"prompt": f"prompt {i}"} for i in range(300)] + [
        {"prompt": f"{name} mine", "split": name} for name in ("train", "val")]), 1)
    found = {r["prompt"]: split for split in data.records for r in data.records[split]}
    assert [found[f"prompt {i}"] for i in range(300)] == sides[:300]
    assert found["train mine"] == "train" and found["val mine"] == "val"


def test_no_prompt_is_left_out_but_training_prompts_above_max_prompt_length(tmp_path):
    folder = prepared(tmp_path, [{"prompt": split[0] * n, "split": split} for split, lengths in (
        ("train", range(10, 110)), ("val", range(5, 45))) for n in lengths])
    data = PromptConsumer(folder, 1, format=PromptFormat(max_prompt_length=50))
    assert [len(r["prompt"]) for r in data.records["train"]] == list(range(10, 51)) and data.longest == 50
    assert [len(r["prompt"]) for r in data.records["val"]] == list(range(5, 45))
    assert data.dropped == 59


@pytest.mark.parametrize("kind", ["problems", "batch"])
def test_problems_do_not_depend_on_how_a_step_is_cut_and_none_occurs_twice(folder, kind):
    whole = PromptConsumer(folder, 40)
    ranks = [PromptConsumer(folder, 10, rank=r, world=2) for r in range(2)]
    expected, other = (getattr(whole, kind)("train", step) for step in (3, 4))
    parts = [getattr(data, kind)("train", 3, micro) for micro in range(2) for data in ranks]
    assert [n for part in parts for n in part["number"]] == list(range(40)) == list(expected["number"])
    texts, again, others = ([whole.tokenizer.decode(row).strip("_") for part in batches for row in part["input"]]
                            for batches in (parts, [expected], [other]))
    assert texts == again != others and len(set(texts)) == 40


def test_a_training_example_is_its_completion_and_the_stop_token(folder):
    data = PromptConsumer(folder, 16)
    t, batch = data.tokenizer, data.batch("train", 5)
    records = data.problems("train", 5)["record"]
    for input, target, mask, record in zip(*(batch[k] for k in ("input", "target", "mask")), records, strict=True):
        prompt, completion = t.encode(record["prompt"]), [*t.encode(record["completion"]), t.stop_token_id]
        assert input[: len(prompt + completion) - 1].tolist() == (prompt + completion)[:-1]
        assert target[mask].tolist() == completion and not target[~mask].any()
        assert mask.argmax() == len(prompt) - 1


def test_the_template_of_the_model_makes_one_start_token_and_ends_where_the_answer_begins(tmp_path):
    t = huggingface_tokenizer(tmp_path / "chat", "chat")
    text, ids = PromptFormat("model", "Add.", "It is", chat_template_kwargs={"enable_thinking": False}).encode(TURNS, t)
    turns = [{"role": "system", "content": "Add."}, *TURNS]
    expected = "".join(f"<|im_start|>{m['role']}\n{m['content']}<|im_end|>\n" for m in turns)
    assert text == expected + "<|im_start|>assistant\n<think></think>"
    assert ids == t.backend.encode(text + "It is", add_special_tokens=False)
    started = huggingface_tokenizer(tmp_path / "start", "start")
    started.backend.chat_template = "<s>{% for m in messages %}{{ m.content }}{% endfor %}"
    assert PromptFormat("model").encode("1+1?", started)[1] == started.backend("1+1?")["input_ids"], "one start token"


def test_masked_examples_are_the_answer_and_ends_with_a_uniform_share_of_masks(prompts):
    data = PromptConsumer(prompts, 40, block_size=12, masked=True)
    shares = []
    for step in range(25):
        batch = data.batch("train", step)
        records = data.problems("train", step)["record"]
        for record, input, target, weight in zip(records, batch["input"], batch["target"], batch["mask"], strict=True):
            length = len(record["tokens"])
            text = [*record["tokens"], *data.tokenizer.encode(record["completion"])]
            assert target.tolist() == (text + [data.tokenizer.stop_token_id] * 12)[:12]
            masked = weight > 0
            assert (input[masked] == data.tokenizer.mask_token_id).all() and (input == target)[~masked].all()
            assert masked.any() and not weight[:length].any()
            assert (weight[masked] == np.float32(1 / masked.sum())).all(), "every example weighs the same"
            shares.append(masked.sum() / (12 - length))
    assert abs(np.mean([share <= 0.5 for share in shares]) - 0.5) < 0.1
