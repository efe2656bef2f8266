"""What a run says that it is about to do."""

from dataclasses import replace

import pytest

from core.models import save_model
from grpo.plan import plan
from grpo.sandbox import run as sandbox
from tests.grpo.trainers import assembled
from tests.tiny import CAUSAL, causal_model, jsonl, one_process, prompt_config


@pytest.fixture(scope="module")
def native(tmp_path_factory):
    """The path of a causal model of this project."""
    path = str(tmp_path_factory.mktemp("native") / "causal")
    save_model(path, causal_model(), CAUSAL)
    return path


def planned(c, dist=None):
    """(the lines that a run prints at its start, its Models, its data)."""
    data, models, scoring = assembled(c)
    return list(plan(c, {}, models, scoring, data, dist or one_process())), models, data


def test_the_plan_says_under_what_code_runs_and_a_strict_run_refuses_less(native, tmp_path, monkeypatch):
    c = prompt_config(dataset=jsonl(tmp_path / "code.jsonl", *({"prompt": f"{i}+1=", "tests": "pass"}
                                                               for i in range(10, 40))),
                      generator_checkpoint=native, reward_functions=("code_execution",))
    under = lambda c: [line for line in planned(c)[0] if line.startswith("code runs under ")]
    assert len(under(c)) == 1 and under(replace(c, reward_functions=("length_penalty",))) == []
    monkeypatch.setattr(sandbox, "missing_parts", lambda: {"Landlock": "syscall 444: Function not implemented"})
    assert "; missing: Landlock (syscall 444: Function not implemented)" in under(c)[0]
    with pytest.raises(ValueError, match="sandbox='Strict'.*Landlock"):
        planned(replace(c, reward_settings={"sandbox": "Strict"}))
