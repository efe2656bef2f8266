"""README.md beside a saved model: the facts of its run, and never in the place of the user's own."""

import os

import pytest

from core.checkpoint_manager import CheckpointManager
from core.run.model_card import MARK, write_card
from core.supervised.config import PretrainConfig
from grpo.grpo_config import GRPOConfig

RUN = GRPOConfig(generator_checkpoint="hf:owner/base-1B", dataset="/home/al/data/sums.jsonl", objective="dr_grpo",
                 advantage="group_mean", reward_functions=("exact_match",), learning_rate=1e-6)
LOCAL = GRPOConfig(generator_checkpoint="/home/al/base", dataset="sums", lora_rank=4)


def card_of(folder, config, file="config.json", step=7):
    """The card of a folder with the file by which a model or an adapter is known."""
    folder.mkdir(exist_ok=True)
    (folder / file).write_text("{}")
    write_card(config, str(folder), step)
    return (folder / "README.md").read_text()


@pytest.mark.parametrize("config, file, facts", [
    (RUN, "config.json", ("library_name: transformers\nbase_model: owner/base-1B\n", "A model of owner/base-1B",
                          "7 steps on `sums.jsonl` with the objective `dr_grpo`.")),
    (LOCAL, "adapter_config.json", ("library_name: peft\ntags", "A LoRA adapter of base,")),
    (PretrainConfig(init_from="hf:owner/base"), "config.json", ("7 steps on `char_diffusion`.",))])
def test_a_card_has_the_facts_of_the_run_and_no_place_on_the_machine(tmp_path, config, file, facts):
    card = card_of(tmp_path / "model", config, file)
    assert all(fact in card for fact in facts) and "/home" not in card and card.count("\n") <= 10


def test_a_card_is_written_anew_at_each_save_but_never_in_the_place_of_the_users_own(tmp_path):
    first, later = (card_of(tmp_path / "model", RUN, step=step) for step in (3, 4))
    assert "3 steps" in first and "4 steps" in later
    own = later.replace(MARK, "Mine.")
    (tmp_path / "model" / "README.md").write_text(own)
    assert card_of(tmp_path / "model", RUN, step=5) == own


def test_every_saved_folder_has_a_card(tmp_path):
    written = []
    manager = CheckpointManager(str(tmp_path), lambda path, **facts: os.mkdir(path), keep=1, suffix="",
                                write_card=lambda *about: written.append(about))
    manager.save(5, {}, [], {})
    assert written == [(str(tmp_path / name), 5) for name in ("model", "model-000005")]
