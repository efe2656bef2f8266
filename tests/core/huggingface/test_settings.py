"""Settings of Hugging Face models: what contradicts each other is refused, and when a reference needs an adapter."""

import pytest

from grpo.grpo_config import GRPOConfig


@pytest.mark.parametrize("settings, second", [
    ({"lora_rank": 4}, False),
    ({"lora_init_from": "x"}, True),
    ({"lora_rank": 4, "reference_mode": "periodic"}, True),
    ({"lora_init_from": "x", "kl_beta": 0.0}, False),
    ({"lora_init_from": "x", "reference_checkpoint": "y"}, False)], ids=str)
def test_there_is_a_second_adapter_only_for_a_reference_that_needs_one(settings, second):
    assert GRPOConfig(**{"kl_beta": 0.1} | settings).reference_adapter == second
