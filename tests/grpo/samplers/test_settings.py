"""Settings of samplers that do not fit each other are refused in one line that names them."""

import pytest

from tests.tiny import config

VLLM = {"sampler": "vllm", "vllm_url": "http://x", "top_p": 1.0}


@pytest.mark.parametrize("settings, message", [
    ({"ray_workers": 2}, "ray_workers=2 .* sampler=ray"),
    ({"vllm_url": "http://x"}, "vllm_url='http://x' .* sampler=vllm"),
    ({"sampler": "vllm"}, "vllm_url=None"),
    (VLLM | {"environment": "Guess", "reward_functions": ("environment",)}, "sampler='vllm' .* environment"),
    (VLLM | {"top_p": 0.9}, "top_p=0.9"),
    (VLLM | {"temperature": 3.0}, "temperature=3.0 .* 0.01 to 2"),
    *((VLLM | {"vllm_url": url}, "^vllm_url=") for url in (
        "localhost:8000", "http://127.0.0.1:1/\r\nX: y", "http://name:password@x")),
    ({"ratio_to": "sampler", "ppo_epochs": 2, "unmask_steps": 2, "fill_estimator": "one_step"}, "ratio_to='sampler' .* fill_estimator")])
def test_a_setting_without_effect_or_against_another_is_refused(settings, message):
    with pytest.raises(ValueError, match=message):
        config(**settings)


@pytest.mark.parametrize("settings", [
    VLLM | {"vllm_url": "http://localhost:8000", "temperature": 2.0}, VLLM | {"vllm_url": "https://10.0.0.2/vllm/"},
    {"sampler": "ray", "top_p": 0.9, "top_k": 5, "min_p": 0.01}, {"max_staleness": 1, "ratio_to": "sampler", "objective": "dppo"}, {"ratio_to": "sampler", "ppo_epochs": 2}])
def test_what_goes_together_is_taken(settings):
    assert all(getattr(config(**settings), key) == x for key, x in settings.items())
