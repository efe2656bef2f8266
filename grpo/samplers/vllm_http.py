"""Requests to a vLLM server: JSON over HTTP, in threads, each with a deadline and errors of one line."""

import http.client
import json
import queue
import threading
import urllib.error
import urllib.request
from concurrent.futures import Future

from grpo.samplers.sampler import SamplerError

CONNECTIONS = 128  # requests under way at once
SHOWN = 300        # characters of a server's own error message that are shown
NEEDED = {         # what the server must be started with, by the path that it does not know otherwise
    "/v1/load_lora_adapter": "VLLM_ALLOW_RUNTIME_LORA_UPDATING=True and --enable-lora",
    "/v1/unload_lora_adapter": "VLLM_ALLOW_RUNTIME_LORA_UPDATING=True and --enable-lora",
    "/pause": "VLLM_SERVER_DEV_MODE=1", "/collective_rpc": "VLLM_SERVER_DEV_MODE=1",
    "/resume": "VLLM_SERVER_DEV_MODE=1"}


class Server:
    """The server at an address. Every call ends within `timeout` seconds (sampler_timeout) or raises SamplerError."""

    def __init__(self, url, timeout):
        if not url.startswith(("http://", "https://")):
            raise SamplerError(f"vllm_url={url} must begin with http:// or https://, as in http://localhost:8000")
        self.url, self.timeout, self.named = url.rstrip("/"), timeout, f"vllm_url={url}"
        self.open = urllib.request.build_opener(urllib.request.ProxyHandler({})).open  # the address is taken as it is
        self.jobs, self.threads, self.closed = queue.SimpleQueue(), 0, False

    def get(self, path):
        return self._call(path, None)

    def post(self, path, body):
        """What the server answers: parsed JSON, or the text if it is none."""
        return self._call(path, json.dumps(body).encode())

    def begin(self, path, bodies):
        """Posts bodies side by side. Returns a Future of each answer."""
        answers = [Future() for _ in bodies]
        for job in zip(answers, bodies, strict=True):
            self.jobs.put((path, *job))
        while self.threads < min(CONNECTIONS, len(bodies)):
            self.threads += 1
            threading.Thread(target=self._work, daemon=True).start()  # none keeps Python from ending
        return answers

    def close(self):
        """Lets the threads end. What was not sent yet is not sent."""
        self.closed = True
        for _ in range(self.threads):
            self.jobs.put(None)

    def _work(self):
        while (job := self.jobs.get()) is not None and not self.closed:
            path, answer, body = job
            try:
                answer.set_result(self.post(path, body))
            except SamplerError as error:
                answer.set_exception(error)

    def _call(self, path, data):
        request = urllib.request.Request(self.url + path, data, {"Content-Type": "application/json"})
        try:
            with self.open(request, timeout=self.timeout) as response:
                text = response.read().decode(errors="replace")
        except urllib.error.HTTPError as error:
            raise SamplerError(self._refused(path, error)) from None
        except TimeoutError:
            raise SamplerError(self.late(path)) from None
        except urllib.error.URLError as error:
            if isinstance(error.reason, TimeoutError):
                raise SamplerError(self.late(path)) from None
            raise SamplerError(f"{self.named} cannot be reached ({error.reason}); start the server, or correct "
                               "vllm_url") from None
        except (OSError, ValueError, http.client.HTTPException) as error:  # the connection broke, or the address is bad
            raise SamplerError(f"{self.named} cannot be reached ({error}); start the server, or correct "
                               "vllm_url") from None
        try:
            return json.loads(text) if text else None
        except ValueError:
            return text

    def late(self, path):
        return f"{self.named} did not answer {path} within sampler_timeout={self.timeout:g} seconds"

    def _refused(self, path, error):
        """The line about an answer with an error status."""
        text = error.read().decode(errors="replace")
        if error.code == 404 and path.split("?")[0] in NEEDED and "exist" not in text:
            return f"{self.named} does not know {path}; start the server with {NEEDED[path.split('?')[0]]}"
        try:
            found = json.loads(text)
            text = found.get("error", found).get("message", text)
        except (ValueError, AttributeError):
            pass
        return f"{self.named} refused {path} with status {error.code}: {' '.join(str(text).split())[:SHOWN]}"
