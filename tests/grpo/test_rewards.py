"""The rewards of a run: which are asked, how they are added, what is skipped, and what is refused at the start."""

import inspect
import math
import multiprocessing
import os
import time
import traceback
from itertools import combinations, product
from types import SimpleNamespace

import numpy as np
import pytest
import torch

from core.judge import calculate_judge_scores
from grpo.reward_functions.judge import Judge
from grpo.rewards import PRESETS, REWARDS, Rewards, Scored, pass_k_weight, reward
from tests.tiny import ROOT, TOKENIZER, Undecoded, config, judge, run_script

BUILT_IN = {"math_format": (-3, 3), "math_answer": (-4.5, 5), "math_number": (-2.5, 3.5), "countdown": (0, 1),
            "math_working": (0, 1), "equations": (0, 1), "judge": (0, 1),
            "code_correctness": (0, 2), "code_execution": (0, 1), "length_penalty": (-1, 1), "exact_match": (0, 1),
            "contains": (0, 1), "regex": (0, 1), "json_valid": (0, 1), "xml_valid": (0, 1), "repetition": (-1, 0),
            "diversity_bonus": (0, 1)}
OF_TEXT = [name for name in BUILT_IN if name not in ("judge", "equations")]
COLUMNS = {"math_answer": ["answer"], "math_number": ["answer"], "countdown": ["numbers", "target"],
           "code_execution": ["tests"], "exact_match": ["answer"], "contains": ["answer"], "regex": ["pattern"],
           "equations": ["answer"]}
RECORD = {"answer": "42", "numbers": [1, 2], "target": 3, "tests": "assert f() == 1", "pattern": "a+"}


@pytest.fixture(autouse=True)
def table():
    """Rewards that a test defines are removed after it."""
    before = dict(REWARDS)
    yield
    REWARDS.clear()
    REWARDS.update(before)


def run_config(*names, **settings):
    return config(**{"reward_functions": names, "task_type": "general", "max_new_tokens": 5} | settings)


def written(completions, tokens=None, place=None, **columns):
    return SimpleNamespace(prompts=["p"] * len(completions), completions=list(completions), columns=columns,
                           tokens=tokens, place=place)


def rolled_out(texts, N, group_size):
    return SimpleNamespace(texts=texts, target=torch.zeros(N, 1, dtype=torch.long), group_size=group_size)


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
    done = run_script(os.path.join(ROOT, "grpo", "rewards.py"), "--reward_file=none.py", cwd=tmp_path)
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
    values, late = rewards.score(texts, 4)
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
    for name, message in (("wrong_count", "reward wrong_count returned 1 values for 4 completions"),
                          ("not_a_number", "reward not_a_number returned nan for completion '7'")):
        with pytest.raises(ValueError, match=message):
            Rewards(run_config(name, **own))(rolled_out(texts, 4, 4))


def test_right_is_the_highest_value_of_the_success_reward():
    reward(0, 1)(graded)
    rewards = Rewards(run_config("graded", "length_penalty"))
    assert rewards.success == "graded"
    values, _ = rewards.score(written(["1", "0.5", "none", "0"]), 4)
    assert rewards.right(values).nan_to_num(-1).tolist() == [1, 0, -1, 0]


def test_one_reward_of_a_run_can_be_asked_alone():
    reader, texts = Judge(judge(), TOKENIZER, False), written(["7", "8"], answer=["7", "7"])
    rewards = Rewards(run_config("judge", "contains", "length_penalty"), reader)
    assert list(rewards.score(texts, 1, ["contains"])[0]) == ["contains"]
    assert rewards.score(texts, 1, ["contains"])[0]["contains"].tolist() == [1, 0]
    assert set(rewards.score(texts, 1)[0]) == {"judge", "contains", "length_penalty"}


def graded(completions):
    return [None if text == "none" else float(text) for text in completions]


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
    b = Scored(torch.rand(1, 2), torch.rand(1, 2, 6), weight=torch.rand(1, 2))
    part = a.select(torch.tensor([True, False, True]))
    joined = Scored.join([part, a.select(torch.zeros(3, dtype=torch.bool)), b])
    for row, (source, i) in enumerate(((a, 0), (a, 2), (b, 0))):
        M = source.credit.shape[2]
        assert joined.reward[row].equal(source.reward[i]) and joined.weight[row].equal(source.weight[i])
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

