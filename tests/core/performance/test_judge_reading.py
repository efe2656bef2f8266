"""Ways to read a judge: equal scores, and a choice that refuses what is not equal."""

import pytest
import torch

from core.huggingface.model import HuggingFaceModel
from core.judge import CHUNK, calculate_judge_scores, calculate_realness
from core.models import load_model
from core.performance import judge_reading as module
from core.performance.judge_reading import PLAIN, READINGS, choose_reading, compare, obstacle, prepared
from tests.tiny import ROOT, TOKENIZER, judge

SHIPPED = f"{ROOT}/data/char_diffusion/pretrained/judge.safetensors"
EAGER = [name for name, reading in READINGS.items() if reading and not reading.compiled]
FAST = EAGER + [pytest.param(name, marks=pytest.mark.slow) for name, reading in READINGS.items()
                if reading and reading.compiled]


def texts(rows, length=32, seed=0):
    return torch.randint(0, 96, (rows, length), generator=torch.Generator().manual_seed(seed))


def scored(text):
    return lambda reader: calculate_judge_scores(reader, text, TOKENIZER.cls_token_id)


def close(name):
    return 2e-3 if READINGS[name].dtype == torch.bfloat16 else 1e-5


def or_skip(judge, name):
    if problem := obstacle(judge, name):
        pytest.skip(problem)


@pytest.mark.slow
@pytest.mark.parametrize("name", FAST)
def test_the_shipped_judge_gives_the_same_scores_and_the_same_order(name):
    scorer, text = load_model(SHIPPED)[0].eval().requires_grad_(False), texts(24, 128)
    or_skip(scorer, name)
    sentence = "the value of the key is returned, or None if there is none. "
    text[::2] = torch.tensor(TOKENIZER.encode(sentence * 3)[:128])
    broken = torch.rand(12, 128, generator=torch.Generator().manual_seed(1)) < torch.linspace(0, 0.9, 12)[:, None]
    text[::2] = text[1::2].where(broken, text[::2])
    difference, correlation = compare(scored(text)(prepared(scorer, name)), scored(text)(scorer))
    assert difference < close(name) and correlation >= 0.999


@pytest.mark.parametrize("head", ["realness", "cls"])
@pytest.mark.parametrize("name", FAST)
def test_a_judge_of_either_head_reads_texts_of_any_length_and_number_alike(name, head):
    scorer = judge(judge_head=head, scale=1.0)
    or_skip(scorer, name)
    fast = prepared(scorer, name)
    for rows, length in ((3, 9), (CHUNK + 2, 32)):
        text = texts(rows, length)
        torch.testing.assert_close(scored(text)(fast), scored(text)(scorer), atol=close(name), rtol=0)
    torch.testing.assert_close(scored(text)(fast)[-1:], scored(text[-1:])(fast), atol=close(name), rtol=0)


@pytest.mark.parametrize("name", EAGER)
def test_the_plain_judge_is_left_as_it_was(name):
    scorer, text = judge(), texts(4)
    or_skip(scorer, name)
    before = calculate_realness(scorer, text)
    prepared(scorer, name)
    assert torch.equal(calculate_realness(scorer, text), before) and prepared(scorer, PLAIN) is scorer


def slow_clock(monkeypatch, speeds):
    """Each reading takes as many seconds as the table says."""
    monkeypatch.setattr(module, "prepared", lambda scorer, name: (name, scorer))
    monkeypatch.setattr(module, "obstacle", lambda scorer, name: None)
    monkeypatch.setattr(module, "seconds", lambda scores, reader: speeds[reader[0] if type(reader) is tuple else PLAIN])


SPEEDS = {PLAIN: 1.0, "packed": 0.8, "packed_bfloat16": 0.6, "compiled": 0.5, "compiled_bfloat16": 0.3}


@pytest.mark.parametrize(("changed", "expected"), [
    ({}, "packed_bfloat16"), ({"packed": 0.55}, "packed"), ({"packed": 0.98, "packed_bfloat16": 2.0}, PLAIN)])
def test_the_fastest_is_chosen_if_it_is_worth_a_change(changed, expected, monkeypatch):
    slow_clock(monkeypatch, SPEEDS | changed)
    name, line = choose_reading(judge(), lambda reader: torch.arange(9.0))
    assert name == expected and line.startswith("plainly" if name == PLAIN else f"in {name}, ")


@pytest.mark.parametrize("broken", ["difference", "order", "not a number"])
def test_a_reading_with_other_scores_is_refused_however_fast(broken, monkeypatch):
    slow_clock(monkeypatch, SPEEDS | {"packed_bfloat16": 0.01})
    right = torch.linspace(0.5, 0.9, 40)
    wrong = {"difference": right + 0.0021, "order": right.flip(0), "not a number": right * float("nan")}[broken]
    scores = lambda reader: wrong if reader[0] == "packed_bfloat16" else right
    monkeypatch.setattr(module, "seconds", lambda scores, reader: SPEEDS[reader[0]] if type(reader) is tuple else 1.0)
    name, line = choose_reading((PLAIN, None), scores)
    assert name == "packed" and "refused: packed_bfloat16 (scores differ" in line


def test_equal_scores_correlate_perfectly_and_reversed_ones_do_not():
    x = torch.rand(20, generator=torch.Generator().manual_seed(0))
    assert compare(x, x)[0] == 0 and compare(x, x)[1] == pytest.approx(1)
    assert compare(-x, x)[1] == pytest.approx(-1) and compare(torch.ones(5), torch.zeros(5))[0] == 1


def test_the_order_of_texts_with_nearly_equal_scores_tells_nothing():
    x = 0.5 + 1e-4 * torch.rand(20, generator=torch.Generator().manual_seed(0))
    assert compare(x.flip(0), x)[1] == compare(x[:2].flip(0), x[:2])[1] == 1.0


def test_a_judge_of_another_kind_or_device_can_only_be_read_as_it_is():
    for other in (judge().to("meta"), HuggingFaceModel.__new__(HuggingFaceModel)):
        torch.nn.Module.__init__(other) if isinstance(other, HuggingFaceModel) else None
        assert all(obstacle(other, name) for name in EAGER) and obstacle(other, PLAIN) is None


def test_without_a_compiler_or_instructions_the_reason_is_told(monkeypatch):
    monkeypatch.setenv("CXX", "no-such-compiler")
    assert obstacle(judge(), "compiled") == "there is no C++ compiler"
    monkeypatch.setattr(torch.ops.mkldnn, "_is_mkldnn_bf16_supported", lambda: False)
    assert obstacle(judge(), "packed_bfloat16") == "this CPU has no instructions for bfloat16"
    assert obstacle(judge(), "packed") is None
