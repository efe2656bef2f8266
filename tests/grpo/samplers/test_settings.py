"""Settings of samplers that do not fit each other are refused in one line that names them."""

import pytest

from tests.tiny import config


@pytest.mark.parametrize("settings, message", [
    ({"ray_workers": 2}, "ray_workers=2 has no effect with sampler='local'; set sampler='ray'"),
    ({"ray_rewards": True, "sampler": "vllm", "vllm_url": "http://x"}, "ray_rewards=True has no effect with sampler="),
    ({"vllm_url": "http://x"}, "vllm_url='http://x' has no effect with sampler='local'; set sampler='vllm'"),
    ({"sampler_timeout": 60.0}, "sampler_timeout=60.0 has no effect with sampler='local'; set sampler='ray' or 'vllm', "),
    ({"sampler": "vllm"}, "set vllm_url"),
    ({"sampler": "vllm", "vllm_url": "http://x", "top_p": 0.9}, "without the tokens that could have been drawn.*top_p="),
    ({"sampler": "vllm", "vllm_url": "http://x", "min_p": 0.1}, "min_p=0.1 with sampler='vllm'"),
    ({"sampler": "vllm", "vllm_url": "http://x", "temperature": 3.0, "top_p": 1.0}, "temperature=3 .* 0.01 to 2"),
    ({"sampler": "vllm", "vllm_url": "http://x", "temperature": 1e-3, "top_p": 1.0}, "temperature=0.001 with sampler="),
    *(({"sampler": "vllm", "vllm_url": url, "top_p": 1.0}, "^vllm_url='.* must be an address") for url in (
        "localhost:8000", "ftp://x", "http://", "http://[::1", "http://127.0.0.1:1/\r\nX: y", "http://a b",
        "http://x:abc", "http://127.0.0.1:99999", "http://name:password@x", "http://x/\x1b[31m", "")),
    ({"importance": "token"}, "importance='token' has nothing to correct"),
    ({"importance": "token", "max_staleness": 1, "fill_estimator": "one_step"}, "'one_step' only estimates"),
    ({"sampler": "rey"}, "sampler='rey' is not one of local, ray, vllm"),
    ({"importance": "some"}, "importance='some' is not one of none, token"),
    ({"max_staleness": -1}, "max_staleness=-1"), ({"sampler_timeout": 0.0}, "sampler_timeout=0.0"),
    ({"sampler": "ray", "ray_workers": 0}, "ray_workers=0"),
    ({"max_staleness": 1, "importance": "token", "importance_cap": 0.5}, "importance_cap=0.5")])
def test_a_setting_without_effect_or_against_another_is_refused(settings, message):
    with pytest.raises(ValueError, match=message):
        config(**settings)


@pytest.mark.parametrize("url", ["http://localhost:8000", "https://10.0.0.2/vllm/", "http://[::1]:8000"])
def test_an_address_is_taken(url):
    assert config(sampler="vllm", vllm_url=url, top_p=1.0, temperature=2.0).vllm_url == url


def test_truncated_sampling_is_allowed_where_the_kept_tokens_come_back():
    assert config(sampler="ray", top_p=0.9, top_k=5, min_p=0.01).sampler == "ray"
    assert config(max_staleness=2, importance="token", top_p=0.9).importance == "token"
