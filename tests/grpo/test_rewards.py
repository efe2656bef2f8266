"""The rewards of a run: which are asked, how they are added, what is skipped, and what is refused at the start."""

import contextlib
import inspect
import math
import os
import traceback
from types import SimpleNamespace

import pytest
import torch

from core.judge import calculate_judge_scores
from grpo.reward_functions.judge import Judge
from grpo.reward_functions.trl import TrainerState
from grpo.rewards import PRESETS, REWARDS, Rewards, Scored, reward
from grpo.rollout import join
from tests.tiny import TOKENIZER, Undecoded, config, fork_workers, judge, run_here

BUILT_IN = tuple(REWARDS)
OF_TEXT = [name for name in BUILT_IN if name not in ("judge", "equations", "reward_model")]
NEEDS = {"math_answer": ["answer"], "math_number": ["answer"], "countdown": ["numbers", "target"],
         "code_execution": ["tests"], "exact_match": ["answer"], "contains": ["answer"], "regex": ["pattern"],
         "equations": ["answer"]}
RECORD = {"answer": "42", "numbers": [1, 2], "target": 3, "tests": "assert f() == 1", "pattern": "a+"}


def run_config(*names, **settings):
    return config(**{"reward_functions": names, "task_type": "general", "max_new_tokens": 5} | settings)


def made(*names, judge=None, **settings):
    """The rewards of a run that names these."""
    return Rewards(run_config(*names, **settings), judge)


def texts_of(completions, tokens=None, place=None, **columns):
    return SimpleNamespace(prompts=["p"] * len(completions), completions=list(completions), columns=columns,
                           tokens=tokens, place=place, completion_ids=[[*map(ord, text)] for text in completions])


def scored(rewards, texts, group_size):
    """What rewards give to rollouts with these texts."""
    N = len(texts.tokens or texts.completions)
    return rewards(SimpleNamespace(texts=texts, target=torch.zeros(N, 1, dtype=torch.long), mask=None,
                                   group_size=group_size))


def values_of(rewards, texts, group_size=1, name=None):
    """The values of a reward, -1 for those that it skipped."""
    return rewards.score(texts, group_size)[0][name or rewards.names[0]].nan_to_num(-1, posinf=math.inf).tolist()


def records(count=3, **fields):
    """Records as PromptConsumer has them; a list gives each record its own value, and a missing one is left out."""
    out = [{"prompt": f"q{i}", "text": f"q{i}", "tokens": [1], "where": f"f.jsonl, line {i + 1}"} for i in range(count)]
    for key, values in fields.items():
        for record, value in zip(out, values, strict=True):
            if value is not None:
                record[key] = value
    return out


@pytest.fixture
def mine(tmp_path):
    """A function that writes a reward_file and returns its path."""
    def write(code):
        (tmp_path / "mine.py").write_text(code)
        return str(tmp_path / "mine.py")
    return write


def graded(completions):
    return [None if text == "none" else float(text) for text in completions]


def looked_up(name, values):
    """Registers a reward of this name that returns these values."""
    def look_up(completions):
        return values

    look_up.__name__ = look_up.__qualname__ = name
    reward(look_up)


# the table

@pytest.mark.parametrize("name", OF_TEXT)
def test_an_empty_completion_has_a_reward_in_range(name):
    value, = values_of(made(name), texts_of([""], **{field: [value] for field, value in RECORD.items()}))
    assert REWARDS[name].low <= value <= REWARDS[name].high


@pytest.mark.parametrize(("name", "field"), [(name, field) for name, fields in NEEDS.items() for field in fields])
def test_a_missing_field_is_an_error_that_names_the_reward_and_the_field(name, field):
    others = {key: [value] for key, value in RECORD.items() if key != field}
    for columns in (others, others | {field: [None]}):
        with pytest.raises(ValueError, match=f"reward {name} needs the field '{field}' in every record"):
            made(name).score(texts_of(["x"], **columns), 1)


