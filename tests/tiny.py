"""Small data sets, models, policies, rewards and training steps that the tests share."""

import contextlib
import importlib.util
import io
import json
import multiprocessing
import os
import pathlib
import subprocess
import sys
from dataclasses import replace
from types import SimpleNamespace

import numpy as np
import torch

from core.data import DatasetConsumer, masked_positions, write_dataset
from core.distributed import Distributed
from core.errors import exit_code
from core.files import each_record
from core.model import GPT, LANGUAGE_MODEL, MASKED_FILL, SEQUENCE_SCORER, GPTConfig, freeze
from core.models import save_model
from core.optim import build_optimizers
from core.prompts import PromptConsumer, PromptFormat
from core.records import write_prompts
from core.settings.setting import settings_of
from core.tokenizer import BPETokenizer, CharTokenizer
from grpo.build import make_rewards
from grpo.grpo_config import GRPOConfig
from grpo.grpo_training_step import (
    collect_rollouts, grpo_training_step, rollout_loss, sample_by, train_on_rollouts)
from grpo.metrics import Timer
from grpo.policies.causal import CausalPolicy
from grpo.policies.fill import FillPolicy
from grpo.policies.prompt_fill import PromptFillPolicy
from grpo.reward_functions import workers
from grpo.reward_functions.judge import Judge
from grpo.reward_functions.registry import run_reward_file
from grpo.rewards import REWARDS, Scored
from grpo.sampling_settings import SamplingSettings
from grpo.step_settings import StepSettings, shapes_of
from grpo.sums import Sums

ROOT = os.path.dirname(os.path.dirname(os.path.abspath(__file__)))
TORCHRUN = ["-m", "torch.distributed.run", "--nproc_per_node=2", "--master_port=0", "--rdzv_backend=c10d",
            "--rdzv_endpoint=localhost:0"]
WORDS = "the quick brown fox jumps over a lazy dog while seven wise owls watch from their old oak tree".split()
TEXT = "".join(" ".join(WORDS[(i * j + j) % len(WORDS)] for j in range(9)) + "\n" for i in range(120))
TOKENIZER, CAUSAL = CharTokenizer(), CharTokenizer(stop=True)


def write_text_dataset(folder, text):
    cut = len(text) * 4 // 5
    write_dataset(str(folder), {"train": TOKENIZER.encode(text[:cut]), "val": TOKENIZER.encode(text[cut:])}, TOKENIZER)


def write_prompt_dataset(folder, count=60):
    """Sums of small numbers: prompts of two lengths."""
    pairs = [(a, b) for a in range(5, 13) for b in range(5, 13)][:count]
    records = [{"prompt": f"{a}+{b}=", "answer": str(a + b), "completion": str(a + b)} for a, b in pairs]
    write_prompts(str(folder), records, CAUSAL)
    return str(folder)


def jsonl(path, *records):
    """Writes a file with one JSON object in each line. Returns its path as a string."""
    path.write_text("".join(json.dumps(record) + "\n" for record in records))
    return str(path)


def read_records(path):
    """The records of a file of a run; none if there is no file."""
    return list(each_record(path))


def without_place(records):
    """Records of prompts without the file and line that each was read from."""
    return [{key: value for key, value in record.items() if key != "where"} for record in records]


def small_bpe(monkeypatch, name="gpt2", *merges, special=("<|endoftext|>",)):
    """The tokenizer of tiktoken's encoding `name`, with the 256 bytes, these merges and special tokens."""
    import tiktoken
    tokens = [*(bytes([b]) for b in range(256)), *merges]
    words = r"'(?:[sdmt]|ll|ve|re)| ?\p{L}++| ?\p{N}++| ?[^\s\p{L}\p{N}]++|\s++$|\s+(?!\S)|\s"
    encoding = tiktoken.Encoding(name, pat_str=words, mergeable_ranks={token: i for i, token in enumerate(tokens)},
                                 special_tokens={text: len(tokens) + 3 * i for i, text in enumerate(special)})
    monkeypatch.setitem(tiktoken.registry.ENCODINGS, name, encoding)
    return BPETokenizer(name)


