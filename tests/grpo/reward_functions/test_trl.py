"""Plain reward functions: they get what TRL gives them."""

import functools
import math
from types import SimpleNamespace

import pytest

from core.files.records import RAW
from grpo.reward_functions import registry, trl
from grpo.reward_functions.registry import Log, Reward, run_reward
from grpo.reward_functions.trl import TrainerState, plain_arguments, register_functions

CHAT = [{"role": "system", "content": "be brief"}, {"role": "user", "content": "1+1"}]


@pytest.fixture(autouse=True)
def empty_table(monkeypatch):
    monkeypatch.setattr(registry, "REWARDS", table := {})
    monkeypatch.setattr(trl, "REWARDS", table)


def texts(prompts=("q", "q"), **columns):
    """Completions of these prompts, which a template has rendered."""
    return SimpleNamespace(prompts=[f"rendered {i}" for i in range(len(prompts))], completions=["a", "b"],
                           completion_ids=[[1, 0], [2]], columns={"prompt": list(prompts)} | columns)


def given(fn, texts, all_fields=()):
    """The arguments that a plain function gets."""
    register_functions([fn.__name__], {fn.__name__: fn}, "mine.py")
    fields, settings = plain_arguments(fn.__name__, texts, {"trainer_state": TrainerState(3, 9)}, all_fields)
    return fields | settings


def everything(**kwargs):
    return [0.0] * len(kwargs["completions"])


def test_a_function_with_kwargs_gets_all_that_trl_gives():
    found = given(everything, texts(answer=["1", "2"], level=[3, 4]))
    assert found == {"prompts": ["q", "q"], "completions": ["a", "b"], "completion_ids": [[1, 0], [2]],
                     "answer": ["1", "2"], "solution": ["1", "2"], "response": ["1", "2"], "output": ["1", "2"],
                     "level": [3, 4], "trainer_state": TrainerState(3, 9),
                     "question": ["q", "q"], "instruction": ["q", "q"], "problem": ["q", "q"]}


def test_a_number_as_an_answer_stays_a_number():
    found = given(everything, texts(answer=["5", "x"], **{RAW: [5, "x"]}), all_fields=("answer", RAW))
    assert found["answer"] == found["solution"] == [5, "x"] and RAW not in found
    found = given(everything, texts(answer=["5", "x"]), all_fields=("answer", RAW))  # a step without such a record
    assert found["answer"] == found["solution"] == ["5", "x"] and RAW not in found


def test_other_functions_get_what_they_name_and_a_field_that_a_record_lacks_as_none():
    def by_name(completions, solution, level, log_metric=None, log_extra=None):
        log_metric("length", len(completions))
        log_extra("mine", solution)
        return [0.5, None]

    found = given(by_name, texts(answer=["1", "2"], other=[3, 4]), all_fields=("answer", "level"))
    assert found == {"completions": ["a", "b"], "solution": ["1", "2"], "level": [None, None]}
    (half, skipped), log = run_reward("by_name", found, {}, 2)
    assert half == 0.5 and math.isnan(skipped) and log == Log({"length": (2.0, 1)}, {"mine": ["1", "2"]})
    with pytest.raises(ValueError, match="reward by_name needs the field 'level' in every record"):
        given(by_name, texts(answer=["1", "2"]), all_fields=("answer",))


def test_a_function_may_change_what_it_gets_from_the_records():
    """Each completion has its own copies of the values of a record."""
    def careless(prompts, completions, numbers):
        for prompt in prompts:
            prompt[0]["role"] = "changed"
        return [own.pop() + len(own) for own in numbers]

    shared, chat = [1, 2], [dict(m) for m in CHAT]
    found = given(careless, texts([chat, chat], numbers=[shared, shared]))
    assert run_reward("careless", found, {}, 2)[0] == [3.0, 3.0]
    assert chat == CHAT and shared == [1, 2], "the data stay as they are"


def test_completions_of_messages_are_messages_each_by_its_own_prompt():
    found = given(everything, texts([CHAT, "q"], completion=["x", "y"]))
    assert found["prompts"] == [CHAT, "q"] and "completion" not in found and "prompt" not in found
    assert found["completions"] == [[{"role": "assistant", "content": "a"}], "b"]


