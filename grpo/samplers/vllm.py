"""The sampler that asks a vLLM server (OpenAI's completions with vLLM's additions): token ids in, token ids out.

The server is started by the user, with the command of docs/scaling.md, and must see the same files.
"""

import contextlib
import hashlib
import os
import secrets
import shutil
import time
from collections import deque
from dataclasses import dataclass, replace

import numpy as np
import torch

from core.files.whole_files import writing
from core.generation import Generation, Stop
from core.huggingface.export import new_folder, write_causal
from core.model import GPT, LANGUAGE_MODEL
from core.run.names import VLLM_WEIGHTS
from core.settings.script import print_error
from grpo.rollout import moved
from grpo.samplers.sampler import SamplerError, SamplerOutput
from grpo.samplers.vllm_answers import Expected, check_temperature, read_completions, read_scores, understanding
from grpo.samplers.vllm_http import Server, Unknown
from grpo.scoring import score_in_batches

SEEDS = 7              # keeps the servers' seeds apart from other noise of a problem
NEVER = -100.0         # the bias of a token that the policy never samples
MOST_NEVER = 1024      # such tokens that a server takes a bias for
LAST_SECONDS = 10.0    # for each request with which a run ends


@dataclass
class Start:
    """Problems that the server samples completions for."""
    problems: dict
    prompts: list   # P lists of ids
    version: int
    model: str      # the name that was asked for
    answers: list   # P Futures


