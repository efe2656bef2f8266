"""The settings and their defaults, and the models, references and problems that a config builds."""

import subprocess
import sys
from dataclasses import replace

import pytest
import torch

from core.config import load_config
from core.models import save_model
from grpo.build import Models, build_data, build_models, build_reference, fill_in_evaluation
from grpo.grpo_config import GRPOConfig
from grpo.losses import OBJECTIVES, baseline_of
from grpo.policies.causal import CausalPolicy
from grpo.policies.fill import FillPolicy
from grpo.policies.prompt_fill import PromptFillPolicy
from tests.tiny import (
    CAUSAL, ROOT, TOKENIZER, causal_model, causal_policy, config, fill_policy, judge, model, one_process, prompt_config,
    same, save)


def load(arguments):
    return load_config(GRPOConfig, arguments.split())[0]


def test_canonical_defaults():
    expected = {
        "group_size": 8, "kl_beta": 0.1, "learning_rate": 1e-5, "temperature": 0.8, "top_p": 0.95, "batch_size": 16,
        "gradient_accumulation_steps": 1, "weight_decay": 0.1, "beta1": 0.9, "beta2": 0.95, "grad_clip": 1.0,
        "seed": 1337, "device": "auto", "out_dir": "out-grpo"}
    assert {key: getattr(GRPOConfig(), key) for key in expected} == expected


def test_a_config_can_add_an_objective_of_its_own(tmp_path, monkeypatch):
    monkeypatch.delitem(OBJECTIVES, "mine", raising=False)  # and so once more at the end
    path = tmp_path / "c.py"
    path.write_text("from grpo import losses\nlosses.OBJECTIVES['mine'] = losses.OBJECTIVES['dapo']\n"
                    "objective = 'mine'\n")
    assert baseline_of(load(str(path))) == OBJECTIVES["dapo"].advantage


@pytest.mark.parametrize("part", ["advantage", "average", "ratio", "surrogate"])
def test_a_wrong_word_in_the_row_of_an_objective_is_refused(monkeypatch, part):
    monkeypatch.setitem(OBJECTIVES, "mine", replace(OBJECTIVES["grpo"], **{part: "completion"}))
    with pytest.raises(ValueError, match=f"{part}='completion'"):
        load("--objective=mine")


@pytest.mark.parametrize("arguments, advantage", [
    ("", "group_std"), ("--objective=rloo", "leave_one_out"), ("--objective=rloo --advantage=group_mean", "group_mean"),
    ("--reward_functions=math_number --train_pass_k=2", "leave_one_out"),
    ("--reward_functions=math_number --reward_normalisation=group", "batch_std")])
def test_the_advantage_is_the_settings_or_what_the_objective_or_the_rewards_need(arguments, advantage):
    assert baseline_of(load(arguments)) == advantage


def test_a_room_is_imported_when_it_opens():
    code = (f"import sys; sys.path.insert(0, {ROOT!r}); from grpo.grpo_config import GRPOConfig; GRPOConfig(SETTING); "
            "print(*sys.modules, sep='\\n')")
    for setting, opened in (("", False), ("sampler='ray', lora_rank=4, report_to=('wandb',)", True)):
        command = [sys.executable, "-c", code.replace("SETTING", setting)]
        done = subprocess.run(command, capture_output=True, text=True, check=True)
        rooms = ("grpo.samplers.settings", "core.huggingface.settings", "core.trackers")
        assert all((room in done.stdout.split()) == opened for room in rooms)


def test_a_users_file_adds_a_mask(dataset, tmp_path):
    path = tmp_path / "mine.py"
    path.write_text("import numpy as np\nfrom core.data import mask\n@mask\ndef first(rng, tokens, count, newline):\n"
                    "    return np.arange(len(tokens)) < count\n")
    c = config(dataset=dataset, generator_checkpoint="x.safetensors", reward_file=str(path), masks={"first": 1.0},
               mask_low=0.25, mask_high=0.25)
    mask = build_data(c, one_process()).batch("train", 0)["mask"]
    assert (mask.sum(1) == 8).all() and mask[:, :8].all()


# Models

def built(c):
    return build_models(c, build_data(c, one_process()), one_process())


def test_the_policy_is_of_the_kind_that_checkpoint_and_dataset_say(tmp_path, dataset, prompts):
    causal, of_prompts = tmp_path / "causal", tmp_path / "fill"
    save_model(str(causal), causal_model(), CAUSAL)
    save_model(str(of_prompts), model(tokenizer=CAUSAL, block_size=64), CAUSAL)
    paths = {name: save(tmp_path / name, net) for name, net in
             {"text": model(), "judge": judge(), "gold": judge(seed=6), "other": model(seed=3)}.items()}
    models = built(config(dataset=dataset, generator_checkpoint=paths["text"], judge_checkpoint=paths["judge"],
                          gold_judge_checkpoint=paths["gold"], reference_checkpoint=paths["other"],
                          reference_mode="ema"))
    assert type(models.policy) is FillPolicy and same(models.policy, fill_policy())
    assert same(models.reference, fill_policy(seed=3))
    assert not any(p.requires_grad for p in models.reference.parameters())
    assert same(models.judge.model, judge()) and same(models.gold_judge.model, judge(seed=6))
    assert models.judge.reads_ids and models.judge.tokenizer.description() == TOKENIZER.description()
    models = built(prompt_config(dataset=prompts, generator_checkpoint=str(causal)))
    assert type(models.policy) is CausalPolicy and same(models.policy, causal_policy())
    assert models.judge is models.gold_judge is None
    models = built(prompt_config(dataset=prompts, generator_checkpoint=str(of_prompts), kl_beta=0.0))
    assert type(models.policy) is PromptFillPolicy and models.reference is None


def test_a_reference_is_a_frozen_copy_of_the_policy_and_only_built_where_one_is_needed(monkeypatch):
    policy, moves = fill_policy(seed=1), []
    assert build_reference(config(kl_beta=0.0), policy, one_process()) is None
    reference = build_reference(config(kl_beta=0.1), policy, one_process())
    assert same(policy, reference) and not any(p.requires_grad for p in reference.parameters())
    with torch.no_grad():
        for p in policy.parameters():
            p.add_(1.0)
    assert same(reference, fill_policy(seed=1)) and not same(policy, reference)
    for mode, held in (("static", {torch.float32, torch.bfloat16}), ("ema", {torch.float32})):
        found = build_reference(config(reference_mode=mode), policy, one_process("bfloat16"))
        assert {p.dtype for p in found.parameters()} == held, "a moving mean needs float32"
    monkeypatch.setattr(FillPolicy, "to", lambda self, device: moves.append((self, device)))
    offloaded = build_reference(config(ref_offload=True), policy, one_process())
    assert moves == [(offloaded, "cpu")] and not any(p.requires_grad for p in offloaded.parameters())


def test_held_out_problems_are_the_same_for_every_seed_and_batch_size(dataset):
    models, both = Models(fill_policy(), None, None, None), []
    for settings in ({"seed": 1, "batch_size": 4}, {"seed": 2, "batch_size": 3}):
        evaluation = fill_in_evaluation(config(dataset=dataset, eval_problems=20, **settings), models)
        both.append([tuple(row) for _, batch in evaluation.batches for row in batch["input"].tolist()])
    assert both[0] == both[1] and len(set(both[0])) == 20
