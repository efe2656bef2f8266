"""The rewards of a run: which are asked, how they are added, what is skipped, and what is refused at the start."""

import contextlib
import inspect
import math
import os
import traceback
from itertools import combinations, product
from types import SimpleNamespace

import numpy as np
import pytest
import torch

from core.judge import calculate_judge_scores
from grpo.reward_functions.judge import Judge
from grpo.reward_functions.trl import TrainerState
from grpo.rewards import PRESETS, REWARDS, Rewards, Scored, normalised, pass_k_weight, reward
from tests.tiny import ROOT, TOKENIZER, Undecoded, config, fork_workers, judge, run_here, run_script

BUILT_IN = {"math_format": (-3, 3), "math_answer": (-4.5, 5), "math_number": (-2.5, 3.5), "countdown": (0, 1),
            "math_working": (0, 1), "equations": (0, 1), "judge": (0, 1),
            "code_correctness": (0, 2), "code_execution": (0, 1), "length_penalty": (-1, 1), "exact_match": (0, 1),
            "contains": (0, 1), "regex": (0, 1), "json_valid": (0, 1), "xml_valid": (0, 1), "repetition": (-1, 0),
            "diversity_bonus": (0, 1), "reward_model": (-math.inf, math.inf)}
OF_TEXT = [name for name in BUILT_IN if name not in ("judge", "equations", "reward_model")]
COLUMNS = {"math_answer": ["answer"], "math_number": ["answer"], "countdown": ["numbers", "target"],
           "code_execution": ["tests"], "exact_match": ["answer"], "contains": ["answer"], "regex": ["pattern"],
           "equations": ["answer"]}
RECORD = {"answer": "42", "numbers": [1, 2], "target": 3, "tests": "assert f() == 1", "pattern": "a+"}


def run_config(*names, **settings):
    return config(**{"reward_functions": names, "task_type": "general", "max_new_tokens": 5} | settings)


def written(completions, tokens=None, place=None, **columns):
    return SimpleNamespace(prompts=["p"] * len(completions), completions=list(completions), columns=columns,
                           tokens=tokens, place=place)


def with_ids(texts):
    """Texts with completion_ids, which plain functions get."""
    texts.completion_ids = [[ord(letter) for letter in text] for text in texts.completions]
    return texts


def rolled_out(texts, N, group_size):
    return SimpleNamespace(texts=texts, target=torch.zeros(N, 1, dtype=torch.long), mask=None, group_size=group_size)


def records(count=3, **fields):
    """Records as PromptConsumer has them; a list gives each record its own value, and a missing one is left out."""
    out = [{"prompt": f"q{i}", "text": f"q{i}", "tokens": [1], "where": f"f.jsonl, line {i + 1}"} for i in range(count)]
    for key, values in fields.items():
        for record, value in zip(out, values, strict=True):
            if value is not None:
                record[key] = value
    return out


# the table

def test_every_built_in_reward_is_registered_with_its_range():
    assert set(REWARDS) == set(BUILT_IN)
    for name, limits in BUILT_IN.items():
        assert (REWARDS[name].low, REWARDS[name].high) == limits, name
        assert REWARDS[name].slow == (name == "code_execution")
        assert REWARDS[name].whole_group == (name == "diversity_bonus")


def test_every_built_in_reward_introduces_itself_in_one_line():
    for name in BUILT_IN:
        assert len(inspect.getdoc(REWARDS[name].fn).split("\n")[0].rstrip()) > 40, name


@pytest.mark.parametrize("name", OF_TEXT)
def test_an_empty_completion_has_a_reward_in_range(name):
    texts = written([""], **{field: [value] for field, value in RECORD.items()})
    value = float(Rewards(run_config(name)).score(texts, 1)[0][name])
    assert REWARDS[name].low <= value <= REWARDS[name].high


@pytest.mark.parametrize(("name", "field"), [(name, field) for name, fields in COLUMNS.items() for field in fields])
def test_a_missing_field_is_an_error_that_names_the_reward_and_the_field(name, field):
    others = {key: [value] for key, value in RECORD.items() if key != field}
    message = f"reward {name} needs the field '{field}' in every record"
    for columns in (others, others | {field: [None]}):
        with pytest.raises(ValueError, match=message):
            Rewards(run_config(name)).score(written(["x"], **columns), 1)