def test_the_list_has_rewards_presets_and_functions_of_a_file_that_read_completions(mine, tmp_path, monkeypatch):
    mine("from grpo.rewards import REWARDS, reward\n\nassert 'contains' in REWARDS\n\n@reward(0, 7)\n"
         "def my_own(completions):\n    '''Mine.'''\n\nasync def loud(completions): pass\n\ndef helper(x): pass\n")
    monkeypatch.chdir(tmp_path)
    done = run_here("grpo/rewards.py", "--reward_file=mine.py")
    assert done.returncode == 0, done.stderr
    lines = {line.split()[0]: line.split(maxsplit=3)[1:] for line in done.stdout.split("\n") if line}
    assert {*BUILT_IN, *PRESETS, "my_own", "loud"} <= set(lines) and "helper" not in lines
    assert lines["math_answer"][:2] == ["[-4.5,", "5]"] and lines["my_own"] == ["[0,", "7]", "Mine."]
    assert {name for names in PRESETS.values() for name in names} <= set(BUILT_IN)
    assert all(len(inspect.getdoc(REWARDS[name].fn).split("\n")[0]) > 40 for name in BUILT_IN)
    done = run_here("grpo/rewards.py", "--reward_file=none.py")
    assert done.returncode == 1 and done.stderr == "error: reward_file=none.py does not exist\n"


# sums

def test_rewards_are_weighted_added_and_may_skip():
    looked_up("half", [0.5, None, 0.5, None])
    looked_up("tensor", torch.tensor([0.25] * 4))
    texts = texts_of(["7", "7", "8", "8"], answer=["7"] * 4)
    rewards = made("half", "contains", "tensor", reward_weights=(2.0, 1.0, 4.0))
    values, late, _ = rewards.score(texts, 4)
    assert {name: x.nan_to_num(-1).tolist() for name, x in values.items()} == {
        "half": [0.5, -1, 0.5, -1], "contains": [1, 1, 0, 0], "tensor": [0.25] * 4}
    assert late.tolist() == [False] * 4

    found = scored(rewards, texts, 4)
    assert found.reward.tolist() == [[3.0, 2.0, 2.0, 1.0]] and found.credit[..., 0].equal(found.reward)
    assert found.weight.tolist() == [[1.0] * 4] and set(found.values) == set(rewards.names)
    assert scored(rewards, texts, 2).reward.tolist() == [[3.0, 2.0], [2.0, 1.0]], "a row for each problem"
    assert scored(made("half"), texts, 4).reward.isnan().tolist() == [[False, True, False, True]]
    assert list(rewards.score(texts, 1, ["contains"])[0]) == ["contains"], "one can be asked alone"


@pytest.mark.parametrize("plain", [False, True])
def test_nan_of_a_plain_function_skips_a_completion_and_is_not_finite_from_a_decorated_one(mine, plain):
    head = "" if plain else "from grpo.rewards import reward\n@reward\n"
    path = mine(f"import math\n{head}def is_nan(completions, **kwargs):\n"
                "    return [math.nan] + [2.0] * len(completions[1:])\n")
    rewards = made("is_nan", reward_file=path)
    assert values_of(rewards, texts_of(["a", "b"])) == [-1 if plain else math.inf, 2]
    with contextlib.nullcontext() if plain else pytest.raises(
            ValueError, match="reward is_nan returned a number that is not finite; return None to skip a completion"):
        rewards.check(records())


def test_right_is_the_highest_value_of_the_success_reward():
    reward(0, 1)(graded)
    rewards = made("graded", "length_penalty")
    assert rewards.success == "graded"
    values = {"graded": torch.tensor([1.0, 0.5, math.nan, 0.0, math.inf])}
    assert rewards.right(values).nan_to_num(-1).tolist() == [1, 0, -1, 0, -1]


# plain functions, as TRL users write them

PLAIN = """
def lengths_of_ids(prompts, completions, completion_ids, level, **kwargs):
    kwargs["log_metric"]("mean_length", sum(map(len, completion_ids)) / len(completion_ids))
    kwargs["log_extra"]("first", [ids[0] for ids in completion_ids])
    step = kwargs["trainer_state"].global_step
    return [len(ids) + step if x is None or x > 0 else None for ids, x in zip(completion_ids, level, strict=True)]

async def loud(completions, log_metric, log_extra):
    log_metric("loud", sum(text.isupper() for text in completions))
    log_extra("first", [text[:1] for text in completions])
    return [float(text.isupper()) for text in completions]
"""


