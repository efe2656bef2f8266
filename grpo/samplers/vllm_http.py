"""Requests to a vLLM server: JSON over HTTP, side by side, each with a deadline and errors of one line."""

import asyncio
import contextlib
import json
import os
import threading

from core.settings.optional import require
from core.settings.user_code import one_line
from grpo.samplers.sampler import SamplerError

CONNECTIONS = 128             # requests under way at once
LARGEST = 2**30               # bytes of an answer
WAITS = (0.0, 0.5, 1.0, 2.0)  # seconds before each try of a request
KEY = "VLLM_API_KEY"          # the environment variable that vLLM itself reads
NEEDED = {                    # what a server must be started with that does not know a path
    "/v1/load_lora_adapter": "VLLM_ALLOW_RUNTIME_LORA_UPDATING=True and --enable-lora",
    "/pause": "VLLM_SERVER_DEV_MODE=1"}


class Unknown(SamplerError):
    """The server does not know the path, or the model."""


class Server:
    """The server at an address. Every call ends within `timeout` seconds (sampler_timeout) or raises SamplerError.

    The requests run in an event loop of their own, in a thread that does not keep Python from ending. A request whose
    connection breaks, or that the server fails at, is sent again a few times.
    """

    def __init__(self, url, timeout):
        self.url, self.timeout = url.rstrip("/"), timeout
        self.named = f"vllm_url={url}"
        self.httpx = require("httpx2", "sampler='vllm'")
        limits = self.httpx.Limits(max_connections=CONNECTIONS, max_keepalive_connections=0)  # a kept one may be stale
        self.client = self.httpx.AsyncClient(headers=headers(), timeout=None, limits=limits,
                                             trust_env=False)  # the address is taken as it is, without a proxy
        self.loop, self.over = asyncio.new_event_loop(), asyncio.Event()
        threading.Thread(target=self._run, daemon=True).start()

    def get(self, path):
        return self._begin("GET", path, None).result()

    def post(self, path, body):
        """Returns what the server answers: parsed JSON, or the text if it is none."""
        return self._begin("POST", path, body).result()

    def begin(self, path, bodies):
        """Posts bodies side by side. Returns a Future of each answer."""
        return [self._begin("POST", path, body) for body in bodies]

    def close(self):
        """Ends what is under way, and the thread."""
        with contextlib.suppress(RuntimeError):  # the loop is closed already
            self.loop.call_soon_threadsafe(self.over.set)

    def _run(self):
        """Keeps the event loop alive until `close`, which cancels what is under way."""
        with asyncio.Runner(loop_factory=lambda: self.loop) as runner:
            runner.run(self.over.wait())

    def _begin(self, *request):
        return asyncio.run_coroutine_threadsafe(self._ask(*request), self.loop)

    async def _ask(self, method, path, body):
        line = f"{self.named} did not answer {path} within sampler_timeout={self.timeout:g} seconds"
        broken = (self.httpx.HTTPError, self.httpx.InvalidURL, OSError, UnicodeError)
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(self.timeout):
                for wait in WAITS:
                    await asyncio.sleep(wait)
                    try:
                        response, text = await self._answer(method, path, body)
                    except broken as error:
                        line = (f"{self.named} cannot be reached ({one_line(error)}); start the server, or correct "
                                "vllm_url")
                        continue
                    if response.is_success:
                        return parsed(text)
                    line = self._refusal(path, response.status_code, text)
                    if response.status_code == 404:
                        raise Unknown(line)
                    if not response.is_server_error:
                        break
        raise SamplerError(line)

    async def _answer(self, method, path, body):
        """The response to a request, and its text. Raises SamplerError if it is too long."""
        content = bytearray()
        async with self.client.stream(method, self.url + path, json=body) as response:
            async for part in response.aiter_bytes():
                content += part
                if len(content) > LARGEST:
                    raise SamplerError(f"{self.named} answers {path} with more than {LARGEST} bytes; does vllm_url "
                                       "name a vLLM server?")
        return response, content.decode(errors="replace")

    def _refusal(self, path, status, text):
        """The line about an answer with an error status."""
        found = parsed(text)
        needed = NEEDED.get(path.split("?")[0])
        if status == 404 and needed:
            return f"{self.named} does not know {path}; start the server with {needed}"
        while isinstance(found, dict):  # the message may be one level further down
            found = found.get("error", found.get("message", text))
        line = f"{self.named} refused {path} with status {status}: {one_line(found)}"
        if status == 401:
            line += f"; put the key that the server was started with into the environment variable {KEY}"
        return line


def headers():
    """The headers of every request. The server's key comes from the environment, so that no file of a run holds it."""
    key = os.environ.get(KEY, "").strip()
    if not key:
        return {}
    if not (key.isascii() and key.isprintable()):
        raise SamplerError(f"{KEY} in the environment has characters that no request can carry; correct it")
    return {"Authorization": f"Bearer {key}"}


def parsed(text):
    """The value of a JSON text; a text that is none as it is."""
    try:
        return json.loads(text)
    except (ValueError, RecursionError):
        return text
