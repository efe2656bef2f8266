"""sampler='vllm': a vLLM server samples (OpenAI's completions with vLLM's additions): token ids in, token ids out.

The user starts it with the command of docs/scaling.md. It must see the same files.
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
from grpo.samplers.sampler import LONGEST_CALL
from grpo.sampling_settings import SamplingSettings

SEEDS = 7                     # keeps the servers' seeds apart from other noise; vLLM adds the number of the completion
NEVER = -100.0                # the logit bias of a token that the policy never samples
LAST_SECONDS = 10             # timeout of each request at the end of a run
CONNECTIONS = 128             # simultaneous requests
WAITS = (0.0, 0.5, 1.0, 2.0)  # seconds before each try of a request
KEY = "VLLM_API_KEY"          # the environment variable that vLLM itself reads
COMMAND = "the command of docs/scaling.md"


def check(config):
    Server(config.vllm_url).ask("GET", "/v1/models")


def build(policy, config, dist):
    return VllmSampler(policy, config, dist)


class VllmSampler:
    """Completions by a vLLM server. A sync brings a new adapter, or all weights.
    policy: the trainer's, causal. Rank 0 brings the weights, each rank asks for its own share of the completions"""

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
        self.prefix = f"nano-grpo-{nonce}-"  # begins the names of weights, so that those of no two runs are equal
        self.starts = deque()                # unfinished starts: (problems, Futures of the answers)
        self.loaded = deque()                # names of the adapters that the server has
        self.name = None                     # of the weights of the last sync
        self.server = Server(config.vllm_url)
        answer = self.server.ask("GET", "/v1/models")
        with self._reading():
            cards = json.loads(answer)["data"]
            base = [card["id"] for card in cards if card.get("parent") is None]
            self.model = base[0]             # until the first adapter

    def start(self, problems, iteration):
        bodies = []
        columns = problems["input"], problems["padding"], problems["number"]
        for row, padding, number in zip(*columns, strict=True):
            prompt = row[int(padding) :].tolist()
            rng = np.random.default_rng([SEEDS, self.config.seed, iteration, int(number)])
            seed = int(rng.integers(2**62))
            bodies.append(self._request(prompt, seed))
        self.starts.append((problems, self.server.begin("/v1/completions", bodies)))

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
        if not self.config.has_adapter:  # weights may not change while the server samples with them
            for _, answers in self.starts:
                wait(answers)
            self.dist.barrier()
        self.name = f"{self.prefix}{version}"
        if self.dist.is_main:
            path = os.path.join(self.folder, self.name)
            with writing(path):
                save_for_vllm(self.policy, path, weights)
            if self.config.has_adapter:
                self._bring_adapter(path)
            else:
                self._bring_weights(path)
        self.dist.barrier()
        if self.config.has_adapter:
            self.model = self.name

    def close(self):
        self.server.close()
        if self.dist.is_main:
            self.server.timeout = LAST_SECONDS
            for name in self.loaded:
                self._unload(name)
            shutil.rmtree(self.folder, ignore_errors=True)

    def _reading(self):
        """A block that raises Mistake for an answer that it cannot read, or that fails its asserts."""
        return others(f"{self.server.named} answered otherwise than a vLLM server", f"start it with {COMMAND}")

    def _completions(self, text):
        """The completions of one prompt, in order, from the text of an answer: of each the ids of its tokens, their
        log-probabilities, and whether it ran out of room before its end."""
        found = []
        with self._reading():
            choices = json.loads(text)["choices"]
            assert len(choices) == self.settings.group_size, f"{len(choices)} completions of a prompt"
            for choice in sorted(choices, key=lambda choice: choice["index"]):
                ids, logp = choice["token_ids"], choice["logprobs"]["token_logprobs"]
                assert ids and len(ids) == len(logp), f"{len(logp)} log-probabilities of {len(ids)} token_ids"
                known = range(self.policy.vocabulary)
                assert all(type(i) is int and i in known for i in ids), "ids of another vocabulary"
                ids, logp = torch.tensor(ids), torch.tensor(logp)
                ends = self.stop(ids[None], 0)[0]
                assert not ends[:-1].any(), f"a completion of {len(ids)} tokens that goes on behind its end"
                found.append((ids, logp, not ends[-1]))
        return found

    def _request(self, prompt, seed):
        """The body of a request. It names the settings that a generation_config.json could change as well."""
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

    def _bring_adapter(self, path):
        """Loads the adapter, and unloads the oldest once no start needs it."""
        body = {"lora_name": self.name, "lora_path": path}
        self.server.ask("POST", "/v1/load_lora_adapter", body)
        self.loaded.append(self.name)
        if len(self.loaded) > self.config.max_staleness + 1:
            self._unload(self.loaded.popleft())

    def _unload(self, name):
        """Some versions of vLLM refuse to unload an adapter that they have evicted."""
        with contextlib.suppress(Mistake):
            self.server.ask("POST", "/v1/unload_lora_adapter", {"lora_name": name})
        shutil.rmtree(os.path.join(self.folder, name), ignore_errors=True)

    def _bring_weights(self, path):
        """The server replaces its weights by those of a folder, and clears its cache."""
        body = {"method": "reload_weights", "kwargs": {"weights_path": path}}
        self.server.ask("POST", "/pause?mode=wait&clear_cache=true", {})
        try:
            self.server.ask("POST", "/collective_rpc", body)
        finally:
            self.server.ask("POST", "/resume", {})
        shutil.rmtree(path, ignore_errors=True)