def test_a_plain_function_of_the_reward_file_is_a_reward(mine):
    rewards = made("lengths_of_ids", "loud", "contains", reward_weights=(1.0, 10.0, 100.0), reward_file=mine(PLAIN),
                   max_iters=7, log_interval=2)
    assert rewards.state == TrainerState(0, 7, 2, rewards.config.eval_interval, rewards.config.save_interval)
    assert rewards.success is None
    texts = texts_of(["a", "BB", "ccc", "D"], answer=["c"] * 4, level=[1, 0, 1, None])
    found = scored(rewards, texts, 2)
    assert found.reward.tolist() == [[1, 10], [103, 11]]
    assert found.metrics == {"mean_length": (1.75, 1), "loud": (2.0, 1)}
    rewards.state.global_step = 5
    assert values_of(rewards, texts) == [6, -1, 8, 6]
    assert rewards.score(texts, 2)[2].columns == {"first": [97, 66, 99, 68], "loud/first": ["a", "B", "c", "D"]}


def test_only_rewards_that_can_log_have_metrics():
    @reward(0, 1)
    def quiet(completions, *, log_metric):
        return [0.0] * len(completions)

    texts = texts_of(["a", "b"], answer=["a", "a"])
    assert scored(made("contains"), texts, 2).metrics is None
    assert scored(made("quiet"), texts, 2).metrics == {}, "it might have, on another rank"


def test_a_plain_function_is_not_called_at_the_start_but_its_fields_are_looked_for(mine):
    rewards = made("picky", reward_file=mine(
        "def picky(completions, answer, level, **kwargs):\n    return [float(text[0] == x[0]) if y is None else 0.5 "
        "for text, x, y in zip(completions, answer, level)]\n"))
    with pytest.raises(ValueError, match="f.jsonl, line 1: reward picky needs the field 'level' in every record"):
        rewards.check(records(answer=["a", "b", "c"]))
    rewards.check(records(answer=["a", "b", "c"], level=[None, None, 3]))
    assert values_of(rewards, texts_of(["a", "x"], answer=["a", "a"])) == [1, 0], "a field that a record lacks is None"


def test_a_reward_of_ours_may_be_async_too():
    @reward(0, 1)
    async def slowly(completions, *, group_size):
        return [1 / group_size for _ in completions]

    assert values_of(made("slowly"), texts_of(["a", "b"]), 2) == [0.5, 0.5]
    made("slowly").check(records())


# rewards of a group

def test_rewards_may_be_normalised_before_they_are_added():
    looked_up("up", [0.1, 0.3, None, 0.9])
    looked_up("flat", [7.0, 7.0, 7.0, None])
    found = scored(made("up", "flat", reward_weights=(1.0, 2.0), reward_normalisation="group"), texts_of([""] * 4), 4)
    mean, std = 1.3 / 3, float(torch.tensor([0.1, 0.3, 0.9]).std())
    expected = [(0.1 - mean) / std, (0.3 - mean) / std, 0.0, (0.9 - mean) / std]
    assert found.credit[0, :, 0].tolist() == pytest.approx(expected, abs=1e-3)
    assert found.reward[0].tolist() == pytest.approx([14.1, 14.3, 14.0, 0.9]), "the metrics show raw rewards"


def test_rewards_that_cancel_when_normalised_teach_nothing():
    looked_up("up", [0.1, 0.3, 0.2, 0.9])
    looked_up("down", [0.9, 0.7, 0.8, 0.1])
    for weights, differ in (((1.0, 3.0), True), ((1.0, 1.0), False)):
        found = scored(made("up", "down", reward_weights=weights, reward_normalisation="group"), texts_of([""] * 4), 4)
        assert (found.credit.unique().numel() > 1) == differ, "equal to the last bit: the group can be dropped"


def test_hard_problems_count_more_when_training_for_pass_at_k():
    texts = texts_of(["7", "8", "8", "8", "7", "7", "7", "8"], answer=["7"] * 8)
    found = scored(made("contains", train_pass_k=2, advantage="leave_one_out"), texts, 4)
    assert found.reward.tolist() == [[1, 0, 0, 0], [1, 1, 1, 0]] and found.credit[..., 0].equal(found.reward)
    assert found.weight[0].tolist() == pytest.approx([2, 4 / 3, 4 / 3, 4 / 3])
    assert found.weight[1].tolist() == pytest.approx([2 / 3, 2 / 3, 2 / 3, 0])


