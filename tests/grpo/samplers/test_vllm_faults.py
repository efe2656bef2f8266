"""A server that misbehaves ends the run with one line that names what is wrong."""

import os
import pathlib
import resource

import pytest
import torch

pytest.importorskip("transformers")

from core.files.whole_files import CannotWrite
from grpo.grpo_training_step import Timer, collect_experience
from grpo.samplers import vllm
from grpo.samplers.sampler import SamplerError
from grpo.samplers.vllm import VllmSampler
from grpo.scoring import score_in_batches
from tests.grpo.samplers.vllm_world import KINDS, folders, world  # noqa: F401 fixtures
from tests.tiny import Catcher, fill_policy, fixed_rewards, one_process, prompt_config, train
from tests.vllm_server import FAULTS

pytestmark = pytest.mark.slow  # it is the number of them that takes the time

CAUGHT = {  # fault: (kind, the line, what caught it)
    "stale adapter": ("adapter", "weights of iteration 1 did not arrive: known tokens get .* of iteration 0"),
    "stale weights": ("ours", "weights of iteration 1 did not arrive: known tokens get .* of iteration 0"),
    "temperature": ("ours", "draws or reports at about temperature 1.6 .*, not at temperature=0.8"),
    "raw": ("ours", "draws or reports at about temperature 1 .*--logprobs-mode processed_logprobs"),
    "re-encoded": ("qwen3", "differ by .* nats on average .*check that it serves the model of this run"),
    "silent": ("ours", "did not answer /v1/completions within sampler_timeout=1 seconds"),
    "page": ("ours", "did not answer as a vLLM server does, but with '<html>not vLLM</html>'; correct vllm_url"),
    "started again": ("ours", "holds the weights 'default', not 'nano-grpo-.*-0': it was started again"),
    "half dead": ("ours", "refused /collective_rpc with status 500: no memory; the server's own log says why"),
    "broken": ("ours", "refused /v1/models with status 500: no memory")}


@pytest.mark.parametrize("fault", FAULTS)
def test_every_fault_ends_the_run_with_a_line_that_names_it(world, fault):
    kind, line = CAUGHT[fault]
    w = world(kind, sampler_timeout=1.0 if fault == "silent" else 20.0, temperature=0.8, max_new_tokens=12)
    w.server.fault = fault
    with pytest.raises(SamplerError, match=line) as error:
        if fault in ("page", "broken"):
            VllmSampler(w.policy, w.config, one_process())
        w.life()
    text = str(error.value)
    assert "\n" not in text and (text.startswith("vllm_url=http://127.0.0.1:") or text.startswith("sampler='vllm': "))


@pytest.mark.parametrize("kind", KINDS)
def test_a_server_without_faults_passes_the_same_checks(world, kind):
    w = world(kind, max_new_tokens=12)
    rollouts = w.life()
    assert torch.allclose(score_in_batches(w.policy, rollouts, w.config) * rollouts.mask, rollouts.old_logp, atol=1e-4)


@pytest.mark.slow
@pytest.mark.parametrize("fault", ["temperature", "re-encoded"])
def test_what_goes_wrong_later_is_limited_by_the_mismatch(world, fault):
    """The first batch was good; then the server is started again with other settings."""
    w = world("qwen3", max_new_tokens=8, group_size=4)
    w.life()
    w.server.fault, w.server.factor = fault, 4
    reward = fixed_rewards(torch.rand(2, 4))

    def step():
        w.sampler.start(w.problems, 2, 1)
        experience = collect_experience(w.policy, None, reward, lambda again, count=None: w.sampler.finish(), w.config,
                                        one_process(), Timer())
        return train(w.policy, experience, w.config, [Catcher(w.policy)])

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


@pytest.mark.parametrize("named", [True, False])
def test_a_server_that_was_started_again_is_noticed_where_it_names_its_weights(world, named):
    """Its completions are of the weights that it was started with, which no other check may see."""
    w = world("ours", {"named": named})
    w.life()
    w.server.start_again()
    if not named:
        w.write(1)
        return
    with pytest.raises(SamplerError, match="holds the weights 'default', not 'nano-grpo-.*-1'.*--resume=auto"):
        w.write(1)
    w.sampler.start(w.problems, 2, 1)
    with pytest.raises(SamplerError, match="holds the weights 'default'"):
        w.sampler.sync(w.policy.weights(), 2)


