"""A small HTTP server that answers as a vLLM server does, with a model that transformers computes token by token. Like
vLLM it keeps what it has read of prompts, by the name of the adapter and the salt, except for requests with
prompt_logprobs. `fault` makes it misbehave in one way.

with running(folder) as server: VllmSampler with vllm_url=server.url
"""

import contextlib
import copy
import json
import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

import torch

FAULTS = {  # what it does wrong; answers without a part, or with a wrong one, are in test_vllm_answers.py
    "stale adapter": "says that it loaded an adapter, but computes with the one before",
    "stale weights": "says that it read the weights again, but keeps those it has",
    "temperature": "draws at a temperature that is `factor` times the one asked for",
    "raw": "reports log-probabilities at temperature 1, as vLLM does without --logprobs-mode processed_logprobs",
    "re-encoded": "reports ids of the text instead of those that it drew, as many as it drew",
    "silent": "takes requests and does not answer", "page": "answers with HTML", "broken": "answers with status 500",
    "started again": "is started again before each completion, and holds the weights that it was started with",
    "half dead": "answers with status 500 to what brings weights, and to what follows"}


class VllmServer(ThreadingHTTPServer):
    """url: its address; asked: the paths that were asked for, in order; fault: a key of FAULTS, or None

    development, adapters: whether it was started with VLLM_SERVER_DEV_MODE, and with what loads adapters
    named: whether it has names for weights, as newer ones have; key: its --api-key; longest: its --max-model-len
    """

    daemon_threads, request_queue_size = True, 256

    def __init__(self, folder, development=True, adapters=True, named=True, key=None, longest=64):
        import transformers
        super().__init__(("127.0.0.1", 0), Handler)
        self.url, self.folder, self.name = f"http://127.0.0.1:{self.server_port}", folder, "served"
        self.development, self.adapters, self.named = development, adapters, named
        self.key, self.longest = key, longest
        self.net = transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
        self.tokenizer = transformers.AutoTokenizer.from_pretrained(folder)
        self.loaded, self.used, self.asked, self.fault, self.factor = {}, {}, [], None, 2
        self.lock, self.over, self.paused = threading.Lock(), threading.Event(), False
        self.first_weights, self.version = copy.deepcopy(self.net.state_dict()), "default"
        self.prompts, self.hits = {}, 0  # {(name, salt, prompt): keys and values of all but its last token}
        self.forgets = True              # its cache, at a pause

    # What requests ask for: each returns (status, JSON or text)

    def models(self):
        cards = [{"id": self.name, "parent": None, "max_model_len": self.longest}]
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
        """What was read of prompts stays, as in vLLM."""
        if self.loaded.pop(body["lora_name"], None) is None:
            return 404, {"error": {"message": f"The lora adapter '{body['lora_name']}' cannot be found."}}
        return 200, "Success"

    def reload(self, body):
        import transformers
        assert body["method"] == "reload_weights" and self.paused
        if self.fault != "stale weights":
            path = body["kwargs"]["weights_path"]
            self.net.load_state_dict(transformers.AutoModelForCausalLM.from_pretrained(path).state_dict())
        return 200, {"results": [None]}

    def start_again(self):
        self.net.load_state_dict(self.first_weights)
        self.version, self.prompts = "default", {}

    def name_weights(self, body):
        self.version = body["new_version"]
        return 200, {"success": True, "new_version": self.version}

    def pause(self, body):
        self.paused = True
        if self.forgets:
            self.prompts = {}
        return 200, {"status": "paused"}

    def resume(self, body):
        self.paused = False
        return 200, {"status": "resumed"}

    def complete(self, body):
        model, ids = body["model"], body["prompt"]
        if model != self.name and model not in self.loaded:
            return 404, {"error": {"message": f"The model `{model}` does not exist."}}
        if len(ids) + body["max_tokens"] > self.longest:
            return 400, {"error": {"message": f"This model's maximum context length is {self.longest} tokens."}}
        answer = {"object": "text_completion", "model": model}
        if "prompt_logprobs" in body:
            return 200, answer | {"choices": [{"index": 0, "prompt_logprobs": self.scores(model, ids)}]}
        choices = [{"index": i} | self.draw(model, ids, body, body["seed"] + i) for i in range(body["n"])]
        choices = choices[1:] + choices[:1]  # no order is promised
        drawn = sum(choice.pop("drawn") for choice in choices)
        return 200, answer | {"choices": choices, "usage": {"completion_tokens": drawn}}

    # The model

    def logits(self, model, ids, past=None):
        """(T, V) float64 logits behind each of the ids; past: keys and values of what stands before them, or None"""
        if self.used:
            self.net.set_adapter(self.loaded[model])
        return self.net(torch.tensor([ids]), past_key_values=past, use_cache=past is not None).logits[0].double()

    def read(self, model, salt, prompt):
        """Keys and values of all but the last token of a prompt, from an earlier request if there was one."""
        import transformers
        known = model, salt, tuple(prompt[:-1])
        self.hits += known in self.prompts
        if known not in self.prompts:
            self.prompts[known] = transformers.DynamicCache(config=self.net.config)
            if prompt[:-1]:
                self.logits(model, prompt[:-1], self.prompts[known])
        return copy.deepcopy(self.prompts[known])

    def scores(self, model, ids):
        logp = self.logits(model, ids).log_softmax(-1)
        likeliest = logp.argmax(-1).tolist()
        return [None] + [{str(i): {"logprob": float(logp[t, i])} for i in {ids[t + 1], likeliest[t]}}
                         for t in range(len(ids) - 1)]

    def draw(self, model, prompt, body, seed):
        """One completion, as vLLM reports it."""
        generator, drawn, logp = torch.Generator().manual_seed(seed), [], []
        temperature = body["temperature"] * (self.factor if self.fault == "temperature" else 1)
        assert body["ignore_eos"] and (body["top_p"], body["top_k"], body["min_p"]) == (1.0, 0, 0.0)
        reason, past = "length", self.read(model, body.get("cache_salt"), prompt)
        while len(drawn) < body["max_tokens"]:
            logits = self.logits(model, [(prompt + drawn)[-1]], past)[-1]
            for i, bias in body["logit_bias"].items():
                logits[int(i)] += bias
            p = (logits / temperature).softmax(-1)
            drawn.append(int(torch.multinomial(p, 1, generator=generator)))
            logp.append(float((logits.softmax(-1) if self.fault == "raw" else p)[drawn[-1]].log()))
            text = self.tokenizer.decode(drawn)
            if drawn[-1] in body["stop_token_ids"] or any(s in text for s in body["stop"]):
                reason = "stop"
                break
        ids = list(drawn)
        if self.fault == "re-encoded":
            text = self.tokenizer.decode(drawn, skip_special_tokens=True)
            ids = self.tokenizer.encode(text, add_special_tokens=False)
            ids = (ids * len(drawn))[: len(drawn) - 1] + drawn[-1:]  # the last is kept
        return {"text": self.tokenizer.decode(drawn), "finish_reason": reason, "drawn": len(drawn), "token_ids": ids,
                "prompt_token_ids": prompt, "logprobs": {"token_logprobs": logp}}


