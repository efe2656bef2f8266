"""Prompts: templates, splits, and batches of problems and of training examples."""

import re
import shutil

import numpy as np
import pytest

from core.config import PROMPT_TEMPLATES
from core.errors import Mistake
from core.huggingface.tokenizer import load_huggingface_tokenizer
from core.models import save_model
from core.prompts import MODEL_TEMPLATES, TEMPLATES, PromptConsumer, PromptFormat
from core.records import split_of, write_prompts
from grpo.build import build_data, with_template
from grpo.grpo_config import GRPOConfig
from grpo.reward_functions.registry import reward
from grpo.rewards import Rewards
from grpo.template import unnamed_tags, unread_arguments
from tests.families import CHAT_TEMPLATE, model_folder, tokenizer_of
from tests.tiny import CAUSAL, causal_model, causal_policy, jsonl, one_process, prompt_config, sampled
from tests.tiny import model as model_of

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


BEGUN = [*TURNS, {"role": "assistant", "content": "The sum"}]


@pytest.mark.parametrize(("settings", "text"), [
    ({}, "a\n\nb\n\nc\n\n"), ({"template": "chat"}, "User: a\n\nAssistant: b\n\nUser: c\n\nAssistant: "),
    ({"prompt_format": "-{prompt}-"}, "a\n\nb\n\n-c-\n\n")])
def test_an_assistant_s_message_at_the_end_is_continued(settings, text):
    ids = CAUSAL.encode(f"{text}The sum is")
    assert PromptFormat(**settings, response_prefix=" is").encode(BEGUN, CAUSAL) == (text, ids)


@pytest.mark.parametrize("content", ["The sum", " The sum\n"])
def test_the_template_of_the_model_continues_an_assistant_s_message(tmp_path, content):
    t = huggingface_tokenizer(tmp_path, "chat")
    text, ids = PromptFormat("model").encode([*TURNS, {"role": "assistant", "content": content}], t)
    assert text.endswith("<|im_start|>assistant\n") and ids == t.encode(text + content)
    t.backend.chat_template = t.backend.chat_template.replace("m['content'] }}", "m['content'] | trim }}")
    trimmed, ids = PromptFormat("model").encode([*TURNS, {"role": "assistant", "content": content}], t)
    assert trimmed == text and ids == t.encode(f"{text}The sum")


def test_rewards_and_people_read_the_beginning_of_an_answer_as_a_part_of_the_completion(tmp_path):
    folder = prepared(tmp_path / "folder", [{"prompt": BEGUN, "answer": "d"}, {"prompt": "x"}])
    texts = sampled(causal_policy(), folder, prompt_config(batch_size=2, group_size=2, max_new_tokens=3)).texts
    of_begun = [isinstance(prompt, list) for prompt in texts.columns["prompt"]]
    assert [text.startswith("The sum") for text in texts.completions] == of_begun and sum(of_begun) == 2
    assert all(text.endswith("c\n\n") == begun for text, begun in zip(texts.prompts, of_begun, strict=True))


def test_a_prompt_that_begins_with_the_start_token_is_read_with_one_and_named(tmp_path):
    t = huggingface_tokenizer(tmp_path / "t", "start")
    dataset = jsonl(tmp_path / "a.jsonl", *({"prompt": f"{begin}{i}"} for i in range(30) for begin in ("<s>", "")))
    data = PromptConsumer(dataset, 4, tokenizer=t)
    start = t.start_ids[0]
    assert all(r["tokens"].count(start) == 1 for split in data.records.values() for r in split)
    assert list(data.notes.values()) == [30]


