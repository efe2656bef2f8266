"""Requests to a server: many side by side, each with a deadline, every failure one line that names the address, however
the server misbehaves."""

import contextlib
import gzip
import json
import socket
import threading
import time
from concurrent.futures import CancelledError
from contextlib import contextmanager

import pytest

from grpo.samplers import vllm_http
from grpo.samplers.sampler import SamplerError
from grpo.samplers.vllm_http import CONNECTIONS, Server


@pytest.fixture(autouse=True)
def no_waits(monkeypatch):
    monkeypatch.setattr(vllm_http, "WAITS", (0.0, 0.0, 0.0))
    monkeypatch.delenv("VLLM_API_KEY", raising=False)


@contextmanager
def raw(act, timeout=20.0):
    """A Server whose other side reads a request, does act(connection, its head, its body) and closes."""
    over = threading.Event()

    def one(connection):
        with connection, contextlib.suppress(OSError):
            request = connection.makefile("rb")
            lines = list(iter(request.readline, b"\r\n"))
            length = [line.split(b":")[1] for line in lines if line.lower().startswith(b"content-length:")]
            body = request.read(int(length[0]) if length else 0)
            act(connection, b"".join(lines), body)

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


def serving(act, timeout=20.0):
    """A Server whose other side answers with act(path, body) -> (status, text)."""
    def respond(connection, head, body):
        status, text = act(head.split()[1].decode(), json.loads(body) if body else None)
        connection.sendall(answer(text.encode(), f"{status} x"))
    return raw(respond, timeout)


def one_line(error):
    assert "\n" not in str(error.value) and str(error.value).startswith("vllm_url=http://127.0.0.1:")
    return str(error.value)


def test_answers_belong_to_their_requests_however_many_are_sent():
    with serving(lambda path, body: (200, json.dumps({"twice": 2 * body["x"]}))) as server:
        answers = server.begin("/double", [{"x": i} for i in range(3 * CONNECTIONS)])
        assert [answer.result(20)["twice"] for answer in answers] == [2 * i for i in range(3 * CONNECTIONS)]


def test_requests_are_under_way_side_by_side():
    """Each is answered when all have come: one after the other would wait for ever."""
    all_there = threading.Barrier(16)

    def act(path, body):
        all_there.wait(20)
        return 200, "{}"

    with serving(act) as server:
        assert [answer.result(20) for answer in server.begin("/x", [{}] * 16)] == [{}] * 16


def test_an_answer_that_is_no_json_is_text_and_an_empty_one_none():
    with serving(lambda path, body: (200, "Success" if path == "/text" else "")) as server:
        assert server.post("/text", {}) == "Success" and server.get("/empty") is None


def test_a_server_that_is_not_there_is_named():
    with socket.socket() as s:
        s.bind(("127.0.0.1", 0))
        port = s.getsockname()[1]
    with pytest.raises(SamplerError, match="cannot be reached .*start the server, or correct vllm_url") as error:
        Server(f"http://127.0.0.1:{port}", 5).get("/v1/models")
    one_line(error)


def test_a_server_that_does_not_answer_is_waited_for_no_longer_than_the_deadline():
    with raw(lambda *_: time.sleep(5), timeout=0.3) as server:
        begun = time.monotonic()
        with pytest.raises(SamplerError, match="did not answer /slow within sampler_timeout=0.3 seconds") as error:
            server.post("/slow", {})
        one_line(error)
        with pytest.raises(SamplerError, match="within sampler_timeout=0.3 seconds"):
            server.begin("/slow", [{}])[0].result(20)
        assert time.monotonic() - begun < 15


@pytest.mark.parametrize("text, shown", [
    ('{"error": {"message": "The model `x`\\ndoes not exist."}}', "The model `x` does not exist."),
    ('{"object": "error", "message": "too long"}', "too long"), ('{"detail": "Not Found"}', '{"detail": "Not Found"}'),
    ("<html>" + "x" * 5000, "<html>xxx"), ("[1]", "[1]"), ("", "")])