def model(mode=MASKED_FILL, seed=0, scale=8.0, tokenizer=TOKENIZER, **settings):
    """A tiny model; `scale` enlarges its weights, so that its distributions are far from uniform."""
    torch.manual_seed(seed)
    settings = {"n_layer": 1, "n_head": 2, "n_embd": 16, "block_size": 33, "tied": False} | settings
    net = GPT(GPTConfig(mode=mode, vocab_size=tokenizer.vocab_size, base_vocab_size=tokenizer.base_vocab_size,
                        **settings))
    with torch.no_grad():
        for p in net.parameters():
            if p.dim() == 2:
                p.mul_(scale)
    return net.eval()


def causal_model(seed=0, scale=8.0, **settings):
    """A tiny language model of CAUSAL's vocabulary."""
    return model(LANGUAGE_MODEL, seed, scale, tokenizer=CAUSAL, **{"block_size": 64} | settings)


def fill_policy(seed=0, scale=8.0, tokenizer=TOKENIZER, dtype=torch.float32, **settings):
    """A fill-in policy with a tiny model."""
    return FillPolicy(model(MASKED_FILL, seed, scale, tokenizer, **settings), tokenizer, dtype=dtype)


def causal_policy(seed=0, scale=8.0, dtype=torch.float32, **settings):
    """A causal policy with a tiny model of CAUSAL's vocabulary."""
    return CausalPolicy(causal_model(seed, scale, **settings), CAUSAL, dtype=dtype)


def prompt_fill_policy(seed=0, scale=8.0, **settings):
    """A policy that answers prompts in any order, with a tiny model of CAUSAL's vocabulary."""
    return PromptFillPolicy(model(seed=seed, scale=scale, tokenizer=CAUSAL, block_size=64, **settings), CAUSAL)


def same(a, b):
    """Whether two models or policies hold the same weights, to the last bit."""
    a, b = (x.weights() if hasattr(x, "weights") else x.state_dict() for x in (a, b))
    return all(torch.equal(x, y) for x, y in zip(a.values(), b.values(), strict=True))


def optimizer_state(optimizers):
    """Copies of all tensors in the states of these optimizers, in a fixed order."""
    return [x.clone() for o in optimizers for s in o.state_dict()["state"].values() for x in s.values()]


def same_momentum(a, b):
    """Whether two lists of optimizers are in the same state, to the last bit."""
    return all(torch.equal(x, y) for x, y in zip(optimizer_state(a), optimizer_state(b), strict=True))


def flat_gradient(policy):
    """The gradient of a policy or model, flattened."""
    return torch.cat([p.grad.flatten() for p in policy.parameters()])


def clear_gradient(policy):
    for p in policy.parameters():
        p.grad = None


def count_rows(net):
    """A list to which the number of input rows of every forward pass of a model is appended."""
    rows, states = [], net.states

    def counted(tokens, *arguments, **settings):
        rows.append(len(tokens))
        return states(tokens, *arguments, **settings)

    net.states = counted
    return rows


def counted(project, sizes):
    """`project` of a model, noting the number of states of each call."""
    def wrapped(h):
        sizes.append(len(h))
        return project(h)
    return wrapped


def prompt_consumer(folder, c, **settings):
    return PromptConsumer(folder, c.batch_size, c.seed, format=PromptFormat.of(c), **settings)


def judge(seed=5, **settings):
    return freeze(model(SEQUENCE_SCORER, seed, **settings))


def save(path, net):
    save_model(str(path), net, TOKENIZER)
    return str(path)


def all_settings(*classes):
    """The names of the settings of classes."""
    return {key for cls in classes for key in settings_of(cls)}


SWITCHES = {"credit_window": {"judge_checkpoint": "j"}} | dict.fromkeys(
    ("train_pass_k", "reward_weights"), {"task_type": "general"})


def config(**settings):
    settings = {"block_size": 32, "batch_size": 4, "group_size": 4, "temperature": 1.0, "top_p": 1.0,
                "learning_rate": 1e-2, "min_lr": 1e-2, "grad_clip": 0.0, "warmup_iters": 0, "max_iters": 4,
                "device": "cpu"} | settings
    for key in settings.keys() & SWITCHES.keys():  # it has an effect only with these
        settings = SWITCHES[key] | settings
    return GRPOConfig(**settings)


def prompt_config(**settings):
    """A config for the prompts of write_prompt_dataset and for causal_policy, which reads 64 tokens."""
    return config(**{"max_new_tokens": 6, "task_type": "general"} | settings)


