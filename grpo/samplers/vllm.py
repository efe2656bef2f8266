"""sampler='vllm': samples on a vLLM server (OpenAI's completions API with vLLM's extensions): token ids in and out.

The user starts the server with the command in docs/scaling.md. The server must see the same files as the run.
"""

import contextlib
import json
import os
import secrets
import shutil
import time
from collections import deque
from concurrent.futures import ThreadPoolExecutor, wait
from http.client import HTTPConnection, HTTPException, HTTPSConnection
from urllib.parse import urlsplit

import numpy as np
import torch
from torch.nn.utils.rnn import pad_sequence

from core.device import moved
from core.errors import Mistake, described, one_line, others
from core.files import VLLM_WEIGHTS, writing
from core.generation import Generation, Stop
from core.huggingface.export import write_generator
from core.huggingface.files import writing_folder
from core.model import GPT, LANGUAGE_MODEL
from grpo.samplers.sampler import LONGEST_CALL, with_ties
from grpo.sampling_settings import SamplingSettings

SEEDS = 7                     # makes the server's seeds differ from other noise; vLLM adds the completion's index
NEVER = -100.0                # logit bias of tokens that the policy never samples
LAST_SECONDS = 10             # timeout of a request at the end of a run
CERTAIN = 1e-3                # largest -log p of a token that a logit bias makes certain
CONNECTIONS = 128             # simultaneous requests
WAITS = (0.0, 0.5, 1.0, 2.0)  # seconds before each try of a request
KEY = "VLLM_API_KEY"          # environment variable, also read by vLLM
COMMAND = "the command of docs/scaling.md"


def check(config):
    Server(config.vllm_url).ask("GET", "/v1/models")


def build(policy, config, dist):
    return VllmSampler(policy, config, dist)


