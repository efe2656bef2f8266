"""What the doctor checks in a step: log-probabilities, KL, gradient, prompts, ends of completions, memory and time.

A check takes an Examination and returns (verdict, sentence, remedy), or None where it does not apply. The verdict is
True: as it should be; False: wrong, the remedy says what to change; None: it could not be checked, or is worth a look.
"""

from collections import Counter
from math import lcm

from core.prompts import PromptConsumer, as_messages, plain
from core.tokenizer import fold_to_ascii
from grpo.reference import needs_reference

TAIL = 60          # characters of a prompt or completion that are shown
DAY = 24 * 3600


def first_ratio(x):
    """Training scores the tokens under the distribution that they were drawn from."""
    if "mismatch_max" not in x.metrics:
        return None  # no token is in the loss
    most, mean = x.metrics["mismatch_max"], x.metrics["mismatch_kl"]
    if (most < 1e-3 if x.float32 else most < 2.0) and mean < 1e-3:
        return True, ("Training gives each sampled token the log-probability that it was sampled with, so the first "
                      f"ratio is 1 (largest difference {tiny(most)})."), ""
    if x.config.fill_estimator != "trajectory":
        return None, (f"fill_estimator={x.config.fill_estimator!r} scores tokens in another text than they were drawn "
                      f"from: their log-probabilities are estimates, which differ by {most:.2g} nats at most."), (
            "nothing to do if you mean that; fill_estimator='trajectory' is exact and reads more texts")
    sentence = ("Training gives sampled tokens another log-probability than they were sampled with, so the first ratio "
                f"is not 1 (largest difference {most:.2g}, KL {mean:.1e} per token).")
    if not x.float32:
        return False, sentence, "set dtype='float32'"
    return False, sentence, ("the model computes something else token by token than at once: python "
                             "grpo/tools/check_model.py MODEL says where")


def first_kl(x):
    """The reference is the policy as it starts."""
    if not needs_reference(x.config):
        return True, "There is no reference (kl_beta=0.0), so no KL keeps the policy near its start.", ""
    if "mean_kl" not in x.metrics:
        return None  # no token is in the loss
    kl, other = x.metrics["mean_kl"], x.config.reference_checkpoint
    if other is not None:
        return (True if kl <= 1.0 else None,
                f"Before the first step the KL to reference_checkpoint={other} is {kl:.3g} nats per token.",
                "the penalty pulls the policy far away from its start: is this the reference that you mean?")
    if abs(kl) < (1e-4 if x.float32 else 1e-2):
        return True, f"Before the first step the KL to the reference is {tiny(abs(kl))}: both are the same model.", ""
    return False, f"Before the first step the KL to the reference is {kl:.3g}, but both should be the same model.", (
        "set dtype='float32'" if not x.float32 else
        "two readings of a text differ: python grpo/tools/check_model.py MODEL says where")


def gradient(x):
    """The loss has a gradient, and it reaches every part of the model."""
    norm, parts = x.metrics["grad_norm"], x.gradient
    if x.metrics["skipped_steps"]:
        return False, f"The loss or its gradient is not finite (norm {norm}).", (
            "set dtype='float32'; if it stays, look for infinite weights in the model, or rewards of enormous size")
    if not x.trained.train_mask.any():
        return False, "No token is in the loss, so nothing is learned.", (
            "see the checks of rewards and of cut completions below; zero_std='drop' and mask_truncated=True leave "
            "completions out")
    if norm == 0 or x.metrics["empty_steps"]:
        return False, "The gradient is 0, so nothing is learned: all advantages are 0.", (
            "see the checks of rewards below: a group teaches something if its completions get different rewards")
    if dead := [part for part, size in parts.items() if size == 0]:
        return False, f"The gradient is 0 in {', '.join(dead)}: nothing is learned there.", (
            "these weights are frozen or unused: load the model without freezing them")
    largest, smallest = (choose(parts, key=parts.get) for choose in (max, min))
    cut = f", which grad_clip={x.config.grad_clip:g} cuts" if 0 < x.config.grad_clip < norm else ""
    return True, (f"The gradient is not 0: its norm is {norm:.2g}{cut}. It is largest in {largest} "
                  f"({parts[largest]:.2g}) and smallest in {smallest} ({parts[smallest]:.2g})."), ""


