"""The sampler that asks a vLLM server (OpenAI's completions with vLLM's additions): token ids in, token ids out.

The server is started by the user, with the command of docs/scaling.md, and must see the same files.
"""

import contextlib
import os
import secrets
import shutil
from collections import deque
from dataclasses import dataclass, replace
from functools import partial

import numpy as np
import torch
from torch.nn.utils.rnn import pad_sequence

from core.files.whole_files import writing
from core.generation import Generation, Stop
from core.huggingface.export import new_folder, write_generator
from core.model import GPT, LANGUAGE_MODEL
from core.run.names import VLLM_WEIGHTS
from core.settings.script import print_error
from grpo.rollout import join, moved
from grpo.samplers.sampler import SamplerError
from grpo.samplers.vllm_answers import Expected, check_first_batch, read_completions, read_scores, understanding
from grpo.samplers.vllm_http import Server, Unknown
from grpo.samplers.vllm_turns import play
from grpo.scoring import score_in_batches

SEEDS = 7            # keeps the servers' seeds apart from other noise of a problem
NEVER = -100.0       # the bias of a token that the policy never samples
MOST_NEVER = 1024    # such tokens that a server takes a bias for
LAST_SECONDS = 10.0  # for each request with which a run ends


@dataclass
class Start:
    """Completions that were asked for."""
    problems: dict
    iteration: int
    episodes: object        # their environments, or None
    model: str              # the name that was asked for
    weights: str            # the name of the weights of the last sync
    answers: list           # Futures of the answers, one for each problem
    completions: list | None = None


