"""A small HTTP server that answers as a vLLM server does, with a model that transformers computes token by token.
`fault` makes it misbehave in one way.

with running(folder) as server: VllmSampler with vllm_url=server.url
"""

import contextlib
import json
import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

import torch

FAULTS = {
    "stale adapter": "says that it loaded an adapter, but computes with the one before",
    "stale weights": "says that it read the weights again, but keeps those it has",
    "raw log-probabilities": "reports those before temperature and biases, as vLLM does unless told otherwise",
    "re-encoded": "reports ids of the text instead of those that it drew, as many as it drew"}


class VllmServer(ThreadingHTTPServer):
    """url: its address; asked: the paths that were asked for, in order; keys: the headers with a key of each

    fault: a key of FAULTS, or None
    """

    daemon_threads, request_queue_size = True, 256

    def __init__(self, folder):
        import transformers
        super().__init__(("127.0.0.1", 0), Handler)
        self.url, self.name = f"http://127.0.0.1:{self.server_port}", "served"
        self.net = transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
        self.tokenizer = transformers.AutoTokenizer.from_pretrained(folder)
        self.adapters, self.asked, self.keys = {}, [], []  # {name: folder}
        self.fault, self.lock, self.paused = None, threading.Lock(), False
        self.salts = {}  # {salt: the weights that were used with it}
        self.known = {
            "/v1/models": self.models, "/v1/completions": self.complete, "/v1/load_lora_adapter": self.load_adapter,
            "/v1/unload_lora_adapter": lambda body: self.adapters.pop(body["lora_name"]),
            "/pause": lambda body: self.pause(True), "/resume": lambda body: self.pause(False),
            "/collective_rpc": self.reload}

    # The answers to requests

    def models(self, body):
        return {"data": [{"id": name, "parent": self.name} for name in self.adapters] +
                        [{"id": self.name, "parent": None}]}

    def load_adapter(self, body):
        import peft
        name, path = body["lora_name"], body["lora_path"]
        if self.fault == "stale adapter":
            path = list(self.adapters.values())[-1]
        if isinstance(self.net, peft.PeftModel):
            self.net.load_adapter(path, name)
        else:
            self.net = peft.PeftModel.from_pretrained(self.net, path, name).eval()
        self.adapters[name] = path

    def pause(self, paused):
        self.paused = paused

    def reload(self, body):
        import transformers
        assert body["method"] == "reload_weights" and self.paused
        if self.fault != "stale weights":
            path = body["kwargs"]["weights_path"]
            self.net.load_state_dict(transformers.AutoModelForCausalLM.from_pretrained(path).state_dict())

    def complete(self, body):
        model, ids = body["model"], body["prompt"]
        assert not self.paused and model in (self.name, *self.adapters)
        weights = model
        if model in self.adapters:
            self.net.set_adapter(model)
        else:
            weights = sum(float(p.sum()) for p in self.net.parameters())
        assert self.salts.setdefault(body["cache_salt"], weights) == weights, "what other weights read would be used"
        choices = [{"index": i} | self.draw(ids, body, body["seed"] + i) for i in range(body["n"])]
        return {"choices": choices[1:] + choices[:1]}  # no order is promised

    def draw(self, prompt, body, seed):
        """One completion, as vLLM reports it."""
        generator, drawn, logp = torch.Generator().manual_seed(seed), [], []
        assert body["ignore_eos"] and (body["top_p"], body["top_k"], body["min_p"]) == (1.0, 0, 0.0)
        while len(drawn) < body["max_tokens"]:
            raw = self.net(torch.tensor([prompt + drawn])).logits[0, -1].double()
            logits = raw.clone()
            for i, bias in body["logit_bias"].items():
                logits[int(i)] += bias
            p = (logits / body["temperature"]).softmax(-1)
            drawn.append(int(torch.multinomial(p, 1, generator=generator)))
            reported = raw.softmax(-1) if self.fault == "raw log-probabilities" else p
            logp.append(float(reported[drawn[-1]].log()))
            text = self.tokenizer.decode(drawn)
            if drawn[-1] in body["stop_token_ids"] or any(s in text for s in body["stop"]):
                break
        ids = drawn
        if self.fault == "re-encoded":
            text = self.tokenizer.decode(drawn, skip_special_tokens=True)
            ids = self.tokenizer.encode(text, add_special_tokens=False)
            ids = (ids * len(drawn))[: len(drawn) - 1] + drawn[-1:]  # the last is kept
        return {"token_ids": ids, "logprobs": {"token_logprobs": logp}}


class Handler(BaseHTTPRequestHandler):
    def log_message(self, *arguments):
        """Nothing is printed."""

    def do_GET(self):
        self.answer(None)

    def do_POST(self):
        self.answer(json.loads(self.rfile.read(int(self.headers["Content-Length"]))))

    def answer(self, body):
        s, path = self.server, self.path.split("?")[0]
        s.asked.append(self.path)
        s.keys.append(self.headers["Authorization"])
        with s.lock, torch.no_grad():  # one request at a time, as no real server does
            data = json.dumps(s.known[path](body)).encode()
        self.send_response(200)
        self.send_header("Content-Length", str(len(data)))
        self.end_headers()
        self.wfile.write(data)


@contextlib.contextmanager
def running(folder):
    """A VllmServer of the model in a folder, until the end of the block."""
    server = VllmServer(folder)
    threading.Thread(target=server.serve_forever, args=(0.01,), daemon=True).start()
    try:
        yield server
    finally:
        server.shutdown()
        server.server_close()