@pytest.mark.parametrize("listed", [b'{"data": 5}', b'{"data": [null]}', b'{"data": [{"id": 5}]}', b'{"data": []}',
                                    b"[" * 10**5, b"7", b"", b'{"data": [{}]}'])
def test_a_list_of_models_of_another_shape_is_one_line(world, monkeypatch, listed):
    w = world("ours")
    monkeypatch.setattr(w.server, "models", lambda: (200, listed.decode()))
    with pytest.raises(SamplerError, match="did not answer as a vLLM server does, .*; correct vllm_url") as error:
        VllmSampler(w.policy, w.config, one_process())
    assert "\n" not in str(error.value) and len(str(error.value)) < 300


def test_a_server_with_a_key_is_given_it_and_no_file_holds_it(world, monkeypatch):
    monkeypatch.setenv("VLLM_API_KEY", "s3cret")
    w = world("adapter", {"key": "s3cret"})
    w.life()
    files = [os.path.join(folder, name) for folder, _, names in os.walk(w.config.out_dir) for name in names]
    assert files and not any(b"s3cret" in pathlib.Path(path).read_bytes() for path in files)
    monkeypatch.delenv("VLLM_API_KEY")
    with pytest.raises(SamplerError, match="status 401: Unauthorized; put the key .* VLLM_API_KEY"):
        VllmSampler(w.policy, w.config, one_process())


@pytest.mark.parametrize("kind", KINDS)
def test_weights_that_do_not_fit_on_the_disk_are_one_line(world, kind):
    """A limit on the size of files is in the place of a full disk."""
    w, (soft, hard) = world(kind), resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (3000, hard))
    try:
        with pytest.raises(CannotWrite, match="vllm-weights/nano-grpo-.* could not be written .File too") as error:
            w.sync(0)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
    assert "\n" not in str(error.value)


def test_a_model_with_more_ids_that_are_never_written_than_a_server_excludes_is_refused(world, monkeypatch):
    w = world("qwen3")
    monkeypatch.setattr(vllm, "MOST_NEVER", len(w.sampler.never) - 1)
    with pytest.raises(ValueError, match=f"never samples {len(w.sampler.never)} of its ids.*use sampler='local'"):
        VllmSampler(w.policy, w.config, one_process())


def test_a_generator_that_fills_in_is_refused(prompts, tmp_path):
    c = prompt_config(sampler="vllm", vllm_url="http://localhost:1", generator_checkpoint="fill", out_dir=str(tmp_path))
    with pytest.raises(ValueError, match="sampler='vllm' writes from left to right, but generator_checkpoint=fill fills"):
        VllmSampler(fill_policy(), c, one_process())


@pytest.mark.parametrize("kind, started, needed", [
    ("adapter", {"adapters": False}, "VLLM_ALLOW_RUNTIME_LORA_UPDATING=True and --enable-lora"),
    ("ours", {"development": False}, "VLLM_SERVER_DEV_MODE=1")])
def test_a_server_that_cannot_take_over_weights_is_told_how_to_start(world, kind, started, needed):
    w = world(kind, started)
    with pytest.raises(SamplerError, match=f"start the server with {needed}"):
        w.sync(0)


def test_a_completion_that_does_not_fit_the_server_is_its_own_message(world):
    w = world(max_new_tokens=60)
    w.sampler.model = w.sampler.base
    w.sampler.start(w.problems, 0, 0)
    with pytest.raises(SamplerError, match="status 400: This model's maximum context length is 64 tokens"):
        w.sampler.finish()


def test_a_closed_sampler_waits_for_nothing(world):
    w = world(sampler_timeout=600.0)
    w.sync(0)
    w.server.fault = "silent"
    w.sampler.start(w.problems, 0, 0)
    w.sampler.close()
    assert not w.sampler.starts
