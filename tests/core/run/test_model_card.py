"""README.md beside a saved model: the facts of its run, and never in the place of the user's own."""

import json
import os
import re

from core.checkpoint_manager import CheckpointManager
from core.run.model_card import MARK, write_card
from core.supervised.config import PretrainConfig
from grpo.grpo_config import GRPOConfig

FIGURES = {"eval/sampled_accuracy": 0.25, "eval/kl": 0.0}, {"eval/sampled_accuracy": 0.75, "eval/kl": 0.125}


def run(**settings):
    return GRPOConfig(**{"generator_checkpoint": "hf:owner/base-1B", "dataset": "/home/al/data/sums.jsonl",
                         "reward_functions": ("exact_match",), "learning_rate": 1e-6, "min_lr": 1e-7} | settings)


def card_of(folder, config, adapter=False, step=7, before=FIGURES[0], after=FIGURES[1]):
    """The card of a folder with the file by which a model or an adapter is known."""
    folder.mkdir(exist_ok=True)
    (folder / ("adapter_config.json" if adapter else "config.json")).write_text("{}")
    write_card(config, str(folder), step, before, after)
    return (folder / "README.md").read_text()


def settings_in(card):
    return json.loads(re.search("```json\n(.*?)\n```", card, re.DOTALL)[1])


def test_a_card_has_the_facts_of_the_run(tmp_path):
    card = card_of(tmp_path / "model", run(objective="dr_grpo", advantage="group_mean"))
    assert card.startswith("---\nlibrary_name: transformers\nbase_model: owner/base-1B\n")
    assert "# A model trained from owner/base-1B" in card
    assert "7 steps on `sums.jsonl` with the objective `dr_grpo` for the rewards exact_match." in card
    assert "| sampled_accuracy | 0.2500 | 0.7500 |" in card and "| kl | 0.0000 | 0.1250 |" in card
    assert re.search(r"torch \d+\.\d+", card)


def test_the_settings_of_a_card_are_those_that_differ_and_name_no_place_on_the_machine(tmp_path):
    config = run(reward_file="/home/al/rewards.py", out_dir="/home/al/out", resume="auto", system_prompt="Secret.")
    card = card_of(tmp_path / "model", config)
    assert settings_in(card) == {
        "dataset": "sums.jsonl", "generator_checkpoint": "owner/base-1B", "learning_rate": 1e-6, "min_lr": 1e-7,
        "reward_file": "rewards.py", "reward_functions": ["exact_match"]}
    assert "/home" not in card and "Secret" not in card
    card = card_of(tmp_path / "model", run(system_prompt="```\n# Be brief", log_text=True))
    assert settings_in(card)["system_prompt"] == "```\n# Be brief", "texts may be shown"


def test_an_adapter_names_its_base_model(tmp_path):
    card = card_of(tmp_path / "model", run(generator_checkpoint="/home/al/base", lora_rank=4), adapter=True)
    assert card.startswith("---\nlibrary_name: peft\ntags") and "# A LoRA adapter of base" in card
    assert "/home" not in card


def test_a_supervised_run_has_a_card_too(tmp_path):
    card = card_of(tmp_path / "model", PretrainConfig(init_from="hf:owner/base"), before={}, after={"val_loss": 1.5})
    assert "7 steps on `char_diffusion` (supervised)." in card and "| val_loss | - | 1.5000 |" in card
    assert "Not measured." in card_of(tmp_path / "other", PretrainConfig(), before={}, after={})


def test_a_card_is_written_anew_at_each_save_but_never_in_the_place_of_the_users_own(tmp_path):
    first, later = (card_of(tmp_path / "model", run(), step=step) for step in (3, 4))
    assert MARK in first and "3 steps" in first and "4 steps" in later
    own = later.replace(MARK, "Mine.")
    (tmp_path / "model" / "README.md").write_text(own)
    assert card_of(tmp_path / "model", run(), step=5) == own


def test_every_saved_folder_has_a_card(tmp_path):
    written = []
    manager = CheckpointManager(str(tmp_path), lambda path, **facts: os.mkdir(path), keep=1, suffix="",
                                write_card=lambda *about: written.append(about))
    manager.save(5, {}, [], {"eval/kl": 1.0}, before={"eval/kl": 0.5})
    assert written == [(str(tmp_path / name), 5, {"eval/kl": 0.5}, {"eval/kl": 1.0}) for name in ("model", "model-000005")]