class OneProcessPool:
    """In a pool's place: runs a job when it is asked for; one with the completion "late" never ends."""

    ended = 0

    def apply_async(self, function, arguments):
        def get(seconds):
            if "late" in arguments[1]["completions"]:
                raise multiprocessing.TimeoutError
            return function(*arguments)

        return SimpleNamespace(get=get)

    def terminate(self):
        self.ended += 1

    def join(self):
        pass


def lengths(completions):
    return [float(len(text)) for text in completions]


def test_a_late_completion_is_skipped_everywhere():
    reward(0, 4, slow=True)(lengths)
    rewards = Rewards(run_config("contains", "lengths", reward_workers=2))
    rewards.pool = OneProcessPool()
    texts = written(["7", "late", "8", "77"], answer=["7", "late", "7", "7"])
    values, late = rewards.score(texts, 4)
    assert late.tolist() == [False, True, False, False]
    assert values["lengths"].nan_to_num(-1).tolist() == [1, -1, 1, 2]
    assert values["contains"].nan_to_num(-1).tolist() == [1, -1, 0, 1], "whatever other rewards would give"
    assert rewards.right(values).nan_to_num(-1).tolist() == [1, -1, 0, 1], "neither right nor wrong"
    rewards.pool = OneProcessPool()
    scored = rewards(rolled_out(texts, 4, 4))
    assert scored.reward.nan_to_num(-1).tolist() == [[2, -1, 1, 3]]


def test_only_a_call_with_late_completions_ends_the_workers():
    reward(0, 4, slow=True)(lengths)
    rewards = Rewards(run_config("lengths", reward_workers=2))
    rewards.pool = first = OneProcessPool()
    assert rewards.score(written(["a", "late"]), 2)[1].tolist() == [False, True]
    assert first.ended == 1 and rewards.pool is None
    rewards.pool = second = OneProcessPool()
    values, late = rewards.score(written(["a", "bb"]), 2)
    assert values["lengths"].tolist() == [1, 2] and not late.any()
    assert second.ended == 0 and rewards.pool is second, "an earlier call's late completion is forgotten"


def test_a_slow_reward_that_looks_at_groups_is_one_job():
    @reward(slow=True, whole_group=True)
    def rank_in_group(completions):
        return [float(sorted(completions).index(text)) for text in completions]

    rewards = Rewards(run_config("rank_in_group", reward_workers=2))
    rewards.pool = OneProcessPool()
    assert rewards.score(written(["b", "c", "a"]), 3)[0]["rank_in_group"].tolist() == [1, 2, 0]
    rewards.pool = OneProcessPool()
    assert rewards.score(written(["b", "late", "a"]), 3)[1].all()


def test_a_slow_reward_that_asks_for_the_judge_runs_in_this_process():
    @reward(0, 1, slow=True)
    def harsh(completions, *, texts, judge_model):
        return judge_model.scores(texts) ** 2

    reader = Judge(judge(), TOKENIZER, False)
    rewards = Rewards(run_config("harsh", reward_workers=2), reader)
    texts = written(["a", "the fox"])
    torch.testing.assert_close(rewards.score(texts, 2)[0]["harsh"], reader.scores(texts) ** 2)
    assert rewards.pool is None


