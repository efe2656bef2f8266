"""The doctor's checks of a run with an environment: equal starts, answers outside of the loss, the template, ends.

A check takes an Examination of such a run and returns what those of checks.py do.
"""

from types import SimpleNamespace

from core.prompts import as_messages
from grpo.environments import TURNS
from grpo.evaluation.samples import ENVIRONMENT, POLICY, turns_of

ANSWER = "what the environment answered"  # stands for each answer where the template renders the turns of a completion


def equal_starts(x):
    """The environments of a group start in one state: those that hear the same texts answer the same."""
    first, second = twins(x), twins(x)
    P = len(x.problems["number"])
    unlike = sum(not alike(first, n) for n in range(0, 2 * P, 2))
    remedy = ("draw what is random from random.Random(seed), with the seed that __init__ gets, and let an episode "
              "change nothing outside of its own environment")
    if unlike:
        return False, (f"In {unlike} of {P} problems two environments heard the same texts and gave other answers or "
                       "rewards: the completions of a group do not start in one state."), remedy
    sums = first.texts.metrics
    changed = [name for name in sums if sums[name] != second.texts.metrics[name]]
    if changed:
        return None, f"{', '.join(changed)} changed when the same episodes were played again.", (
            f"nothing to do if it measures time or the like; else {remedy}")
    return True, f"Two environments of a problem that hear the same texts answer the same, in {P} of {P} problems.", ""


def twins(x):
    """Rollouts of two completions of each problem, with the same noise: the policy writes both alike as long as what it
    reads is the same."""
    problems = {key: column.repeat(2, axis=0) for key, column in x.problems.items()}
    settings = {"group_size": 1, "batch_size": len(problems["number"])}
    return x.models.policy.sample(problems, 0, SimpleNamespace(**vars(x.config) | settings))


def alike(rollouts, n):
    """Tells whether the environments of completions n and n + 1 did the same while they heard the same."""
    rewards = rollouts.texts.columns[TURNS]
    target = rollouts.target[n : n + 2]
    mask = rollouts.mask[n : n + 2]
    other = ((target[0] != target[1]) | (mask[0] != mask[1])).nonzero().flatten()
    if len(other):  # on some devices rounding can make the policy itself write another token
        return bool(mask[:, other[0]].all())
    return rewards[n] == rewards[n + 1]


def answers_in_loss(x):
    """The loss leaves out what an environment answers."""
    rollouts = x.rollouts
    answered = 0
    for n in range(len(rollouts.target)):
        answered += sum(len(ids) for writer, ids in turns_of(rollouts, n) if writer == ENVIRONMENT)
    turns, episodes = rollouts.texts.metrics["environment/turns"]
    trained = (rollouts.scored > rollouts.mask).any()
    if trained or (turns > episodes and not answered):
        return False, "Tokens that the environment answered are in the loss, as if the policy had written them.", (
            "a policy of your own must set mask and train_mask to 0 there; nothing to do if all answers are empty")
    return True, f"The {answered} tokens of answers have mask 0: no part in loss, KL and gradient.", ""


def glue(x):
    """In its later turns the policy reads what the template renders for these messages."""
    if x.data.format.template == "plain":
        return True, "template='plain': an answer is appended as it is, and nothing stands around it.", ""
    N = len(x.rollouts.target)
    equal = [as_rendered(x, n) for n in range(N) if len(turns_of(x.rollouts, n)) > 1]
    sentence = f"In {sum(equal)} of {len(equal)} episodes the policy read what the template renders for their turns."
    return all(equal) or None, sentence, (
        "nothing to do if the template only leaves out space, thoughts or another end token of earlier turns; the "
        "policy reads them in training, and would not in a chat. Else use template='plain' or another chat template")


def as_rendered(x, n):
    """Tells whether completion n, up to its last answer, is what the template renders for its turns, whatever the
    answers are."""
    tokenizer, texts = x.data.tokenizer, x.rollouts.texts
    form = x.data.format
    decode = getattr(tokenizer, "backend", tokenizer).decode  # transformers' own shows special tokens
    messages = as_messages(texts.columns["prompt"][n], form.system_prompt, form.prompt_format)
    ids = []
    for writer, turn in turns_of(x.rollouts, n)[:-1]:
        ids += turn
        role, content = "user", ANSWER
        if writer == POLICY:
            role, content = "assistant", decode([i for i in turn if i not in tokenizer.stop_token_ids])
        messages.append({"role": role, "content": content})
    text = texts.prompts[n] + decode(ids)
    place = 0
    for part in form.render(messages, tokenizer).split(ANSWER):
        place = text.find(part, place) + len(part)
        if place < len(part):
            return False
    return place == len(text)


def endless_turns(x):
    """Most episodes end before they run out of turns or of room."""
    c = x.config
    N = len(x.rollouts.target)
    cut = int(x.rollouts.truncated.sum()) / N
    parts = 2 * c.max_turns - 1  # with the answers between them
    last = sum(len(turns_of(x.rollouts, n)) >= parts for n in range(N)) / N
    sentence = (f"{cut:.0%} of the episodes are cut at max_new_tokens={c.max_new_tokens}, {last:.0%} come to "
                f"max_turns={c.max_turns} turns.")
    if cut > 0.5:
        return False, sentence, ("raise max_new_tokens, in which answers count too; if turns go on and on, name in "
                                 "stop_sequences what ends one, or train the model on such episodes first")
    if last > 0.5:
        return None, sentence, ("nothing to do if episodes are meant to be as long; else raise max_turns, or let step "
                                "return the answer None where an episode is over")
    return True, sentence, ""
