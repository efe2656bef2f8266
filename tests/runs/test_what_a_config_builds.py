"""The settings and their defaults, and the models, references and problems that a config builds."""

from dataclasses import replace

import pytest
import torch

from core.config import WITH_CODE, load_config
from core.errors import Mistake, UsageError
from core.models import save_model
from grpo.build import build_data, build_models, build_reference
from grpo.grpo_config import GRPOConfig
from grpo.losses import OBJECTIVES
from grpo.policies.causal import CausalPolicy
from grpo.policies.fill import FillPolicy
from grpo.policies.prompt_fill import PromptFillPolicy
from tests.tiny import (
    CAUSAL, causal_model, causal_policy, config, fill_policy, judge, model, one_process, prompt_config,
    same, save)


def load(arguments):
    return load_config(GRPOConfig, arguments.split())[0]


def test_canonical_defaults():
    expected = {
        "group_size": 8, "kl_beta": 0.1, "learning_rate": 1e-5, "temperature": 0.8, "top_p": 0.95, "batch_size": 16,
        "gradient_accumulation_steps": 1, "weight_decay": 0.1, "beta1": 0.9, "beta2": 0.95, "grad_clip": 1.0,
        "seed": 1337, "device": "auto", "out_dir": "out-grpo"}
    assert {key: getattr(GRPOConfig(), key) for key in expected} == expected


def test_a_wrong_word_in_the_row_of_an_objective_is_refused(monkeypatch):
    monkeypatch.setitem(OBJECTIVES, "mine", replace(OBJECTIVES["grpo"], ratio="completion"))
    with pytest.raises(Mistake, match="ratio='completion'"):
        load("--objective=mine")


def test_a_config_may_add_an_objective_of_its_own(tmp_path, monkeypatch):
    monkeypatch.delitem(OBJECTIVES, "mine", raising=False)  # and so once more at the end
    path = tmp_path / "c.py"
    path.write_text("from grpo import losses\n\nlosses.OBJECTIVES['mine'] = losses.OBJECTIVES['dapo']\n"
                    "objective = 'mine'\n")
    assert load(str(path)).objective == "mine" and OBJECTIVES["mine"] is OBJECTIVES["dapo"]


def test_a_config_draws_no_random_number():
    before = torch.get_rng_state()
    config(unmask_steps=2, unmask_order="left_to_right", kl_estimator="k2")
    assert torch.equal(torch.get_rng_state(), before)


def test_a_config_may_import_tables_and_settings_but_no_other_value(tmp_path, monkeypatch):
    monkeypatch.syspath_prepend(tmp_path)
    (tmp_path / "shared_by_configs.py").write_text("kl_estimator, batch_size, helper = 'k2', 3, {}\n")
    (tmp_path / "c.py").write_text("from grpo.losses import ADVANTAGES, OBJECTIVES as rows\n"
                                   "from grpo.environments import environment\n"
                                   "from shared_by_configs import batch_size, helper, kl_estimator\n")
    c = load(str(tmp_path / "c.py"))
    assert (c.kl_estimator, c.batch_size) == ("k2", 3) and str(tmp_path / "c.py") in WITH_CODE
    for wrong in ("from math import pi\n", "def helper():\n    from math import pi as lr\n\n\nlr = 1e-3\n"):
        (tmp_path / "c.py").write_text(wrong)
        with pytest.raises(UsageError):
            load(str(tmp_path / "c.py"))


def test_a_type_hint_in_a_function_or_class_of_a_config_sets_nothing_and_needs_no_value(tmp_path):
    path = tmp_path / "c.py"
    path.write_text("def half(n):\n    learning_rate: float\n    return n // 2\n\n\nclass Row:\n    size: int\n\n\n"
                    "batch_size = half(6)\n")
    assert load(str(path)).batch_size == 3 and str(path) not in WITH_CODE
    path.write_text("if True:\n    learning_rate: 1e-4\n")
    with pytest.raises(UsageError, match="learning_rate"):
        load(str(path))


@pytest.mark.parametrize("name", OBJECTIVES)
def test_the_name_of_an_objective_may_be_in_any_case(name, monkeypatch):
    assert {load(f"--objective={each}").objective for each in (name.upper(), name.title(), name)} == {name}
    monkeypatch.setitem(OBJECTIVES, name.upper(), OBJECTIVES[name])
    assert load(f"--objective={name.upper()}").objective == name.upper()


def test_a_users_file_adds_a_mask(dataset, tmp_path):
    path = tmp_path / "mine.py"
    path.write_text("import numpy\nfrom core.data import mask\n\n\n@mask\ndef first(rng, tokens, count, newline):\n"
                    "    return numpy.arange(len(tokens)) < count\n")
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
             {"text": model(), "judge": judge(), "other": model(seed=3)}.items()}
    models = built(config(dataset=dataset, generator_checkpoint=paths["text"], judge_checkpoint=paths["judge"],
                          reference_checkpoint=paths["other"], reference_mode="ema"))
    assert type(models.policy) is FillPolicy and same(models.policy, fill_policy())
    assert same(models.reference, fill_policy(seed=3))
    assert not any(p.requires_grad for p in models.reference.parameters())
    assert same(models.judge.model, judge()) and models.judge.reads_ids
    models = built(prompt_config(dataset=prompts, generator_checkpoint=str(causal)))
    assert type(models.policy) is CausalPolicy and same(models.policy, causal_policy())
    assert models.judge is models.gold_judge is None
    models = built(prompt_config(dataset=prompts, generator_checkpoint=str(of_prompts), kl_beta=0.0))
    assert type(models.policy) is PromptFillPolicy and models.reference is None


def test_a_reference_is_a_frozen_copy_of_the_policy_and_only_built_where_one_is_needed():
    policy = fill_policy(seed=1)
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
