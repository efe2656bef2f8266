"""The table of estimators: with one pass one_step and agrpo are exact, with several they are not."""

import pytest

from core.models import save_model
from grpo.tools import estimators
from tests.tiny import CAUSAL, causal_model, prompt_fill_policy, run_here

DIGITS = """
from grpo.rewards import reward

@reward(low=0.0, high=9.0)
def digits(prompts, completions, **columns):
    return [float(sum(c.isdigit() for c in text)) for text in completions]
"""


def rows(tmp_path, prompts, *arguments):
    """{estimator: [cosine, cosine of the sum, norm, tokens]} that the script prints."""
    path = str(tmp_path / "model.safetensors")
    (tmp_path / "digits.py").write_text(DIGITS)
    save_model(path, prompt_fill_policy(seed=1).model, CAUSAL)
    done = run_here("grpo/tools/estimators.py", f"--dataset={prompts}", f"--generator_checkpoint={path}", "--device=cpu",
                    "--max_new_tokens=6", "--batch_size=4", "--group_size=4", "--top_p=1.0", "--task_type=general",
                    f"--reward_file={tmp_path}/digits.py", "--reward_functions=digits",
                    "--batches=2", *arguments)
    assert done.returncode == 0, done.stderr
    lines = [line.split(" | ") for line in done.stdout.strip().split("\n")[2:]]
    return {name[2:]: [float(x.split(" ± ")[0]) for x in cells[:-1]] for name, *cells in lines}


def test_a_causal_generator_has_no_estimators(prompts, tmp_path):
    path = str(tmp_path / "causal.safetensors")
    save_model(path, causal_model(), CAUSAL)
    done = run_here("grpo/tools/estimators.py", f"--dataset={prompts}", f"--generator_checkpoint={path}", "--device=cpu",
                    "--top_p=1.0", "--task_type=general", "--reward_functions=length_penalty")
    assert done.returncode == 1 and "fill_estimator=agrpo is for fill-in and prompts, in any order" in done.stderr


def test_several_ranks_are_refused(monkeypatch):
    for name, value in {"RANK": "1", "WORLD_SIZE": "2", "MASTER_ADDR": "localhost", "MASTER_PORT": "29400"}.items():
        monkeypatch.setenv(name, value)
    monkeypatch.setattr(estimators, "Distributed", None)  # nobody waits for the other rank
    with pytest.raises(ValueError, match="in one process, not in 2: start it without torchrun"):
        estimators.main(["config/grpo_any_order.py"])


def test_where_an_estimator_is_exact_its_row_says_so(tmp_path, prompts):
    one = rows(tmp_path, prompts, "--unmask_steps=1")
    assert one["one_step"] == one["trajectory"] == [1, 1, 1, 1] and one["agrpo"][:3] == [1, 1, 1]
    several = rows(tmp_path, prompts, "--unmask_steps=3")
    assert several["trajectory"] == [1, 1, 1, 1] and len(several) == 7
    assert all(-1 <= cosine < 0.999 for name, (cosine, *_) in several.items() if name != "trajectory")
    assert several["one_step"][3] < several["step_merge"][3] < several["agrpo"][3] < 1
