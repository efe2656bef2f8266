"""A small HTTP server that answers as a vLLM server does, with a model that transformers computes, token by token and
without a cache. `fault` makes it misbehave in one way.

with running(folder) as server: VllmSampler with vllm_url=server.url
"""

import contextlib
import json
import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

import torch

FAULTS = {  # what it does wrong
    "stale adapter": "says that it loaded an adapter, but computes with the one before",
    "stale weights": "says that it read the weights again, but keeps those it has",
    "temperature": "draws at a temperature that is `factor` times the one asked for",
    "raw": "reports log-probabilities at temperature 1, as vLLM does without --logprobs-mode processed_logprobs",
    "re-encoded": "reports the ids of the text instead of those that it drew",
    "re-encoded, equal number": "the same, with as many log-probabilities",
    "silent": "takes requests and does not answer", "no log-probabilities": "leaves them out",
    "no ids": "leaves out the ids", "no scores": "leaves out prompt_logprobs",
    "other end": "also ends a completion at an id that is no end", "no end": "writes on behind the ends",
    "other model": "answers with the model that it was started with", "prompt": "reads a token before each prompt",
    "fewer": "answers with one completion less", "page": "answers with HTML", "broken": "answers with status 500"}


class VllmServer(ThreadingHTTPServer):
    """url: its address; asked: the paths that were asked for, in order; fault: a key of FAULTS, or None"""

    daemon_threads, request_queue_size = True, 256

    def __init__(self, folder, development=True, adapters=True):
        import transformers
        super().__init__(("127.0.0.1", 0), Handler)
        self.url, self.folder, self.name = f"http://127.0.0.1:{self.server_port}", folder, "served"
        self.development, self.adapters = development, adapters
        self.net = transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
        self.tokenizer = transformers.AutoTokenizer.from_pretrained(folder)
        self.loaded, self.used, self.asked, self.fault, self.factor = {}, {}, [], None, 2
        self.lock, self.over, self.paused = threading.Lock(), threading.Event(), False

    # What requests ask for: each returns (status, JSON or text)

    def models(self):
        cards = [{"id": self.name, "parent": None, "max_model_len": 64}]
        return 200, {"data": cards + [{"id": name, "parent": self.name} for name in self.loaded]}

    def load_adapter(self, body):
        import peft
        name, path = body["lora_name"], body["lora_path"]
        if name in self.loaded:
            return 400, {"error": {"message": f"The lora adapter '{name}' has already been loaded."}}
        used = f"adapter{len(self.used)}"
        if self.fault == "stale adapter" and self.loaded:
            used = self.loaded[list(self.loaded)[-1]]
        elif not self.used:
            self.net = peft.PeftModel.from_pretrained(self.net, path, used).eval()
        else:
            self.net.load_adapter(path, used)
        self.loaded[name] = self.used[name] = used
        return 200, f"Success: LoRA adapter '{name}' added successfully."

    def unload_adapter(self, body):
        self.loaded.pop(body["lora_name"])
        return 200, "Success"

    def reload(self, body):
        import transformers
        assert body["method"] == "reload_weights" and self.paused
        if self.fault != "stale weights":
            path = body["kwargs"]["weights_path"]
            self.net.load_state_dict(transformers.AutoModelForCausalLM.from_pretrained(path).state_dict())
        return 200, {"results": [None]}

    def complete(self, body):
        model, ids = body["model"], body["prompt"]
        if model != self.name and model not in self.loaded:
            return 404, {"error": {"message": f"The model `{model}` does not exist."}}
        if len(ids) + body["max_tokens"] > 64:
            return 400, {"error": {"message": "This model's maximum context length is 64 tokens."}}
        answer = {"object": "text_completion", "model": self.name if self.fault == "other model" else model}
        if "prompt_logprobs" in body:
            return 200, answer | {"choices": [{"index": 0, "prompt_logprobs": self.scores(model, ids)}]}
        number = body["n"] - (self.fault == "fewer")
        choices = [{"index": i} | self.draw(model, ids, body, body["seed"] + i) for i in range(number)]
        choices = choices[1:] + choices[:1]  # no order is promised
        drawn = sum(choice.pop("drawn") for choice in choices)
        return 200, answer | {"choices": choices, "usage": {"completion_tokens": drawn}}

    # The model

    def logits(self, model, ids):
        """(T, V) float64 logits behind each of the ids."""
        if self.used:
            self.net.set_adapter(self.loaded[model])
        return self.net(torch.tensor([ids])).logits[0].double()

    def scores(self, model, ids):
        if self.fault == "no scores":
            return None
        logp = self.logits(model, ids).log_softmax(-1)
        likeliest = logp.argmax(-1).tolist()
        return [None] + [{str(i): {"logprob": float(logp[t, i])} for i in {ids[t + 1], likeliest[t]}}
                         for t in range(len(ids) - 1)]

    def draw(self, model, prompt, body, seed):
        """One completion, as vLLM reports it."""
        generator, drawn, logp = torch.Generator().manual_seed(seed), [], []
        read = [prompt[0], *prompt] if self.fault == "prompt" else prompt
        temperature = body["temperature"] * (self.factor if self.fault == "temperature" else 1)
        ends = set() if self.fault == "no end" else set(body["stop_token_ids"])
        assert body["ignore_eos"] and (body["top_p"], body["top_k"], body["min_p"]) == (1.0, 0, 0.0)
        reason = "length"
        while len(drawn) < body["max_tokens"]:
            logits = self.logits(model, read + drawn)[-1]
            for i, bias in body["logit_bias"].items():
                logits[int(i)] += bias
            p = (logits / temperature).softmax(-1)
            drawn.append(int(torch.multinomial(p, 1, generator=generator)))
            logp.append(float((logits.softmax(-1) if self.fault == "raw" else p)[drawn[-1]].log()))
            text = self.tokenizer.decode(drawn)
            end = drawn[-1] in ends or any(s in text for s in body["stop"])
            if end or self.fault == "other end" and len(drawn) == 2:
                reason = "stop"
                break
        ids = list(drawn)
        if self.fault and self.fault.startswith("re-encoded"):
            text = self.tokenizer.decode(drawn, skip_special_tokens=True)
            ids = self.tokenizer.encode(text, add_special_tokens=False)
            if "equal" in self.fault:  # with as many as were drawn, the last kept
                ids = (ids * len(drawn))[: len(drawn) - 1] + drawn[-1:]
        choice = {"text": self.tokenizer.decode(drawn), "finish_reason": reason, "drawn": len(drawn), "token_ids": ids,
                  "prompt_token_ids": read, "logprobs": {"token_logprobs": logp}}
        for fault, field in (("no log-probabilities", "logprobs"), ("no ids", "token_ids")):
            if self.fault == fault:
                choice[field] = None
        return choice


