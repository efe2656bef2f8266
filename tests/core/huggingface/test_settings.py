"""Settings of Hugging Face models: what contradicts each other is refused, and when a reference needs an adapter."""

import pytest

from core.config import RunConfig
from core.huggingface.settings import LoraConfig
from grpo.grpo_config import GRPOConfig


@pytest.mark.parametrize("settings, words", [
    ({"lora_rank": 4, "lora_alpha": 0.0}, "lora_alpha=0.0"),
    ({"lora_rank": 4, "lora_init_from": "x"}, "lora_rank=4.*lora_init_from"),
    ({"lora_alpha": 64.0}, "lora_alpha=64.0 is a setting of lora_rank"),
    ({"lora_init_from": "x", "lora_targets": "q_proj"}, "lora_targets=")], ids=str)
def test_settings_that_contradict_each_other_are_refused(settings, words):
    with pytest.raises(ValueError, match=words):
        RunConfig(**settings)


def test_a_text_names_the_layers_between_its_commas():
    assert LoraConfig(lora_rank=4, lora_targets="q_proj, v_proj").targets == ["q_proj", "v_proj"]


@pytest.mark.parametrize("settings, second", [
    ({"lora_rank": 4}, False),
    ({"lora_init_from": "x"}, True),
    ({"lora_rank": 4, "reference_mode": "periodic"}, True),
    ({"lora_init_from": "x", "kl_beta": 0.0}, False),
    ({"lora_init_from": "x", "reference_checkpoint": "y"}, False)], ids=str)
def test_there_is_a_second_adapter_only_for_a_reference_that_needs_one(settings, second):
    assert GRPOConfig(**{"kl_beta": 0.1} | settings).reference_adapter == second
