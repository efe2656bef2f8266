"""Records that a reward cannot score are found before the first step, in few calls."""

import pytest

from core.files.records import RAW
from grpo.reward_functions import registry
from grpo.reward_functions.record_checks import LONGEST, check_reader, check_records, named, one_of_each_kind, unwritten
from grpo.reward_functions.registry import Reward


def records(count, **fields):
    return [{"prompt": f"q{i}", "text": f"rendered {i}", "tokens": [1], "where": f"f.jsonl, line {i + 1}",
             **{key: values[i] for key, values in fields.items()}} for i in range(count)]


def register(monkeypatch, fn, **settings):
    monkeypatch.setitem(registry.REWARDS, "mine", Reward(
        fn, 0, 1, **{"slow": False, "whole_group": False, "check": None} | settings))


def test_completions_are_empty_texts_without_tokens():
    texts = unwritten(records(2, answer=["1", "2"]))
    assert texts.prompts == ["rendered 0", "rendered 1"] and texts.completions == ["", ""]
    assert texts.completion_ids == [[], []] and texts.columns["answer"] == ["1", "2"]


@pytest.mark.parametrize("bad", [0, 57, 99])
def test_one_call_has_all_records_and_the_first_that_fails_is_named(monkeypatch, bad):
    register(monkeypatch, lambda completions: None)
    sizes = []

    def call(name, texts):
        sizes.append(len(texts.prompts))
        if any(level >= bad for level in texts.columns["level"]):
            raise ValueError("no")

    check_records("mine", records(100, level=[-1] * 100), call)
    assert sizes == [100]
    with pytest.raises(ValueError, match=f"^f.jsonl, line {bad + 1}: no$"):
        check_records("mine", records(100, level=list(range(100))), call)


def test_a_check_of_its_own_sees_every_record_without_its_prompt(monkeypatch):
    seen = []
    register(monkeypatch, None, check=lambda **fields: seen.append(fields))
    check_records("mine", records(3, answer=["1", "2", "3"], **{RAW: [1, 2, 3]}), None)
    assert seen == [{"answer": "1"}, {"answer": "2"}, {"answer": "3"}]


def test_a_slow_reward_is_called_with_one_record_of_each_kind_and_one_that_reads_ids_not_at_all(monkeypatch):
    called = []
    data = records(4, answer=["1", None, "3", None])
    assert [record["prompt"] for record in one_of_each_kind(data)] == ["q0", "q1"]
    register(monkeypatch, lambda completions: None, slow=True)
    check_records("mine", data, lambda name, texts: called.append(len(texts.prompts)))
    assert called == [2]
    for unavailable in (lambda *, texts: None, lambda *, judge_model: None, lambda *, reward_scorer: None):
        register(monkeypatch, unavailable)
        check_records("mine", data, lambda name, texts: called.append(0))
    assert called == [2]


def test_an_error_begins_with_the_place_of_the_record():
    def refuse(value, *, where):
        raise ValueError(f"{value} {where}")

    with pytest.raises(ValueError, match="^f.jsonl, line 1: 3 there$"):
        named(records(1)[0], refuse, 3, where="there")


# whether a judge or a reward model can read the prompts

class Reader:
    """Reads letters as tokens; its template accepts no system role."""
    setting = "reader_checkpoint"

    def __init__(self, room, shares):
        self.room, self.shares_tokens, self.read = lambda: room, lambda tokenizer: shares or tokenizer == "mine", []

    def token_ids(self, texts):
        self.read.append(texts.prompts[0])
        if any(m["role"] == "system" for m in texts.columns["prompt"][0] if isinstance(m, dict)):
            raise ValueError("no system")
        assert texts.completions == [""] and len(texts.tokens[0]) == 1
        return [list(texts.prompts[0])]


def test_the_longest_prompt_needs_room_for_its_completion():
    many = records(150)                                            # "rendered 149": 12 letters
    check_reader(Reader(17, True), many, 5)
    for shares, tokenizer in ((True, None), (False, "mine")):
        with pytest.raises(ValueError, match="^f.jsonl, line 101: reader_checkpoint reads 16 tokens, but this prompt "
                                             "has 12 and its completion up to 5: lower max_new_tokens"):
            check_reader(Reader(16, shares), many, 5, tokenizer)
    check_reader(reader := Reader(13, False), many, 5)
    assert len(reader.read) <= LONGEST + 1, "not all records are read"
    with pytest.raises(ValueError, match="reads 12 tokens, but this prompt has 12 and its completion at least 1"):
        check_reader(Reader(12, False), many, 5)


def test_one_record_of_each_sequence_of_roles_is_read():
    many, short = records(100), {"text": "", "tokens": [1], "where": "f.jsonl, line 7"}
    many.insert(50, {"prompt": [{"role": "user", "content": ""}], **short})
    check_reader(Reader(50, True), many, 5)
    many.insert(60, {"prompt": [{"role": role, "content": ""} for role in ("system", "user")], **short})
    with pytest.raises(ValueError, match="^f.jsonl, line 7: no system"):
        check_reader(Reader(50, True), many, 5)
