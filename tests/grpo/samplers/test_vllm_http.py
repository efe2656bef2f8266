"""Requests to a server: many side by side, each with a deadline, every failure one line that names the address."""

import json
import socket
import threading
import time
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

import pytest

from grpo.samplers.sampler import SamplerError
from grpo.samplers.vllm_http import CONNECTIONS, Server


@contextmanager
def serving(act, timeout=20.0):
    """A Server whose other side answers with act(path, body) -> (status, text); None: it never answers."""
    over = threading.Event()

    class Handler(BaseHTTPRequestHandler):
        def do_POST(self):
            body = self.rfile.read(int(self.headers.get("Content-Length") or 0))
            found = act(self.path, json.loads(body) if body else None)
            if found is None:
                over.wait()
                return
            status, text = found
            self.send_response(status)
            self.send_header("Content-Length", str(len(text.encode())))
            self.end_headers()
            self.wfile.write(text.encode())

        do_GET = do_POST

        def log_message(self, *arguments):
            pass

    class Other(ThreadingHTTPServer):
        request_queue_size = 2 * CONNECTIONS

    other = Other(("127.0.0.1", 0), Handler)
    other.daemon_threads = True
    threading.Thread(target=other.serve_forever, kwargs={"poll_interval": 0.01}, daemon=True).start()
    server = Server(f"http://127.0.0.1:{other.server_port}/", timeout)
    try:
        yield server
    finally:
        server.close()
        over.set()
        other.shutdown()
        other.server_close()


def one_line(error):
    assert "\n" not in str(error.value) and str(error.value).startswith("vllm_url=http://127.0.0.1:")
    return str(error.value)


def test_answers_belong_to_their_requests_however_many_are_sent():
    with serving(lambda path, body: (200, json.dumps({"twice": 2 * body["x"]}))) as server:
        answers = server.begin("/double", [{"x": i} for i in range(3 * CONNECTIONS)])
        assert [answer.result(20)["twice"] for answer in answers] == [2 * i for i in range(3 * CONNECTIONS)]
        assert server.threads <= CONNECTIONS


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
    with pytest.raises(SamplerError, match="^vllm_url=localhost must begin with http:// or https://"):
        Server("localhost", 5)


def test_a_server_that_does_not_answer_is_waited_for_no_longer_than_the_deadline():
    with serving(lambda path, body: None, timeout=0.3) as server:
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


def test_a_connection_that_breaks_is_named():
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        listener.listen()

        def answer_half():
            connection, _ = listener.accept()
            connection.recv(1000)
            connection.sendall(b"HTTP/1.1 200 OK\r\nContent-Length: 100\r\n\r\nhalf")
            connection.close()

        threading.Thread(target=answer_half, daemon=True).start()
        with pytest.raises(SamplerError, match="cannot be reached"):
            Server(f"http://127.0.0.1:{listener.getsockname()[1]}", 5).get("/v1/models")