def test_a_value_error_in_a_worker_process_is_one_line_for_the_user():
    @reward(0, 1, slow=True)
    def strict(completions):
        raise ValueError(f"cannot score {completions[0]!r}")

    rewards = Rewards(run_config("strict", reward_workers=1))
    rewards.pool = multiprocessing.get_context("fork").Pool(1)  # its process knows the reward above
    try:
        with pytest.raises(ValueError, match="^cannot score 'a'$") as caught:
            rewards.score(written(["a", "b"]), 2)
    finally:
        rewards.close()
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
def test_slow_rewards_run_in_processes_with_a_deadline(tmp_path):
    mine = tmp_path / "mine.py"
    mine.write_text("import time\nfrom grpo.rewards import reward\n\n@reward(0, 9, slow=True)\n"
                    "def sleepy(prompts, completions, **columns):\n"
                    "    time.sleep(60 if 'late' in completions else 0)\n    return [len(x) for x in completions]\n")
    own = {"reward_workers": 2, "reward_file": str(mine)}
    rewards = Rewards(run_config("sleepy", reward_timeout=20.0, **own))
    values, late = rewards.score(written(["a", "bb", "ccc", "dddd"]), 4)
    assert values["sleepy"].tolist() == [1, 2, 3, 4] and not late.any()
    rewards.config = run_config("sleepy", reward_timeout=2.0, **own)
    started = time.monotonic()
    values, late = rewards.score(written(["a", "bb", "late", "dddd"]), 4)
    assert values["sleepy"].nan_to_num(-1).tolist() == [1, 2, -1, 4] and late.tolist() == [False, False, True, False]
    assert time.monotonic() - started < 40 and rewards.pool is None, "late workers are gone"


# what is refused

@pytest.mark.parametrize(("settings", "message"), [
    ({"reward_functions": ("exact",)}, "reward_functions: 'exact' is not one of .*define your own in reward_file"),
    ({"reward_functions": ("contains",), "reward_weights": (1.0, 2.0)}, "must be as many as the rewards: contains"),
    ({"reward_functions": ("judge",)}, "judge_checkpoint is not set, but reward judge is asked for"),
    ({"reward_functions": ("contains",), "credit_window": 2}, "use credit_window=None with other rewards"),
    ({"reward_functions": ("contains",), "success_reward": "countdown"}, "'countdown' is not one of the rewards that "
                                                                         "have a highest value: contains"),
    ({"reward_functions": ("contains",), "reward_file": "none.py"}, "reward_file=none.py does not exist")])
def test_a_mistake_in_the_settings_is_refused(settings, message):
    with pytest.raises((ValueError, FileNotFoundError), match=message):
        Rewards(run_config(**settings))


def test_training_for_pass_at_k_needs_a_reward_that_decides_what_is_correct():
    c = run_config("judge", train_pass_k=2, advantage="leave_one_out")
    with pytest.raises(ValueError, match="train_pass_k=2 needs a success_reward"):
        Rewards(c, Judge(judge(), TOKENIZER, True))


@pytest.mark.parametrize(("name", "fields", "message"), [
    ("regex", {"pattern": ["a", "(a", "b"]}, r"f.jsonl, line 2: reward regex: pattern '\(a' of a record"),
    ("code_execution", {"tests": ["pass", " ", "pass"]},
     r"f.jsonl, line 2: reward code_execution needs the field 'tests' in every record, not ' '"),
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
    assert rewards.pool is None
    rewards.check(records(1, **{key: values[:1] for key, values in fields.items()}))


def test_a_fast_reward_is_checked_in_one_call_and_a_bad_record_found_in_few():
    calls = []

    @reward(0, 1)
    def picky(completions, answer):
        calls.append(len(completions))
        if "bad" in answer:
            raise ValueError("no")
        return [0.0] * len(completions)

    rewards = Rewards(run_config("picky"))
    rewards.check(records(5000, answer=["good"] * 5000))
    assert calls == [5000]
    with pytest.raises(ValueError, match="^f.jsonl, line 3457: no$"):
        rewards.check(records(5000, answer=["good"] * 3456 + ["bad"] + ["good"] * 500 + ["bad"] * 1043))
    assert len(calls) < 20


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


def test_the_judge_is_not_asked_about_records():
    class Refusing:
        def scores(self, texts):
            raise AssertionError

    Rewards(run_config("judge", "exact_match"), Refusing()).check(records(answer=["1", "2", "3"]))


def test_a_field_may_have_any_name():
    @reward(0, 1, slow=True, check=lambda **columns: None)
    def anything(completions, **columns):
        return [0.0] * len(completions)

    Rewards(run_config("anything")).check(records(record=["1", "2", "3"], function=["1", "2", "3"]))
