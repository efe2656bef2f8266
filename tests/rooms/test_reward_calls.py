"""How a function becomes a reward, that it gets what TRL gives it, and how its return value is read."""

import asyncio
import math
import sys
import threading
from types import SimpleNamespace

import numpy as np
import pytest
import torch

from core.errors import Mistake
from grpo.reward_functions import registry
from grpo.reward_functions.registry import Call, Reward, arguments, run_reward

CHAT = [{"role": "system", "content": "be brief"}, {"role": "user", "content": "1+1"}]
STATE = SimpleNamespace(global_step=3, max_steps=9)


@pytest.fixture(autouse=True)
def empty_table(monkeypatch):
    monkeypatch.setattr(registry, "REWARDS", {})


def texts(prompts=("q", "q"), **columns):
    """Completions of these prompts, which a template has rendered."""
    return SimpleNamespace(prompts=[f"rendered {i}" for i in range(len(prompts))], completions=["a", "b"],
                           completion_ids=[[1, 0], [2]], columns={"prompt": list(prompts)} | columns)


def call_of(fn, texts, known=None, empty=()):
    """The Call of a function without @reward."""
    registry.REWARDS["mine"] = Reward(fn)
    return arguments("mine", texts, {"trainer_state": STATE} | (known or {}), empty)


def returned(fn, N=2):
    """The values of a function without @reward, as they are read."""
    registry.REWARDS["mine"] = Reward(fn)
    return run_reward(Call("mine", {"completions": ["a"] * N}, {}, N))[0]


def with_settings(completions, *, length_min=3, texts, group_size, **columns):
    pass


def test_a_function_gets_what_its_signature_names():
    """A setting wins over a field; a field that these records lack, but others of the data have, is None."""
    found = call_of(lambda completions, solution, level=None: [], texts(answer=[1, "2"]), empty=["level"])
    assert found.fields == {"completions": ["a", "b"], "solution": [1, "2"], "level": [None, None]}
    known = {"texts": "the texts", "judge_model": "a judge", "group_size": 2, "length_min": 7}
    found = call_of(with_settings, texts(length_min=[1, 2], answer=[1, "2"]), known)
    settings = {"texts": "the texts", "group_size": 2, "length_min": 7, "trainer_state": STATE}
    assert found.settings == settings and "length_min" not in found.fields
    assert found.fields["response"] == [1, "2"] and found.fields["question"] == found.fields["prompts"] == ["q", "q"]


def test_a_function_may_change_what_it_gets_from_the_records():
    """Each completion has its own copies of the values of a record."""
    numbers = [1, 2]
    call = call_of(lambda numbers: [own.pop() + len(own) for own in numbers], texts(numbers=[numbers, numbers]))
    assert run_reward(call)[0] == [3.0, 3.0] and numbers == [1, 2], "the data stay as they are"


def running_loop():
    """An event loop in a thread, as TRL's trainer has one."""
    loop = asyncio.new_event_loop()
    threading.Thread(target=loop.run_forever, daemon=True).start()
    return loop


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

    def mine(**given):
        seen.append(given)
        return [1.0, None]

    async def mine_async(**given):
        return mine(**given)

    answers = [[{"role": "assistant", "content": x}] for x in "ab"] if chat else ["a", "b"]
    records = [{"prompt": prompt, "answer": answer, "level": level}
               for prompt, answer, level in zip(prompts, "12", (3, 4), strict=True)]
    fn = mine_async if is_async else mine
    trainer = SimpleNamespace(
        accelerator=SimpleNamespace(device="cpu", is_main_process=False), reward_funcs=[fn], environments=None,
        reward_processing_classes=[None], reward_func_names=["mine"], state=STATE, _log_metric=print,
        _log_completion_extra=print, args=SimpleNamespace(report_to=[]), async_loop=running_loop())
    monkeypatch.setattr("trl.trainer.grpo_trainer.gather", lambda x: x)
    monkeypatch.setattr("trl.trainer.grpo_trainer.logger", SimpleNamespace(warning=print))
    theirs = GRPOTrainer._calculate_rewards(trainer, records, prompts, answers, [[1, 0], [2]])
    values, _ = run_reward(call_of(fn, texts(prompts, answer=["1", "2"], level=[3, 4])))
    # Names of the prompt and of the answer that TRL does not know
    left_out = {"prompt", "question", "instruction", "problem", "solution", "response", "output"}
    them, us = ({key: x for key, x in call.items() if key not in left_out and not callable(x)} for call in seen)
    assert us == them and set(seen[0]) - left_out == set(seen[1]) - left_out
    assert values[0] == theirs[0, 0] == 1 and math.isnan(values[1]) and theirs[1, 0].isnan()


@pytest.mark.parametrize("values, expected", [
    *((values, [0.5, 1.0]) for values in (
        (0.5, 1.0), np.array([0.5, 1.0]), torch.tensor([0.5, 1.0]), [np.float32(0.5), torch.tensor(1.0)], [0.5, True],
        torch.tensor([[0.5], [1.0]]), np.array([[0.5], [1.0]]))),
    ([None, 1.0], [-1, 1.0]), ([math.nan, 1.0], [-1, 1.0]), (torch.tensor([math.nan, 1.0]), [-1, 1.0]),
    ([math.inf, -math.inf], [math.inf, -math.inf])])
def test_values_may_be_any_numbers_none_and_nan_skip_and_infinity_keeps_its_sign(values, expected):
    found = returned(lambda completions: values)
    assert [-1 if math.isnan(x) else x for x in found] == expected and all(type(x) is float for x in found)


@pytest.mark.parametrize("values", [None, 1.0, "ab", [[1.0], 2.0], torch.zeros(2, 2), ["1", "2"],
                                    torch.zeros(1, 2), [0.0, 10**400], [1.0]])
def test_what_is_no_list_of_a_number_for_each_completion_is_refused(values):
    with pytest.raises(Mistake, match="test_reward_calls.py, line .* reward mine "):
        returned(lambda completions: values)


def test_async_rewards_share_one_event_loop():
    loops = []

    async def waits(completions):
        loops.append(asyncio.get_running_loop())
        return [1.0, 2.0]

    assert returned(waits) == returned(waits) == [1.0, 2.0]
    assert loops[0] is loops[1], "a connection that belongs to the loop stays open"


@pytest.mark.parametrize("body", ["raise SystemExit", "raise ValueError('x' * 10_000_000)",
                                  "raise ValueError(chr(27) + '[2J' + chr(0) + chr(0x202e) + chr(10))"])
@pytest.mark.parametrize("prefix", ["def", "async def"])
def test_whatever_a_reward_does_it_ends_in_one_line_that_names_its_file(body, prefix, tmp_path):
    """The file imports a neighbour."""
    (tmp_path / "neighbour_of_rewards.py").write_text("ONE = 1\n")
    path = tmp_path / "mine.py"
    path.write_text(f"from neighbour_of_rewards import ONE\n{prefix} hostile(completions):\n    {body}\n")
    registry.register_functions(["hostile", "not there"], str(path))
    with pytest.raises(Mistake, match="mine.py, line") as found:
        run_reward(Call("hostile", {"completions": ["a", "b"]}, {}, 2))
    assert str(found.value).isprintable() and len(str(found.value)) < 2000
    assert set(registry.REWARDS) == {"hostile"} and str(tmp_path) not in sys.path
