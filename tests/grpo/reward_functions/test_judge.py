"""The judge as a reward: scores of texts of any length, and the credit of their tokens."""

import math
from types import SimpleNamespace

import pytest
import torch

from core.distributed import Distributed
from core.judge import CHUNK, calculate_judge_scores
from core.performance.judge_reading import MEASURED
from grpo.reward_functions import judge as module
from grpo.reward_functions.judge import Judge, choose_readings, windowed_mean
from tests.tiny import ROOT, TOKENIZER, judge, run_script


def random_ids(*lengths, seed=0):
    generator = torch.Generator().manual_seed(seed)
    return [torch.randint(0, TOKENIZER.base_vocab_size, (length,), generator=generator) for length in lengths]


def written(prompts, completions):
    return SimpleNamespace(prompts=prompts, completions=completions)


def test_the_judge_scores_texts_of_any_length_as_if_each_were_alone():
    scorer, texts = judge(), ["the quick", "a", "the quick", "seven wise owls"]
    scores = Judge(scorer, TOKENIZER, reads_ids=False).scores(written(["so "] * 4, texts))
    for text, found in zip(texts, scores.tolist(), strict=True):
        assert found == pytest.approx(float(scorer(torch.tensor([TOKENIZER.encode("so " + text)])).sigmoid().mean()),
                                      rel=1e-4)
    ids = [torch.tensor(TOKENIZER.encode("so " + text)) for text in texts]
    assert torch.equal(Judge(scorer, TOKENIZER, reads_ids=True).scores(SimpleNamespace(tokens=ids)), scores)


@pytest.mark.parametrize("head", ["realness", "cls"])
def test_texts_of_one_length_are_scored_as_one_batch_to_the_last_bit(head):
    scorer, ids = judge(judge_head=head), random_ids(*[24] * (CHUNK + 5))
    scores = Judge(scorer, TOKENIZER, reads_ids=True).scores(SimpleNamespace(tokens=ids))
    assert torch.equal(scores, calculate_judge_scores(scorer, torch.stack(ids), TOKENIZER.cls_token_id))


def test_a_cls_judge_reads_each_text_after_cls():
    scorer, ids = judge(judge_head="cls"), random_ids(5, 9, 5)
    scores = Judge(scorer, TOKENIZER, reads_ids=True).scores(SimpleNamespace(tokens=ids))
    for text, found in zip(ids, scores, strict=True):
        alone = 1 - scorer(torch.cat((torch.tensor([TOKENIZER.cls_token_id]), text))[None]).sigmoid()
        torch.testing.assert_close(found, alone[0])


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_judge_computes_in_its_own_type_and_scores_in_float32(dtype):
    scorer, ids, seen = judge(), random_ids(*[24] * 5), []
    scorer.blocks[0].up.register_forward_hook(lambda module, args, out: seen.append(out.dtype))
    texts = SimpleNamespace(tokens=ids, place=torch.zeros(5, 1, dtype=torch.long))
    reader, exact = Judge(scorer, TOKENIZER, True, dtype), Judge(judge(), TOKENIZER, True)
    (scores, credit), expected = reader.score_and_credit(texts, 2), exact.scores(texts)
    for found in (scores, reader.scores(texts)):
        assert found.dtype == credit.dtype == torch.float32
        torch.testing.assert_close(found, expected, rtol=0.05, atol=0.02)
        assert torch.equal(found, expected) == (dtype == torch.float32)
    assert set(seen) == {dtype}


