"""TRL's side of the comparison: its GRPOTrainer on given work, timed from outside."""

import tempfile
import time

import torch

from core.settings.optional import quiet_transformers, require
from grpo.benchmarks.work import check_lengths, gpt2, record_of, share_of_letter

NEEDS = "bench.py peer", "-r requirements-peer.txt -r requirements-hf.txt"  # who needs TRL, what pip is to install
PROMPTS = 32       # steps until prompts come again
ROWS = 16          # TRL's fastest number of completions in a forward pass on two cores
NEVER = "<never>"  # a token behind the model's vocabulary: with it as the end, no completion ends by itself


def trl_steps(work, device, dtype, turn):
    """Trains in turns (grpo/benchmarks/side.py)."""
    trl = require("trl", *NEEDS)
    datasets = require("datasets", *NEEDS)
    transformers = quiet_transformers("GPT-2", "model")
    datasets.disable_progress_bars()
    prompts = ["".join(map(letter, ids)) for step in range(PROMPTS) for ids in work.prompts(step)]
    with tempfile.TemporaryDirectory() as folder:
        gpt2(transformers, work).save_pretrained(folder)
        trainer = trl.GRPOTrainer(
            folder, share_with_checks(work), fastest(trl, work, device, dtype, folder),
            datasets.Dataset.from_dict({"prompt": prompts}), processing_class=tokenizer_of(transformers, work),
            callbacks=[in_turns_with(transformers, turn)])
        if work.mixed:
            end_at_drawn_lengths(trainer, work)
        trainer.train()


def fastest(trl, work, device, dtype, folder):
    """The settings with which TRL is fastest on two cores."""
    rows = work.batch_size * work.group_size
    at_once = min(ROWS, rows)
    return trl.GRPOConfig(
        folder, per_device_train_batch_size=at_once, gradient_accumulation_steps=rows // at_once,
        num_generations=work.group_size, max_completion_length=work.completion_length, beta=0.04, temperature=1.0,
        top_p=1.0, num_iterations=1, learning_rate=1e-4, max_steps=10**6, lr_scheduler_type="constant",
        use_cpu=device == "cpu", bf16=dtype == "bfloat16", seed=0, report_to="none", save_strategy="no",
        disable_tqdm=True, gradient_checkpointing=False, logging_strategy="no", optim="adamw_torch_fused")


def share_with_checks(work):
    """The reward of the work, which checks the lengths of completions too."""
    def share(completions, completion_ids, trainer_state, **_):
        check_lengths(map(len, completion_ids), work, trainer_state.global_step)
        return share_of_letter(completions)
    return share


def letter(i):
    """The character of a token id. Spaces are left out: a prompt's end would be cut."""
    return chr(33 + i) if i < 94 else chr(0x100 + i)


def tokenizer_of(transformers, work):
    """A tokenizer of one character for each id."""
    from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers
    words = {letter(i): i for i in range(work.stop_id)}
    plain = Tokenizer(models.WordLevel(words | {"<eos>": work.stop_id}))
    plain.pre_tokenizer = pre_tokenizers.Split(Regex("."), "isolated")
    plain.decoder = decoders.Fuse()
    end = "<eos>" if work.mixed else NEVER
    return transformers.PreTrainedTokenizerFast(tokenizer_object=plain, eos_token=end, pad_token=end)


def turns_of(transformers, turn):
    """A kind of callback that waits for the first turn when training begins, and in `wait` for the next one."""
    class Turns(transformers.TrainerCallback):
        def on_train_begin(self, args, state, control, **_):
            self.wait(None, control)

        def wait(self, record, control):
            control.should_training_stop = not turn(record)
            self.start = time.perf_counter()
    return Turns


def in_turns_with(transformers, turn):
    """A callback that waits for the turn between two steps."""
    class EachStep(turns_of(transformers, turn)):
        def on_step_end(self, args, state, control, **_):
            self.wait(record_of(self.start, args.device), control)
    return EachStep()


def end_at_drawn_lengths(trainer, work):
    """Makes the completions of a trainer end at the lengths that the work has drawn for them, and not before."""
    generate = trainer.model.generate

    def generate_to_lengths(*arguments, **named):
        end = ending(work, trainer.state.global_step)
        return generate(*arguments, **named, logits_processor=[end])

    trainer.model.generate = generate_to_lengths


def ending(work, step):
    """A logits processor: only the token that ends a completion where its length is reached, all others before."""
    lengths = torch.from_numpy(work.lengths(step).flatten())                         # (N,)
    is_stop = torch.arange(work.vocab_size) == work.stop_id                          # (V,)

    def process(ids, scores):
        reached = ids.shape[1] - work.prompt_length + 1 >= lengths                   # (N,)
        excluded = (reached[:, None] != is_stop).to(scores.device)                   # (N, V)
        return scores.masked_fill(excluded, -torch.inf)
    return process
