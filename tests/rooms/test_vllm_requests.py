"""Requests to a server: many side by side, every failure one line that names the address."""

import contextlib
import json
import socket
import threading

import pytest

from grpo.samplers import vllm
from grpo.samplers.sampler import SamplerError
from grpo.samplers.vllm import CONNECTIONS, Server


@pytest.fixture
def serve(monkeypatch):
    """act -> a Server whose other side reads a request and sends what act(its body) returns."""
    monkeypatch.setattr(vllm, "WAITS", (0.0, 0.0, 0.0))
    monkeypatch.delenv("VLLM_API_KEY", raising=False)

    def one(connection, act):
        with connection, contextlib.suppress(OSError):
            request = connection.makefile("rb")
            lines = list(iter(request.readline, b"\r\n"))
            length = [line.split(b":")[1] for line in lines if line.lower().startswith(b"content-length:")]
            connection.sendall(act(request.read(int(length[0]))))

    def listen(act):
        with contextlib.suppress(OSError):
            while True:
                connection, _ = listener.accept()
                threading.Thread(target=one, args=(connection, act), daemon=True).start()

    def made(act, timeout=20.0):
        threading.Thread(target=listen, args=(act,), daemon=True).start()
        return Server(f"http://127.0.0.1:{listener.getsockname()[1]}", timeout)

    with socket.create_server(("127.0.0.1", 0), backlog=2 * CONNECTIONS) as listener:
        yield made


def answer(content, status="200 OK", length=None):
    """What a server sends: an answer that promises `length` bytes."""
    length = len(content) if length is None else length
    return f"HTTP/1.1 {status}\r\nLocation: /target\r\nContent-Length: {length}\r\n\r\n".encode() + content


def test_answers_belong_to_their_requests_which_are_under_way_side_by_side(serve):
    """Each is answered when 16 have come: one after the other would wait for ever."""
    there = threading.Barrier(16)

    def twice(body):
        there.wait(20)
        return answer(json.dumps({"twice": 2 * json.loads(body)["x"]}).encode())

    answers = serve(twice).begin("/double", [{"x": i} for i in range(3 * CONNECTIONS)])
    assert [json.loads(answer.result(20))["twice"] for answer in answers] == [2 * i for i in range(3 * CONNECTIONS)]


@pytest.mark.parametrize("sent, tries, line", [
    (answer(b'{"message": "no\x1b[31m"}', "400 x"), 1, "refused /x with status 400: .*no.*docs/scaling.md"),
    (answer(b"", "302 x"), 1, "refused /x with status 302"),  # the key would travel to another address too
    (answer(b"", "503 x"), 3, "refused /x with status 503"), (answer(b"half", length=100), 3, "cannot be reached"),
    (None, 1, "did not answer /x within 0.3 seconds")])
def test_a_failure_is_one_line_and_what_may_be_chance_is_asked_again(serve, sent, tries, line):
    asked, over = [], threading.Event()

    def act(body):
        asked.append(body)
        if sent is None:
            over.wait(20)
        return sent or b""

    with pytest.raises(SamplerError, match=f"^vllm_url=http://127.0.0.1:[0-9]* {line}") as error:
        serve(act, timeout=0.3 if sent is None else 20.0).ask("POST", "/x", {})
    over.set()
    assert len(asked) == tries and str(error.value).isprintable()


def test_a_server_that_comes_back_is_asked_again(serve):
    sent = [answer(b"", "503 x"), b"", answer(b"yes")]
    assert serve(lambda body: sent.pop(0)).ask("POST", "/x", {}) == "yes"