class Server:
    """Requests to a vLLM server, side by side, without proxy or redirects. timeout: seconds for which it may be silent

    A request is sent again if its connection breaks or the server fails (status 5xx).
    """

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
        """Posts bodies side by side. Returns a Future of each answer's text."""
        return [self.threads.submit(self.ask, "POST", path, body) for body in bodies]

    def ask(self, method, path, body=None):
        """The text of an answer. Raises Mistake after the last try."""
        for pause in WAITS:
            time.sleep(pause)
            try:
                status, text = self._try(method, path, body)
            except TimeoutError:
                line = f"did not answer {path} within {self.timeout:g} seconds"
                break
            except (OSError, HTTPException, UnicodeError) as error:  # of a name that is no host
                line = f"cannot be reached ({described(error)}); start the server, or correct vllm_url"
                continue
            if status < 300:
                return text
            line = f"refused {path} with status {status}: {one_line(text)}; start it with {COMMAND}"
            if status < 500:
                break
        raise Mistake(f"{self.named} {line}")

    def close(self):
        """Drops requests of `begin` that are not under way."""
        self.threads.shutdown(wait=False, cancel_futures=True)

    def _try(self, method, path, body):
        """(status, text) of one try."""
        content = None if body is None else json.dumps(body)
        kind = HTTPSConnection if self.url.scheme == "https" else HTTPConnection
        connection = kind(self.url.netloc, timeout=self.timeout)
        with contextlib.closing(connection):
            connection.request(method, self.url.path + path, content, self.headers)
            response = connection.getresponse()
            return response.status, response.read().decode(errors="replace")


def never_sampled(policy):
    """Ids that the policy never samples: banned tokens, and rows of a Hugging Face model beyond its vocabulary."""
    ids = list(policy.tokenizer.banned_token_ids)
    if not isinstance(policy.model, GPT):
        ids += range(policy.vocabulary, policy.model.config.vocab_size)
    return ids


def save_for_vllm(policy, path, weights):
    """Writes what the server loads: the adapter, or the whole model in Hugging Face format."""
    if isinstance(policy.model, GPT):
        twin = GPT(policy.model.config)
        twin.load_weights(weights)
        with writing_folder(path) as folder:
            write_generator(twin, policy.tokenizer, folder)
    else:
        policy.save(path, weights=weights)
