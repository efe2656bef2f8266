"""Requests to a vLLM server over HTTP, side by side; what fails is one line."""

import contextlib
import json
import os
import time
from concurrent.futures import ThreadPoolExecutor
from http.client import HTTPConnection, HTTPException, HTTPSConnection
from urllib.parse import urlsplit

from core.settings.user_code import one_line
from grpo.samplers.sampler import SamplerError

CONNECTIONS = 128             # requests under way at once
WAITS = (0.0, 0.5, 1.0, 2.0)  # seconds before each try of a request
KEY = "VLLM_API_KEY"          # the environment variable that vLLM itself reads
BROKEN = (OSError, HTTPException, UnicodeError, OverflowError)


class Server:
    """The server at an address, without a proxy or redirects. timeout: seconds for which it may say nothing.

    A request whose connection breaks, or that the server fails at, is sent again a few times.
    """

    def __init__(self, url, timeout):
        self.named, self.timeout = f"vllm_url={url}", timeout
        self.url = urlsplit(url.rstrip("/"))
        key = os.environ.get(KEY, "").strip()
        if not (key.isascii() and key.isprintable()):
            raise SamplerError(f"{KEY} in the environment has characters that no request can carry; correct it")
        self.headers = {"Content-Type": "application/json"}
        if key:
            self.headers["Authorization"] = f"Bearer {key}"
        self.threads = ThreadPoolExecutor(CONNECTIONS)

    def begin(self, path, bodies):
        """Posts bodies side by side. Returns a Future of each answer, a text."""
        return [self.threads.submit(self.ask, "POST", path, body) for body in bodies]

    def ask(self, method, path, body=None):
        """The text of an answer. Raises SamplerError if there is none, or a refusal."""
        line = ""
        for wait in WAITS:
            time.sleep(wait)
            try:
                status, text = self._try(method, path, body)
            except TimeoutError:
                line = f"did not answer {path} within sampler_timeout={self.timeout:g} seconds"
                break
            except BROKEN as error:
                line = f"cannot be reached ({one_line(error)}); start the server, or correct vllm_url"
                continue
            if status < 300:
                return text
            line = (f"refused {path} with status {status}: {one_line(text)}; start it with the command of "
                    "docs/scaling.md")
            if status < 500:
                break
        raise SamplerError(f"{self.named} {line}")

    def close(self):
        """Forgets the requests of `begin` that are not under way. Python waits at its end for those that are."""
        self.threads.shutdown(wait=False, cancel_futures=True)

    def _try(self, method, path, body):
        """(status, text) of one try."""
        content = None if body is None else json.dumps(body)
        make = HTTPSConnection if self.url.scheme == "https" else HTTPConnection
        with contextlib.closing(make(self.url.netloc, timeout=self.timeout)) as connection:
            connection.request(method, self.url.path + path, content, self.headers)
            response = connection.getresponse()
            return response.status, response.read().decode(errors="replace")