class VllmSampler:
    """Samples on a vLLM server. At a sync, rank 0 sends the adapter or all weights; each rank requests its own share of
    the completions. policy: the trainer's policy, a causal one"""

    def __init__(self, policy, config, dist):
        if policy.model.mode != LANGUAGE_MODEL:
            raise Mistake(f"generator_checkpoint={config.generator_checkpoint} needs sampler='local' or 'ray': a "
                          "vLLM server writes from left to right")
        self.policy = policy
        self.config = config
        self.dist = dist
        self.settings = SamplingSettings.of(config)
        self.stop = Stop(policy.tokenizer, config.stop_sequences, config.response_prefix)
        self.never = never_sampled(policy)
        self.folder = os.path.join(config.absolute_out_dir, VLLM_WEIGHTS)
        nonce = dist.keys_of_all([secrets.token_hex(4)])[0]
        self.prefix = f"nano-grpo-{nonce}-"  # of weight names, unique to this run
        self.starts = deque()                # unfinished starts: (problems, Futures of the answers)
        self.loaded = deque()                # names of the adapters on the server
        self.name = None                     # name of the weights of the last sync
        self.server = Server(config.vllm_url)
        answer = self.server.ask("GET", "/v1/models")
        with self._reading():
            cards = json.loads(answer)["data"]
            base = [card["id"] for card in cards if card.get("parent") is None]
            self.model = base[0]             # the model in requests, until the first adapter

    def start(self, problems, iteration):
        bodies = []
        columns = problems["input"], problems["padding"], problems["number"]
        for row, padding, number in zip(*columns, strict=True):
            prompt = row[int(padding) :].tolist()
            entropy = [SEEDS, self.config.seed, iteration, int(number)]
            seed = np.random.default_rng(entropy).integers(2**62)
            body = self._request(prompt, int(seed))
            bodies.append(body)
        answers = self.server.begin("/v1/completions", bodies)
        self.starts.append((problems, answers))

    def finish(self):
        problems, answers = self.starts.popleft()
        completions = []
        for answer in answers:
            completions += self._completions(answer.result())
        ids, logp, truncated = zip(*completions, strict=True)
        ones = [torch.ones(len(row)) for row in ids]
        target = pad_sequence(ids, batch_first=True)                                 # (N, M)
        mask = pad_sequence(ones, batch_first=True)                                  # (N, M)
        logp = pad_sequence(logp, batch_first=True)                                  # (N, M)
        generation = Generation(target, mask, logp, None, torch.tensor(truncated))
        generation = moved(generation, self.policy.device)
        return self.policy.rollouts(problems, generation, self.settings)

    def sync(self, weights, version):
        has_adapter = self.config.has_adapter
        if not has_adapter:  # the server may still be sampling with its only weights
            for _, answers in self.starts:
                wait(answers)
            self.dist.barrier()
        self.name = f"{self.prefix}{version}"
        if self.dist.is_main:
            path = os.path.join(self.folder, self.name)
            with writing(path):
                save_for_vllm(self.policy, path, weights)
            if has_adapter:
                self._load_adapter(path)
            else:
                self._replace_weights(path)
        self.dist.barrier()
        if has_adapter:
            self.model = self.name
        self._check_logprobs()

    def close(self):
        self.server.close()
        if self.dist.is_main:
            self.server.timeout = LAST_SECONDS
            for name in self.loaded:
                self._unload(name)
            shutil.rmtree(self.folder, ignore_errors=True)

    def _reading(self):
        """Returns a context manager for reading an answer: any error, or a failed assert, becomes a Mistake."""
        return others(f"{self.server.named} answered otherwise than a vLLM server", f"start it with {COMMAND}")

    def _completions(self, text):
        """Parses an answer. Returns the completions of its prompt in order, each (token ids, log-probabilities, True if
        truncated)."""
        found = []
        vocabulary = range(self.policy.vocabulary)
        with self._reading():
            choices = json.loads(text)["choices"]
            assert len(choices) == self.settings.group_size, f"{len(choices)} completions of a prompt"
            for choice in sorted(choices, key=lambda choice: choice["index"]):
                ids = choice["token_ids"]
                logp = choice["logprobs"]["token_logprobs"]
                assert ids and len(ids) == len(logp), f"{len(logp)} log-probabilities of {len(ids)} token_ids"
                assert all(type(i) is int and i in vocabulary for i in ids), "ids of another vocabulary"
                ids = torch.tensor(ids)
                logp = torch.tensor(logp)
                ends = self.stop(ids[None], 0)[0]
                assert not ends[:-1].any(), f"a completion of {len(ids)} tokens that continues after its end"
                is_truncated = not ends[-1]
                found.append((ids, logp, is_truncated))
        return found

    def _request(self, prompt, seed):
        """Returns the body of a request. It sets every option that a generation_config.json could change."""
        c = self.settings
        return {
            "model": self.model,
            "prompt": prompt,
            "seed": seed,
            "n": c.group_size,
            "max_tokens": c.max_new_tokens,
            "temperature": c.temperature,
            "top_p": 1.0,
            "top_k": 0,
            "min_p": 0.0,
            "repetition_penalty": 1.0,
            "logit_bias": dict.fromkeys(self.never, NEVER),
            "stop_token_ids": list(self.policy.tokenizer.stop_token_ids),
            "ignore_eos": True,
            "stop": list(c.stop_sequences),
            "include_stop_str_in_output": True,
            "skip_special_tokens": False,
            "logprobs": 1,
            "return_token_ids": True,
            "cache_salt": self.name}

    def _check_logprobs(self):
        """Raises Mistake if the server's log-probabilities are those before temperature and biases: near a temperature
        of 1 the mismatch is too small to end the run."""
        certain = {"logit_bias": {0: -NEVER}, "max_tokens": 1}
        body = self._request([0], 0) | certain
        answer = self.server.ask("POST", "/v1/completions", body)
        _, logp, _ = self._completions(answer)[0]
        if abs(logp) > CERTAIN:
            raise Mistake(f"{self.server.named} has log-probabilities before temperature and biases "
                          f"(--logprobs-mode); start it with {COMMAND}")

    def _load_adapter(self, path):
        """Makes the server load the adapter, and unload the oldest adapter once no start needs it."""
        body = {"lora_name": self.name, "lora_path": path}
        self.server.ask("POST", "/v1/load_lora_adapter", body)
        self.loaded.append(self.name)
        if len(self.loaded) > self.config.max_staleness + 1:
            self._unload(self.loaded.popleft())

    def _unload(self, name):
        """Makes the server unload an adapter."""
        with contextlib.suppress(Mistake):  # some versions of vLLM refuse if they have evicted the adapter
            self.server.ask("POST", "/v1/unload_lora_adapter", {"lora_name": name})
        path = os.path.join(self.folder, name)
        shutil.rmtree(path, ignore_errors=True)

    def _replace_weights(self, path):
        """Makes the server load weights from a folder and clear its cache."""
        body = {"method": "reload_weights", "kwargs": {"weights_path": path}}
        self.server.ask("POST", "/pause?mode=wait&clear_cache=true", {})
        try:
            self.server.ask("POST", "/collective_rpc", body)
        finally:
            self.server.ask("POST", "/resume", {})
        shutil.rmtree(path, ignore_errors=True)


