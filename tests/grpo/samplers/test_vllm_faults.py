"""A server that misbehaves ends the run with one line that names what is wrong."""

import os
import pathlib
import resource

import pytest
import torch

pytest.importorskip("transformers")

from core.files.whole_files import CannotWrite
from grpo.grpo_training_step import Timer, collect_rollouts
from grpo.samplers import vllm
from grpo.samplers.sampler import SamplerError
from grpo.samplers.vllm import VllmSampler
from tests.grpo.samplers.vllm_world import folders, world  # noqa: F401 fixtures
from tests.tiny import Catcher, fill_policy, fixed_rewards, one_process, prompt_config, train

pytestmark = pytest.mark.slow  # it is the number of them that takes the time

CAUGHT = {  # fault: (kind, the line that ends the run)
    "stale adapter": ("adapter", "weights of iteration 1 did not arrive: known tokens get .* of iteration 0"),
    "stale weights": ("ours", "weights of iteration 1 did not arrive: known tokens get .* of iteration 0"),
    "raw": ("ours", "reports log-probabilities at temperature 1 .*--logprobs-mode processed_logprobs"),
    "re-encoded": ("qwen3", "differ by .* nats on average .*check that it serves the model of this run"),
    "silent": ("ours", "did not answer /v1/completions within sampler_timeout=1 seconds"),
    "started again": ("ours", "holds the weights 'default', not 'nano-grpo-.*-0': it was started again"),
    "half dead": ("ours", "refused /collective_rpc with status 500: no memory; the server's own log says why")}


@pytest.mark.parametrize("fault", CAUGHT)
def test_every_fault_ends_the_run_with_a_line_that_names_it(world, fault):
    kind, line = CAUGHT[fault]
    w = world(kind, sampler_timeout=1.0 if fault == "silent" else 20.0, max_new_tokens=12)
    w.server.fault = fault
    with pytest.raises(SamplerError, match=line) as error:
        w.life()
    text = str(error.value)
    assert "\n" not in text and text.startswith(("vllm_url=http://127.0.0.1:", "sampler='vllm': "))
    w.sampler.close()  # waits for nothing
    assert not os.path.exists(w.sampler.folder) and not w.server.paused


def test_what_goes_wrong_later_is_limited_by_the_mismatch(world):
    """The first batch was good; then the server is started again with other settings."""
    w = world("qwen3", max_new_tokens=8, group_size=4)
    w.life()
    w.server.fault = "re-encoded"
    reward = fixed_rewards(torch.rand(2, 4))

    def step():
        w.sampler.start(w.problems, 2)
        rollouts, sums, _ = collect_rollouts(w.policy, None, reward, lambda again, count=None: w.sampler.finish(), w.config,
                                             one_process(), Timer())
        return train(w.policy, rollouts, sums, w.config, [Catcher(w.policy)])

    with pytest.raises(ValueError, match="sampler='vllm': mismatch_kl=.* nats per token is above 0.2"):
        step()
    w.server.fault = None
    metrics = step()
    assert metrics["mismatch_max"] < 1e-4 and metrics["effective_sample_size"] > 1 - 1e-4


def test_a_server_of_another_model_is_refused_at_the_first_sync(world):
    """Its adapters are added to other weights."""
    w = world("adapter")
    with torch.no_grad():
        for p in w.server.net.parameters():
            p.add_(0.3 * p.abs().mean() * torch.randn_like(p))
    with pytest.raises(SamplerError, match="it holds other weights, another model"):
        w.sync(0)


@pytest.mark.parametrize("unknown", [(), ("/weight_info", "/update_weight_version")])
def test_a_server_that_was_started_again_is_noticed_where_it_names_its_weights(world, unknown):
    """Its completions are of the weights that it was started with, which no other check may see."""
    w = world("ours", {"unknown": unknown})
    w.life()
    w.server.start_again()
    if unknown:
        w.write()
        return
    line = "holds the weights 'default', not 'nano-grpo-.*-1'.*--resume=auto"
    with pytest.raises(SamplerError, match=line):
        w.write()
    with pytest.raises(SamplerError, match=line):
        w.sampler.sync(w.policy.weights(), 2)


@pytest.mark.parametrize("listed", ["<html>", {"data": 5}, {"data": [None]}, {"data": []}, {"data": [{}]}])
def test_a_list_of_models_of_another_shape_is_one_line(world, listed):
    w = world("ours")
    w.server.known["/v1/models"] = lambda body: (200, listed)
    with pytest.raises(SamplerError, match="did not answer as a vLLM server does, .*; correct vllm_url") as error:
        w.connect()
    assert "\n" not in str(error.value)


def test_no_file_holds_the_key_of_a_server(world, monkeypatch):
    monkeypatch.setenv("VLLM_API_KEY", "s3cret")
    w = world("adapter")
    w.life()
    files = [os.path.join(folder, name) for folder, _, names in os.walk(w.config.out_dir) for name in names]
    assert files and not any(b"s3cret" in pathlib.Path(path).read_bytes() for path in files)


@pytest.mark.parametrize("kind", ["ours", "adapter"])
def test_weights_that_do_not_fit_on_the_disk_are_one_line(world, kind):
    """A limit on the size of files is in the place of a full disk."""
    w, (soft, hard) = world(kind), resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (3000, hard))
    try:
        with pytest.raises(CannotWrite, match="vllm-weights/nano-grpo-.* could not be written .*File too") as error:
            w.sync(0)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
    assert "\n" not in str(error.value)


def test_a_model_that_no_server_can_sample_from_is_refused(world, monkeypatch):
    """One with more ids that are never sampled than a server excludes, and one that fills in."""
    w = world("qwen3")
    monkeypatch.setattr(vllm, "MOST_NEVER", len(w.sampler.never) - 1)
    with pytest.raises(ValueError, match=f"never samples {len(w.sampler.never)} of its ids.*use sampler='local'"):
        w.connect()
    c = prompt_config(sampler="vllm", vllm_url="http://localhost:1", generator_checkpoint="fill", out_dir="unwritten")
    with pytest.raises(ValueError, match="sampler='vllm' writes from left to right, but .*=fill fills in"):
        VllmSampler(fill_policy(), c, one_process())