def prompt(x):
    """The model can read the prompts, and this is how one ends."""
    decode, tokenizer = x.data.tokenizer.decode, x.data.tokenizer
    if not isinstance(x.data, PromptConsumer):
        text = decode(x.problems["input"][0].tolist())
        return True, f"The first text ends in {text[-TAIL:]!r}, where _ is to be filled in.", ""
    first = x.data.records["train"][0]
    shown = f"The first prompt ends in {(first['text'] + x.data.format.response_prefix)[-TAIL:]!r}."
    lost, total = Counter(), 0
    for record in x.data.records["train"][:100]:
        text = plain(as_messages(record["prompt"]))
        wanted, read = characters(text), characters(decode(tokenizer.encode(text)))
        lost, total = lost + (wanted - read), total + wanted.total()
    if lost.total() > total / 1000:
        seen = ", ".join(repr(c) for c, _ in lost.most_common(5))
        return False, (f"{shown} {lost.total() / max(total, 1):.0%} of the characters in the prompts are lost, such as "
                       f"{seen}: the tokenizer has no tokens for them."), (
            "use a model whose tokenizer knows them, or write the prompts without them")
    if x.data.format.template != "model" and getattr(tokenizer, "has_chat_template", False):
        return None, f"{shown} The model has a chat template that template={x.data.format.template!r} does not use.", (
            "set template='model' if the model was trained on chats")
    return True, shown, ""


def characters(text):
    """How often each character is in a text, without spaces, accents and case, which tokenizers may leave out."""
    return Counter("".join(fold_to_ascii(c)[0] or c for c in text.lower() if not c.isspace()))


def left_out_prompts(x):
    """Few prompts are too long."""
    if not isinstance(x.data, PromptConsumer):
        return None
    dropped, limit = x.data.dropped, x.config.max_prompt_length
    share = dropped / (dropped + len(x.data.records["train"]))
    sentence = (f"{share:.0%} of the training prompts are left out because they are longer than {limit} tokens; none "
                "is cut.")
    return share <= 0.1, sentence, f"raise max_prompt_length={limit}"


def ends_of_completions(x):
    """What ends a completion, and that it does not cut or forbid the records' own completions."""
    if not isinstance(x.data, PromptConsumer):
        return None
    tokenizer, c = x.data.tokenizer, x.config
    ends = [f"the token {name} ({i})" for i, name in zip(tokenizer.stop_token_ids, tokenizer.stop_token_names,
                                                          strict=True)]
    ends += [f"the text {s!r}" for s in c.stop_sequences]
    shown = f"A completion ends with {' or '.join(ends)}, or is cut after max_new_tokens={c.max_new_tokens}."
    own = [str(record["completion"]) for record in x.data.records["train"][:1000] if record.get("completion")]
    for s in c.stop_sequences:
        if cut := [text for text in own if text.partition(s)[2].strip()]:  # one that ends with it is whole
            return False, f"{shown} The text {s!r} is inside {len(cut) / len(own):.0%} of the records' completions.", (
                f"leave {s!r} out of stop_sequences: it ends a right completion too early")
    lengths = sorted(len(tokenizer.encode(text)) + 1 for text in own)
    longer = sum(n > c.max_new_tokens for n in lengths)
    if longer > len(own) / 20:
        enough = lengths[int(0.95 * len(lengths))]
        return False, f"{shown} {longer / len(own):.0%} of the records' completions are longer.", (
            f"set max_new_tokens={enough}, which is enough for 95% of them")
    return True, shown, ""