class Server:
    """Sends requests to a vLLM server in parallel, without proxies or redirects. Retries a request if its connection
    breaks or the server fails (status 5xx). timeout: seconds to wait for a silent server"""

    def __init__(self, url):
        self.named = f"vllm_url={one_line(url, 100)}"
        self.timeout = LONGEST_CALL
        self.url = urlsplit(url.rstrip("/"))
        self.headers = {"Content-Type": "application/json"}
        key = os.environ.get(KEY, "").strip()
        if key:
            self.headers["Authorization"] = f"Bearer {key}"
        self.threads = ThreadPoolExecutor(CONNECTIONS)

    def begin(self, path, bodies):
        """Posts bodies in parallel. Returns a list of Futures of the answers' texts."""
        return [self.threads.submit(self.ask, "POST", path, body) for body in bodies]

    def ask(self, method, path, body=None):
        """Sends a request and returns the text of the answer. Raises Mistake after the last try."""
        for pause in WAITS:
            time.sleep(pause)
            try:
                status, text = self._try(method, path, body)
            except TimeoutError:
                line = f"did not answer {path} within {self.timeout:g} seconds"
                break
            except (OSError, HTTPException, UnicodeError) as error:  # UnicodeError: an invalid host name
                line = f"cannot be reached ({described(error)}); start the server, or correct vllm_url"
                continue
            if status < 300:
                return text
            line = f"refused {path} with status {status}: {one_line(text)}; start it with {COMMAND}"
            if status < 500:
                break
        raise Mistake(f"{self.named} {line}")

    def close(self):
        """Drops requests of `begin` that have not been sent yet."""
        self.threads.shutdown(wait=False, cancel_futures=True)

    def _try(self, method, path, body):
        """Sends a request once. Returns (status, text)."""
        content = None if body is None else json.dumps(body)
        kind = HTTPSConnection if self.url.scheme == "https" else HTTPConnection
        connection = kind(self.url.netloc, timeout=self.timeout)
        with contextlib.closing(connection):
            connection.request(method, self.url.path + path, content, self.headers)
            response = connection.getresponse()
            text = response.read().decode(errors="replace")
            return response.status, text


def never_sampled(policy):
    """Returns the ids that the policy never samples: banned tokens, and rows of a Hugging Face model beyond its
    vocabulary."""
    ids = list(policy.tokenizer.banned_token_ids)
    if not isinstance(policy.model, GPT):
        ids += range(policy.vocabulary, policy.model.config.vocab_size)
    return ids


def save_for_vllm(policy, path, weights):
    """Writes the weights for the server in the precision of the run: the adapter, or the whole model in Hugging Face
    format."""
    if isinstance(policy.model, GPT):
        twin = GPT(policy.model.config)
        twin.load_weights(weights)
        with writing_folder(path) as folder:
            write_generator(twin, policy.tokenizer, folder, policy.dtype)
        return

    def cast(x):
        return x.to(policy.dtype) if x.is_floating_point() else x

    policy.save(path, weights=with_ties(cast, weights))
