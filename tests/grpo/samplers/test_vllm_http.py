"""Requests to a server: many side by side, each with a deadline, every failure one line that names the address, however
the server misbehaves."""

import contextlib
import json
import socket
import threading
import time
from concurrent.futures import CancelledError
from contextlib import contextmanager

import pytest

from grpo.samplers import vllm_http
from grpo.samplers.sampler import SamplerError
from grpo.samplers.vllm_http import CONNECTIONS, Server, Unknown


@pytest.fixture(autouse=True)
def no_waits(monkeypatch):
    monkeypatch.setattr(vllm_http, "WAITS", (0.0, 0.0, 0.0))
    monkeypatch.delenv("VLLM_API_KEY", raising=False)


@contextmanager
def raw(act, timeout=20.0):
    """A Server whose other side reads a request, does act(connection, its head, its body) and closes. What it sends
    where act returns bytes."""
    over = threading.Event()

    def one(connection):
        with connection, contextlib.suppress(OSError):
            request = connection.makefile("rb")
            lines = list(iter(request.readline, b"\r\n"))
            length = [line.split(b":")[1] for line in lines if line.lower().startswith(b"content-length:")]
            body = request.read(int(length[0]) if length else 0)
            connection.sendall(act(connection, b"".join(lines), body))

    def listen():
        while True:
            connection, _ = listener.accept()
            if over.is_set():
                connection.close()
                return
            threading.Thread(target=one, args=(connection,), daemon=True).start()

    with socket.create_server(("127.0.0.1", 0), backlog=2 * CONNECTIONS) as listener:
        thread = threading.Thread(target=listen, daemon=True)
        thread.start()
        server = Server(f"http://127.0.0.1:{listener.getsockname()[1]}", timeout)
        try:
            yield server
        finally:
            server.close()
            over.set()
            socket.create_connection(listener.getsockname()).close()
            thread.join()


def answer(content, status="200 OK", length=None):
    """What a server sends: an answer that promises `length` bytes."""
    length = len(content) if length is None else length
    return f"HTTP/1.1 {status}\r\nContent-Length: {length}\r\n\r\n".encode() + content


def failure_of(act, path="/x", timeout=20.0):
    """The one line with which a request to this server fails."""
    with raw(act, timeout) as server:
        with pytest.raises(SamplerError) as error:
            server.post(path, {})
    text = str(error.value)
    assert text.isprintable() and text.startswith("vllm_url=http://127.0.0.1:") and len(text) < 500
    return text


def test_answers_belong_to_their_requests_which_are_under_way_side_by_side():
    """Each is answered when 16 have come: one after the other would wait for ever."""
    there = threading.Barrier(16)

    def twice(connection, head, body):
        there.wait(20)
        return answer(json.dumps({"twice": 2 * json.loads(body)["x"]}).encode())

    with raw(twice) as server:
        answers = server.begin("/double", [{"x": i} for i in range(3 * CONNECTIONS)])
        assert [answer.result(20)["twice"] for answer in answers] == [2 * i for i in range(3 * CONNECTIONS)]


@pytest.mark.parametrize("text", ["Success", "", "[" * 200_000])
def test_an_answer_that_is_no_json_is_text(text):
    with raw(lambda *_: answer(text.encode())) as server:
        assert server.post("/x", {}) == text


@pytest.mark.parametrize("status, text, shown", [
    (400, '{"error": {"message": "The model `x`\\ndoes not exist."}}', "400: The model `x` does not exist."),
    (400, '{"object": "error", "message": "too long"}', "400: too long"),
    (400, "<html>" + "x" * 5000, "400: <html>xxx"),
    (400, "[1]", "400: [1]"), (400, "", "400: "), (302, "", "302: "),
    (400, '{"message": "\\u001b[31mred\\u202e\\r\\n\\u0000 end"}', "400: ?[31mred? ? end"),
    (401, '{"error": "Unauthorized"}', "401: Unauthorized; put the key that the server was started with into the "
                                       "environment variable VLLM_API_KEY")])
def test_what_the_server_refuses_is_shown_in_one_line_and_not_asked_again(status, text, shown):
    asked = []

    def act(connection, head, body):
        asked.append(head)
        return answer(text.encode(), f"{status} x\r\nLocation: /target")

    assert f"refused /x with status {shown}" in failure_of(act)
    assert len(asked) == 1, "neither again nor at another address, where the key would travel too"