def stop_token(x):
    """Completions end by themselves, and the loss sees the token that ends them."""
    if not isinstance(x.data, PromptConsumer):
        return None
    tokenizer, (rollouts, _) = x.data.tokenizer, x.sampled[0]
    N, cut = len(rollouts.target), int(rollouts.truncated.sum())
    last = lambda r: r.target.gather(1, (r.mask.sum(1).long() - 1).clamp(min=0)[:, None])[:, 0]  # (N,)
    stops = lambda r: sum((last(r) == i for i in tokenizer.stop_token_ids), last(r) < 0).bool()  # (N,)
    longer = (f"raise max_new_tokens={x.config.max_new_tokens}; if completions go on and on, the model does not know "
              "this prompt: set template='model' for a chat model, name in stop_sequences what should end a "
              "completion, or train the model on such records first (core/pretrain.py)")
    if cut == N:
        return False, (f"All {N} completions are cut at max_new_tokens={x.config.max_new_tokens}: none ends by itself, "
                       "so the stop token is not trained."), longer
    r = x.trained
    place = (r.mask.sum(1).long() - 1).clamp(min=0)[:, None]                         # (N, 1)
    ended = stops(r) & ~r.truncated                                                  # (N,)
    if ended.any() and not r.train_mask.gather(1, place)[:, 0][ended].any():
        return False, "The loss does not see the stop token, so the model cannot learn when to end.", (
            "the policy's train_mask must be 1.0 on the token that ends a completion")
    count = int((stops(rollouts) & ~rollouts.truncated).sum())
    by_text = N - cut - count
    sentence = (f"Of {N} completions {count} end with a stop token, which the loss sees"
                f"{f', {by_text} with a text of stop_sequences' if by_text else ''}, and {cut} ({cut / N:.0%}) are "
                "cut.")
    return cut <= N / 2, sentence, longer


def memory(x):
    """A step with completions of full length fits."""
    m = x.memory
    highest = "memory that is not measured here" if m.highest is None else f"{m.highest:.0f} MB of memory now"
    sentence = f"The run takes {highest}, and about {m.needed:.0f} MB with texts of full length"
    if m.limit is None:
        return None, f"{sentence}; how much there is, is not known here.", "compare it with what the machine has"
    return m.needed <= 0.95 * m.limit, f"{sentence}, of the {m.limit:.0f} MB that it can have.", (
        "halve batch_size and double gradient_accumulation_steps, which changes nothing else, or set "
        "micro_batch_tokens or grad_checkpoint=True")


def duration(x):
    """How long the run takes, and how much of it the evaluations."""
    c = x.config
    a, b, last = c.eval_interval, c.sample_interval, c.max_iters
    count = 1 + last // a + last // b - last // lcm(a, b) + (last % a != 0 and last % b != 0)
    steps, evaluations = c.max_iters * x.step_seconds, count * x.evaluation_seconds
    sentence = (f"A step takes about {in_words(x.step_seconds)}, an evaluation {in_words(x.evaluation_seconds)}, the "
                f"run of {c.max_iters} steps and {count} evaluations {in_words(steps + evaluations)}.")
    if count > 2 and evaluations > steps:
        return False, f"{sentence} Most of that are evaluations.", (
            f"raise eval_interval={c.eval_interval} and sample_interval={c.sample_interval}, or lower eval_problems="
            f"{c.eval_problems}")
    if steps + evaluations > DAY:
        return None, sentence, "is that what you want? Fewer max_iters, a smaller batch_size or group_size take less"
    return True, sentence, ""


def tiny(x):
    """A number that should be 0."""
    return f"{x:.0e}" if x else "0"


def in_words(seconds):
    """A time as people say it."""
    if seconds < 100:
        return f"{seconds:.2g} s" if seconds < 10 else f"{seconds:.0f} s"
    if seconds < 7200:
        return f"{seconds / 60:.0f} min"
    return f"{seconds / 3600:.0f} h" if seconds < 2 * DAY else f"{seconds / DAY:.0f} days"
