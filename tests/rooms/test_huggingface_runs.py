"""GRPO on Hugging Face models: the first step, and whole runs from a folder and a file, as a user starts them."""

import functools
import os

import pytest
import torch

transformers = pytest.importorskip("transformers")

from core.huggingface.tokenizer import load_huggingface_tokenizer
from core.logger import format_number
from core.models import load_model
from grpo.build import build_data, build_models
from grpo.grpo_config import GRPOConfig
from grpo.rewards import Scored
from tests.families import (
    CAUSAL_FAMILIES,
    DIFFUSION_FAMILIES,
    FILL_FAMILIES,
    adapter_folder,
    base_model,
    model_folder,
    write_prose,
    write_sums,
)
from tests.tiny import grpo_step, one_process, read_records, run_here, run_script, without_clock

pytestmark = pytest.mark.slow  # it is the number of them that takes the time

TRAIN = "grpo/train_grpo.py"
SMALL = {"batch_size": 4, "group_size": 4, "max_iters": 3, "eval_problems": 4, "eval_completions": 4, "log_interval": 1,
         "sample_interval": 3, "device": "cpu", "learning_rate": 1e-3, "min_lr": 1e-3, "warmup_iters": 0}
CAUSAL_RUN = SMALL | {"max_new_tokens": 6, "task_type": "general"}
FILL_RUN = SMALL | {"block_size": 16}
VOWELS = '''
from grpo.rewards import reward

@reward(low=0.0, high=1.0)
def vowels(prompts, completions, **columns):
    """The share of vowels among the characters."""
    return [sum(c in "aeiou" for c in text) / max(1, len(text)) for text in completions]
'''


@pytest.fixture(scope="module")
def world(tmp_path_factory):
    """name -> a path: a model of a family, a data set, rewards or an adapter, made when it is first needed."""
    root, made = tmp_path_factory.mktemp("world"), {}

    def make(name):
        if name == "sums":
            return write_sums(root / "sums.jsonl")
        if name == "rewards":
            (root / "vowels.py").write_text(VOWELS)
            return str(root / "vowels.py")
        if name.endswith(" adapter"):
            return adapter_folder(root / name, of(name.removesuffix(" adapter")))
        if name.startswith("prose of "):
            return write_prose(root / name, load_huggingface_tokenizer(of(name.removeprefix("prose of "))))
        if name == "wide llama":  # a block of 4 bits has 64 weights of a row
            return model_folder(root / name, "llama", n_embd=64)
        return model_folder(root / name, name)

    def of(name):
        made[name] = made.get(name) or make(name)
        return made[name]
    return of


def settings_of(world, family, **more):
    """The settings of a small run of this family, with a reward that differs from completion to completion."""
    causal = family.removeprefix("wide ") in (*CAUSAL_FAMILIES, *DIFFUSION_FAMILIES)
    if family in DIFFUSION_FAMILIES:
        more = {"unmask_steps": 3} | more
    data = world("sums") if causal else world(f"prose of {family}")
    settings = {"generator_checkpoint": world(family), "dataset": data, "reward_file": world("rewards"),
                "reward_functions": ("vowels",)}
    return (CAUSAL_RUN if causal else FILL_RUN) | settings | more


def arguments(settings):
    return [f"--{key}={value}" for key, value in settings.items()]


def launch(settings, start=run_here, **more):
    """The command, which must end well."""
    done = start(TRAIN, *arguments(settings), **more)
    assert done.returncode == 0, done.stderr


def steps(folder):
    """The records of optimizer steps in a run's metrics.jsonl, without times."""
    return [r for r in without_clock(read_records(os.path.join(folder, "metrics.jsonl"))) if "loss" in r]


def state_of(folder):
    return torch.load(os.path.join(folder, "state.pt"), weights_only=True)["model"]


def random_rewards(rollouts):
    """A rewards object: different for all completions, the same whenever it is asked."""
    generator = torch.Generator().manual_seed(len(rollouts.target))
    return Scored(torch.rand(rollouts.problems, rollouts.group_size, generator=generator))


FULL, LORA, PASSES = {}, {"lora_rank": 4}, {"unmask_steps": 3, "top_p": 1.0}
FAMILIES = (*CAUSAL_FAMILIES, *DIFFUSION_FAMILIES, *FILL_FAMILIES)
FIRST_STEPS = [(family, more) for family in FAMILIES for more in (FULL, LORA)]


@pytest.mark.parametrize("family, more", [*FIRST_STEPS, ("modernbert", PASSES)], ids=str)
def test_at_step_0_the_policy_is_its_reference_and_the_sampler_agrees_with_the_scorer(family, more, world):
    c, dist = GRPOConfig(**settings_of(world, family, kl_beta=0.1, **more)), one_process()
    data = build_data(c, dist)
    models = build_models(c, data, dist)
    metrics = grpo_step(models.policy, models.reference, random_rewards, data, c)
    assert metrics["mean_kl"] == 0.0, "to the last bit"
    assert metrics["mismatch_max"] < 2e-5 and metrics["mismatch_kl"] < 1e-9 and metrics["ratio_minus_one"] < 1e-5
    assert metrics["grad_norm"] > 1e-3