def test_a_skipped_completion_counts_neither_right_nor_wrong_for_pass_at_k():
    reward(0, 1)(graded)
    found = scored(made("graded", "length_penalty", train_pass_k=2, advantage="leave_one_out"),
                   texts_of(["1", "none", "0", "none"]), 4)
    assert not found.reward.isnan().any(), "another reward scored it"
    assert found.weight.tolist() == [[2, 1, 0, 1]]


# the judge

def test_the_judge_alone_reads_token_ids_and_no_text_is_decoded():
    ids, scorer = torch.randint(0, 96, (6, 20)), judge()
    found = scored(made("judge", judge=Judge(scorer, TOKENIZER, True)), Undecoded(list(ids)), 3)
    expected = calculate_judge_scores(scorer, ids, TOKENIZER.cls_token_id)
    assert torch.equal(found.reward, expected.view(2, 3)) and torch.equal(found.values["judge"], expected)


def test_the_judge_is_weighted_and_added_like_the_others():
    texts, reader = texts_of(["7", "fox", "8", "7 o"], answer=["7"] * 4), Judge(judge(), TOKENIZER, False)
    found = scored(made("contains", "judge", reward_weights=(1.0, 2.0), judge=reader), texts, 4)
    torch.testing.assert_close(found.reward[0], torch.tensor([1.0, 0, 0, 1]) + 2 * reader.scores(texts))


def test_with_a_credit_window_the_judge_gives_credit_to_tokens():
    texts = texts_of([""] * 6, list(torch.randint(0, 96, (6, 20))), torch.randint(0, 20, (6, 4)))
    reader = Judge(judge(), TOKENIZER, True)
    found = scored(made("judge", credit_window=2, judge=reader), texts, 3)
    score, credit = reader.score_and_credit(texts, 2)
    assert torch.equal(found.reward, score.view(2, 3)) and torch.equal(found.values["judge"], score)
    assert torch.equal(found.credit, credit.view(2, 3, 4)) and found.weight.tolist() == [[1.0] * 3] * 2


# Scored

def test_a_reward_alone_is_a_whole_result():
    found = Scored(torch.rand(2, 3))
    assert found.credit.equal(found.reward[..., None]) and found.weight.equal(torch.ones(2, 3))
    assert found.values == {}


def test_selected_and_joined_results_keep_each_problem_with_its_own():
    none = torch.zeros(3, dtype=torch.bool)
    a = Scored(torch.rand(3, 2), torch.rand(3, 2, 4), {"judge": torch.rand(6)}, torch.rand(3, 2))
    b = Scored(torch.rand(1, 2), torch.rand(1, 2, 6), weight=torch.rand(1, 2))
    part = a.select(torch.tensor([True, False, True]))
    joined = join([part, a.select(none), b])
    for row, (source, i) in enumerate(((a, 0), (a, 2), (b, 0))):
        M = source.credit.shape[2]
        assert joined.reward[row].equal(source.reward[i]) and joined.weight[row].equal(source.weight[i])
        assert joined.credit[row, :, :M].equal(source.credit[i]) and not joined.credit[row, :, M:].any()
    assert joined.credit.shape == (3, 2, 6) and joined.values == part.values == {}
    assert join([a.select(none), a.select(none)]).reward.shape == (0, 2)
    logged = join([Scored(a.reward, metrics={"seen": (1.0, 2)}), Scored(b.reward, metrics={"seen": (2.0, 1), "rare": (5.0, 1)})])
    assert logged.metrics == {"seen": (3.0, 3), "rare": (5.0, 1)}


# slow rewards

def lengths(completions):
    """Its process ends at the completion "late"."""
    return [float(len(text)) if text != "late" else os._exit(1) for text in completions]


@pytest.fixture
def slow(monkeypatch):
    """A function: the rewards of a run with two worker processes, which start at once and end with the test."""
    fork_workers(monkeypatch)
    with contextlib.ExitStack() as stack:
        yield lambda *names, **settings: stack.enter_context(contextlib.closing(
            made(*names, reward_workers=2, **settings)))


