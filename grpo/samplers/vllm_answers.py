"""What a vLLM server answers, checked: the completions that it drew for a prompt, and its scores of known tokens."""

import contextlib
import math
import operator
import reprlib
from dataclasses import dataclass, replace

import torch

from grpo.samplers.sampler import SamplerError
from grpo.samplers.settings import VLLM_TEMPERATURES
from grpo.scoring import score_in_batches

PROCESSED = "start the server with --logprobs-mode processed_logprobs"
OTHER_TEMPERATURES = (0.25, 0.5, 0.8, 1.25, 2.0, 4.0)  # that of the run times these is tried, and 1
CHECKED = 8      # problems of the first batch whose log-probabilities are checked
DIFFERENT = 0.3  # nats: mean difference in the first batch that no precision explains


@dataclass
class Expected:
    """What every answer is checked for; `named` begins the error lines."""
    named: str
    group_size: int
    longest: int         # max_new_tokens
    able: torch.Tensor   # (V,) bool: the ids that the policy can sample
    stop: object         # a Stop of core/generation.py: where completions end
    ends: str            # the ids and texts that end one, in words

    def fail(self, what):
        raise SamplerError(f"{self.named} {what}")


@contextlib.contextmanager
def understanding(answer, named):
    """Within, an answer of another shape than a vLLM server's becomes a SamplerError. named: begins the line"""
    try:
        yield
    except SamplerError:
        raise
    except (TypeError, ValueError, LookupError, AttributeError, OverflowError):
        raise SamplerError(f"{named} did not answer as a vLLM server does, but with {reprlib.repr(answer)}; correct "
                           "vllm_url") from None


def read_completions(answer, prompt, model, expected):
    """The completions of one prompt, [(ids, log-probabilities, whether it was cut)], in order.

    prompt: the ids that were sent; model: the name that was asked for
    Raises SamplerError for an answer that is not what was asked for
    """
    with understanding(answer, expected.named):
        choices = choices_of(answer, model, expected)
        if sorted(choice.get("index", -1) for choice in choices) != list(range(expected.group_size)):
            expected.fail(f"answered with {len(choices)} completions of a prompt, not group_size={expected.group_size}")
        in_order = sorted(choices, key=lambda choice: choice["index"])
        found = [read_choice(choice, prompt, expected) for choice in in_order]
        counted = (answer.get("usage") or {}).get("completion_tokens")
        total = sum(len(ids) for ids, _, _ in found)
        if counted not in (None, total):
            expected.fail(f"drew {counted} tokens but reports {total} ids: they are not those that it drew")
        return found


def choices_of(answer, model, expected):
    """The choices of an answer by the right model."""
    choices = answer["choices"]
    if answer.get("model") != model:
        expected.fail(f"answered with the model {reprlib.repr(answer.get('model'))}, but {model!r} was asked for")
    return choices


def read_choice(choice, prompt, expected):
    """One completion: (ids, log-probabilities, whether it ran out of room)."""
    ids = choice.get("token_ids")
    if ids is None:
        expected.fail("answered without token_ids; it must be vLLM 0.10.2 or later, which knows return_token_ids")
    ids = [operator.index(i) for i in ids]
    if choice.get("prompt_token_ids") not in (None, prompt):
        expected.fail("read other ids than those of the prompt; it may not add or cut tokens")
    logp = (choice.get("logprobs") or {}).get("token_logprobs")
    if logp is None or None in logp:
        expected.fail("answered without the log-probabilities of the tokens that it drew (logprobs)")
    if not ids or len(ids) != len(logp):
        expected.fail(f"reports {len(ids)} ids for {len(logp)} tokens that it drew: the ids are not those drawn")
    if not all(math.isfinite(x) and x <= 1e-4 for x in logp):
        expected.fail(f"reports {max(logp):.3g} as a log-probability; {PROCESSED}")
    for i in ids:
        if not 0 <= i < len(expected.able) or not expected.able[i]:
            expected.fail(f"drew the id {i}, which the policy never samples; serve the model with its own tokenizer")
    return ids, logp, check_end(ids, expected)


def check_end(ids, expected):
    """Whether a completion ran out of room. Raises SamplerError if it ends where it should not, or goes on."""
    ends = expected.stop(torch.tensor([ids]), 0)[0].tolist()
    if any(ends[:-1]):
        expected.fail(f"wrote on behind an end of the completion ({expected.ends}): it does not stop there")
    if not ends[-1] and len(ids) != expected.longest:
        expected.fail(f"ended a completion of {len(ids)} tokens at the id {ids[-1]}, which is no end of the run's "
                      f"({expected.ends}), before max_new_tokens={expected.longest}")
    return not ends[-1]


def read_scores(answer, ids, count, model, expected):
    """The log-probabilities of the last `count` of the ids that were sent."""
    with understanding(answer, expected.named):
        choices = choices_of(answer, model, expected)
        scores = choices[0].get("prompt_logprobs") if choices else None
        if scores is None or len(scores) != len(ids):
            expected.fail("answered without prompt_logprobs of all tokens that it was sent, which "
                          "the check after a sync needs")
        last = zip(scores[-count:], ids[-count:], strict=True)
        found = [(score or {}).get(str(i), {}).get("logprob") for score, i in last]
        if None in found:
            expected.fail("did not report the log-probability of a token that it was sent (prompt_logprobs)")
        return [float(x) for x in found]


@torch.no_grad()
def check_temperature(policy, rollouts, config, named):
    """Raises SamplerError if the log-probabilities with which rollouts were drawn are not those of the policy at the
    run's temperature, but nearer to those at another one, or far from both. The policy is the one that wrote them."""
    few, _ = rollouts.select(torch.arange(min(CHECKED, rollouts.problems)))

    def away(temperature):
        logp = score_in_batches(policy, few, replace(config, temperature=temperature))
        return float((logp - few.old_logp)[few.mask > 0].abs().mean())

    low, high = VLLM_TEMPERATURES
    others = {1.0, *(config.temperature * x for x in OTHER_TEMPERATURES)} - {config.temperature}
    own, others = away(config.temperature), {x: away(x) for x in others if low <= x <= high}
    best = min(others, key=others.get)
    if own > max(2 * others[best], 1e-4):
        raise SamplerError(f"{named} draws or reports at about temperature {best:g} (mean difference {others[best]:.2g}"
                           f" nats), not at temperature={config.temperature:g} ({own:.2g} nats); {PROCESSED}")
    if not own <= DIFFERENT:
        raise SamplerError(f"{named} reports log-probabilities that differ by {own:.2g} nats on average from the "
                           f"policy's for the same ids; check that it serves the model of this run and reports the ids "
                           f"that it drew, and {PROCESSED}")
