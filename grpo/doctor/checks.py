"""The doctor's checks of a step: log-probabilities, KL, gradient, prompts, ends of completions, time.

A check takes an Examination and returns (verdict, sentence, remedy), or None where it does not apply. The verdict is
True: as it should be; False: wrong, the remedy says what to change; None: it could not be checked, or is worth a look.
"""

from collections import Counter

from core.prompts import PromptConsumer, as_messages, plain
from core.tokenizer import fold_to_ascii

DAY = 24 * 3600


def first_ratio(x):
    """Training scores the tokens under the distribution that they were drawn from."""
    if "mismatch_max" not in x.metrics:
        return None  # no token is in the loss
    most, mean = x.metrics["mismatch_max"], x.metrics["mismatch_kl"]
    tolerated = 1e-3 if x.float32 else 2.0
    if most < tolerated and mean < 1e-3:
        return True, ("Training gives each sampled token the log-probability that it was sampled with, so the first "
                      f"ratio is 1 (largest difference {most:.1g})."), ""
    if not x.config.scores_as_drawn:
        return None, (f"fill_estimator={x.config.fill_estimator!r} scores tokens in another text than they were drawn "
                      f"from: their log-probabilities are estimates, which differ by {most:.2g} nats at most."), (
            "nothing to do if you mean that; fill_estimator='trajectory' is exact and reads more texts")
    return False, ("Training gives sampled tokens another log-probability than they were sampled with, so the first "
                   f"ratio is not 1 (largest difference {most:.2g}, KL {mean:.1e} per token)."), inexact_model(x)


def order_of_passes(x):
    """A completion's places are filled in in an order that does not depend on the policy."""
    if x.config.unmask_order != "confidence":
        return None
    return None, ("unmask_order='confidence' keeps the likeliest tokens first: the order depends on the policy, its "
                  "probability is not in the loss, and the gradient is an estimate."), (
        "nothing to do if you mean that; with unmask_order='random' or 'left_to_right' the order has no part in it")


def first_kl(x):
    """The reference is the policy as it starts, and a teacher is not."""
    if "mean_kl" not in x.metrics or x.config.reference_checkpoint is not None:
        return None
    kl = x.metrics["mean_kl"]
    equal = abs(kl) < (1e-4 if x.float32 else 1e-2)
    if x.config.teacher_checkpoint is not None:
        return not equal, f"Before the first step the KL to the teacher is {kl:.3g} for each token.", (
            "the teacher is the generator itself and teaches nothing: set teacher_checkpoint to another model")
    if equal:
        return True, f"Before the first step the KL to the reference is {abs(kl):.1g}: both are the same model.", ""
    return False, (f"Before the first step the KL to the reference is {kl:.3g}, but both should be the same "
                   "model."), inexact_model(x)


def inexact_model(x):
    """The remedy where a model gives other log-probabilities than it gave before."""
    if x.float32:
        return "the model computes something else token by token than at once: look at its cache and its padding"
    return "set dtype='float32'"


def gradient(x):
    """The loss has a gradient, and it reaches every part of the model."""
    norm = x.metrics["grad_norm"]
    if x.metrics["skipped_steps"]:
        return False, f"The loss or its gradient is not finite (norm {norm}).", (
            "set dtype='float32'; if it stays, look for infinite weights in the model, or rewards of enormous size")
    if norm == 0 or x.metrics["empty_steps"]:
        return False, "The gradient is 0, so nothing is learned: no token is in the loss, or all advantages are 0.", (
            "see the checks of rewards and of cut completions; a group teaches something if its completions get "
            "different rewards, and mask_truncated=True leaves cut ones out")
    dead = [part for part, size in x.gradient.items() if size == 0]
    if dead:
        return False, f"The gradient is 0 in {', '.join(dead)}: nothing is learned there.", (
            "these weights are frozen or unused: load the model without freezing them")
    largest = max(x.gradient, key=x.gradient.get)
    return True, f"The gradient reaches all parts of the model: its norm is {norm:.2g}, and largest in {largest}.", ""