class VllmSampler:
    """Completions by a vLLM server, to which a sync brings a new adapter under a name of its own, or all weights.

    policy: the trainer's, causal; dist: the Distributed. Rank 0 brings the weights, each rank asks for its own share
    """

    outside = True

    def __init__(self, policy, config, dist):
        if policy.model.mode != LANGUAGE_MODEL:
            raise ValueError(f"sampler='vllm' writes from left to right, but generator_checkpoint="
                             f"{config.generator_checkpoint} fills in; use sampler='local' or 'ray'")
        self.policy, self.config = policy, config
        self.dist = dist
        self.never = never_sampled(policy)
        if len(self.never) > MOST_NEVER:
            raise ValueError(f"generator_checkpoint={config.generator_checkpoint} never samples {len(self.never)} of "
                             f"its ids, and a vLLM server excludes at most {MOST_NEVER}; use sampler='local' or 'ray'")
        self.server = Server(config.vllm_url, config.sampler_timeout)
        self.expected = self._expected()
        self.folder = os.path.join(os.path.abspath(config.out_dir), VLLM_WEIGHTS)
        self.of_folder = f"nano-grpo-{hashlib.sha256(self.folder.encode()).hexdigest()[:8]}-"
        nonce = dist.names_of_all([secrets.token_hex(4)])[0]  # no two runs give a name to different weights
        self.prefix = f"{self.of_folder}{nonce}-"
        self.starts = deque()
        self.loaded = {}   # {version: (name, folder)} of adapters
        self.first = True  # no batch has been finished
        self.name = None   # of the weights of the last sync
        self.model = None  # what requests call them: the name of the adapter, or of the model that is served
        self.held = None   # what the server called its weights then; None where it has no name for them
        self.base = self._look()

    def _expected(self):
        """What the server's answers are checked for."""
        policy, config = self.policy, self.config
        able = torch.ones(policy.vocabulary, dtype=torch.bool)
        able[[i for i in self.never if i < len(able)]] = False
        ends = f"stop_token_ids {list(policy.tokenizer.stop_token_ids)}"
        if config.stop_sequences:
            ends += f", stop_sequences {list(config.stop_sequences)}"
        stop = Stop(policy.tokenizer, config.stop_sequences, config.response_prefix)
        return Expected(self.server.named, config.group_size, config.max_new_tokens, able, stop, ends)

    def start(self, problems, iteration, version):
        prompts = prompts_of(problems)
        bodies = [self._request(prompt) | {"seed": seed_of(self.config.seed, iteration, number)}
                  for prompt, number in zip(prompts, problems["number"], strict=True)]
        answers = self.server.begin("/v1/completions", bodies)
        self.starts.append(Start(problems, prompts, version, self.model, answers))

    def finish(self):
        start = self.starts.popleft()
        completions = []
        for answer, prompt in zip(self._wait(start.answers), start.prompts, strict=True):
            completions += read_completions(answer, prompt, start.model, self.expected)
        self._check_held()
        generation = moved(as_generation(completions), self.policy.device)
        rollouts = self.policy.rollouts(start.problems, generation, self.config)
        if self.first:  # the policy has not moved since it was synced
            check_temperature(self.policy, rollouts, self.config, self.server.named)
            self.first = False
        return SamplerOutput(rollouts, start.version)

    def sync(self, weights, version):
        has_adapter = getattr(self.policy.model, "has_adapter", False)
        if not has_adapter:  # weights may not change while the server samples with them
            for start in self.starts:
                self._wait(start.answers)
            self._check_held()
            self.dist.barrier()
        name = f"{self.prefix}{version}"
        if self.dist.is_main:
            path = os.path.join(self.folder, name)
            with writing(path):
                os.makedirs(self.folder, exist_ok=True)
                save_for_vllm(self.policy, path, weights)
            if has_adapter:
                self._bring_adapter(name, path, version)
            else:
                self._bring_weights(name, path)
        self.dist.barrier()
        self.name = self.model = name
        if not has_adapter:
            self.model = self.base
            self.held = self._weights_held()

    def score(self, problems, written):
        model = self.model
        prompts = prompts_of(problems)
        length = written.mask.sum(1).long().tolist()
        completions = [ids[:n] for ids, n in zip(written.target.tolist(), length, strict=True)]
        texts = [prompts[n // self.config.group_size] + ids for n, ids in enumerate(completions)]
        request = {"model": model, "max_tokens": 1, "temperature": 1.0, "prompt_logprobs": 1}
        answers = self.server.begin("/v1/completions", [request | {"prompt": ids} for ids in texts])
        excluded = self._excluded(problems, written)

        def wait():
            scores = torch.zeros(written.mask.shape)
            for n, (answer, ids) in enumerate(zip(self._wait(answers), texts, strict=True)):
                scores[n, :length[n]] = torch.tensor(read_scores(answer, ids, length[n], model, self.expected))
            return [scores - excluded]
        return wait

    def close(self):
        for start in self.starts:
            for answer in start.answers:
                answer.cancel()
        self.starts.clear()
        self.server.timeout = min(self.server.timeout, LAST_SECONDS)
        if self.dist.is_main:
            with contextlib.suppress(SamplerError):  # the server may be the reason for the end
                for name, _ in self.loaded.values():
                    self.server.post("/v1/unload_lora_adapter", {"lora_name": name})
            shutil.rmtree(self.folder, ignore_errors=True)
        self.server.close()

    def _look(self):
        """The name of the model that is served. On rank 0, what an earlier run of this folder left is removed."""
        answer = self.server.get("/v1/models")
        with understanding(answer, self.server.named):
            names = [(card["id"], card.get("parent")) for card in answer["data"]]
            left = [name for name, _ in names if name.startswith(self.of_folder)]
            base = next((name for name, parent in names if parent is None), names[0][0])
        if self.dist.is_main:
            shutil.rmtree(self.folder, ignore_errors=True)
            for name in left:
                self._unload(name)
            if self._asked("/is_paused", "is_paused"):  # a run ended while it brought weights
                self.server.post("/resume", {})
        return base

    def _asked(self, path, field):
        """A field of what the server answers, or None if it does not know the path: it is older than the field."""
        try:
            answer = self.server.get(path)
        except Unknown:
            return None
        with understanding(answer, self.server.named):
            return answer[field]

    def _weights_held(self):
        return self._asked("/weight_info", "weight_version")

    def _check_held(self):
        """Raises SamplerError if the server holds other weights than after the last sync. An adapter needs no such
        check: a server that was started again does not know its name."""
        if self.held is None:
            return
        found = self._weights_held()
        if found != self.held:
            raise SamplerError(f"{self.server.named} holds the weights {found!r}, not {self.held!r}: it was started "
                               "again, or another run brings it weights; go on with --resume=auto")

    def _excluded(self, problems, written):
        """Log of the probability (N, M) that is left to the tokens that the policy samples, at temperature 1: a server
        scores known tokens without the bias of those that it never samples."""
        if not self.never:
            return torch.zeros(written.mask.shape)
        rollouts = self.policy.rollouts(problems, written, self.config)
        c = replace(self.config, temperature=1.0)
        with every_token(self.policy):
            among_all = score_in_batches(self.policy, rollouts, c)
        return (among_all - score_in_batches(self.policy, rollouts, c)).cpu()        # (N, M)

    def _request(self, prompt):
        """What the server is asked for a prompt. Settings that its generation_config.json may bring are named too."""
        c = self.config
        return {"model": self.model, "prompt": prompt, "n": c.group_size, "max_tokens": c.max_new_tokens,
                "temperature": c.temperature, "top_p": 1.0, "top_k": 0, "min_p": 0.0, "repetition_penalty": 1.0,
                "presence_penalty": 0.0, "frequency_penalty": 0.0, "logit_bias": {str(i): NEVER for i in self.never},
                "stop_token_ids": list(self.policy.tokenizer.stop_token_ids), "ignore_eos": True,
                "stop": list(c.stop_sequences), "include_stop_str_in_output": True, "skip_special_tokens": False,
                "logprobs": 1, "return_token_ids": True, "cache_salt": self.name}

    def _wait(self, answers):
        """The answers of Futures, all within sampler_timeout."""
        until = time.monotonic() + self.config.sampler_timeout
        try:
            return [answer.result(max(0.0, until - time.monotonic())) for answer in answers]
        except TimeoutError:
            raise SamplerError(self.server.late("/v1/completions")) from None

    def _bring_adapter(self, name, path, version):
        """Loads the adapter, and unloads those that no start needs any more."""
        self.server.post("/v1/load_lora_adapter", {"lora_name": name, "lora_path": path})
        self.loaded[version] = name, path
        for old in [v for v in self.loaded if v < version - self.config.max_staleness]:
            name, path = self.loaded.pop(old)
            self._unload(name)
            shutil.rmtree(path, ignore_errors=True)

    def _unload(self, name):
        """Some versions of vLLM refuse to unload an adapter that has already made room for others."""
        try:
            self.server.post("/v1/unload_lora_adapter", {"lora_name": name})
        except SamplerError as error:
            print_error(f"warning: {error}")

    def _bring_weights(self, name, path):
        """Lets the server read the weights of a folder in the place of its own, and forget what it has cached."""
        self.server.post("/pause?mode=wait&clear_cache=true", {})
        try:
            self.server.post("/collective_rpc", {"method": "reload_weights", "kwargs": {"weights_path": path}})
            with contextlib.suppress(Unknown):  # an older vLLM has no name for its weights
                self.server.post("/update_weight_version", {"new_version": name})
        except SamplerError as error:
            with contextlib.suppress(SamplerError):
                self.server.post("/resume", {})
            raise SamplerError(f"{error}; the server's own log says why: does it serve this run's model?") from None
        self.server.post("/resume", {})
        shutil.rmtree(path, ignore_errors=True)


def prompts_of(problems):
    """The ids of each prompt of a batch, without padding."""
    return [row[int(n):].tolist() for row, n in zip(problems["input"], problems["padding"], strict=True)]


def never_sampled(policy):
    """The ids of a model in Hugging Face format that the policy never samples: those without a text, and rows of the
    output layer behind the vocabulary."""
    return [*policy.tokenizer.banned_token_ids, *range(policy.vocabulary, rows_of(policy))]


def rows_of(policy):
    """Rows of the output layer: ids that a server of the model could sample."""
    return policy.vocabulary if isinstance(policy.model, GPT) else policy.model.config.vocab_size


@contextlib.contextmanager
def every_token(policy):
    """Within, the distributions of the policy are over all ids, also those that it never samples."""
    model, before = policy.model, (policy.model.vocabulary, policy.model.banned_ids)
    model.vocabulary, model.banned_ids = rows_of(policy), ()
    try:
        yield
    finally:
        model.vocabulary, model.banned_ids = before


def seed_of(seed, iteration, number):
    """The seed of a problem's completions; vLLM adds the number of the completion. It depends on these alone."""
    return int(np.random.default_rng([SEEDS, seed, iteration, int(number)]).integers(2**62))


def save_for_vllm(policy, path, weights):
    """Writes what the server loads: the adapter, or the whole model in Hugging Face format.

    weights: what policy.weights() gives
    """
    if isinstance(policy.model, GPT):
        twin = GPT(policy.model.config)
        twin.load_weights(weights)
        with new_folder(path, "out_dir") as folder:
            write_causal(twin, policy.tokenizer, folder)
    else:
        policy.save(path, weights=weights)


def as_generation(completions):
    """A Generation of N completions (ids, log-probabilities, whether it was cut)."""
    shape = (len(completions), max(len(ids) for ids, _, _ in completions))
    target, mask, logp = torch.zeros(shape, dtype=torch.long), torch.zeros(shape), torch.zeros(shape)
    for n, (ids, drawn, _) in enumerate(completions):
        target[n, :len(ids)] = torch.tensor(ids)
        logp[n, :len(ids)] = torch.tensor(drawn)
        mask[n, :len(ids)] = 1.0
    return Generation(target, mask, logp, None, torch.tensor([cut for _, _, cut in completions]))
