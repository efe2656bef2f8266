"""Checks of a vLLM server's answers: the completions that it drew for a prompt, and its scores of known tokens."""

import contextlib
import math
import reprlib
from dataclasses import dataclass, replace

import torch

from grpo.samplers.sampler import SamplerError
from grpo.scoring import score_in_batches

PROCESSED = "start the server with --logprobs-mode processed_logprobs"
CHECKED = 8      # problems of the first batch whose log-probabilities are checked
DIFFERENT = 0.3  # nats: mean difference in the first batch that no precision explains


@dataclass
class Expected:
    """The facts that every answer is checked against; `named` begins the error lines."""
    named: str
    group_size: int
    longest: int  # max_new_tokens
    ids: set      # which the policy can sample
    stop: object  # a Stop of core/generation.py: where completions end

    def fail(self, what):
        raise SamplerError(f"{self.named} {what}")


@contextlib.contextmanager
def understanding(answer, named):
    """Raises SamplerError for an answer that the code within does not understand. named: begins the line"""
    try:
        yield
    except SamplerError:
        raise
    except (TypeError, ValueError, LookupError, AttributeError):
        raise SamplerError(f"{named} did not answer as a vLLM server does, but with {reprlib.repr(answer)}; correct "
                           "vllm_url") from None


def read_completions(answer, model, expected):
    """The completions of one prompt, [(ids, log-probabilities, whether it was cut)], in order.

    model: the name that was asked for. Raises SamplerError for an answer that is not what was asked for
    """
    with understanding(answer, expected.named):
        choices = choices_of(answer, model, expected)
        if len(choices) != expected.group_size:
            expected.fail(f"answered with {len(choices)} completions of a prompt, not group_size={expected.group_size}")
        in_order = sorted(choices, key=lambda choice: choice["index"])
        return [read_choice(choice, expected) for choice in in_order]


def choices_of(answer, model, expected):
    """The choices of an answer by the right model."""
    if answer["model"] != model:
        expected.fail(f"answered with the model {reprlib.repr(answer['model'])}, but {model!r} was asked for")
    return answer["choices"]


def read_choice(choice, expected):
    """One completion: (ids, log-probabilities, whether it was cut)."""
    ids = choice.get("token_ids")
    if ids is None:
        expected.fail("answered without token_ids; it must be vLLM 0.10.2 or later, which knows return_token_ids")
    logp = choice["logprobs"]["token_logprobs"]
    if not ids or len(ids) != len(logp):
        expected.fail(f"reports {len(ids)} ids for {len(logp)} tokens that it drew: the ids are not those drawn")
    if not all(math.isfinite(x) and x <= 1e-4 for x in logp):
        expected.fail(f"reports {max(logp):.3g} as a log-probability; {PROCESSED}")
    for i in ids:
        if i not in expected.ids:
            expected.fail(f"drew the id {i}, which the policy never samples; serve the model with its own tokenizer")
    ends = expected.stop(torch.tensor([ids]), 0)[0].tolist()
    if any(ends[:-1]):
        expected.fail(f"wrote on behind an end of the completion, with the ids {ids}: it does not stop at every end id "
                      "of the tokenizer and at stop_sequences")
    cut = not ends[-1]
    if cut and len(ids) != expected.longest:
        expected.fail(f"ended a completion of {len(ids)} tokens at the id {ids[-1]}, which is no end of the "
                      f"tokenizer or stop_sequences, before max_new_tokens={expected.longest}")
    return ids, logp, cut


def read_scores(answer, ids, model, expected):
    """The log-probabilities of ids with which the text that was sent ends."""
    with understanding(answer, expected.named):
        choice, = choices_of(answer, model, expected)
        scores = choice["prompt_logprobs"][-len(ids) :]
        return [float(score[str(i)]["logprob"]) for score, i in zip(scores, ids, strict=True)]


@torch.no_grad()
def check_first_batch(policy, rollouts, config, named):
    """Raises SamplerError if the log-probabilities that came with rollouts are not those of the policy, which has not
    moved since, at the run's temperature: a server without PROCESSED reports those at temperature 1."""
    few, _ = rollouts.select(torch.arange(min(CHECKED, rollouts.problems)))
    away = {}
    for temperature in (config.temperature, 1.0):
        logp = score_in_batches(policy, few, replace(config, temperature=temperature))
        away[temperature] = float((logp - few.old_logp)[few.mask > 0].abs().mean())
    own = away[config.temperature]
    if own > max(2 * away[1.0], 1e-4):
        raise SamplerError(f"{named} reports log-probabilities at temperature 1 (mean difference {away[1.0]:.2g} "
                           f"nats), not at temperature={config.temperature:g} ({own:.2g} nats); {PROCESSED}")
    if not own <= DIFFERENT:
        raise SamplerError(f"{named} reports log-probabilities that differ by {own:.2g} nats on average from the "
                           f"policy's for the same ids; check that it serves the model of this run and reports the ids "
                           f"that it drew, and {PROCESSED}")