def consumer(dataset, c, **settings):
    return DatasetConsumer(dataset, MASKED_FILL, c.block_size, c.batch_size, c.seed, masks=c.masks, mask_low=c.mask_low,
                           mask_high=c.mask_high, **settings)


def rewards(c, scorer):
    """The rewards of a fill-in run with this judge."""
    return make_rewards(c, Judge(scorer, TOKENIZER, reads_ids=True))


def expect_frequencies(token, logp, logits, temperature, top_p):
    """Checks drawn tokens and their reported log-probabilities, (n,) each, against the distribution of logits (V,).
    Returns which tokens truncation keeps, (V,) bool."""
    p = np.exp(logits.detach().double().numpy() / temperature)  # the same distribution, by hand
    p /= p.sum()
    order = np.argsort(-p)
    size = next(k for k in range(1, len(p) + 1) if p[order[:k]].sum() >= top_p - 1e-9)
    kept = np.isin(np.arange(len(p)), order[:size])
    p = p * kept / p[kept].sum()
    counts, expected = np.bincount(token.numpy(), minlength=len(p)), len(token) * p
    assert not counts[~kept].any()
    assert ((counts - expected)[kept] ** 2 / expected[kept]).sum() < 25  # of 6 tokens it is more once in 7,000 times
    np.testing.assert_allclose(logp.exp().numpy(), p[token.numpy()], rtol=1e-4)
    return kept


def rewards_of(name, *texts, settings=None, **record):
    """The values that one reward gives to texts that all answer the same record."""
    columns = {field: [value] * len(texts) for field, value in record.items()}
    values = REWARDS[name].fn(["?"] * len(texts), list(texts), **columns, **(settings or {}))
    assert len(values) == len(texts)
    assert all(type(x) is float and REWARDS[name].low <= x <= REWARDS[name].high for x in values)
    return values[0] if len(texts) == 1 else values


def expect_rewards(name, cases, **record):
    """Checks the value of a reward for each text of {text: value}."""
    for text, value in cases.items():
        assert rewards_of(name, text, **record) == value, f"{name} of {text!r}"


def fixed_rewards(reward):
    """A rewards object: the first rows of reward (P, G), whatever was sampled."""
    return lambda rollouts: Scored(reward[: rollouts.problems])


def length_reward(rollouts):
    """A rewards object: the number of sampled tokens."""
    return Scored(rollouts.mask.sum(1).view(rollouts.problems, -1))


class Catcher:
    """In an optimizer's place: keeps the gradient of its last step, flattened, and moves nothing."""

    def __init__(self, policy):
        self.policy, self.param_groups, self.gradient = policy, [{"lr": 0.0}], None

    def step(self):
        self.gradient = flat_gradient(self.policy)

    def zero_grad(self, set_to_none):
        clear_gradient(self.policy)


def one_process(dtype="float32"):
    return Distributed("cpu", dtype)


def masked_problems(data):
    """The problems of the first step of a fill-in data set: (batch, input, position, hidden)."""
    batch = data.problems("train", 0)
    input, mask = torch.from_numpy(batch["input"]), torch.from_numpy(batch["mask"])
    return batch, input, *masked_positions(mask, "cpu")


def sampled(policy, folder, c, number=0):
    """Rollouts of the problems of step `number` from a folder with a data set for this policy."""
    of_prompts = isinstance(policy, (CausalPolicy, PromptFillPolicy))
    data = (prompt_consumer if of_prompts else consumer)(folder, c)
    return policy.sample(data.problems("train", number), number, SamplingSettings.of(c))


def step_problems(data, c, number=0):
    """round -> the problems of step `number`, those of all micro-batches joined."""
    n = c.gradient_accumulation_steps

    def problems(again=0):
        parts = [data.problems("train", number, again * n + i) for i in range(n)]
        return {key: np.concatenate([part[key] for part in parts]) for key in parts[0]}
    return problems


def grpo_step(policy, reference, scorer, data, c, number=0, optimizers=None, dist=None, buffer=None):
    """Step `number` of GRPO. Returns its metrics."""
    optimizers = optimizers or build_optimizers(policy, c)
    return grpo_training_step(policy, reference, scorer, step_problems(data, c, number), optimizers, number, c,
                              dist or one_process(), buffer)