def test_the_servers_own_message_is_shown_in_one_line(text, shown):
    with serving(lambda path, body: (400, text)) as server:
        with pytest.raises(SamplerError) as error:
            server.post("/v1/completions", {})
        line = one_line(error)
        assert f"refused /v1/completions with status 400: {shown}" in line and len(line) < 500


@pytest.mark.parametrize("path, needed", [
    ("/v1/load_lora_adapter", "VLLM_ALLOW_RUNTIME_LORA_UPDATING=True and --enable-lora"),
    ("/pause?mode=wait&clear_cache=true", "VLLM_SERVER_DEV_MODE=1"), ("/collective_rpc", "VLLM_SERVER_DEV_MODE=1")])
def test_what_a_server_was_not_started_with_is_named(path, needed):
    with serving(lambda path, body: (404, '{"detail":"Not Found"}')) as server:
        with pytest.raises(SamplerError) as error:
            server.post(path, {})
        assert one_line(error).endswith(f"does not know {path}; start the server with {needed}")


# Servers that misbehave below HTTP


def dripping(start, part):
    """Sends `start`, and then parts for ever."""
    def act(connection, head, body):
        connection.sendall(start)
        for i in range(10**6):
            connection.sendall(part % i)
            time.sleep(0.05)
    return act


def stalling(connection, *_):
    connection.sendall(answer(b"half", "500 x", length=100))
    time.sleep(30)