class Handler(BaseHTTPRequestHandler):
    def log_message(self, *arguments):
        """Nothing is printed."""

    def do_GET(self):
        self.answer(lambda body: self.server.models() if self.path == "/v1/models" else (404, {"detail": "Not Found"}))

    def do_POST(self):
        s, path = self.server, self.path.split("?")[0]
        known = {"/v1/completions": s.complete}
        if s.adapters:
            known |= {"/v1/load_lora_adapter": s.load_adapter, "/v1/unload_lora_adapter": s.unload_adapter}
        if s.development:
            known |= {"/pause": lambda body: self.pause(True), "/resume": lambda body: self.pause(False),
                      "/collective_rpc": s.reload}
        self.answer(known.get(path, lambda body: (404, {"detail": "Not Found"})))

    def pause(self, paused):
        self.server.paused = paused
        return 200, {"status": "paused" if paused else "resumed"}

    def answer(self, act):
        s, body = self.server, None
        if length := int(self.headers.get("Content-Length") or 0):
            body = json.loads(self.rfile.read(length))
        with s.lock, torch.no_grad():  # one request at a time, as no real server does
            s.asked.append(self.path)
            if s.fault == "silent" and self.path == "/v1/completions":
                status, content = None, None
            elif s.fault in ("page", "broken"):
                status = 200 if s.fault == "page" else 500
                content = "<html>not vLLM</html>" if s.fault == "page" else {"message": "no memory"}
            else:
                status, content = act(body)
        if status is None:
            s.over.wait()
            return
        data = (content if isinstance(content, str) else json.dumps(content)).encode()
        with contextlib.suppress(BrokenPipeError, ConnectionResetError):  # the client did not wait
            self.send_response(status)
            self.send_header("Content-Length", str(len(data)))
            self.end_headers()
            self.wfile.write(data)


@contextlib.contextmanager
def running(folder, **settings):
    """A VllmServer of the model in a folder, until the end of the block."""
    server = VllmServer(folder, **settings)
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01}, daemon=True)
    thread.start()
    try:
        yield server
    finally:
        server.over.set()
        server.shutdown()
        server.server_close()
        thread.join()