def test_a_late_completion_is_skipped_everywhere(slow):
    reward(0, 4, slow=True)(lengths)
    texts = texts_of(["7", "late", "8", "77"], answer=["7", "late", "7", "7"])
    rewards = slow("contains", "lengths")
    values, late, _ = rewards.score(texts, 4)
    assert late.tolist() == [False, True, False, False]
    assert values["lengths"].nan_to_num(-1).tolist() == [1, -1, 1, 2]
    assert values["contains"].nan_to_num(-1).tolist() == [1, -1, 0, 1], "whatever other rewards would give"
    assert rewards.right(values).nan_to_num(-1).tolist() == [1, -1, 0, 1], "neither right nor wrong"
    assert scored(rewards, texts, 4).reward.nan_to_num(-1).tolist() == [[2, -1, 1, 3]]
    values, late, _ = rewards.score(texts_of(["a", "bb"], answer=["a", "b"]), 2)
    assert values["lengths"].tolist() == [1, 2] and not late.any(), "an earlier call's late completion is forgotten"


def test_a_slow_reward_that_looks_at_groups_is_one_job(slow):
    @reward(slow=True, whole_group=True)
    def rank_in_group(completions):
        return [sorted(completions).index(text) if "late" not in completions else os._exit(1) for text in completions]

    rewards = slow("rank_in_group")
    assert values_of(rewards, texts_of(["b", "c", "a"]), 3) == [1, 2, 0]
    assert rewards.score(texts_of(["b", "late", "a"]), 3)[1].all()


def test_a_slow_reward_that_asks_for_the_judge_runs_in_this_process(slow):
    @reward(0, 1, slow=True)
    def harsh(completions, *, texts, judge_model):
        return judge_model.scores(texts) ** 2

    reader, texts = Judge(judge(), TOKENIZER, False), texts_of(["a", "the fox"])
    rewards = slow("harsh", judge=reader)
    assert values_of(rewards, texts) == (reader.scores(texts) ** 2).tolist()
    assert not rewards.workers.workers


def test_a_value_error_in_a_worker_process_is_one_line_for_the_user(slow):
    @reward(0, 1, slow=True)
    def strict(completions):
        raise ValueError(f"cannot score {completions[0]!r}")

    with pytest.raises(ValueError, match=": reward strict: ValueError: cannot score 'a'$") as caught:
        slow("strict").score(texts_of(["a"]), 1)
    assert "RemoteTraceback" not in "".join(traceback.format_exception(caught.value))


@pytest.mark.slow
def test_an_async_reward_of_a_file_runs_in_real_worker_processes_and_logs_from_there(mine):
    path = mine("import asyncio, os\nfrom grpo.rewards import REWARDS, reward\n\nassert 'contains' in REWARDS\n\n"
                "@reward(slow=True)\nasync def length(completions, trainer_state, log_metric, log_extra):\n"
                "    await asyncio.sleep(3600 if 'late' in completions else 0)\n    log_metric('process', os.getpid())\n"
                "    log_extra('upper', [x.upper() for x in completions])\n"
                "    return [len(x) + trainer_state.max_steps for x in completions]\n")
    rewards = made("length", reward_workers=2, reward_file=path, max_iters=10, reward_timeout=300.0)
    with contextlib.closing(rewards):
        values, late, log = rewards.score(texts_of(["a", "bb", "ccc"]), 3)
        assert values["length"].tolist() == [11, 12, 13] and not late.any()
        assert log.columns == {"upper": ["A", "BB", "CCC"]} and log.metrics["process"][1] == 3
        assert log.metrics["process"][0] != 3 * os.getpid()
        rewards.workers.timeout = 0.5
        values, late, _ = rewards.score(texts_of(["late"] * 3), 3)
        assert late.all() and values["length"].isnan().all()


# what is refused