NEVER_ENDING = {
    "body": dripping(answer(b"", length=10**6), b"%d"),
    "head": dripping(b"HTTP/1.1 200 OK\r\n", b"X-%d: y\r\n"),
    "chunks": dripping(b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n", b"1\r\n%.1d\r\n"),
    "error without its end": stalling}


def direct(server):
    return server.post("/x", {})


@pytest.mark.parametrize("name", NEVER_ENDING)
def test_an_answer_that_never_ends_is_waited_for_no_longer_than_the_deadline(name):
    with raw(NEVER_ENDING[name], timeout=0.4) as server:
        with pytest.raises(SamplerError, match="did not answer /x within sampler_timeout=0.4 seconds") as error:
            direct(server)
        one_line(error)


BROKEN = {
    "cut": lambda connection, *_: connection.sendall(answer(b"half", length=100)),
    "cut error": lambda connection, *_: connection.sendall(answer(b"half", "500 x", length=100)),
    "nothing": lambda connection, *_: None,
    "garbage": lambda connection, *_: connection.sendall(b"\x1b[31m \xff garbage\r\n\r\n"),
    "no gzip": lambda connection, *_: connection.sendall(
        b"HTTP/1.1 200 OK\r\nContent-Encoding: gzip\r\nContent-Length: 4\r\n\r\nhalf")}


@pytest.mark.parametrize("name", BROKEN)
def test_a_connection_that_breaks_is_named(name):
    with raw(BROKEN[name]) as server:
        with pytest.raises(SamplerError, match="cannot be reached .*start the server, or correct vllm_url") as error:
            direct(server)
        assert one_line(error).isprintable()


def test_an_answer_too_long_for_the_memory_is_refused(monkeypatch):
    monkeypatch.setattr(vllm_http, "LARGEST", 2**20)
    sent = gzip.compress(bytes(2**23))
    zipped = b"HTTP/1.1 200 OK\r\nContent-Encoding: gzip\r\nContent-Length: %d\r\n\r\n" % len(sent) + sent
    for content in (answer(bytes(2**21), length=9 * 10**9), answer(bytes(2**21), "500 x"), zipped):
        with raw(lambda connection, *_, content=content: connection.sendall(content)) as server:
            with pytest.raises(SamplerError, match="answers /x with more than 0.000976562 GB") as error:
                direct(server)
            one_line(error)


def test_json_that_is_nested_too_deeply_is_text():
    text = "[" * 200_000
    with raw(lambda connection, *_: connection.sendall(answer(text.encode()))) as server:
        assert direct(server) == text


def test_a_redirect_is_not_followed(monkeypatch):
    """The request that it makes of a POST is a GET, whose answer says nothing; and the key would travel with it."""
    monkeypatch.setenv("VLLM_API_KEY", "s3cret")
    asked = []

    def act(connection, head, body):
        asked.append(head.split()[1])
        connection.sendall(b"HTTP/1.1 302 Found\r\nLocation: /target\r\nContent-Length: 0\r\n\r\n")

    with raw(act) as server:
        with pytest.raises(SamplerError, match="status 302: ; it leads to another address, which") as error:
            direct(server)
        one_line(error)
        assert asked == [b"/x"]


def test_control_characters_of_a_server_do_not_reach_the_terminal():
    text = '{"message": "\\u001b[31mred\\u202e\\r\\n\\u0000 end"}'
    with raw(lambda connection, *_: connection.sendall(answer(text.encode(), "400 x"))) as server:
        with pytest.raises(SamplerError) as error:
            direct(server)
        assert one_line(error).endswith("status 400: ?[31mred? ? end") and str(error.value).isprintable()
    for url in ("http://127.0.0.1:1/\r\nX: \x1b[31my", "http://[::1"):
        server = Server(url, 5)
        with pytest.raises(SamplerError) as error:
            server.get("/v1/models")
        assert str(error.value).isprintable()
        server.close()


def test_the_key_of_a_server_comes_from_the_environment_alone(monkeypatch):
    def act(connection, head, body):
        given = b"authorization: bearer s3cret" in head.lower()
        connection.sendall(answer(b"{}") if given else answer(b'{"error":"Unauthorized"}', "401 Unauthorized"))

    with raw(act) as server:
        with pytest.raises(SamplerError, match="status 401: Unauthorized; put the key .* VLLM_API_KEY"):
            direct(server)
    monkeypatch.setenv("VLLM_API_KEY", " s3cret\n")
    with raw(act) as server:
        assert direct(server) == {}
    monkeypatch.setenv("VLLM_API_KEY", "s3\ncret")
    with pytest.raises(SamplerError, match="VLLM_API_KEY in the environment has characters that no request") as error:
        Server("http://127.0.0.1:1", 5)
    assert "cret" not in str(error.value)


class Failing:
    """Answers the first `times` requests with a failure, and those behind them well."""

    def __init__(self, times, failure):
        self.times, self.failure, self.asked = times, failure, 0

    def __call__(self, connection, *_):
        self.asked += 1
        connection.sendall(self.failure if self.asked <= self.times else answer(b"1"))


FAILURES = {"reset": b"", "cut": answer(b"1", length=9), "500": answer(b"", "500 x"), "503": answer(b"", "503 x")}


@pytest.mark.parametrize("name", FAILURES)
def test_what_failed_by_chance_is_asked_again(name):
    act = Failing(2, FAILURES[name])
    with raw(act) as server:
        assert direct(server) == 1 and act.asked == 3
        assert server.get("/y") == 1


@pytest.mark.parametrize("path, failure, tries", [
    ("/x", "reset", 3), ("/x", "503", 3), ("/v1/load_lora_adapter", "reset", 1), ("/v1/unload_lora_adapter", "500", 1)])
def test_nothing_is_asked_more_often_than_it_may(path, failure, tries):
    act = Failing(9, FAILURES[failure])
    with raw(act) as server:
        with pytest.raises(SamplerError):
            server.post(path, {})
        assert act.asked == tries


def test_what_the_server_refuses_is_not_asked_again():
    act = Failing(9, answer(b"too long", "400 x"))
    with raw(act) as server:
        with pytest.raises(SamplerError, match="too long"):
            server.post("/x", {})
        assert act.asked == 1


def test_all_tries_together_end_at_the_deadline(monkeypatch):
    monkeypatch.setattr(vllm_http, "WAITS", (0.0, 1000.0))
    with raw(Failing(9, FAILURES["503"]), timeout=0.4) as server:
        with pytest.raises(SamplerError, match="status 503"):
            direct(server)


def test_closing_ends_what_is_under_way():
    with raw(stalling, timeout=600.0) as server:
        waiting = server.begin("/x", [{}] * 3)
        server.close()
        for answer_ in waiting:
            with pytest.raises((CancelledError, SamplerError)):
                answer_.result(20)
        server.close()
