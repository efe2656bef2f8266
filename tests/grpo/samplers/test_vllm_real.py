"""A real vLLM server, which VLLM_URL names: docs/scaling.md has the commands to start one.

VLLM_MODEL is the model that it serves, as generator_checkpoint names it. A model of this project, by default that of
data/arithmetic, is brought whole; a folder in Hugging Face format gets an adapter.
"""

import os

import pytest
import torch

pytest.importorskip("transformers")

from core.files.records import write_prompts
from core.huggingface.settings import LoraConfig
from core.models import is_huggingface, load_model, load_tokenizer
from core.prompts import PromptConsumer
from grpo.policies.causal import CausalPolicy
from grpo.samplers.sync_check import SyncCheck
from grpo.samplers.mismatch import mismatch, mismatch_metrics
from grpo.samplers.vllm import VllmSampler
from grpo.scoring import score_in_batches
from tests.tiny import ROOT, one_process, prompt_config

URL = os.environ.get("VLLM_URL")
MODEL = os.environ.get("VLLM_MODEL", os.path.join(ROOT, "data", "arithmetic", "pretrained", "generator.safetensors"))
RANK = 4 if is_huggingface(MODEL) else 0
CLOSE = 1e-3  # nats: more than the largest difference of a token in float32, less than the movements below make

pytestmark = [pytest.mark.slow, pytest.mark.skipif(not URL, reason="VLLM_URL names no server")]


@pytest.fixture
def policy():
    model, _ = load_model(MODEL, adapter=LoraConfig(lora_rank=RANK))
    return CausalPolicy(model, load_tokenizer(MODEL))


@pytest.fixture
def problems(policy, tmp_path):
    """Sums as text, whatever model reads them."""
    records = [{"prompt": f"{a}+{b}=", "answer": str(a + b)} for a in range(5, 13) for b in range(5, 13)]
    write_prompts(str(tmp_path / "sums"), records, policy.tokenizer)
    data = PromptConsumer(str(tmp_path / "sums"), 16, 0, tokenizer=policy.tokenizer)
    return data.problems("train", 0)


def move(policy, seed):
    g = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for p in filter(lambda p: p.requires_grad, policy.parameters()):
            p.add_(0.05 * (p.abs().mean() + 0.1 * (p.abs().mean() == 0)) * torch.randn(p.shape, generator=g))


def test_a_real_server_writes_with_the_weights_of_each_sync_and_reports_what_it_drew(policy, problems, tmp_path):
    """Also for a second run of the same folder on the server that stays, which begins with other weights."""
    c = prompt_config(sampler="vllm", vllm_url=URL, out_dir=str(tmp_path / "out"), kl_beta=0.0, temperature=0.8,
                      top_p=1.0, batch_size=16, group_size=8, max_new_tokens=8, sampler_timeout=300.0,
                      lora_rank=RANK)
    for run in range(2):
        sampler = VllmSampler(policy, c, one_process())
        sync_check = SyncCheck(sampler, policy, problems, c)
        for version in range(2):
            sampler.sync(policy.weights(), version)
            sync_check.begin(version)
            sync_check.check()
            sampler.start(problems, 0)
            rollouts, _ = sampler.finish()
            logp = score_in_batches(policy, rollouts, c)
            metrics = mismatch_metrics({key: float(x) for key, x in mismatch(logp, rollouts).items()})
            theirs, = sampler.score(problems, sync_check.written)()
            apart = (theirs - sync_check.now[1])[sync_check.mask].abs()
            print(f"run {run}, version {version}: mismatch_kl {metrics['mismatch_kl']:.1e}, mismatch_max "
                  f"{metrics['mismatch_max']:.1e}, known tokens {apart.mean():.1e}, {len(rollouts.target)} completions")
            assert metrics["mismatch_max"] < CLOSE and apart.max() < CLOSE
            move(policy, seed=2 * run + version)
            moved = score_in_batches(policy, rollouts, c)
            assert ((moved - logp) * rollouts.mask).abs().max() > 10 * CLOSE, "the next weights are others"
        sampler.close()
        assert not os.path.exists(sampler.folder)