@pytest.mark.parametrize("head", ["realness", "cls", "told"])
def test_equal_texts_are_read_once_and_have_equal_scores_to_the_last_bit(head):
    """A text at other places of a batch may get other last bits, and a group of equal texts would seem to differ."""
    scorer, rows = judge(judge_head=head), []
    two = random_ids(24, 24)
    texts = SimpleNamespace(tokens=[two[i % 2] for i in range(CHUNK + 6)], place=torch.arange(5).repeat(CHUNK + 6, 1))
    reader = Judge(scorer, TOKENIZER, True, torch.bfloat16)
    scorer.register_forward_pre_hook(lambda model, args: rows.append(len(args[0])))
    scores = reader.scores(texts)
    assert sum(rows) == 2 and len(scores) == CHUNK + 6
    torch.testing.assert_close(scores[:2], reader.scores(SimpleNamespace(tokens=two)), rtol=0, atol=0)
    assert torch.equal(scores[0::2], scores[:1].expand(CHUNK // 2 + 3)) and scores[0] != scores[1]
    if head == "cls":
        return
    mask, told = torch.ones(CHUNK + 6, 5), torch.arange(CHUNK + 6) % 4 < 2
    rows.clear()
    knows = {"mask": mask, "told": told, "told_window": 1} if head == "told" else {}
    scores, credit = reader.score_and_credit(texts, 2, **knows)
    assert sum(rows) == (4 if head == "told" else 2), "a judge reads a text in another way where it is told"
    for n in range(4, CHUNK + 6):
        assert scores[n] == scores[n % 4] and torch.equal(credit[n], credit[n % 4])
    assert (scores[0] != scores[2]) == (head == "told")


def test_an_empty_text_is_scored():
    scorer = judge()
    pad = scorer(torch.tensor([[TOKENIZER.pad_token_id]])).sigmoid()[0, 0]
    scores = Judge(scorer, TOKENIZER, reads_ids=False).scores(written(["", "a"], ["", "b"]))
    torch.testing.assert_close(scores[0], pad)
    scores = Judge(scorer, TOKENIZER, reads_ids=True).scores(SimpleNamespace(tokens=random_ids(4, 0)))
    torch.testing.assert_close(scores[1], pad)


@pytest.mark.parametrize(("head", "room"), [("realness", 33), ("cls", 32)])
def test_a_text_that_is_too_long_is_a_clear_error(head, room):
    reader = Judge(judge(judge_head=head), TOKENIZER, reads_ids=True)
    assert reader.scores(SimpleNamespace(tokens=random_ids(room))).shape == (1,)
    with pytest.raises(ValueError, match=f"judge_checkpoint reads {room} tokens, but a prompt with its completion has "
                                         f"{room + 1}: lower max_new_tokens"):
        reader.scores(SimpleNamespace(tokens=random_ids(3, room + 1)))


@pytest.mark.parametrize("lengths", [(20,) * 4, (20, 7, 20, 9)])
def test_where_a_judge_is_told_the_sampled_tokens_they_alone_count(lengths):
    scorer, ids = judge(judge_head="told"), random_ids(*lengths)
    generator = torch.Generator().manual_seed(1)
    place = torch.stack([torch.randperm(length, generator=generator)[:5] for length in lengths])
    mask, told = torch.ones(len(lengths), 5), torch.tensor([True, True, False, False])
    mask[1, 3:] = 0.0
    texts, reader = SimpleNamespace(tokens=ids, place=place), Judge(scorer, TOKENIZER, reads_ids=True)
    scores, credit = reader.score_and_credit(texts, 2, 1, mask, told)
    for n, text in enumerate(ids):
        sampled = {int(t) for t, chosen in zip(place[n], mask[n], strict=True) if chosen}
        marked = [x + TOKENIZER.vocab_size * bool(told[n] and t in sampled) for t, x in enumerate(text.tolist())]
        odds = scorer(torch.tensor([marked]))[0].clamp(-6.9, 6.9).tolist()
        counted, window = (sampled, 1) if told[n] else (set(range(len(text))), 2)
        realness = [1 / (1 + math.exp(-odds[t])) for t in counted]
        assert float(scores[n]) == pytest.approx(sum(realness) / len(realness), rel=1e-2)
        for m in range(5):
            if mask[n, m]:
                near = [odds[u] for u in counted if abs(u - int(place[n, m])) <= window]
                assert float(credit[n, m]) == pytest.approx(sum(near) / len(near), rel=2e-2, abs=2e-2)


@pytest.mark.parametrize("lengths", [(20,) * 6, (20, 7, 20, 13, 7, 20)])
def test_credit_of_a_token_is_the_log_odds_near_it(lengths):
    scorer, ids, window = judge(), random_ids(*lengths), 3
    generator = torch.Generator().manual_seed(1)
    place = torch.stack([torch.randint(0, length, (5,), generator=generator) for length in lengths])
    texts, reader = SimpleNamespace(tokens=ids, place=place), Judge(scorer, TOKENIZER, reads_ids=True)
    scores, credit = reader.score_and_credit(texts, window)
    assert credit.shape == (len(lengths), 5)
    for n, text in enumerate(ids):
        odds = scorer(text[None])[0].clamp(-6.9, 6.9)
        torch.testing.assert_close(scores[n], odds.sigmoid().mean(), rtol=1e-4, atol=1e-4)
        for m, t in enumerate(place[n].tolist()):
            near = [float(odds[s]) for s in range(len(text)) if abs(s - t) <= window]
            assert float(credit[n, m]) == pytest.approx(sum(near) / len(near), rel=1e-2, abs=1e-2)
    everywhere = reader.score_and_credit(texts, max(lengths))[1]
    torch.testing.assert_close(everywhere, everywhere[:, :1].expand_as(everywhere))


def test_the_place_of_padding_may_lie_behind_a_short_text():
    texts = SimpleNamespace(tokens=random_ids(4, 9), place=torch.tensor([[1, 3, 8], [1, 3, 8]]))
    credit = Judge(judge(), TOKENIZER, reads_ids=True).score_and_credit(texts, 0)[1]
    assert credit.shape == (2, 3) and credit.isfinite().all() and credit[0, 1] != credit[0, 0]


@pytest.mark.parametrize("width", [0, 1, 3, 20])
def test_a_windowed_mean_is_that_of_a_loop(width):
    x = torch.randn(3, 11)
    for n in range(3):
        for t in range(11):
            near = x[n, [s for s in range(11) if abs(s - t) <= width]]
            torch.testing.assert_close(windowed_mean(x, width)[n, t], near.mean())


def test_a_reading_that_is_chosen_by_name_scores_and_credits_like_the_plain_one():
    texts = SimpleNamespace(tokens=random_ids(20, 7, 20, 13), place=torch.zeros(4, 2, dtype=torch.long))
    plain = Judge(judge(scale=1.0), TOKENIZER, True)
    for dtype in (torch.float32, torch.bfloat16):  # of the run; a reading has its own
        fast = Judge(judge(scale=1.0), TOKENIZER, True, dtype)
        fast.read_in("packed")
        assert fast.reading == "packed"
        for found, expected in zip(fast.score_and_credit(texts, 2), plain.score_and_credit(texts, 2), strict=True):
            torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-5)
        torch.testing.assert_close(fast.scores(texts), plain.scores(texts))


def test_a_reading_that_is_not_possible_here_is_a_clear_error():
    with pytest.raises(ValueError, match="judge_reading='packed' is not possible: it is for judges of this project on "
                                         "a CPU, whole in each process; use judge_reading='plain'"):
        Judge(judge().to("meta"), TOKENIZER, True).read_in("packed")


def test_all_judges_take_the_choice_of_the_first(monkeypatch):
    seen = []

    def choose(model, scores, names):
        seen.append((tuple(names), scores(model).shape))
        return ("packed", "in packed")
    monkeypatch.setattr(module, "choose_reading", choose)
    judges = {"judge": Judge(judge(), TOKENIZER, True), "gold_judge": Judge(judge(1), TOKENIZER, True), "third": None}
    sample = lambda: SimpleNamespace(tokens=random_ids(9, 9))
    lines = choose_readings(judges, dict.fromkeys(judges, "auto"), sample, 50, Distributed("cpu"))
    assert lines == ["judge is read in packed", "gold judge is read in packed"]
    assert judges["judge"].reading == judges["gold_judge"].reading == "packed"
    assert seen == [(MEASURED, (2,)), (("packed",), (2,))]
    assert choose_readings(judges, {"judge": "plain", "gold_judge": "packed"}, None, 7, Distributed("cpu")) == []
    assert judges["judge"].reading == "plain" and len(seen) == 2, "what is named is not measured"
    lines = choose_readings(judges, dict.fromkeys(judges, "auto"), None, 7, Distributed("cpu"))
    assert [line.split(":")[0] for line in lines] == ["judge is read plainly", "gold judge is read plainly"]
    assert len(seen) == 2, "too few texts"


@pytest.mark.slow
def test_all_ranks_take_the_choice_of_the_first_rank(tmp_path):
    script = tmp_path / "ranks.py"
    script.write_text(f"""
import sys; sys.path.insert(0, {ROOT!r})
import torch
from types import SimpleNamespace
from core.distributed import Distributed
from grpo.reward_functions import judge as module
from tests.tiny import TOKENIZER, judge
dist = Distributed("cpu")
module.choose_reading = lambda *args: ("packed", "in packed") if dist.is_main else ("plain", "plainly")
reader = module.Judge(judge(), TOKENIZER, True)
sample = lambda: SimpleNamespace(tokens=[torch.zeros(5, dtype=torch.long)])
lines = module.choose_readings({{"judge": reader}}, {{"judge": "auto"}}, sample, 50, dist)
open({str(tmp_path)!r} + f"/{{dist.rank}}", "w").write(f"{{reader.reading}} {{lines}}")
dist.close()
""")
    done = run_script(script, ranks=2)
    assert done.returncode == 0, done.stderr
    assert (tmp_path / "0").read_text() == "packed ['judge is read in packed']"
    assert (tmp_path / "1").read_text() == "packed []"