def test_only_records_that_are_equal_in_every_field_are_merged_and_a_line_says_how_many(tmp_path):
    records = [{"prompt": "Move.", "board": i // 2, "split": split} for split in ("train", "val") for i in range(20)]
    records.append({"split": "train", "board": 0, "prompt": "Move."})
    data = PromptConsumer(jsonl(tmp_path / "a.jsonl", *records), 4, tokenizer=CAUSAL)
    assert [[r["board"] for r in data.records[split]] for split in ("train", "val")] == [list(range(10))] * 2
    assert list(data.notes.values()) == [21, 10], "copies and a prompt in both splits are noted"


@pytest.mark.parametrize(("records", "train", "val"), [
    ([{"prompt": "a"}, {"prompt": "b"}, {"prompt": "d"}], 3, 3), ([{"prompt": "c"}], 1, 1),
    ([{"prompt": "same", "seed": i} for i in range(30)], 30, 30),
    ([{"prompt": "a", "split": "train"}, {"prompt": "a", "x": 1}, {"prompt": "b", "split": "val"}], 2, 1),
    ([{"prompt": "a", "split": "train"}, {"prompt": "a", "split": "val"}], 1, 1)])
def test_few_records_that_name_no_split_are_evaluated_on_and_said_to_be(tmp_path, records, train, val):
    named = any("split" in record for record in records)
    for path in (jsonl(tmp_path / "a.jsonl", *records), prepared(tmp_path / "folder", records)):
        data = PromptConsumer(path, 4, tokenizer=CAUSAL)
        assert [len(data.records[split]) for split in ("train", "val")] == [train, val]
        lines = [line for line in data.describe_prompts(64) if '"split"' in line]
        assert len(lines) == (not named) and all(str(train) in line for line in lines)
        assert any("64 problems" in line for line in data.describe_prompts(64))


@pytest.mark.parametrize(("records", "words"), [
    ([{"prompt": "a", "split": "train"}] * 3, "split val"), ([{"prompt": "a", "split": "test"}], "split train"),
    ([{"prompt": "a" * 600, "split": "train"}, {"prompt": "b", "split": "val"}], "max_prompt_length")])
def test_a_split_without_prompts_is_refused_for_its_own_reason(tmp_path, records, words):
    with pytest.raises(Mistake, match=words):
        PromptConsumer(jsonl(tmp_path / "a.jsonl", *records), 4, tokenizer=CAUSAL)


def test_a_prompt_has_one_split_unless_its_record_gives_another(tmp_path):
    sides = [split_of(f"prompt {i}") for i in range(3000)]
    assert 0.07 < sides.count("val") / 3000 < 0.13
    assert split_of(TURNS) == split_of([dict(reversed(turn.items())) for turn in TURNS])
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


@pytest.mark.parametrize(("share", "lengths", "kept"), [
    (0.9, range(1, 11), range(1, 10)), (0.9, range(1, 10), range(1, 10)), (0.9, [5], [5]), (0.5, [7, 7, 7], [7, 7, 7]),
    (0.5, [1, 2, 2, 2, 9, 9], [1, 2, 2, 2]), (0.66, [1, 4, 6], [1, 4]), (0.67, [1, 4, 6], [1, 4, 6]),
    (0.07, range(1, 101), range(1, 8)), (0.999, range(1, 101), range(1, 101)), (0.5, [30, 1, 1, 20], [1, 1]),
    (1e-9, [3, 2], [2])])
def test_a_share_leaves_out_training_prompts_above_that_percentile_and_no_validation_prompt(
        tmp_path, share, lengths, kept):
    kept, lengths = list(kept), list(lengths)
    records = [{"prompt": "a" * n, "i": i, "split": "train"} for i, n in enumerate(lengths)]
    path = jsonl(tmp_path / "a.jsonl", *records, {"prompt": "b" * 200, "split": "val"})
    data = PromptConsumer(path, 1, tokenizer=CAUSAL, format=PromptFormat(max_prompt_length=share))
    assert sorted(len(r["prompt"]) for r in data.records["train"]) == kept
    assert [len(r["prompt"]) for r in data.records["val"]] == [200]
    left_out = len(lengths) - len(kept)
    assert data.dropped == left_out
    shown = re.findall(r"[\d.e-]*\d", data.size())
    if left_out:
        assert shown[-3:] == [str(left_out), str(kept[-1]), str(share)], "how many, from what length"
    else:
        assert str(share) not in shown


def test_a_prompt_of_both_splits_that_a_share_leaves_out_is_evaluated_on_and_said_to_be(tmp_path):
    path = jsonl(tmp_path / "a.jsonl", *({"prompt": "d" * n} for n in (3, 1, 2)))
    for share, lengths in ((0.5, [1, 2]), (0.9, [1, 2, 3])):
        data = PromptConsumer(path, 1, tokenizer=CAUSAL, format=PromptFormat(max_prompt_length=share))
        assert sorted(len(r["prompt"]) for r in data.records["train"]) == lengths
        assert [len(r["prompt"]) for r in data.records["val"]] == [3, 1, 2]
        assert sum(str(share) in line for line in data.describe_prompts(1)) == data.dropped == 3 - len(lengths)


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


MATH = ("Put your reasoning between <start_working_out> and <end_working_out>, then the final number between "
        "<SOLUTION> and </SOLUTION>.")
CODE = "Answer with one fenced block of Python code."
ASSISTANT = "<|im_start|>assistant\n"
BRIEF = {"system_prompt": "Be brief."}
REFUSES = "{% if messages[0]['role'] == 'system' %}{{ raise_exception('System role not supported') }}{% endif %}"
SYSTEM = [{"role": "system", "content": "Add."}, {"role": "user", "content": "1+1"}]


def test_a_system_message_behind_the_first_turn_has_no_rules(generators):
    tokenizer = load_huggingface_tokenizer(str(generators / "chat"))
    answer = [{"role": "system", "content": "2 + 2"}]
    texts = [PromptFormat(template).after_turn(answer, tokenizer) for template in ("model", "model_math")]
    assert texts[0] == texts[1] and "2 + 2" in texts[0]


def test_the_setting_has_the_names_of_all_templates():
    assert PROMPT_TEMPLATES == (*TEMPLATES, *MODEL_TEMPLATES)


def turns(*contents):
    """What CHAT_TEMPLATE makes of contents, the last of which is the user's and the others the system's."""
    roles = ["system"] * (len(contents) - 1) + ["user"]
    return "".join(f"<|im_start|>{role}\n{text}<|im_end|>\n" for role, text in zip(roles, contents)) + ASSISTANT


@pytest.fixture(scope="module")
def generators(tmp_path_factory):
    """Models: two of ours, and three with a chat template, which shows, refuses or ignores a system message."""
    pytest.importorskip("transformers")
    folder = tmp_path_factory.mktemp("generators")
    save_model(str(folder / "own"), causal_model(block_size=400), CAUSAL)
    save_model(str(folder / "any order"), model_of(tokenizer=CAUSAL, block_size=400), CAUSAL)
    model_folder(folder / "chat", "qwen3")
    for name, template in (("refuses", REFUSES + CHAT_TEMPLATE),
                           ("ignores", CHAT_TEMPLATE.replace("messages", "messages if m['role'] != 'system'"))):
        shutil.copytree(folder / "chat", folder / name)
        (folder / name / "chat_template.jinja").write_text(template)
    return folder


def with_data(folder, tmp_path, prompt="1+1", origin=None, **settings):
    """(config, data) of a run with this prompt."""
    dataset = jsonl(tmp_path / "a.jsonl", {"prompt": prompt, "answer": "2"})
    c = GRPOConfig(dataset=dataset, generator_checkpoint=str(folder), device="cpu", **settings)
    c = with_template(c, {} if origin is None else origin)
    return c, build_data(c, one_process())


@pytest.mark.parametrize(("model", "settings", "prompt", "text"), [
    ("own", {"task_type": "math"}, "1+1", f"System: {MATH}\n\nUser: 1+1\n\nAssistant: "),
    ("any order", {"task_type": "math"}, "1+1", f"System: {MATH}\n\nUser: 1+1\n\nAssistant: "),
    ("own", {"task_type": "reasoning"}, "1+1", f"System: {MATH}\n\nUser: 1+1\n\nAssistant: "),
    ("own", {"task_type": "code"}, "1+1", f"System: {CODE}\n\nUser: 1+1\n\nAssistant: "),
    ("own", {"task_type": "general"}, "1+1", "1+1"),
    ("own", {"reward_functions": ("exact_match",)}, "1+1", "1+1"),
    ("own", {"task_type": "math", "template": "plain"}, "1+1", "1+1"),
    ("own", {"task_type": "code", "template": None}, "1+1", f"System: {CODE}\n\nUser: 1+1\n\nAssistant: "),
    ("own", {"task_type": "code", "template": "chat"}, "1+1", "User: 1+1\n\nAssistant: "),
    ("own", {"task_type": "math", "prompt_format": "Q: {prompt}"} | BRIEF, "1+1",
     f"System: {MATH}\n\nSystem: Be brief.\n\nUser: Q: 1+1\n\nAssistant: "),
    ("own", {"task_type": "math"}, SYSTEM, f"System: {MATH}\n\nSystem: Add.\n\nUser: 1+1\n\nAssistant: "),
    ("chat", {"task_type": "math"}, "1+1", turns(MATH, "1+1")),
    ("chat", {"task_type": "reasoning", "response_prefix": "So"}, "1+1", turns(MATH, "1+1")),
    ("chat", {"task_type": "code", "prompt_format": "Q: {prompt}"}, "1+1", turns(CODE, "Q: 1+1")),
    ("chat", {"task_type": "math"} | BRIEF, "1+1", turns(f"{MATH}\n\nBe brief.", "1+1")),
    ("chat", {"task_type": "math"}, SYSTEM, turns(f"{MATH}\n\nAdd.", "1+1")),
    ("chat", {"task_type": "math"}, [{"role": "user", "content": "1"}, *SYSTEM],
     turns("1").removesuffix(ASSISTANT).replace("system", "user") + turns(f"{MATH}\n\nAdd.", "1+1")),
    ("chat", {"task_type": "math", "chat_template_kwargs": {"enable_thinking": False}}, "1+1",
     turns(MATH, "1+1") + "<think></think>"),
    ("chat", {"task_type": "math", "template": "math"}, "1+1", f"System: {MATH}\n\nUser: 1+1\n\nAssistant: "),
    ("chat", {"task_type": "math", "template": "model"}, "1+1", turns("1+1")),
    ("chat", {"task_type": "math", "template": "plain"}, "1+1", "1+1"),
    ("chat", {"task_type": "general"}, "1+1", "1+1"),
    ("refuses", {"task_type": "math"}, "1+1", turns(f"{MATH}\n\n1+1")),
    ("refuses", {"task_type": "code", "prompt_format": "Q: {prompt}"}, "1+1", turns(f"{CODE}\n\nQ: 1+1")),
    ("chat", {"template": "model_code", "reward_functions": ("exact_match",)} | BRIEF, "1+1",
     turns(f"{CODE}\n\nBe brief.", "1+1")),
    ("ignores", {"task_type": "math"}, SYSTEM, turns(f"{MATH}\n\n1+1")),
], ids=str)
def test_a_task_has_a_template_unless_one_is_set(generators, tmp_path, model, settings, prompt, text):
    origin = dict.fromkeys(settings, "command line")
    c, data = with_data(generators / model, tmp_path, prompt, origin, **settings)
    assert data.records["train"][0]["text"] == text
    assert c.template in PROMPT_TEMPLATES, "it is recorded"
    taken = c.template != "plain" and settings.get("template") is None
    assert ("task_type" in origin.get("template", "")) == taken, "and said"
    assert data.records["train"][0]["tokens"] == data.tokenizer.encode(text + c.response_prefix)


@pytest.mark.parametrize(("model", "settings", "prompt", "words"), [
    ("chat", {"task_type": "math"} | BRIEF, SYSTEM, "system_prompt"),
    ("own", {"task_type": "math", "chat_template_kwargs": {"a": 1}}, "1+1", "chat_template_kwargs.*model"),
    ("chat", {"task_type": "code", "template": "chat", "chat_template_kwargs": {"a": 1}}, "1+1", "template_kwargs"),
    ("chat", {"task_type": "general", "chat_template_kwargs": {"a": 1}}, "1+1", "template_kwargs.*model")], ids=str)
def test_what_the_template_of_a_task_cannot_be_with_names_a_setting_of_the_user(generators, tmp_path, model, settings,
                                                                               prompt, words):
    with pytest.raises(Mistake, match=words):
        with_data(generators / model, tmp_path, prompt, **settings)


@pytest.mark.parametrize(("arguments", "is_said"), [
    ({"enable_thinking": False}, False), ({"enable_thinking": True}, True), ({"tools": [{"name": "add"}]}, True),
    ({"tools": [], "enable_thinking": False}, False), (None, False), ({}, False)], ids=str)
def test_arguments_that_the_chat_template_does_not_read_are_said(generators, tmp_path, arguments, is_said):
    c, data = with_data(generators / "chat", tmp_path, template="model", chat_template_kwargs=arguments)
    lines = list(unread_arguments(data))
    assert len(lines) == is_said and all(key in line for line in lines for key in ("chat_template_kwargs", *arguments))


def test_an_argument_that_the_chat_template_demands_is_read(generators, tmp_path):
    c, data = with_data(generators / "chat", tmp_path, template="model", chat_template_kwargs={"style": 1})
    demands = "{% if style is not defined %}{{ raise_exception('no style') }}{% endif %}"
    backend = data.tokenizer.backend
    before, backend.chat_template = backend.chat_template, demands + backend.chat_template
    assert not list(unread_arguments(data))
    backend.chat_template = before


END, OPEN, CLOSE = "<end_working_out>", "<SOLUTION>", "</SOLUTION>"


@pytest.mark.parametrize("name_of", ["own", "any order", "chat"])
@pytest.mark.parametrize(("settings", "expected"), [
    ({"task_type": "math", "template": "plain"},
     {"math_format": {END, OPEN, CLOSE}, "math_answer": {OPEN, CLOSE}, "math_number": {OPEN, CLOSE}}),
    ({"task_type": "math"}, {}), ({"task_type": "general"}, {}),
    ({"task_type": "reasoning", "template": "chat"}, {"math_format": {END, OPEN, CLOSE}}),
    ({"reward_functions": ("math_working", "exact_match")}, {"math_working": {END}}),
    ({"reward_functions": ("math_format", "math_number"), "reward_weights": (0.0, 2.0)},
     {"math_number": {OPEN, CLOSE}}),
    ({"reward_functions": ("math_format",), "response_prefix": "<SOLUTION>"}, {"math_format": {END, CLOSE}}),
    ({"reward_functions": ("math_number",), "system_prompt": "<SOLUTION>2</SOLUTION>"}, {}),
    ({"reward_functions": ("math_format",), "prompt_format": "{prompt} <end_working_out>"},
     {"math_format": {OPEN, CLOSE}}),
    ({"reward_functions": ("tagged", "countdown", "xml_valid")}, {"tagged": {"<mine>"}})])
def test_tags_that_a_reward_looks_for_and_no_prompt_names_are_told(generators, tmp_path, settings, expected, name_of):
    @reward(0, 1, tags="<mine>")
    def tagged(completions, **columns):
        return [0.0] * len(completions)

    c, data = with_data(generators / name_of, tmp_path, **settings)
    lines = list(unnamed_tags(Rewards(c), data))
    words = "".join(lines).replace(",", " ").replace(";", " ").replace(":", " ").split()
    found = {}
    for word in words[: words.index("system_prompt")] if lines else []:
        if word in expected:
            name = word
            found[name] = set()
        elif word.startswith("<"):
            found[name].add(word)
    assert found == expected and len(lines) == bool(expected)
    if lines:
        assert {"system_prompt", "prompt_format"} <= set(words)
        template = "model_math" if name_of == "chat" else "math"
        assert (f"template={template!r}" in words) == ("tagged" not in expected), "it has no tags of the user's"
