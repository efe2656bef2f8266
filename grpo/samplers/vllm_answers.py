"""What a vLLM server answers, checked: the completions that it drew for a prompt, and its scores of known tokens."""

import math
from dataclasses import dataclass

import torch

from grpo.samplers.sampler import SamplerError

PROCESSED = "start the server with --logprobs-mode processed_logprobs"


@dataclass
class Expected:
    """What every answer is checked for; `named` begins the error lines."""
    named: str
    group_size: int
    longest: int         # max_new_tokens
    able: torch.Tensor   # (V,) bool: the ids that the policy can write
    stop: object         # a Stop of core/generation.py: where completions end
    ends: str            # the ids and texts that end one, in words

    def fail(self, what):
        raise SamplerError(f"{self.named} {what}")


def read_completions(answer, prompt, model, expected):
    """The completions of one prompt, [(ids, log-probabilities, whether it was cut)], in order.

    prompt: the ids that were sent; model: the name that was asked for
    Raises SamplerError for an answer that is not what was asked for
    """
    choices = fields_of(answer, model, expected)
    if sorted(choice.get("index", -1) for choice in choices) != list(range(expected.group_size)):
        expected.fail(f"answered with {len(choices)} completions of a prompt, not group_size={expected.group_size}")
    found = [read_choice(choice, prompt, expected) for choice in sorted(choices, key=lambda choice: choice["index"])]
    counted = (answer.get("usage") or {}).get("completion_tokens")
    if counted not in (None, sum(len(ids) for ids, _, _ in found)):
        expected.fail(f"drew {counted} tokens but reports {sum(len(ids) for ids, _, _ in found)} ids: they are not "
                      "those that it drew")
    return found


def fields_of(answer, model, expected):
    """The choices of an answer that is of the right kind, by the right model."""
    choices = answer.get("choices") if isinstance(answer, dict) else None
    if not isinstance(choices, list) or not all(isinstance(choice, dict) for choice in choices):
        expected.fail(f"did not answer as a vLLM server does, but with {str(answer)[:100]!r}")
    if answer.get("model") != model:
        expected.fail(f"answered with the model {answer.get('model')!r}, but {model!r} was asked for")
    return choices


def read_choice(choice, prompt, expected):
    """One completion: (ids, log-probabilities, whether it ran out of room)."""
    ids = choice.get("token_ids")
    if not isinstance(ids, list):
        expected.fail("answered without token_ids; it must be vLLM 0.10.2 or later, which knows return_token_ids")
    if choice.get("prompt_token_ids") not in (None, prompt):
        expected.fail("read other ids than those of the prompt; it may not add or cut tokens")
    logp = (choice.get("logprobs") or {}).get("token_logprobs")
    if not isinstance(logp, list) or None in logp:
        expected.fail("answered without the log-probabilities of the tokens that it drew (logprobs)")
    if not ids or len(ids) != len(logp):
        expected.fail(f"reports {len(ids)} ids for {len(logp)} tokens that it drew: the ids are not those drawn")
    if not all(math.isfinite(x) and x <= 1e-4 for x in logp):
        expected.fail(f"reports {max(logp):.3g} as a log-probability; {PROCESSED}")
    if unable := [i for i in ids if not 0 <= i < len(expected.able) or not expected.able[i]]:
        expected.fail(f"drew the id {unable[0]}, which the policy never writes; serve the model with its own tokenizer")
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
    choices = fields_of(answer, model, expected)
    scores = choices[0].get("prompt_logprobs") if choices else None
    if not isinstance(scores, list) or len(scores) != len(ids):
        expected.fail("answered without prompt_logprobs of all tokens that it was sent; the canary needs them")
    last = zip(scores[-count:], ids[-count:], strict=True)
    found = [(score or {}).get(str(i), {}).get("logprob") for score, i in last]
    if None in found:
        expected.fail("did not report the log-probability of a token that it was sent (prompt_logprobs)")
    return found