@pytest.mark.parametrize(("names", "settings", "message"), [
    (("exact",), {}, "reward_functions: 'exact' is not one of .*; did you mean exact_match"),
    (("contains",), {"reward_weights": (1.0, 2.0)}, "must be as many as the rewards: contains"),
    (("judge",), {}, "judge_checkpoint is not set, but reward judge is asked for"),
    (("contains",), {"credit_window": 2}, "use credit_window=None with other rewards"),
    (("contains",), {"success_reward": "countdown"}, "'countdown' is not one of the rewards of texts that have a "
                                                     "highest value: contains"),
    (("contains",), {"reward_normalisation": "group", "train_pass_k": 2, "advantage": "leave_one_out"},
     "reward_normalisation='group' changes the rewards that train_pass_k=2 is made for"),
    (("judge",), {"reward_normalisation": "group", "credit_window": 2, "judge": True},
     "reward_normalisation='group' changes the rewards that credit_window=2 is"),
    (("judge",), {"train_pass_k": 2, "advantage": "leave_one_out", "judge": True},
     "train_pass_k=2 needs a success_reward"),
    (("judge",), {"success_reward": "judge", "judge": True}, "highest value: this run has none; use success_reward=None"),
    ((), {"task_type": "fill_in"}, "judge_checkpoint is not set, and neither is reward_functions: for prompts set "
                                   "those that python grpo"),
    (("reward_model",), {}, "reward_model_checkpoint is not set, but reward reward_model is asked"),
    (("contains",), {"reward_file": "none.py"}, "reward_file=none.py does not exist")])
def test_a_mistake_in_the_settings_is_refused(names, settings, message):
    if "judge" in settings:
        settings = settings | {"judge": Judge(judge(), TOKENIZER, True)}
    with pytest.raises((ValueError, FileNotFoundError), match=message):
        made(*names, **settings)


@pytest.mark.parametrize(("name", "fields", "message"), [
    ("regex", {"pattern": ["a", "(a", "b"]}, r"f.jsonl, line 2: reward regex: pattern '\(a' of a record"),
    ("code_execution", {"tests": ["pass", " ", "pass"]},
     "f.jsonl, line 2: reward code_execution needs the field 'tests' in every record, not .' '.: any code would pass"),
    ("code_execution", {"tests": ["pass", "pass", "assert f(1) =="]}, "f.jsonl, line 3: reward code_execution: tests="),
    ("exact_match", {"answer": ["a", "b", None]}, "f.jsonl, line 3: reward exact_match needs the field 'answer'"),
    ("countdown", {"numbers": [[1], ["one"], [3]], "target": [1, 1, 1]}, "f.jsonl, line 2: .*numbers=.*one")])
@pytest.mark.parametrize("workers", [0, 2])
def test_every_record_is_checked_and_the_first_bad_one_is_named(name, fields, message, workers):
    rewards = made(name, reward_workers=workers)
    with pytest.raises(ValueError, match=message):
        rewards.check(records(**fields))
    assert not rewards.workers.workers
    rewards.check(records(1, **{key: values[:1] for key, values in fields.items()}))


def test_a_record_that_a_reward_of_the_user_cannot_score_is_named():
    @reward(0, 1)
    def picky(completions, answer):
        if "bad" in answer:
            raise ValueError("no")
        return [0.0] * len(completions)

    with pytest.raises(ValueError, match="^f.jsonl, line 2: .*: reward picky: ValueError: no$"):
        made("picky").check(records(answer=["good", "bad", "bad"]))


def test_an_error_that_no_record_causes_names_none():
    looked_up("one", [1.0])
    with pytest.raises(ValueError, match="^reward one returned 1 values for 3 completions"):
        made("one").check(records())


def test_the_judge_does_not_score_records_but_must_have_room_for_prompt_and_completion():
    class Refusing(Judge):
        def scores(self, texts):
            raise AssertionError

    net, three = judge(), records(answer=["1", "2", "3"])
    for reads_ids, most in ((True, net.longest_input - 1), (False, 2 * net.longest_input)):
        made("judge", "exact_match", max_new_tokens=most, judge=Refusing(net, TOKENIZER, reads_ids)).check(three)
    three[1]["tokens"], three[1]["text"] = [1, 1], "longer"
    rewards = made("judge", max_new_tokens=net.longest_input - 1, judge=Judge(net, TOKENIZER, True))
    with pytest.raises(ValueError, match=f"f.jsonl, line 2: judge_checkpoint reads {net.longest_input} tokens, but "
                                         f"this prompt has 2 and its completion up to {net.longest_input - 1}: lower"):
        rewards.check(three)


def test_a_field_may_have_any_name():
    @reward(0, 1, slow=True, check=lambda **columns: None)
    def anything(completions, **columns):
        return [0.0] * len(completions)

    made("anything").check(records(record=["1", "2", "3"], function=["1", "2", "3"]))