def step_gradient(policy, reference, scorer, data, c):
    """The gradient of the first step of GRPO, flattened; the policy does not move."""
    catcher = Catcher(policy)
    grpo_step(policy, reference, scorer, data, c, optimizers=[catcher])
    return catcher.gradient


def collect(policy, scorer, data, c, reference=None, dist=None, number=0):
    """(rollouts, sums) of step `number`."""
    problems, sample = step_problems(data, c, number), sample_by(policy, number, c)
    settings = StepSettings.of(c, policy)
    return collect_rollouts(policy, reference, scorer, problems, sample, settings, dist or one_process(), Timer())


def train(policy, rollouts, sums, c, optimizers=None, dist=None):
    """One optimizer step on rollouts. Returns its metrics."""
    optimizers = optimizers or build_optimizers(policy, c)
    settings = StepSettings.of(c, policy)
    metrics, _ = train_on_rollouts(policy, rollouts, sums, optimizers, settings, dist or one_process())
    return metrics


def shaped(rollouts, scored, c, rewards=None):
    """Rollouts and Scored as the shapes of the settings leave them."""
    for shape in shapes_of(c):
        rollouts, scored = shape(rollouts, scored, rewards)
    return rollouts, scored


def loss_of(policy, rollouts, weight, c, on_policy=False):
    """The loss of rollouts as one micro-batch, and {metric: (total, count)}.
    on_policy: the ratio is 1; else it is to old_logp"""
    rollouts = replace(rollouts, proximal_logp=None if on_policy else rollouts.old_logp)
    scores = policy.score(rollouts, c.temperature, c.entropy_bonus > 0)
    sums = Sums()
    loss = rollout_loss(scores, rollouts, weight, StepSettings.of(c, policy), sums)
    return loss, pairs(sums)


def pairs(sums):
    """{metric: (total, count)} of Sums."""
    return {name: pair for (_, name), pair in sums.entries.items()}


def without_clock(records):
    """Logged records without times and speeds, which differ from run to run."""
    return [{key: x for key, x in record.items() if not key.startswith(("time/", "tokens_per_second"))}
            for record in records]


def contents(folder):
    """{path within the folder: text} of all files in it."""
    return {str(p.relative_to(folder)): p.read_text() for p in sorted(pathlib.Path(folder).rglob("*")) if p.is_file()}


class Cut(Exception):
    """The power failed."""


def cut_after(monkeypatch, count):
    """The operation on files number `count` (from 0) and all later ones do not happen."""
    left = [count]

    def limited(real):
        def operation(*arguments):
            if left[0] == 0:
                raise Cut
            left[0] -= 1
            return real(*arguments)
        return operation

    for name in ("replace", "remove"):
        monkeypatch.setattr(os, name, limited(getattr(os, name)))


def run_script(*arguments, ranks=1, **environment):
    """Runs a script of the repository as a user would, on several ranks by tests/ranks.py. Returns the finished process
    with its output."""
    several = ["tests/ranks.py", str(ranks)] if ranks > 1 else []
    env = os.environ | {"OMP_NUM_THREADS": "1"} | environment
    return subprocess.run([sys.executable, *several, *map(str, arguments)], cwd=ROOT, env=env, capture_output=True,
                          text=True, timeout=600)


def run_here(script, *arguments):
    """Runs a script of the repository in this process, which spares the seconds in which Python and torch start.
    Returns its exit code and output as run_script does."""
    spec = importlib.util.spec_from_file_location(f"script_{script.replace('/', '_')}", os.path.join(ROOT, script))
    module = sys.modules[spec.name] = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    out, err, before = io.StringIO(), io.StringIO(), sys.argv
    sys.argv = [script, *map(str, arguments)]
    run_reward_file.cache_clear()  # a new process reads the file again
    try:
        with contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):
            code = exit_code(module.main)
    finally:
        sys.argv = before
    return SimpleNamespace(returncode=code or 0, stdout=out.getvalue(), stderr=err.getvalue())


def fork_workers(monkeypatch):
    """Worker processes start at once, and know the rewards that this process knows."""
    monkeypatch.setattr(workers, "PROCESSES", multiprocessing.get_context("fork"))
