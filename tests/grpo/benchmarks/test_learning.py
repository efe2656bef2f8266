"""The comparison of learning: both sides read the same prompts and give the same rewards; the table; the small model."""

import json
import random

import pytest

from grpo.benchmarks import learning, learning_tools
from grpo.benchmarks.learning import LearningConfig, report
from grpo.benchmarks.learning_ours import our_steps
from grpo.reward_functions.registry import load_reward_file
from tests.grpo.benchmarks.test_peer import steps_of
from tests.tiny import jsonl, prompt_config

REWARD = '''
import json
from grpo.rewards import reward

@reward(0, 1)
def seen(prompts, completions, answer, **columns):
    """The share of digits; writes down what it was called with."""
    shares = [sum(c.isdigit() for c in text) / max(1, len(text)) for text in completions]
    with open({path!r}, "a") as file:
        file.write(json.dumps([sorted(answer), sum(shares) / len(shares)]) + "\\n")
    return shares
'''


@pytest.mark.parametrize("changes, message", [
    ({"task": "chess"}, "task='chess' is not one of sums, tools"), ({"steps": 4}, "steps=4 must be at least 5"),
    ({"group_size": 1}, "group_size=1 must be at least 2"),
    ({"batch_size": 5, "group_size": 4}, "batch_size=5 . group_size=4 must be at most 16 or a multiple of it")])
def test_settings_that_cannot_be_are_refused(changes, message):
    with pytest.raises(ValueError, match=message):
        LearningConfig(**changes)


def test_the_table_has_the_mean_of_each_fifth_over_seeds_and_the_ratio_of_the_times(capsys):
    def side(rewards, seconds):
        return [{"reward": x, "seconds": seconds} for x in rewards]
    low, high = [0, 0, 0.2, 0.4, 0.6, 0.8, 0.8, 0.8, 1, 1, 0.4], [0.2] * 11
    report([(side(low, 6.0), side(high, 2.0)), (side([x / 2 for x in low], 6.0), side(high, 2.0))])
    *lines, last = capsys.readouterr().out.strip().split("\n")
    assert json.loads(last) == {"ratio": 3.0, "TRL": {"seconds": 6.0, "rewards": [low, [x / 2 for x in low]]},
                                "ours": {"seconds": 2.0, "rewards": [high, high]}}
    assert "0.225 ± 0.106" in lines[0] and "0.525 ± 0.247" in lines[0] and lines[1].count("0.200 ± 0.000") == 5


@pytest.mark.slow
def test_both_sides_read_the_same_prompts_in_each_step_and_record_the_reward_of_what_they_wrote(tmp_path):
    pytest.importorskip("trl")
    from grpo.benchmarks.learning_trl import trl_steps
    from tests.families import model_folder
    seen = tmp_path / "seen.jsonl"
    (tmp_path / "seen.py").write_text(REWARD.replace("{path!r}", repr(str(seen))))
    records = ({"prompt": f"{a}+{b}=", "answer": str(100 * a + b)} for a in range(1, 9) for b in range(1, 9))
    c = prompt_config(generator_checkpoint=model_folder(tmp_path / "qwen3", "qwen3", longest=256), template="model",
                      dataset=jsonl(tmp_path / "sums.jsonl", *records), reward_file=str(tmp_path / "seen.py"),
                      reward_functions=("seen",), batch_size=3, group_size=2, max_new_tokens=5, max_iters=3, kl_beta=0.0, lora_rank=2,
                      temperature=1.0)
    calls = {}
    for run in (our_steps, trl_steps):
        seen.write_text("")
        recorded = [record["reward"] for record in steps_of(run, c, steps=3)]
        written = [json.loads(line) for line in seen.read_text().splitlines()]
        calls[run] = [answers for answers, _ in written if len(answers) == 6][-3:]  # others are checks of the records
        assert recorded == pytest.approx([share for answers, share in written if len(answers) == 6][-3:])
    assert calls[our_steps] == calls[trl_steps] and len(set(map(tuple, calls[our_steps]))) == 3


def test_half_of_the_calls_in_the_examples_have_a_wrong_number_and_the_tool_answers_them():
    rng, right = random.Random(0), []
    tool = load_reward_file(learning_tools.TOOL_FILE)["Multiply"]()
    for _ in range(2000):
        record = learning_tools.example(rng)
        turns = [message["content"] for message in record["prompt"]]
        call = record["completion"] if len(turns) == 1 else turns[1]
        arguments = json.loads(call.removeprefix("<tool_call>").removesuffix("</tool_call>"))["arguments"]
        tool.reset(**record)
        product = tool.multiply(**arguments)
        assert len(turns) == 1 or turns[2] == record["completion"] == str(product)
        assert f"what is {record['a']}*{record['b']}?" in turns[0] and record["answer"] == str(record["a"] * record["b"])
        right.append(tool.get_reward())
    assert 0.5 < sum(right) / len(right) < 0.62, "half, and wrong numbers that are right by chance"


@pytest.mark.slow
def test_both_sides_play_the_task_with_the_tool_from_the_same_model(tmp_path, monkeypatch):
    pytest.importorskip("trl")
    monkeypatch.setattr(learning_tools, "SUPERVISED", (*learning_tools.SUPERVISED, "--max_iters=1", "--warmup_iters=1", "--batch_size=2"))
    monkeypatch.setattr(learning_tools, "EXAMPLES", 60)
    monkeypatch.setattr(learning_tools, "PROBLEMS", 60)
    from core.config import load_config
    from grpo.grpo_config import GRPOConfig
    c, _ = load_config(GRPOConfig, [*learning.TASKS["tools"](str(tmp_path)), "--max_iters=1", "--batch_size=2", "--group_size=2", "--max_new_tokens=8"])
    from grpo.benchmarks.learning_trl import trl_steps
    for run in (our_steps, trl_steps):
        record, = steps_of(run, c, steps=1)
        assert 0.0 <= record["reward"] <= 1.0 and record["seconds"] > 0
