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
ADAPTERS = "VLLM_ALLOW_RUNTIME_LORA_UPDATING=True and --enable-lora"
NEEDED = {                    # what the server must be started with, by the path that it does not know otherwise
    "/v1/load_lora_adapter": ADAPTERS, "/v1/unload_lora_adapter": ADAPTERS,
    "/pause": "VLLM_SERVER_DEV_MODE=1", "/collective_rpc": "VLLM_SERVER_DEV_MODE=1",
    "/resume": "VLLM_SERVER_DEV_MODE=1"}
NO_PATH = {"detail": "Not Found"}  # what a server answers that does not know a path, rather than an adapter
ONCE = {"/v1/load_lora_adapter", "/v1/unload_lora_adapter"}  # refused where an earlier try did what it asked for


class Unknown(SamplerError):
    """The server does not know the path, or the model."""


class Failed(SamplerError):
    """The connection broke, or the server did: the same request may succeed."""


class Server:
    """The server at an address. Every call ends within `timeout` seconds (sampler_timeout) or raises SamplerError.

    The requests run in an event loop of their own, in a thread that does not keep Python from ending. A request that
    fails is sent again, a few times: all but those of ONCE change nothing if they are answered twice.
    """

    def __init__(self, url, timeout):
        self.url, self.timeout, self.named = url.rstrip("/"), timeout, f"vllm_url={one_line(url)}"
        self.httpx, self.headers = require("httpx2", "sampler='vllm'"), headers()
        self.room, ready = asyncio.Semaphore(CONNECTIONS), threading.Event()
        threading.Thread(target=asyncio.run, args=(self._live(ready),), daemon=True).start()
        ready.wait()

    def get(self, path):
        return self._begin("GET", path, None).result()

    def post(self, path, body):
        """What the server answers: parsed JSON, or the text if it is none."""
        return self._begin("POST", path, body).result()

    def begin(self, path, bodies):
        """Posts bodies side by side. Returns a Future of each answer."""
        return [self._begin("POST", path, body) for body in bodies]

    def close(self):
        """Ends what is under way, and the thread."""
        with contextlib.suppress(RuntimeError):  # the loop is closed already
            self.loop.call_soon_threadsafe(self.over.set)

    async def _live(self, ready):
        """The event loop's main task; what is under way at its end is cancelled."""
        self.loop, self.over = asyncio.get_running_loop(), asyncio.Event()
        limits = self.httpx.Limits(max_connections=None, max_keepalive_connections=0)  # one kept open may be stale
        self.client = self.httpx.AsyncClient(headers=self.headers, timeout=None, limits=limits,
                                             trust_env=False)  # the address is taken as it is, without a proxy
        ready.set()
        await self.over.wait()

    def _begin(self, *request):
        return asyncio.run_coroutine_threadsafe(self._ask(*request), self.loop)

    async def _ask(self, method, path, body):
        waits = WAITS[:1] if path in ONCE else WAITS
        error = SamplerError(self.late(path))
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(self.timeout), self.room:
                for wait in waits:
                    await asyncio.sleep(wait)
                    try:
                        return await self._try(method, path, body)
                    except Failed as failed:
                        error = failed
        raise error

    async def _try(self, method, path, body):
        try:
            async with self.client.stream(method, self.url + path, json=body) as response:
                text = await self._content(response, path)
        except (self.httpx.HTTPError, self.httpx.InvalidURL, OSError, UnicodeError) as error:
            raise Failed(f"{self.named} cannot be reached ({one_line(error)}); start the server, or correct "
                         "vllm_url") from None
        if response.is_success:
            return parsed(text)
        line = self._refused(path, response.status_code, text)
        if response.is_server_error:
            raise Failed(line)
        if response.status_code == 404:
            raise Unknown(line)
        raise SamplerError(line)

    async def _content(self, response, path):
        """The text of an answer. Raises SamplerError if it is too long to be one."""
        content = bytearray()
        async for part in response.aiter_bytes():
            content += part
            if len(content) > LARGEST:
                raise SamplerError(f"{self.named} answers {path} with more than {LARGEST / 2**30:g} GB; does vllm_url "
                                   "name a vLLM server?")
        return content.decode(errors="replace")

    def late(self, path):
        return f"{self.named} did not answer {path} within sampler_timeout={self.timeout:g} seconds"

    def _refused(self, path, status, text):
        """The line about an answer with an error status."""
        bare = path.split("?")[0]
        found = parsed(text) or ""
        if status == 404 and bare in NEEDED and found == NO_PATH:
            return f"{self.named} does not know {path}; start the server with {NEEDED[bare]}"
        while isinstance(found, dict):  # the message may be one level further down
            found = found.get("error", found.get("message", text))
        line = f"{self.named} refused {path} with status {status}: {one_line(found)}"
        if status == 401:
            return f"{line}; put the key that the server was started with into the environment variable {KEY}"
        if 300 <= status < 400:
            return f"{line}; it leads to another address, which is not followed: correct vllm_url"
        return line


def headers():
    """Those of every request. The server's key comes from the environment, so that no file of a run holds it."""
    key = os.environ.get(KEY, "").strip()
    if not (key.isascii() and key.isprintable()):
        raise SamplerError(f"{KEY} in the environment has characters that no request can carry; correct it")
    plain = {"Accept-Encoding": "identity"}
    return plain | {"Authorization": f"Bearer {key}"} if key else plain


def parsed(text):
    """The value of a JSON text; a text that is none as it is."""
    if not text:
        return None
    try:
        return json.loads(text)
    except (ValueError, RecursionError):
        return text