class Handler(BaseHTTPRequestHandler):
    def log_message(self, *arguments):
        """Nothing is printed."""

    def do_GET(self):
        s = self.server
        known = {"/v1/models": lambda body: s.models()}
        if s.development:
            known["/is_paused"] = lambda body: (200, {"is_paused": s.paused})
        if s.development and s.named:
            known["/weight_info"] = lambda body: (200, {"weight_version": s.version})
        self.answer(known)

    def do_POST(self):
        s = self.server
        known = {"/v1/completions": s.complete}
        if s.adapters:
            known |= {"/v1/load_lora_adapter": s.load_adapter, "/v1/unload_lora_adapter": s.unload_adapter}
        if s.development:
            known |= {"/pause": s.pause, "/resume": s.resume, "/collective_rpc": s.reload}
        if s.development and s.named:
            known["/update_weight_version"] = s.name_weights
        self.answer(known)

    def answer(self, known):
        """known: {path: what answers it}; the key covers what begins with /v1, as in vLLM"""
        s, body, path = self.server, None, self.path.split("?")[0]
        act = known.get(path, lambda body: (404, {"detail": "Not Found"}))
        if s.key is not None and path.startswith("/v1") and self.headers.get("Authorization") != f"Bearer {s.key}":
            act = lambda body: (401, {"error": "Unauthorized"})
        if length := int(self.headers.get("Content-Length") or 0):
            body = json.loads(self.rfile.read(length))
        with s.lock, torch.no_grad():  # one request at a time, as no real server does
            s.asked.append(self.path)
            if s.fault == "silent" and self.path == "/v1/completions":
                status, content = None, None
            elif s.fault in ("page", "broken") or (s.fault == "half dead" and path in ("/collective_rpc", "/resume")):
                status = 200 if s.fault == "page" else 500
                content = "<html>not vLLM</html>" if s.fault == "page" else {"message": "no memory"}
            else:
                if s.fault == "started again" and path == "/v1/completions":
                    s.start_again()
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