@pytest.mark.slow
def test_the_list_of_rewards_and_presets_works_from_another_folder(tmp_path):
    (tmp_path / "mine.py").write_text("from grpo.rewards import REWARDS, reward\n\nassert 'contains' in REWARDS\n\n"
                                      "@reward(0, 7)\ndef my_own(completions):\n    '''Mine.'''\n")
    done = run_script(os.path.join(ROOT, "grpo", "rewards.py"), "--reward_file=mine.py", cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    for name in (*REWARDS, *PRESETS):
        assert name in done.stdout
    assert {name for names in PRESETS.values() for name in names} <= set(REWARDS)
    assert "[-4.5, 5]" in done.stdout
    assert any(line.split() == ["my_own", "[0,", "7]", "Mine."] for line in done.stdout.split("\n"))
    done = run_here("grpo/rewards.py", "--reward_file=none.py")
    assert done.returncode == 1 and done.stderr == "error: reward_file=none.py does not exist\n"


# sums

def test_rewards_are_weighted_added_and_may_skip(tmp_path):
    mine = tmp_path / "mine.py"
    mine.write_text("import torch\n\nfrom grpo.rewards import reward\n\nHALF = 0.5\n\n"
                    "@reward(0, 1)\ndef half_or_none(prompts, completions, *, length_min=0, **columns):\n"
                    "    return [None if i % 2 else HALF * length_min for i in range(len(completions))]\n"
                    "@reward(0, 1)\ndef as_tensor(completions):\n    return torch.tensor([0.25] * len(completions))\n"
                    "@reward(0, 1)\ndef wrong_count(prompts, completions, **columns):\n    return [1.0]\n"
                    "@reward(0, 1)\ndef not_a_number(prompts, completions, **columns):\n"
                    "    return torch.full((len(completions),), float('nan'))\n")
    own = {"reward_file": str(mine), "length_min": 1, "length_max": 6}
    texts = written(["7", "7", "8", "8"], answer=["7"] * 4)
    rewards = Rewards(run_config("half_or_none", "contains", "as_tensor", reward_weights=(2.0, 1.0, 4.0), **own))
    values, late, _ = rewards.score(texts, 4)
    assert values["half_or_none"].nan_to_num(-1).tolist() == [0.5, -1, 0.5, -1]
    assert values["contains"].tolist() == [1, 1, 0, 0] and values["as_tensor"].tolist() == [0.25] * 4
    assert not late.any() and late.shape == (4,)

    scored = rewards(rolled_out(texts, 4, 4))
    assert scored.reward.tolist() == [[3.0, 2.0, 2.0, 1.0]] and scored.credit.tolist() == [[[3.0], [2.0], [2.0], [1.0]]]
    assert scored.weight.tolist() == [[1.0] * 4] and set(scored.values) == set(rewards.names)
    scored = rewards(rolled_out(texts, 4, 2))
    assert scored.reward.tolist() == [[3.0, 2.0], [2.0, 1.0]], "a row for each problem"
    alone = Rewards(run_config("half_or_none", **own))(rolled_out(texts, 4, 4))
    assert alone.reward.isnan().tolist() == [[False, True, False, True]], "skipped by every reward"
    with pytest.raises(ValueError, match="reward wrong_count returned 1 values for 4 completions"):
        Rewards(run_config("wrong_count", **own))(rolled_out(texts, 4, 4))
    not_a_number = Rewards(run_config("not_a_number", **own))
    assert not_a_number(rolled_out(texts, 4, 4)).reward.isinf().all(), "NaN would mean that they were skipped"
    with pytest.raises(ValueError, match="reward not_a_number returned a number that is not finite; return None"):
        not_a_number.check(records())


def test_right_is_the_highest_value_of_the_success_reward():
    reward(0, 1)(graded)
    rewards = Rewards(run_config("graded", "length_penalty"))
    assert rewards.success == "graded"
    values, _, _ = rewards.score(written(["1", "0.5", "none", "0"]), 4)
    assert rewards.right(values).nan_to_num(-1).tolist() == [1, 0, -1, 0]


def test_one_reward_of_a_run_can_be_asked_alone():
    reader, texts = Judge(judge(), TOKENIZER, False), written(["7", "8"], answer=["7", "7"])
    rewards = Rewards(run_config("judge", "contains", "length_penalty"), reader)
    assert list(rewards.score(texts, 1, ["contains"])[0]) == ["contains"]
    assert rewards.score(texts, 1, ["contains"])[0]["contains"].tolist() == [1, 0]
    assert set(rewards.score(texts, 1)[0]) == {"judge", "contains", "length_penalty"}


def graded(completions):
    return [None if text == "none" else float(text) for text in completions]


# plain functions, as TRL users write them

PLAIN = """
def lengths_of_ids(prompts, completions, completion_ids, level, **kwargs):
    kwargs["log_metric"]("mean_length", sum(map(len, completion_ids)) / len(completion_ids))
    kwargs["log_extra"]("first", [ids[0] for ids in completion_ids])
    step = kwargs["trainer_state"].global_step
    return [len(ids) + step if x is None or x > 0 else None for ids, x in zip(completion_ids, level, strict=True)]

async def loud(completions, log_metric):
    log_metric("loud", sum(text.isupper() for text in completions))
    return [float(text.isupper()) for text in completions]

def helper(x):
    return x
"""


@pytest.fixture
def plain_file(tmp_path):
    path = tmp_path / "plain.py"
    path.write_text(PLAIN)
    return str(path)


def test_a_plain_function_of_the_reward_file_is_a_reward(plain_file):
    c = run_config("lengths_of_ids", "loud", "contains", reward_weights=(1.0, 10.0, 100.0), reward_file=plain_file,
                   max_iters=7, log_interval=2)
    rewards = Rewards(c)
    assert rewards.state == TrainerState(0, 7, 2, c.eval_interval, c.save_interval)
    texts = with_ids(written(["a", "BB", "ccc", "D"], answer=["c"] * 4, level=[1, 0, 1, None]))
    scored = rewards(rolled_out(texts, 4, 2))
    assert scored.reward.tolist() == [[1, 10], [103, 11]]
    assert scored.values["lengths_of_ids"].nan_to_num(-1).tolist() == [1, -1, 3, 1]
    assert scored.metrics == {"mean_length": (1.75, 1), "loud": (2.0, 1)}
    rewards.state.global_step = 5
    values, _, log = rewards.score(texts, 2)
    assert values["lengths_of_ids"].nan_to_num(-1).tolist() == [6, -1, 8, 6]
    assert log.columns == {"first": [97, 66, 99, 68]}
    assert rewards.success is None and "helper" not in REWARDS


def test_rewards_that_cannot_log_have_no_metrics(plain_file):
    texts = with_ids(written(["a", "b"], answer=["a", "a"], level=[1, 1]))
    assert Rewards(run_config("contains"))(rolled_out(texts, 2, 2)).metrics is None

    @reward(0, 1)
    def quiet(completions, *, log_metric):
        return [0.0] * len(completions)

    assert Rewards(run_config("quiet"))(rolled_out(texts, 2, 2)).metrics == {}, "it might have, on another rank"


def test_a_plain_function_is_not_called_at_the_start_but_its_fields_are_looked_for(tmp_path):
    mine = tmp_path / "mine.py"
    mine.write_text("def picky(completions, answer, level, **kwargs):\n"
                    "    return [float(text[0] == x[0]) if y is None else 0.5 for text, x, y in "
                    "zip(completions, answer, level)]\n")
    rewards = Rewards(run_config("picky", reward_file=str(mine)))
    with pytest.raises(ValueError, match="f.jsonl, line 1: reward picky needs the field 'level' in every record"):
        rewards.check(records(answer=["a", "b", "c"]))
    rewards.check(records(answer=["a", "b", "c"], level=[None, None, 3]))
    values, _, _ = rewards.score(with_ids(written(["a", "x"], answer=["a", "a"])), 2)
    assert values["picky"].tolist() == [1, 0], "completions of records without the field: it is None"


def test_a_plain_function_may_not_have_the_name_of_a_built_in_reward(tmp_path):
    mine = tmp_path / "mine.py"
    mine.write_text("def contains(completions, **kwargs):\n    return [1.0] * len(completions)\n")
    with pytest.raises(ValueError, match="'contains' is a function of reward_file=.*give the function another name"):
        Rewards(run_config("contains", reward_file=str(mine)))


def test_the_list_of_rewards_has_plain_functions_that_read_completions(plain_file):
    done = run_here("grpo/rewards.py", f"--reward_file={plain_file}")
    assert done.returncode == 0, done.stderr
    names = [line.split()[0] for line in done.stdout.split("\n") if line]
    assert {"lengths_of_ids", "loud", "exact_match"} <= set(names) and "helper" not in names


def test_a_reward_of_ours_may_be_async_too():
    @reward(0, 1)
    async def slowly(completions, *, group_size):
        return [1 / group_size for _ in completions]

    texts = written(["a", "b"])
    assert Rewards(run_config("slowly")).score(texts, 2)[0]["slowly"].tolist() == [0.5, 0.5]
    Rewards(run_config("slowly")).check(records())


# normalisation

def normalised_by_a_loop(groups):
    """The definition, group by group, without the completions that were skipped."""
    out = []
    for group in groups:
        seen = [x for x in group if not math.isnan(x)]
        mean = sum(seen) / len(seen) if seen else 0.0
        std = math.sqrt(sum((x - mean) ** 2 for x in seen) / (len(seen) - 1)) if len(seen) > 1 else 0.0
        out.append([(x - mean) / (std + 1e-4) for x in group])
    return out


def test_each_reward_is_normalised_within_its_group_before_they_are_added():
    rng = np.random.default_rng(0)
    tables = {"small": rng.normal(0, 0.01, (4, 6)), "large": rng.normal(50, 20, (4, 6))}
    tables["small"][1, 2:] = math.nan
    tables["large"][1, 4] = tables["small"][2, 1:] = math.nan
    tables["large"][3] = 7.0
    for name, table in tables.items():
        def look_up(completions, table=table):
            return [None if math.isnan(x) else x for x in table.flatten().tolist()]
        look_up.__name__ = look_up.__qualname__ = name
        reward(look_up)
    c = run_config("small", "large", reward_weights=(2.0, 1.0), reward_normalisation="group")
    rewards = Rewards(c)
    rewards.prepared = lambda name, texts, G: (name, {"completions": texts.completions}, {}, 24)
    scored = rewards(rolled_out(written([""] * 24), 24, 6))
    parts = {name: normalised_by_a_loop(table.astype(np.float32).tolist()) for name, table in tables.items()}
    for i, j in product(range(4), range(6)):
        both = [w * parts[n][i][j] for n, w in (("small", 2.0), ("large", 1.0)) if not math.isnan(tables[n][i][j])]
        raw = [w * tables[n][i][j] for n, w in (("small", 2.0), ("large", 1.0)) if not math.isnan(tables[n][i][j])]
        if both:
            assert float(scored.credit[i, j, 0]) == pytest.approx(sum(both), abs=2e-5), (i, j)
            assert float(scored.reward[i, j]) == pytest.approx(sum(raw), rel=1e-5), "the metrics show raw rewards"
    assert scored.reward.isnan().equal(scored.credit[..., 0].isnan()) and scored.reward[1, 4].isnan()
    assert scored.compared.nan_to_num(0).equal(scored.credit[..., 0].nan_to_num(0))
    assert scored.compared[3].std() > 0, "the other reward still tells them apart"


def test_without_normalisation_the_credit_is_the_reward_itself():
    texts = written(["7", "8", "77", "8"], answer=["7"] * 4)
    scored = Rewards(run_config("contains"))(rolled_out(texts, 4, 2))
    assert scored.compared is scored.reward and scored.credit[..., 0].equal(scored.reward)


def test_rewards_that_cancel_when_normalised_teach_nothing_and_others_do():
    ups = torch.tensor([0.1, 0.3, 0.2, 0.9])
    values = {"up": ups, "down": (1 - ups) * 7, "flat": torch.full((4,), 0.1)}
    cancelling = {name: values[name] for name in ("up", "down")}
    rewards = SimpleNamespace(names=("up", "down"), weights=(1.0, 1.0))
    total = Rewards.total(rewards, normalised(cancelling, 4))
    assert total.abs().max() < 1e-2 and normalised(values, 4)["flat"].abs().max() < 1e-6
    assert normalised(values, 4)["up"].std() == pytest.approx(1.0, abs=1e-3)

    @reward
    def up(completions):
        return ups.tolist()

    @reward
    def down(completions):
        return (1 - ups).tolist()

    c = run_config("up", "down", reward_weights=(1.0, 3.0), reward_normalisation="group")
    scored = Rewards(c)(rolled_out(written([""] * 4), 4, 4))
    assert scored.reward.std() > 0 and scored.compared.std() > 0
    c = run_config("up", "down", reward_weights=(1.0, 1.0), reward_normalisation="group")
    scored = Rewards(c)(rolled_out(written([""] * 4), 4, 4))
    assert scored.compared.unique().numel() == 1, "equal to the last bit: the group can be dropped"


# the judge

def test_the_judge_alone_reads_token_ids_and_no_text_is_decoded():
    ids, scorer = torch.randint(0, 96, (6, 20)), judge()
    scored = Rewards(run_config("judge"), Judge(scorer, TOKENIZER, True))(rolled_out(Undecoded(list(ids)), 6, 3))
    expected = calculate_judge_scores(scorer, ids, TOKENIZER.cls_token_id)
    assert torch.equal(scored.reward, expected.view(2, 3)) and torch.equal(scored.values["judge"], expected)


def test_the_judge_is_weighted_and_added_like_the_others():
    texts = written(["7", "the fox", "8", "7 owls"], answer=["7"] * 4)
    reader = Judge(judge(), TOKENIZER, False)
    scored = Rewards(run_config("contains", "judge", reward_weights=(1.0, 2.0)), reader)(rolled_out(texts, 4, 4))
    expected = torch.tensor([1.0, 0, 0, 1]) + 2 * reader.scores(texts)
    torch.testing.assert_close(scored.reward[0], expected)


def test_with_a_credit_window_the_judge_gives_credit_to_tokens():
    ids, place = list(torch.randint(0, 96, (6, 20))), torch.randint(0, 20, (6, 4))
    texts, reader = written([""] * 6, ids, place), Judge(judge(), TOKENIZER, True)
    scored = Rewards(run_config("judge", credit_window=2), reader)(rolled_out(texts, 6, 3))
    score, credit = reader.score_and_credit(texts, 2)
    assert torch.equal(scored.reward, score.view(2, 3)) and torch.equal(scored.values["judge"], score)
    for i, j, m in product(range(2), range(3), range(4)):
        assert scored.credit[i, j, m] == credit[3 * i + j, m]
    assert scored.weight.tolist() == [[1.0] * 3] * 2


# pass@k

@pytest.mark.parametrize("k", [1, 2, 4])
def test_a_weight_is_k_times_the_share_of_sets_of_others_that_are_all_wrong(k):
    groups = [[1, 0, 0, 0, 0, 0], [1, 1, 0, 0, 0, 0], [1, 1, 1, 1, 1, 0], [1, 1, 1, 1, 1, 1], [0] * 6,
              [1, None, 0, 0, 0, 0], [None, 1, 0, None, 0, 0], [None, 0, 0, None, 0, 0]]
    right = torch.tensor([[math.nan if x is None else float(x) for x in group] for group in groups])
    found = pass_k_weight(right, k)
    assert found.shape == right.shape
    for i, group in enumerate(groups):
        for j in range(6):
            others = [x for x in (*group[:j], *group[j + 1 :]) if x is not None]
            sets = [not any(chosen) for chosen in combinations(others, k - 1)]
            assert float(found[i, j]) == pytest.approx(k * np.mean(sets), abs=1e-6), (group, j)


def test_with_too_few_scored_others_the_weight_is_one():
    nan = math.nan
    found = pass_k_weight(torch.tensor([[0.0, nan, nan, nan], [0.0, 0.0, nan, nan], [nan] * 4]), 3)
    assert found.tolist() == [[1.0] * 4, [1.0, 1.0, 3.0, 3.0], [1.0] * 4], "the skipped ones have two scored others"


@pytest.mark.parametrize(("G", "k", "p", "known"), [
    (8, 2, 0.9, 0.2), (8, 4, 0.6, 0.256), (8, 1, 0.3, 1.0), (5, 5, 0.2, None), (6, 3, 0.5, None), (2, 2, 0.7, None)])
def test_the_expected_update_is_the_gradient_of_pass_at_k(G, k, p, known):
    """All 2^G outcomes of a group of G completions, each right with probability p. The gradient of the log-probability
    of an outcome r by p is (r - p) / (p (1 - p)), and pass@k is 1 - (1 - p)^k."""
    outcomes = torch.tensor(list(product((0.0, 1.0), repeat=G)))                     # (2^G, G)
    r = outcomes.double()
    chance = p ** r.sum(1) * (1 - p) ** (1 - r).sum(1)                               # (2^G,)
    others = (r.sum(1, keepdim=True) - r) / (G - 1)
    update = (pass_k_weight(outcomes, k).double() * (r - others) * (r - p) / (p * (1 - p))).sum(1) / G
    gradient = k * (1 - p) ** (k - 1)
    assert float((chance * update).sum()) == pytest.approx(gradient, abs=1e-6)
    assert known is None or gradient == pytest.approx(known)


def test_hard_problems_count_more_when_training_for_pass_at_k():
    texts = written(["7", "8", "8", "8", "7", "7", "7", "8"], answer=["7"] * 8)
    c = run_config("contains", train_pass_k=2, advantage="leave_one_out")
    scored = Rewards(c)(rolled_out(texts, 8, 4))
    assert scored.reward.tolist() == [[1, 0, 0, 0], [1, 1, 1, 0]] and scored.credit[..., 0].equal(scored.reward)
    assert scored.weight[0].tolist() == pytest.approx([2, 4 / 3, 4 / 3, 4 / 3])
    assert scored.weight[1].tolist() == pytest.approx([2 / 3, 2 / 3, 2 / 3, 0])


def test_a_skipped_completion_counts_neither_right_nor_wrong_for_pass_at_k():
    reward(0, 1)(graded)
    c = run_config("graded", "length_penalty", train_pass_k=2, advantage="leave_one_out")
    scored = Rewards(c)(rolled_out(written(["1", "none", "0", "none"]), 4, 4))
    assert not scored.reward.isnan().any(), "another reward scored it"
    assert scored.weight.tolist() == [[2, 1, 0, 1]]


# Scored

def test_a_reward_alone_is_a_whole_result():
    scored = Scored(torch.rand(2, 3))
    assert scored.credit.equal(scored.reward[..., None]) and scored.weight.equal(torch.ones(2, 3))
    assert scored.values == {}


def test_selected_and_joined_results_keep_each_problem_with_its_own():
    a = Scored(torch.rand(3, 2), torch.rand(3, 2, 4), {"judge": torch.rand(6)}, torch.rand(3, 2))
    b = Scored(torch.rand(1, 2), torch.rand(1, 2, 6), weight=torch.rand(1, 2), compared=torch.rand(1, 2))
    part = a.select(torch.tensor([True, False, True]))
    joined = Scored.join([part, a.select(torch.zeros(3, dtype=torch.bool)), b])
    for row, (source, i) in enumerate(((a, 0), (a, 2), (b, 0))):
        M = source.credit.shape[2]
        assert joined.reward[row].equal(source.reward[i]) and joined.weight[row].equal(source.weight[i])
        assert joined.compared[row].equal(source.compared[i])
        assert joined.credit[row, :, :M].equal(source.credit[i]) and not joined.credit[row, :, M:].any()
    assert joined.credit.shape == (3, 2, 6) and joined.values == part.values == {}
    assert Scored.join([Scored(a.reward), Scored(b.reward)]).credit.shape == (4, 2, 1)
    assert len(Scored.join([a.select(torch.zeros(3, dtype=torch.bool))] * 2).reward) == 0


def test_credit_of_completions_of_one_token_joins_that_of_longer_ones():
    short, long = Scored(torch.rand(2, 3), torch.rand(2, 3, 1)), Scored(torch.rand(1, 3), torch.rand(1, 3, 4))
    joined = Scored.join([short, long])
    for p, g, m in product(range(3), range(3), range(4)):
        expected = long.credit[0, g, m] if p == 2 else short.credit[p, g, 0] if m == 0 else 0
        assert joined.credit[p, g, m] == expected


# slow rewards

def lengths(completions):
    """Its process ends at the completion "late"."""
    return [float(len(text)) if text != "late" else os._exit(1) for text in completions]


def test_a_late_completion_is_skipped_everywhere(monkeypatch):
    fork_workers(monkeypatch)
    reward(0, 4, slow=True)(lengths)
    texts = written(["7", "late", "8", "77"], answer=["7", "late", "7", "7"])
    with contextlib.closing(Rewards(run_config("contains", "lengths", reward_workers=2))) as rewards:
        values, late, _ = rewards.score(texts, 4)
        assert late.tolist() == [False, True, False, False]
        assert values["lengths"].nan_to_num(-1).tolist() == [1, -1, 1, 2]
        assert values["contains"].nan_to_num(-1).tolist() == [1, -1, 0, 1], "whatever other rewards would give"
        assert rewards.right(values).nan_to_num(-1).tolist() == [1, -1, 0, 1], "neither right nor wrong"
        assert rewards(rolled_out(texts, 4, 4)).reward.nan_to_num(-1).tolist() == [[2, -1, 1, 3]]
        values, late, _ = rewards.score(written(["a", "bb"], answer=["a", "b"]), 2)
        assert values["lengths"].tolist() == [1, 2] and not late.any(), "an earlier call's late completion is forgotten"


def test_a_slow_reward_that_looks_at_groups_is_one_job(monkeypatch):
    @reward(slow=True, whole_group=True)
    def rank_in_group(completions):
        return [float(sorted(completions).index(text)) if "late" not in completions else os._exit(1)
                for text in completions]

    fork_workers(monkeypatch)
    with contextlib.closing(Rewards(run_config("rank_in_group", reward_workers=2))) as rewards:
        assert rewards.score(written(["b", "c", "a"]), 3)[0]["rank_in_group"].tolist() == [1, 2, 0]
        assert rewards.score(written(["b", "late", "a"]), 3)[1].all()


def test_a_slow_reward_that_asks_for_the_judge_runs_in_this_process():
    @reward(0, 1, slow=True)
    def harsh(completions, *, texts, judge_model):
        return judge_model.scores(texts) ** 2

    reader = Judge(judge(), TOKENIZER, False)
    rewards = Rewards(run_config("harsh", reward_workers=2), reader)
    texts = written(["a", "the fox"])
    torch.testing.assert_close(rewards.score(texts, 2)[0]["harsh"], reader.scores(texts) ** 2)
    assert not rewards.workers.workers


def test_a_value_error_in_a_worker_process_is_one_line_for_the_user(monkeypatch):
    @reward(0, 1, slow=True)
    def strict(completions):
        raise ValueError(f"cannot score {completions[0]!r}")

    fork_workers(monkeypatch)
    with contextlib.closing(Rewards(run_config("strict", reward_workers=1))) as rewards:
        with pytest.raises(ValueError, match=": reward strict: ValueError: cannot score 'a'$") as caught:
            rewards.score(written(["a", "b"]), 2)
    assert "RemoteTraceback" not in "".join(traceback.format_exception(caught.value))


@pytest.mark.slow
def test_the_time_of_a_job_begins_when_every_worker_has_started(tmp_path):
    """Each process that loads the file leaves a mark; the first worker to come loads it at once, the second slowly."""
    mine = tmp_path / "mine.py"
    mine.write_text("import multiprocessing, os, time\nfrom grpo.rewards import reward\n\n"
                    "if multiprocessing.parent_process():\n    folder = os.path.dirname(__file__)\n    try:\n"
                    "        os.mkdir(os.path.join(folder, 'first'))\n    except FileExistsError:\n"
                    "        time.sleep(5)\n        os.mkdir(os.path.join(folder, 'second'))\n\n"
                    "@reward(0, 9, slow=True)\ndef length(completions):\n    return [len(x) for x in completions]\n")
    rewards = Rewards(run_config("length", reward_workers=2, reward_timeout=20.0, reward_file=str(mine)))
    try:
        assert rewards.score(written(["a", "bb"]), 2)[0]["length"].tolist() == [1, 2]
        assert (tmp_path / "first").exists() and (tmp_path / "second").exists()
    finally:
        rewards.close()


@pytest.mark.slow
def test_an_async_reward_runs_in_processes_and_logs_from_there(tmp_path):
    mine = tmp_path / "mine.py"
    mine.write_text("import asyncio, os\nfrom grpo.rewards import REWARDS, reward\n\nassert 'contains' in REWARDS\n\n"
                    "@reward(slow=True)\nasync def length(completions, trainer_state, log_metric, log_extra):\n"
                    "    await asyncio.sleep(0.01)\n    log_metric('process', os.getpid())\n"
                    "    log_extra('upper', [x.upper() for x in completions])\n"
                    "    return [len(x) + trainer_state.max_steps for x in completions]\n")
    rewards = Rewards(run_config("length", reward_workers=2, reward_file=str(mine), max_iters=10))
    try:
        values, late, log = rewards.score(written(["a", "bb", "ccc"]), 3)
    finally:
        rewards.close()
    assert values["length"].tolist() == [11, 12, 13] and not late.any()
    assert log.columns == {"upper": ["A", "BB", "CCC"]} and log.metrics["process"][1] == 3
    assert log.metrics["process"][0] != 3 * os.getpid()


@pytest.mark.slow
def test_slow_rewards_run_in_processes_with_a_deadline(tmp_path):
    mine = tmp_path / "mine.py"
    mine.write_text("import time\nfrom grpo.rewards import reward\n\n@reward(0, 9, slow=True)\n"
                    "def sleepy(prompts, completions, **columns):\n"
                    "    time.sleep(3600 if 'late' in completions else 0)\n    return [len(x) for x in completions]\n")
    own = {"reward_workers": 2, "reward_file": str(mine)}
    with contextlib.closing(Rewards(run_config("sleepy", reward_timeout=300.0, **own))) as rewards:
        values, late, _ = rewards.score(written(["a", "bb", "ccc", "dddd"]), 4)
        assert values["sleepy"].tolist() == [1, 2, 3, 4] and not late.any()
        rewards.workers.timeout = 0.5
        values, late, _ = rewards.score(written(["late", "late", "late"]), 3)
        assert late.all() and values["sleepy"].isnan().all()
        rewards.workers.timeout = 300.0
        assert rewards.score(written(["a", "bb"]), 2)[0]["sleepy"].tolist() == [1, 2]


# what is refused

@pytest.mark.parametrize(("settings", "message"), [
    ({"reward_functions": ("exact",)}, "reward_functions: 'exact' is not one of .*; did you mean exact_match"),
    ({"reward_functions": ("contains",), "reward_weights": (1.0, 2.0)}, "must be as many as the rewards: contains"),
    ({"reward_functions": ("judge",)}, "judge_checkpoint is not set, but reward judge is asked for"),
    ({"reward_functions": ("contains",), "credit_window": 2}, "use credit_window=None with other rewards"),
    ({"reward_functions": ("contains",), "success_reward": "countdown"}, "'countdown' is not one of the rewards of "
                                                                         "texts that have a highest value: contains"),
    ({"reward_functions": ("contains",), "reward_normalisation": "group", "train_pass_k": 2,
      "advantage": "leave_one_out"}, "reward_normalisation='group' changes the rewards that train_pass_k=2 is made for"),
    ({"reward_functions": ("reward_model",), "success_reward": "reward_model", "reward_model_checkpoint": "x"},
     "highest value: this run has none; use success_reward=None"),
    ({"reward_functions": (), "task_type": "fill_in"}, "judge_checkpoint is not set, and neither is reward_"
                                                       "functions: for prompts set those that python grpo"),
    ({"reward_functions": ("reward_model",)}, "reward_model_checkpoint is not set, but reward reward_model is asked"),
    ({"reward_functions": ("contains",), "reward_file": "none.py"}, "reward_file=none.py does not exist")])
def test_a_mistake_in_the_settings_is_refused(settings, message):
    with pytest.raises((ValueError, FileNotFoundError), match=message):
        Rewards(run_config(**settings), reward_scorer="loaded" if "reward_model_checkpoint" in settings else None)


def test_the_credit_of_tokens_is_not_normalised():
    c = run_config("judge", credit_window=2, reward_normalisation="group")
    with pytest.raises(ValueError, match="reward_normalisation='group' changes the rewards that credit_window=2 is"):
        Rewards(c, Judge(judge(), TOKENIZER, True))


def test_training_for_pass_at_k_needs_a_reward_that_decides_what_is_correct():
    c = run_config("judge", train_pass_k=2, advantage="leave_one_out")
    with pytest.raises(ValueError, match="train_pass_k=2 needs a success_reward"):
        Rewards(c, Judge(judge(), TOKENIZER, True))


@pytest.mark.parametrize(("name", "fields", "message"), [
    ("regex", {"pattern": ["a", "(a", "b"]}, r"f.jsonl, line 2: reward regex: pattern '\(a' of a record"),
    ("code_execution", {"tests": ["pass", " ", "pass"]},
     r"f.jsonl, line 2: reward code_execution needs the field 'tests' in every record, not .' '.: any code would pass blank tests"),
    ("code_execution", {"tests": ["pass", ["a"], 3]}, "f.jsonl, line 3: reward code_execution: tests=3 of a"),
    ("exact_match", {"answer": ["a", "b", None]}, "f.jsonl, line 3: reward exact_match needs the field 'answer'"),
    ("countdown", {"numbers": [[1], [2], [3]], "target": [1, None, None]}, "f.jsonl, line 2: reward countdown needs"),
    ("code_execution", {"tests": ["pass", "pass", "assert f(1) =="]}, "f.jsonl, line 3: reward code_execution: tests="),
    ("countdown", {"numbers": [[1], ["one"], [3]], "target": [1, 1, 1]}, "f.jsonl, line 2: .*numbers=.*one"),
    ("countdown", {"numbers": [[1]] * 3, "target": [1, 1, [1]]}, r"f.jsonl, line 3: .*target=\[1\]"),
    ("countdown", {"numbers": [[1]] * 3, "target": [1, math.inf, 1]}, "f.jsonl, line 2: .*target=inf")])
@pytest.mark.parametrize("workers", [0, 2])
def test_every_record_is_checked_and_the_first_bad_one_is_named(name, fields, message, workers):
    rewards = Rewards(run_config(name, reward_workers=workers))
    with pytest.raises(ValueError, match=message):
        rewards.check(records(**fields))
    assert not rewards.workers.workers
    rewards.check(records(1, **{key: values[:1] for key, values in fields.items()}))


def test_a_fast_reward_is_checked_in_one_call_and_the_first_bad_record_is_named():
    calls = []

    @reward(0, 1)
    def picky(completions, answer):
        calls.append(len(completions))
        if "bad" in answer:
            raise ValueError("no")
        return [0.0] * len(completions)

    rewards = Rewards(run_config("picky"))
    rewards.check(records(500, answer=["good"] * 500))
    assert calls == [500]
    with pytest.raises(ValueError, match="^f.jsonl, line 347: .*: reward picky: ValueError: no$"):
        rewards.check(records(500, answer=["good"] * 346 + ["bad"] + ["good"] * 100 + ["bad"] * 53))


def test_an_error_that_no_record_causes_names_none():
    @reward(0, 1)
    def wrong_count(completions):
        return [1.0]

    with pytest.raises(ValueError, match="^reward wrong_count returned 1 values for 3 completions"):
        Rewards(run_config("wrong_count")).check(records())


def test_a_slow_reward_without_a_check_is_called_on_one_record_of_each_set_of_fields():
    seen = []

    @reward(0, 1, slow=True)
    def costly(completions, prompts, **columns):
        seen.extend(prompts)
        return [0.0] * len(completions)

    answers, levels = ["a", None, "b", None, "c", "d"], [1, None, 2, 3, 4, 5]
    Rewards(run_config("costly")).check(records(6, answer=answers, level=levels))
    assert sorted(seen) == ["q0", "q1", "q3"]


def test_the_judge_does_not_score_records_but_must_have_room_for_prompt_and_completion():
    class Refusing(Judge):
        def scores(self, texts):
            raise AssertionError

    net, three = judge(), records(answer=["1", "2", "3"])
    for reads_ids, most in ((True, net.longest_input - 1), (False, 2 * net.longest_input)):
        rewards = Rewards(run_config("judge", "exact_match", max_new_tokens=most), Refusing(net, TOKENIZER, reads_ids))
        rewards.check(three)
    three[1]["tokens"], three[1]["text"] = [1, 1], "longer"
    rewards = Rewards(run_config("judge", max_new_tokens=net.longest_input - 1), Judge(net, TOKENIZER, True))
    with pytest.raises(ValueError, match=f"f.jsonl, line 2: judge_checkpoint reads {net.longest_input} tokens, but "
                                         f"this prompt has 2 and its completion up to {net.longest_input - 1}: lower"):
        rewards.check(three)


def test_the_same_column_of_two_rewards_is_kept_twice(tmp_path):
    mine = tmp_path / "mine.py"
    mine.write_text("".join(f"def {name}(completions, log_extra, **kwargs):\n"
                            f"    log_extra('length', [{number}] * len(completions))\n"
                            "    return [1.0] * len(completions)\n" for number, name in enumerate(("one", "two"))))
    rewards = Rewards(run_config("one", "two", reward_file=str(mine)))
    assert rewards.score(with_ids(written(["a", "b"])), 2)[2].columns == {"length": [0, 0], "two/length": [1, 1]}


def test_nan_of_a_plain_function_skips_a_completion_and_is_not_finite_from_a_decorated_one(tmp_path):
    mine = tmp_path / "mine.py"
    mine.write_text("import math\nfrom grpo.reward_functions.registry import reward\n"
                    "def plain_nan(completions, **kwargs):\n    return [math.nan, 2.0]\n"
                    "@reward\ndef decorated_nan(completions):\n    return [math.nan, 2.0]\n")
    scored = Rewards(run_config("plain_nan", reward_file=str(mine)))(rolled_out(with_ids(written(["a", "b"])), 2, 2))
    assert scored.reward[0, 0].isnan() and scored.reward[0, 1] == 2
    values, *_ = Rewards(run_config("decorated_nan", reward_file=str(mine))).score(written(["a", "b"]), 2)
    assert values["decorated_nan"].tolist() == [math.inf, 2.0]


def test_a_value_that_is_not_finite_is_neither_right_nor_wrong():
    rewards = Rewards(run_config("contains"))
    values = {"contains": torch.tensor([1.0, 0.0, math.nan, math.inf])}
    assert rewards.right(values).nan_to_num(-1).tolist() == [1, 0, -1, -1]


def test_a_field_may_have_any_name():
    @reward(0, 1, slow=True, check=lambda **columns: None)
    def anything(completions, **columns):
        return [0.0] * len(completions)

    Rewards(run_config("anything")).check(records(record=["1", "2", "3"], function=["1", "2", "3"]))
