"""The part that the policies of both kinds share: precision, weights, copies, files."""

import copy

import torch

from core.distributed import autocast, is_sharded
from core.models import save_model
from grpo.rollout import Policy, counts, join


def sampling_of(config):
    """The settings of core.distributions.sample_tokens."""
    return {name: getattr(config, name) for name in ("temperature", "top_p", "top_k", "min_p")}


def inputs_of(chosen, kept, size, **own):
    """The inputs of Rollouts (grpo/rollout.py). kept: the KeptTokens of all states, or None; own: tensors of a kind."""
    inputs = {"chosen": chosen, "size": size} | {name: x.cpu() for name, x in own.items()}
    if kept is not None:
        inputs["kept"] = kept.split(counts(chosen))
    return inputs


class ModelPolicy(Policy):
    """A policy that is one model of core's model interface and its tokenizer. A kind adds sample_part and `states`.

    The model is always in eval mode: dropout would make the first ratio differ from 1.
    """

    def __init__(self, model, tokenizer, dtype=torch.float32, grad_checkpoint=False):
        self.model = model.eval()
        self.tokenizer = tokenizer
        self.dtype = dtype
        model.grad_checkpoint = grad_checkpoint

    @property
    def device(self):
        return next(self.model.parameters()).device

    @property
    def vocabulary(self):
        return self.model.vocabulary

    @property
    def suffix(self):
        return self.model.suffix

    @torch.no_grad()
    def sample(self, problems, iteration, config):
        """Rollouts, of few enough problems at a time."""
        at_once = self.at_once(config)
        starts = range(0, len(problems["number"]), at_once)
        parts = ({key: x[i : i + at_once] for key, x in problems.items()} for i in starts)
        return join([self.sample_part(part, iteration, config) for part in parts])

    def rows(self, config):
        """Completions that are sampled at a time. A GPU takes as long for all of an iteration as for a few."""
        problems = config.batch_size if self.device.type == "cpu" else config.problems
        return config.sample_rows or problems * config.group_size

    def at_once(self, config):
        """Problems that are sampled at a time."""
        return max(1, self.rows(config) // config.group_size)

    def autocast(self):
        return autocast(self.device, self.dtype)

    def put(self, x):
        """A tensor of the CPU on the device. Does not wait for what the device still computes."""
        return x.to(self.device, non_blocking=True)

    def on_device(self, padding):
        """The padding of texts, or None if there is none: attention is faster without."""
        return self.put(padding) if padding.any() else None

    def project(self, states):
        with self.autocast():
            return self.model.project(states)

    def frozen(self):
        twin = copy.copy(self)
        twin.model = self.model.frozen()
        return twin

    def parameters(self):
        return self.model.parameters()

    def parameters_by_kind(self):
        return self.model.parameters_by_kind()

    def weights(self):
        return self.model.weights()

    def load_weights(self, weights):
        own = self.model.weights()
        if any(map(is_sharded, own.values())):
            from core.performance.sharding import cut_like
            weights = {name: cut_like(x, own[name]) for name, x in weights.items()}
        self.model.load_weights(weights)

    def calls(self, rollouts):
        """Number of times that `states` calls the model."""
        return 1

    def idle_loss(self, times):
        """0, with gradients of 0, of `times` calls: every rank takes part in putting a sharded model together."""
        token = torch.zeros(1, 1, dtype=torch.long, device=self.device)
        with self.autocast():
            return sum(0 * self.model.states(token).flatten()[0] for _ in range(times))

    def identity(self):
        """The facts that must be equal for a saved state to fit, besides the names and shapes of the weights."""
        return getattr(self.model, "identity", dict)()

    def save(self, path, weights=None, **facts):
        save_model(path, self.model, self.tokenizer, weights=weights, **facts)

    def to(self, device):
        self.model.to(device)

    def compile(self):
        """Compiles the layers, for reading texts. A reference, a copy that was made before, needs a call too."""
        if not hasattr(self.model, "compile_layers"):
            raise ValueError("compile=True: a Hugging Face model cannot be compiled here; set compile=False")
        self.model.compile_layers()
