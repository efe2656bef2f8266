"""TRL's side of the comparison: its GRPOTrainer on given work, timed from outside."""

import tempfile
import time

import numpy as np
import torch

from core.settings.optional import quiet_transformers, require
from grpo.benchmarks.side import KEEP_MEMORY
from grpo.benchmarks.work import gpt2, wait_for_device

INSTALL = "-r requirements-peer.txt -r requirements-hf.txt"
ROWS = 16  # TRL's fastest number of completions in a forward pass on two cores
BEST = {"gradient_checkpointing": False, "logging_strategy": "no", "optim": "adamw_torch_fused"}
NEVER = "<never>"  # a token behind the model's vocabulary: with it as the end, no completion ends by itself


def require_trl():
    """The package trl. Raises ValueError with the pip command if it is not installed."""
    return require("trl", "bench.py peer", INSTALL)


def trl_steps(work, best, device, dtype, turn):
    """Trains in turns (grpo/benchmarks/side.py).

    best: with the settings that are fastest on two cores; else with TRL's own defaults. The precision is part of the
    work: TRL's default, bfloat16, is not used with dtype float32.
    """
    trl, transformers = require_trl(), quiet_transformers("GPT-2", "model")
    datasets = require("datasets", "bench.py peer", INSTALL)
    datasets.disable_progress_bars()
    clock = Clock(transformers, work, turn)
    with tempfile.TemporaryDirectory() as folder:
        model, tokenizer = saved_model(transformers, work, folder)
        text = lambda ids: "".join(letter(i) for i in ids)
        prompts = [text(ids) for step in range(32) for ids in work.prompts(step)]
        args = trl.GRPOConfig(output_dir=folder, **settings(work, best, device, dtype))
        trainer = trl.GRPOTrainer(model=model, args=args, reward_funcs=clock.reward, processing_class=tokenizer,
                                  train_dataset=datasets.Dataset.from_dict({"prompt": prompts}),
                                  callbacks=[clock.callback()])
        clock.watch(trainer)
        trainer.train()


def settings(work, best, device, dtype):
    """Arguments of TRL's GRPOConfig: those of the work, and with `best` those that make it fast."""
    limit = ROWS if best else 8  # 8 is its default
    rows = max(n for n in range(1, limit + 1) if work.rows % n == 0)
    args = {"per_device_train_batch_size": rows, "gradient_accumulation_steps": work.rows // rows,
            "num_generations": work.group_size, "max_completion_length": work.completion_length, "beta": 0.04,
            "temperature": 1.0, "top_p": 1.0, "num_iterations": 1, "learning_rate": 1e-4, "max_steps": 10**6,
            "lr_scheduler_type": "constant", "use_cpu": device == "cpu", "bf16": dtype == "bfloat16", "seed": 0,
            "report_to": "none", "save_strategy": "no", "disable_tqdm": True}
    return args | (BEST if best else {})


def environment(best):
    """Environment variables of the process."""
    return {"HF_HUB_OFFLINE": "1"} | (KEEP_MEMORY if best else {})


def letter(i):
    """The character of a token id. Spaces are left out: a prompt's end would be cut."""
    return chr(33 + i) if i < 94 else chr(0x100 + i)


def saved_model(transformers, work, folder):
    """(GPT-2, its tokenizer of one character for each id). The model is saved, because TRL loads its reference."""
    from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers
    words = {letter(i): i for i in range(work.vocab_size - 3)} | {
        name: work.vocab_size - 3 + i for i, name in enumerate(("<unk>", "<pad>", "<eos>"))}
    plain = Tokenizer(models.WordLevel(words, unk_token="<unk>"))
    plain.pre_tokenizer = pre_tokenizers.Split(Regex("."), "isolated")
    plain.decoder = decoders.Fuse()
    tokenizer = transformers.PreTrainedTokenizerFast(
        tokenizer_object=plain, unk_token="<unk>", pad_token="<pad>", eos_token="<eos>", padding_side="left")
    model = gpt2(transformers, work)
    model.save_pretrained(folder)
    model = transformers.GPT2LMHeadModel.from_pretrained(folder, dtype=torch.float32)
    if not work.mixed:
        tokenizer.add_special_tokens({"eos_token": NEVER})
        model.config.eos_token_id = model.generation_config.eos_token_id = tokenizer.eos_token_id
    return model, tokenizer


class EndAtDrawnLength:
    """A logits processor that ends each row at the length drawn for it, and not before."""

    def __init__(self, lengths, stop_id):
        self.lengths, self.stop_id, self.written = torch.from_numpy(lengths.flatten()), stop_id, 0

    def __call__(self, ids, scores):
        assert len(scores) == len(self.lengths), f"{len(scores)} rows at once, not {len(self.lengths)}"
        self.written += 1
        scores, end = scores.clone(), (self.lengths <= self.written).to(scores.device)  # (N, V), (N,)
        scores[:, self.stop_id] = -torch.inf
        scores[end] = -torch.inf
        scores[end, self.stop_id] = 0.0
        return scores


class Clock:
    """Measures the phases of TRL's steps, checks the lengths of its completions, and waits between two steps."""

    def __init__(self, transformers, work, turn):
        self.transformers, self.work, self.turn = transformers, work, turn
        self.phases, self.step, self.start = {}, 0, 0.0

    def timed(self, phase, function):
        """The function, whose seconds count for the phase."""
        def run(*arguments, **named):
            start = time.perf_counter()
            try:
                return function(*arguments, **named)
            finally:
                self.phases[phase] = self.phases.get(phase, 0.0) + time.perf_counter() - start
        return run

    def watch(self, trainer):
        """Measures this trainer."""
        score, generate = trainer._get_per_token_logps_and_entropies, trainer.model.generate
        reference = self.timed("reference", score)
        trainer._get_per_token_logps_and_entropies = lambda model, *arguments, **named: (
            reference if model is trainer.ref_model else score)(model, *arguments, **named)
        trainer._generate = self.timed("generation", trainer._generate)
        trainer.compute_loss = self.timed("policy", trainer.compute_loss)
        trainer.accelerator.backward = self.timed("policy", trainer.accelerator.backward)
        if self.work.mixed:
            trainer.model.generate = lambda *arguments, **named: generate(
                *arguments, **named, logits_processor=self.transformers.LogitsProcessorList(
                    [EndAtDrawnLength(self.work.lengths(self.step), self.work.stop_id)]))

    def reward(self, completions, completion_ids, **_):
        """The share of the letter a in each completion."""
        lengths = np.array([len(ids) for ids in completion_ids])
        drawn = self.work.lengths(self.step).flatten()
        assert (lengths == drawn).all(), f"lengths {lengths} are not those that were drawn, {drawn}"
        return [text.count("a") / max(1, len(text)) for text in completions]

    def callback(self):
        """What waits for the turn, and takes the time of the optimizer."""
        clock = self

        class Turns(self.transformers.TrainerCallback):
            def on_train_begin(self, args, state, control, **_):
                control.should_training_stop = not clock.turn(None)
                clock.start = time.perf_counter()

            def on_pre_optimizer_step(self, *_, **__):
                clock.optimizer = time.perf_counter()

            def on_optimizer_step(self, *_, **__):
                clock.phases["optimizer"] = time.perf_counter() - clock.optimizer

            def on_step_end(self, args, state, control, **_):
                wait_for_device(args.device)
                whole = time.perf_counter() - clock.start
                record = clock.phases | {"rest": whole - sum(clock.phases.values()), "step": whole}
                clock.phases, clock.step = {}, clock.step + 1
                control.should_training_stop = not clock.turn(record)
                clock.start = time.perf_counter()
        return Turns()