class Counts:
    def __call__(self, completions, **kwargs):
        return [float(len(text)) for text in completions]


class Waits:
    async def __call__(self, completions, **kwargs):
        return [2.0 for _ in completions]


@pytest.mark.parametrize(("function", "expected"), [
    (Counts(), 1.0), (Waits(), 2.0), (functools.partial(lambda completions, factor, **kwargs: [
        factor * len(text) for text in completions], factor=3.0), 3.0)])
def test_anything_that_can_be_called_may_be_a_reward(function, expected):
    register_functions(["mine"], {"mine": function}, "mine.py")
    fields, settings = plain_arguments("mine", texts(), {"trainer_state": TrainerState()})
    assert run_reward("mine", fields, settings, 2)[0] == [expected] * 2


def test_a_function_takes_no_name_of_another_reward_but_may_be_loaded_again():
    registry.REWARDS["exact"] = Reward(lambda completions: [], 0, 1, False, False, None)
    with pytest.raises(ValueError, match="'exact' is a function of reward_file=mine.py, but also a reward that is"):
        register_functions(["exact"], {"exact": everything}, "mine.py")
    register_functions(["exact"], {"exact": registry.REWARDS["exact"].fn}, "mine.py")  # imported from where it is
    assert not registry.REWARDS["exact"].plain
    for function in (everything, Counts()):
        register_functions(["mine", "not there"], {"mine": function, "more": print}, "mine.py")
        assert registry.REWARDS["mine"].fn is function and set(registry.REWARDS) == {"exact", "mine"}


@pytest.mark.slow
@pytest.mark.parametrize("chat", [False, True])
@pytest.mark.parametrize("is_async", [False, True])
def test_a_function_gets_the_same_from_trl_itself(chat, is_async, monkeypatch):
    """TRL's own call of reward functions, on the same records and completions."""
    package = pytest.importorskip("trl")
    if package.__version__ != "1.16.0":  # called by its private name
        pytest.skip(f"written for trl==1.16.0, not {package.__version__}")
    from trl.trainer.grpo_trainer import GRPOTrainer
    seen, prompts = [], [CHAT, CHAT] if chat else ["q", "q"]

    def mine(prompts, completions, completion_ids, answer, **kwargs):
        seen.append({"prompts": prompts, "completions": completions, "completion_ids": completion_ids, "answer": answer}
                    | kwargs)
        return [1.0, None]

    async def mine_async(prompts, completions, completion_ids, answer, **kwargs):
        return mine(prompts, completions, completion_ids, answer, **kwargs)

    ours = texts(prompts, answer=["1", "2"], level=[3, 4])
    answers = [[{"role": "assistant", "content": x}] for x in "ab"] if chat else ["a", "b"]
    records = [{"prompt": prompt, "answer": answer, "level": level}
               for prompt, answer, level in zip(prompts, "12", (3, 4), strict=True)]
    fn = mine_async if is_async else mine
    trainer = SimpleNamespace(
        accelerator=SimpleNamespace(device="cpu", is_main_process=False), reward_funcs=[fn], reward_processing_classes=[None],
        reward_func_names=["mine"], environments=None, state=TrainerState(3, 9), _log_metric=print,
        _log_completion_extra=print, args=SimpleNamespace(report_to=[]), async_loop=registry.event_loop())
    monkeypatch.setattr("trl.trainer.grpo_trainer.gather", lambda x: x)
    monkeypatch.setattr("trl.trainer.grpo_trainer.logger", SimpleNamespace(warning=print))
    theirs = GRPOTrainer._calculate_rewards(trainer, records, prompts, answers, [[1, 0], [2]])
    register_functions([fn.__name__], {fn.__name__: fn}, "mine.py")
    values, _ = run_reward(fn.__name__, *plain_arguments(fn.__name__, ours, {"trainer_state": TrainerState(3, 9)}), 2)
    # Names of the prompt and of the answer that TRL does not know
    left_out = {"question", "instruction", "problem", "solution", "response", "output"}
    them, us = ({key: x for key, x in call.items() if key not in left_out and not callable(x)} for call in seen)
    assert us == them and set(seen[0]) - left_out == set(seen[1]) - left_out
    assert values[0] == theirs[0, 0] == 1 and math.isnan(values[1]) and theirs[1, 0].isnan()
