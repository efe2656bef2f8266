"""Records that a reward cannot score are found before the first step, in few calls."""

import pytest

from core.files.records import RAW
from grpo.reward_functions import registry
from grpo.reward_functions.record_checks import LONGEST, check_reader, check_records
from grpo.reward_functions.registry import Reward


def records(count, **fields):
    return [{"prompt": f"q{i}", "text": f"rendered {i}", "tokens": [1], "where": f"f.jsonl, line {i + 1}",
             **{key: values[i] for key, values in fields.items()}} for i in range(count)]


def register(monkeypatch, fn, **settings):
    monkeypatch.setitem(registry.REWARDS, "mine", Reward(
        fn, 0, 1, **{"slow": False, "whole_group": False, "check": None} | settings))


@pytest.mark.parametrize("bad", [0, 57, 99])
def test_one_call_has_all_records_and_the_first_that_fails_is_named(monkeypatch, bad):
    register(monkeypatch, lambda completions: None)
    seen = []

    def call(name, texts):
        seen.append(texts)
        if any(level >= bad for level in texts.columns["level"]):
            raise ValueError("no")

    check_records("mine", records(100, level=[-1] * 100), call)
    texts, = seen
    assert texts.prompts[1] == "rendered 1" and texts.completions == [""] * 100 and texts.completion_ids == [[]] * 100
    with pytest.raises(ValueError, match=f"^f.jsonl, line {bad + 1}: no$"):
        check_records("mine", records(100, level=list(range(100))), call)


def test_a_check_of_its_own_sees_every_record_without_its_prompt(monkeypatch):
    seen = []

    def check(answer, **fields):
        seen.append({"answer": answer} | fields)

    register(monkeypatch, None, check=check)
    check_records("mine", records(3, answer=["1", "2", "3"], record=["a", "b", "c"], **{RAW: [1, 2, 3]}), None)
    assert seen == [{"answer": answer, "record": x} for answer, x in zip("123", "abc", strict=True)]
    with pytest.raises(ValueError, match="^f.jsonl, line 2: reward mine needs the field 'answer' in every record$"):
        check_records("mine", records(3, answer=["1", None, "3"]), None)


def test_a_slow_reward_is_called_with_one_record_of_each_kind_and_one_that_reads_ids_not_at_all(monkeypatch):
    called, data = [], records(4, answer=["1", None, "3", None])
    register(monkeypatch, lambda completions: None, slow=True)
    check_records("mine", data, lambda name, texts: called.append(texts.columns["answer"]))
    assert called == [["3", None]]
    for unavailable in (lambda *, texts: None, lambda *, judge_model: None, lambda *, reward_scorer: None):
        register(monkeypatch, unavailable)
        check_records("mine", data, lambda name, texts: called.append(None))
    assert len(called) == 1


class Reader:
    """Reads letters as tokens."""
    setting = "reader_checkpoint"

    def __init__(self, room, shares):
        self.room, self.shares_tokens, self.read = lambda: room, lambda tokenizer: shares or tokenizer == "mine", []

    def token_ids(self, texts):
        self.read.append(texts.prompts[0])
        assert texts.completions == [""] and len(texts.tokens[0]) == 1
        return [list(texts.prompts[0])]


@pytest.mark.parametrize(("room", "shares", "tokenizer", "needs"), [
    (17, True, None, None), (16, True, None, 5), (16, False, "mine", 5), (13, False, None, None), (12, False, None, 1)])
def test_the_longest_prompt_needs_room_for_its_completion(room, shares, tokenizer, needs):
    many, reader = records(150), Reader(room, shares)              # "rendered 149": 12 letters
    if needs is None:
        check_reader(reader, many, 5, tokenizer)
        assert len(reader.read) == LONGEST, "not all records are read"
        return
    with pytest.raises(ValueError, match=f"^f.jsonl, line 101: reader_checkpoint reads {room} tokens, but this prompt "
                                         f"has 12 and its completion needs {needs}: lower max_new_tokens"):
        check_reader(reader, many, 5, tokenizer)