def lost_characters(x):
    """The tokenizer can write the prompts."""
    if not isinstance(x.data, PromptConsumer):
        return None
    tokenizer = x.data.tokenizer
    text = "\n".join(plain(as_messages(record["prompt"])) for record in x.data.records["train"][:100])
    written = characters(text)
    lost = written - characters(tokenizer.decode(tokenizer.encode(text)))
    share = lost.total() / max(1, written.total())
    if share <= 1e-3:
        return True, "The tokenizer can write the prompts.", ""
    examples = ", ".join(repr(character) for character, _ in lost.most_common(5))
    return False, (f"{share:.0%} of the characters in the prompts are lost, such as {examples}: the tokenizer has no "
                   "tokens for them."), "use a model whose tokenizer knows them, or write the prompts without them"


def characters(text):
    """Counts the characters of a text, without spaces, accents and case, which tokenizers may leave out."""
    return Counter("".join(fold_to_ascii(c)[0] or c for c in text.lower() if not c.isspace()))


def ends_of_completions(x):
    """The records' own completions are neither cut off nor end too early."""
    if not isinstance(x.data, PromptConsumer):
        return None
    own = [str(record["completion"]) for record in x.data.records["train"][:1000] if record.get("completion")]
    if not own:
        return None
    for stop in x.config.stop_sequences if x.config.environment is None else ():  # else they end turns
        cut = [text for text in own if text.partition(stop)[2].strip()]  # one that ends with it is whole
        if cut:
            return False, f"The text {stop!r} is inside {len(cut) / len(own):.0%} of the records' completions.", (
                f"leave {stop!r} out of stop_sequences: it ends a right completion too early")
    most = x.config.max_new_tokens
    lengths = sorted(len(x.data.tokenizer.encode(text)) + 1 for text in own)
    longer = sum(length > most for length in lengths) / len(own)
    if longer > 0.05:
        return False, f"{longer:.0%} of the records' completions are longer than max_new_tokens={most}.", (
            f"set max_new_tokens={lengths[int(0.95 * len(lengths))]}, which is enough for 95% of them")
    return True, f"The records' completions fit into max_new_tokens={most}, and no stop sequence cuts them.", ""


def cut_completions(x):
    """Most completions end by themselves. Of episodes the doctor's environments.py tells."""
    if not isinstance(x.data, PromptConsumer) or x.config.environment is not None:
        return None
    most, cut = x.config.max_new_tokens, float(x.rollouts.truncated.float().mean())
    sentence = f"{cut:.0%} of the completions are cut at max_new_tokens={most}; the others end by themselves."
    return cut <= 0.5, sentence, (
        f"raise max_new_tokens={most}; if completions go on and on, the model does not know this prompt: set "
        "template='model' for a chat model, name in stop_sequences what should end a completion, or train the model on "
        "such records first (core/pretrain.py)")


def duration(x):
    """The run does not take days, and trains for most of its time."""
    c = x.config
    last = c.max_iters
    count = len({0, last, *range(0, last, c.eval_interval), *range(0, last, c.sample_interval)})
    steps, evaluations = last * x.step_seconds, count * x.evaluation_seconds
    sentence = (f"A step takes about {in_words(x.step_seconds)}, an evaluation {in_words(x.evaluation_seconds)}, the "
                f"run of {last} steps and {count} evaluations {in_words(steps + evaluations)}.")
    if count > 2 and evaluations > steps:
        return False, f"{sentence} Most of that are evaluations.", (
            f"raise eval_interval={c.eval_interval} and sample_interval={c.sample_interval}, or lower eval_problems="
            f"{c.eval_problems}")
    if steps + evaluations > DAY:
        return None, sentence, "is that what you want? Fewer max_iters, a smaller batch_size or group_size take less"
    return True, sentence, ""


def in_words(seconds):
    """A time in the unit that suits it."""
    if seconds < 100:
        return f"{seconds:.2g} s"
    if seconds < 7200:
        return f"{seconds / 60:.0f} min"
    return f"{seconds / 3600:.0f} h"