class VllmSampler:
    """Completions by a vLLM server, to which a sync brings a new adapter under a name of its own, or all weights.

    policy: the trainer's, causal; dist: the Distributed. Rank 0 brings the weights, each rank asks for its own share
    """

    outside = True

    def __init__(self, policy, config, dist):
        if policy.model.mode != LANGUAGE_MODEL:
            raise ValueError(f"sampler='vllm' writes from left to right, but generator_checkpoint="
                             f"{config.generator_checkpoint} fills in; use sampler='local' or 'ray'")
        self.never = never_sampled(policy)
        if len(self.never) > MOST_NEVER:
            raise ValueError(f"generator_checkpoint={config.generator_checkpoint} never samples {len(self.never)} of "
                             f"its ids, and a vLLM server excludes at most {MOST_NEVER}; use sampler='local' or 'ray'")
        self.policy, self.config = policy, config
        self.dist = dist
        self.has_adapter = getattr(policy.model, "has_adapter", False)
        self.server = Server(config.vllm_url, config.sampler_timeout)
        self.expected = Expected(
            self.server.named, config.group_size, config.max_new_tokens,
            ids=set(range(policy.vocabulary)).difference(self.never),
            stop=Stop(policy.tokenizer, config.stop_sequences, config.response_prefix))
        self.folder = os.path.join(config.absolute_out_dir, VLLM_WEIGHTS)
        nonce = dist.names_of_all([secrets.token_hex(4)])[0]
        self.prefix = f"nano-grpo-{nonce}-"  # of the names of weights: no two runs give one to different weights
        self.starts = deque()  # Starts that were not finished
        self.loaded = []       # versions of the adapters that the server has
        self.first = True      # no batch has been finished
        self.name = None       # of the weights of the last sync
        self.held = None       # what the server called them then; None where it has no name for them
        self.model = self._served()  # what requests ask for: the model that is served, or an adapter

    def start(self, problems, iteration):
        episodes = self.policy.episodes(problems, iteration, self.config, self.expected.stop)
        if episodes is not None:
            problems = episodes.problems
        seeds = [seed_of(self.config.seed, iteration, number) for number in problems["number"]]
        bodies = [self._request(*asked) for asked in zip(prompts_of(problems), seeds, strict=True)]
        answers = self.server.begin("/v1/completions", bodies)
        self.starts.append(Start(problems, iteration, episodes, self.model, self.name, answers))

    def finish(self):
        start = self.starts[0]
        completions = self._completions(start)
        self.starts.popleft()
        self._check_held()
        generation = as_generation(completions)
        if start.episodes is not None:
            M = generation.mask.shape[1]
            generation.mask *= start.episodes.given[:, :M] < 0
        generation = moved(generation, self.policy.device)
        rollouts = self.policy.rollouts(start.problems, generation, self.config, start.episodes)
        if self.first:
            check_first_batch(self.policy, rollouts, self.config, self.server.named)
            self.first = False
        return rollouts, {}

    def sync(self, weights, version):
        if not self.has_adapter:  # weights may not change while the server samples with them
            for start in self.starts:
                self._completions(start)
            self._check_held()
            self.dist.barrier()
        self.name = f"{self.prefix}{version}"
        if self.dist.is_main:
            path = os.path.join(self.folder, self.name)
            with writing(path):
                os.makedirs(self.folder, exist_ok=True)
                save_for_vllm(self.policy, path, weights)
            if self.has_adapter:
                self._bring_adapter(path, version)
            else:
                self._bring_weights(path)
        self.dist.barrier()
        if self.has_adapter:
            self.model = self.name
        else:
            self.held = self._weights_held()

    def score(self, problems, rollouts):
        model, G = self.model, self.config.group_size
        prompts = prompts_of(problems)
        written = [ids[mask > 0].tolist() for ids, mask in zip(rollouts.target, rollouts.mask, strict=True)]
        texts = [prompts[n // G] + ids for n, ids in enumerate(written)]
        request = {"model": model, "max_tokens": 1, "temperature": 1.0, "prompt_logprobs": 1}
        answers = self.server.begin("/v1/completions", [request | {"prompt": ids} for ids in texts])
        excluded = self._excluded(rollouts)

        def wait():
            scores = []
            for answer, ids in zip(answers, written, strict=True):
                scores.append(read_scores(answer.result(), ids, model, self.expected))
            return [padded(scores) - excluded]
        return wait

    def close(self):
        for start in self.starts:
            for answer in start.answers:
                answer.cancel()
            if start.episodes is not None:
                start.episodes.close()
        if self.dist.is_main:
            self.server.timeout = LAST_SECONDS
            for version in self.loaded:
                self._unload(version)
            shutil.rmtree(self.folder, ignore_errors=True)
        self.server.close()

    def _served(self):
        """The name of the model that is served."""
        answer = self.server.get("/v1/models")
        with understanding(answer, self.server.named):
            return [card["id"] for card in answer["data"] if card.get("parent") is None][0]

    def _weights_held(self):
        """The server's name for its weights, or None if it knows none, as an older one."""
        try:
            answer = self.server.get("/weight_info")
        except Unknown:
            return None
        with understanding(answer, self.server.named):
            return answer["weight_version"]

    def _check_held(self):
        """Raises SamplerError if the server holds other weights than after the last sync. An adapter needs no such
        check: a server that was started again does not know its name."""
        if self.held is None:
            return
        found = self._weights_held()
        if found != self.held:
            raise SamplerError(f"{self.server.named} holds the weights {found!r}, not {self.held!r}: it was started "
                               "again, or another run brings it weights; go on with --resume=auto")

    def _excluded(self, rollouts):
        """Log of the probability (N, M) that is left to the tokens that the policy samples, at temperature 1: a server
        scores known tokens without the bias of those that it never samples."""
        if not self.never:
            return 0.0
        model, c = self.policy.model, replace(self.config, temperature=1.0)
        logp = score_in_batches(self.policy, rollouts, c)
        before = model.vocabulary, model.banned_ids
        model.vocabulary, model.banned_ids = model.config.vocab_size, ()
        among_all = score_in_batches(self.policy, rollouts, c)
        model.vocabulary, model.banned_ids = before
        return (among_all - logp).cpu()

    def _completions(self, start):
        """Waits for the completions of a start, and plays their episodes: N (ids, log-probabilities, whether it was
        cut)."""
        if start.completions is None:
            groups = [read_completions(answer.result(), start.model, self.expected) for answer in start.answers]
            start.completions = join(groups)
            if start.episodes is not None:
                ask = partial(self._next_turns, start)
                room = self.config.max_new_tokens
                start.completions = play(start.episodes, start.completions, room, ask)
        return start.completions

    def _next_turns(self, start, so_far):
        """Asks for a further turn of completions. so_far: {completion: its ids}. Returns {completion: (ids,
        log-probabilities, whether it was cut)}."""
        prompts, G = prompts_of(start.problems), self.config.group_size
        bodies, expected = [], []
        for n, ids in so_far.items():
            p = n // G
            number = start.problems["number"][p]
            seed = seed_of(self.config.seed, start.iteration, number, n % G, len(ids))
            room = self.config.max_new_tokens - len(ids)
            own = {
                "n": 1,
                "max_tokens": room,
                "model": start.model,
                "cache_salt": start.weights}
            bodies.append(self._request(prompts[p] + ids, seed) | own)
            expected.append(replace(self.expected, group_size=1, longest=room))
        answers = self.server.begin("/v1/completions", bodies)
        turns = {}
        for n, answer, one in zip(so_far, answers, expected, strict=True):
            turns[n], = read_completions(answer.result(), start.model, one)
        return turns

    def _request(self, prompt, seed):
        """The body of the request for a prompt. Settings that its generation_config.json may bring are named too."""
        c = self.config
        return {
            "model": self.model, "prompt": prompt, "seed": seed,
            "n": c.group_size, "max_tokens": c.max_new_tokens,
            "temperature": c.temperature, "top_p": 1.0, "top_k": 0, "min_p": 0.0, "repetition_penalty": 1.0,
            "logit_bias": {str(i): NEVER for i in self.never},
            "stop_token_ids": list(self.policy.tokenizer.stop_token_ids), "ignore_eos": True,
            "stop": list(c.stop_sequences), "include_stop_str_in_output": True,
            "skip_special_tokens": False,
            "logprobs": 1,
            "return_token_ids": True,
            "cache_salt": self.name}

    def _bring_adapter(self, path, version):
        """Loads the adapter, and unloads those that no start needs any more."""
        self.server.post("/v1/load_lora_adapter", {"lora_name": self.name, "lora_path": path})
        self.loaded.append(version)
        while self.loaded[0] < version - self.config.max_staleness:
            self._unload(self.loaded.pop(0))

    def _unload(self, version):
        """Some versions of vLLM refuse to unload an adapter that has already made room for others."""
        name = f"{self.prefix}{version}"
        try:
            self.server.post("/v1/unload_lora_adapter", {"lora_name": name})
        except SamplerError as error:
            print_error(f"warning: {error}")
        shutil.rmtree(os.path.join(self.folder, name), ignore_errors=True)

    def _bring_weights(self, path):
        """Lets the server read the weights of a folder in the place of its own, and forget what it has cached."""
        self.server.post("/pause?mode=wait&clear_cache=true", {})
        try:
            self.server.post("/collective_rpc", {"method": "reload_weights", "kwargs": {"weights_path": path}})
        except SamplerError as error:
            with contextlib.suppress(SamplerError):  # a server that stays is not left paused
                self.server.post("/resume", {})
            raise SamplerError(f"{error}; the server's own log says why: does it serve this run's model?") from None
        with contextlib.suppress(Unknown):  # an older vLLM has no name for its weights
            self.server.post("/update_weight_version", {"new_version": self.name})
        self.server.post("/resume", {})
        shutil.rmtree(path, ignore_errors=True)


def prompts_of(problems):
    """The ids of each prompt of a batch, without padding."""
    return [row[int(n):].tolist() for row, n in zip(problems["input"], problems["padding"], strict=True)]


def never_sampled(policy):
    """The ids of a model in Hugging Face format that the policy never samples: those without a text, and rows of the
    output layer behind the vocabulary."""
    rows = policy.vocabulary if isinstance(policy.model, GPT) else policy.model.config.vocab_size
    return [*policy.tokenizer.banned_token_ids, *range(policy.vocabulary, rows)]


def seed_of(seed, iteration, number, *turn):
    """The seed of a problem's completions; vLLM adds the number of the completion. It depends on these alone.

    turn: of a later turn, the number of the completion and its length so far
    """
    return int(np.random.default_rng([SEEDS, seed, iteration, int(number), *turn]).integers(2**62))


def save_for_vllm(policy, path, weights):
    """Writes what the server loads: the adapter, or the whole model in Hugging Face format.

    weights: what policy.weights() gives
    """
    if isinstance(policy.model, GPT):
        twin = GPT(policy.model.config)
        twin.load_weights(weights)
        with new_folder(path, "out_dir") as folder:
            write_generator(twin, policy.tokenizer, folder)
    else:
        policy.save(path, weights=weights)


def as_generation(completions):
    """A Generation of N completions (ids, log-probabilities, whether it was cut)."""
    ids, logp, cut = zip(*completions, strict=True)
    mask = padded([[1.0] * len(row) for row in ids])                                 # (N, M)
    return Generation(padded(ids), mask, padded(logp), None, torch.tensor(cut))


def padded(rows):
    """Lists of numbers as a tensor (N, M), 0 behind the end of each."""
    return pad_sequence([torch.tensor(row) for row in rows], batch_first=True)