@pytest.mark.parametrize("rank, start", [(0, run_script), (8, run_here)], ids=["full", "lora"])
def test_a_run_from_nothing_but_a_folder_and_a_file_learns_and_saves_what_transformers_or_peft_opens(
        rank, start, world, tmp_path):
    out = tmp_path / "out"
    more = {"lora_rank": rank, "max_iters": 15, "group_size": 16, "kl_beta": 0.0, "out_dir": out,
            "learning_rate": 3e-2 if rank else 5e-3}
    launch(settings_of(world, "llama", **more), start)
    rewards = [r["mean_reward"] for r in steps(out)]
    assert sum(rewards[-3:]) > sum(rewards[:3]) + 0.3, rewards
    *_, evaluated = [r["eval/mean_reward"] for r in read_records(out / "metrics.jsonl") if "eval/mean_reward" in r]
    card = (out / "model" / "README.md").read_text("utf-8")
    assert f" eval/mean_reward {format_number(evaluated)}" in card and "steps: 15;" in card
    net, expected = base_model(world("llama") if rank else out / "model"), load_model(str(out / "model"))[0]
    if rank:
        net = pytest.importorskip("peft").PeftModel.from_pretrained(net, str(out / "model")).eval()
    ids = torch.arange(20)[None]
    with torch.no_grad():
        torch.testing.assert_close(net(input_ids=ids).logits, expected(ids), rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("family, more", [
    ("llama", {"lora_init_from": "llama adapter"}), ("Dream", {}), ("bert", {}), ("mamba2", {}),
    ("wide llama", {"lora_rank": 4, "load_in_4bit": True, "dtype": "bfloat16", "grad_checkpoint": True}),
    ("llama", {"lora_rank": 4, "reference_mode": "periodic", "reference_update_freq": 1})], ids=str)
def test_a_resumed_run_is_the_run_that_was_not_interrupted_to_the_last_bit(family, more, world, tmp_path):
    if "lora_init_from" in more:
        more = {"lora_init_from": world(more["lora_init_from"])}
    if "load_in_4bit" in more:
        pytest.importorskip("bitsandbytes")
    settings = settings_of(world, family, ppo_epochs=2, kl_beta=0.05, lr_decay_iters=4, eval_interval=100, **more)
    launch(settings | {"max_iters": 4, "out_dir": tmp_path / "whole"})
    launch(settings | {"max_iters": 3, "out_dir": tmp_path / "cut"})  # within an iteration
    launch(settings | {"max_iters": 4, "out_dir": tmp_path / "cut", "resume": True})
    whole, cut = steps(tmp_path / "whole"), steps(tmp_path / "cut")
    assert [r["step"] for r in whole] == [1, 2, 3, 4] and whole == cut and whole[-1]["mean_kl"] > 0
    states = [state_of(tmp_path / name) for name in ("whole", "cut")]
    assert states[0].keys() == states[1].keys() and all(torch.equal(p, states[1][name])
                                                        for name, p in states[0].items())
    assert all(("lora_" in name) == bool(more) for name in states[0])


@pytest.mark.parametrize("family, rank", [("llama", 4), ("qwen3_5", 0), ("llada", 0)])
def test_two_ranks_equal_one(family, rank, world, tmp_path):
    settings = settings_of(world, family, lora_rank=rank, kl_beta=0.05, eval_interval=100, grad_clip=1.0)
    launch(settings | {"max_iters": 1, "out_dir": tmp_path / "first"})
    launch(settings | {"out_dir": tmp_path / "one"})
    launch(settings | {"batch_size": 2, "out_dir": tmp_path / "two"}, run_script, ranks=2)
    one, two = steps(tmp_path / "one"), steps(tmp_path / "two")
    for key in ("loss", "mean_reward", "std_reward", "entropy", "grad_norm", "unique_completions", "mean_log_prob"):
        assert two[0][key] == pytest.approx(one[0][key], rel=2e-5, abs=2e-6), key
    first, last, other = (torch.cat([p.flatten().float() for p in state_of(tmp_path / name).values()])
                          for name in ("first", "one", "two"))
    assert 0 < (last - other).norm() < 0.02 * (last - first).norm()


PEAK = """
from grpo.rewards import reward

@reward(low=0.0, high=1.0)
def vowels(prompts, completions, trainer_state, log_metric, **columns):
    log_metric("peak", -abs(trainer_state.global_step - 2))
    return [sum(c in "aeiou" for c in text) / max(1, len(text)) for text in completions]
"""


@pytest.mark.parametrize("ranks", [1, 2])
def test_the_best_adapter_is_kept_whole_and_its_run_goes_on_also_sharded(world, tmp_path, ranks):
    """Its metric is highest at step 2."""
    (tmp_path / "peak.py").write_text(PEAK)
    settings = settings_of(world, "llama", lora_rank=4, reward_file=tmp_path / "peak.py", keep_best="eval/peak",
                           max_iters=4, eval_interval=1, save_interval=4, out_dir=tmp_path / "out")
    start = run_here
    if ranks > 1:
        start = functools.partial(run_script, ranks=ranks)
        settings |= {"parallel": "fsdp"}
    launch(settings, start)
    whole, best = tmp_path / "out", tmp_path / "out" / "best"
    kept = state_of(best)
    adapter = GRPOConfig(lora_init_from=str(best / "model"))
    opened = load_model(world("llama"), adapter=adapter)[0].weights()
    assert opened.keys() == kept.keys() and all(torch.equal(opened[name], x) for name, x in kept.items())
    assert steps(best) == steps(whole)[:2]
    for script, more in (("core/sample.py", ("--num_samples=1",)), ("core/export.py", (f"--out={tmp_path}/merged",))):
        done = run_here(script, f"--checkpoint={best}/model", *more)
        assert done.returncode == 0, done.stderr
    done = start(TRAIN, "--resume=True", f"--out_dir={best}")
    assert done.returncode == 0, done.stderr
    assert steps(best) == steps(whole)
    last = state_of(whole)
    assert all(torch.equal(last[name], x) for name, x in state_of(best).items())
    assert any(not torch.equal(last[name], x) for name, x in kept.items())
    assert all(torch.equal(kept[name], x) for name, x in state_of(best / "best").items())