@pytest.mark.parametrize("path, line", [
    ("/v1/load_lora_adapter", "does not know /v1/load_lora_adapter; start the server with "
                              "VLLM_ALLOW_RUNTIME_LORA_UPDATING=True and --enable-lora"),
    ("/pause?mode=wait", "does not know /pause.mode=wait; start the server with VLLM_SERVER_DEV_MODE=1"),
    ("/weight_info", "refused /weight_info with status 404")])  # it can be done without
def test_what_a_server_was_not_started_with_is_named(path, line):
    with raw(lambda *_: answer(b'{"detail":"Not Found"}', "404 x")) as server:
        with pytest.raises(Unknown, match=line):
            server.get(path)


# Servers that misbehave below HTTP


def dripping(start, part):
    """Sends `start`, and then parts for ever."""
    def act(connection, head, body):
        connection.sendall(start)
        for i in range(10**6):
            connection.sendall(part % i)
            time.sleep(0.05)
    return act


def silent(connection, *_):
    time.sleep(30)


@pytest.mark.parametrize("act", [
    silent, dripping(answer(b"", length=10**6), b"%d"), dripping(b"HTTP/1.1 200 OK\r\n", b"X-%d: y\r\n")],
    ids=["silent", "body", "head"])
def test_an_answer_that_never_ends_is_waited_for_no_longer_than_the_deadline(act):
    assert "did not answer /x within sampler_timeout=0.4 seconds" in failure_of(act, timeout=0.4)


def test_an_answer_of_any_size_is_not_taken(monkeypatch):
    monkeypatch.setattr(vllm_http, "LARGEST", 1000)
    line = failure_of(dripping(answer(b"", length=10**9), b"%1000d"))
    assert "answers /x with more than 1000 bytes; does vllm_url name a vLLM server?" in line


BROKEN = {
    "cut": answer(b"half", length=100), "cut error": answer(b"half", "500 x", length=100), "nothing": b"",
    "garbage": b"\x1b[31m \xff garbage\r\n\r\n",
    "no gzip": b"HTTP/1.1 200 OK\r\nContent-Encoding: gzip\r\nContent-Length: 4\r\n\r\nhalf"}


@pytest.mark.parametrize("name", BROKEN)
def test_a_connection_that_breaks_is_named(name):
    assert "cannot be reached (" in failure_of(lambda *_: BROKEN[name])


def test_a_server_that_is_not_there_is_named():
    server = Server("http://127.0.0.1:1", 5)
    with pytest.raises(SamplerError, match="cannot be reached .*start the server, or correct vllm_url"):
        server.get("/v1/models")
    server.close()


def test_the_key_of_a_server_comes_from_the_environment_alone(monkeypatch):
    heads = []

    def act(connection, head, body):
        heads.append(b"authorization: bearer s3cret" in head.lower())
        return answer(b"{}")

    for key in ("", " s3cret\n"):
        monkeypatch.setenv("VLLM_API_KEY", key)
        with raw(act) as server:
            server.get("/x")
    assert heads == [False, True]
    monkeypatch.setenv("VLLM_API_KEY", "s3\ncret")
    with pytest.raises(SamplerError, match="^VLLM_API_KEY in the environment has characters that no request can carry"):
        Server("http://127.0.0.1:1", 5)


@pytest.mark.parametrize("failure", [b"", answer(b"1", length=9), answer(b"", "500 x"), answer(b"", "503 x")])
@pytest.mark.parametrize("failures", [2, 9])
def test_what_failed_by_chance_is_asked_again_a_few_times(failure, failures):
    asked = []

    def act(*_):
        asked.append(1)
        return failure if len(asked) <= failures else answer(b"1")

    if failures == 9:
        failure_of(act)
    else:
        with raw(act) as server:
            assert server.post("/x", {}) == 1
    assert len(asked) == 3


def test_all_tries_together_end_at_the_deadline(monkeypatch):
    monkeypatch.setattr(vllm_http, "WAITS", (0.0, 1000.0))
    assert "status 503" in failure_of(lambda *_: answer(b"", "503 x"), timeout=0.4)


def test_closing_ends_what_is_under_way():
    with raw(silent, timeout=600.0) as server:
        waiting = server.begin("/x", [{}] * 3)
        server.close()
        for answer_ in waiting:
            with pytest.raises((CancelledError, SamplerError)):
                answer_.result(20)
        server.close()
