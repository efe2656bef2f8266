"""TRL's side of the comparison: its GRPOTrainer on given work, timed from outside."""

import tempfile
import time

import torch

from core.settings.optional import quiet_transformers, require
from grpo.benchmarks.work import check_lengths, gpt2, record_of, share_of_letter

INSTALL = "-r requirements-peer.txt -r requirements-hf.txt"
ROWS = 16          # TRL's fastest number of completions in a forward pass on two cores
NEVER = "<never>"  # a token behind the model's vocabulary: with it as the end, no completion ends by itself


def require_trl():
    """The package trl. Raises ValueError with the pip command if it is not installed."""
    return require("trl", "bench.py peer", INSTALL)


def trl_steps(work, device, dtype, turn):
    """Trains in turns (grpo/benchmarks/side.py)."""
    trl = require_trl()
    transformers = quiet_transformers("GPT-2", "model")
    datasets = require("datasets", "bench.py peer", INSTALL)
    datasets.disable_progress_bars()
    clock = Clock(transformers, work, turn)
    with tempfile.TemporaryDirectory() as folder:
        model, tokenizer = saved_model(transformers, work, folder)
        prompts = ["".join(map(letter, ids)) for step in range(32) for ids in work.prompts(step)]
        args = trl.GRPOConfig(output_dir=folder, **settings(work, device, dtype))
        trainer = trl.GRPOTrainer(model=model, args=args, reward_funcs=clock.reward, processing_class=tokenizer,
                                  train_dataset=datasets.Dataset.from_dict({"prompt": prompts}),
                                  callbacks=[clock.callback()])
        clock.watch(trainer)
        trainer.train()


def settings(work, device, dtype):
    """Arguments of TRL's GRPOConfig, the fastest on two cores."""
    rows = min(ROWS, work.rows)
    return {"per_device_train_batch_size": rows, "gradient_accumulation_steps": work.rows // rows,
            "num_generations": work.group_size, "max_completion_length": work.completion_length, "beta": 0.04,
            "temperature": 1.0, "top_p": 1.0, "num_iterations": 1, "learning_rate": 1e-4, "max_steps": 10**6,
            "lr_scheduler_type": "constant", "use_cpu": device == "cpu", "bf16": dtype == "bfloat16", "seed": 0,
            "report_to": "none", "save_strategy": "no", "disable_tqdm": True, "gradient_checkpointing": False,
            "logging_strategy": "no", "optim": "adamw_torch_fused"}


def letter(i):
    """The character of a token id. Spaces are left out: a prompt's end would be cut."""
    return chr(33 + i) if i < 94 else chr(0x100 + i)


def saved_model(transformers, work, folder):
    """(GPT-2, its tokenizer of one character for each id). The model is saved, because TRL loads its reference."""
    from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers
    names = [*map(letter, range(work.vocab_size - 3)), "<unk>", "<pad>", "<eos>"]
    words = {name: i for i, name in enumerate(names)}
    plain = Tokenizer(models.WordLevel(words, unk_token="<unk>"))
    plain.pre_tokenizer = pre_tokenizers.Split(Regex("."), "isolated")
    plain.decoder = decoders.Fuse()
    tokenizer = transformers.PreTrainedTokenizerFast(
        tokenizer_object=plain, unk_token="<unk>", pad_token="<pad>", eos_token="<eos>", padding_side="left")
    gpt2(transformers, work).save_pretrained(folder)
    model = transformers.GPT2LMHeadModel.from_pretrained(folder, dtype=torch.float32)
    if not work.mixed:
        tokenizer.add_special_tokens({"eos_token": NEVER})
        model.config.eos_token_id = model.generation_config.eos_token_id = tokenizer.eos_token_id
    return model, tokenizer


class EndAtDrawnLength:
    """A logits processor that ends each row at the length drawn for it, and not before."""

    def __init__(self, lengths, stop_id):
        self.lengths = torch.from_numpy(lengths.flatten())                           # (N,)
        self.stop_id = stop_id
        self.sampled = 0

    def __call__(self, ids, scores):
        self.sampled += 1
        end = (self.lengths <= self.sampled).to(scores.device)                       # (N,)
        scores = scores.clone()                                                      # (N, V)
        scores[:, self.stop_id] = -torch.inf
        scores[end] = -torch.inf
        scores[end, self.stop_id] = 0.0
        return scores


class Clock:
    """Measures the phases of TRL's steps, checks the lengths of its completions, and waits between two steps."""

    def __init__(self, transformers, work, turn):
        self.transformers, self.work = transformers, work
        self.turn = turn
        self.seconds = {"generation": 0.0, "reference": 0.0}
        self.step = 0

    def timed(self, phase, function):
        """The function, whose seconds count for the phase."""
        def run(*arguments, **named):
            start = time.perf_counter()
            result = function(*arguments, **named)
            self.seconds[phase] += time.perf_counter() - start
            return result
        return run

    def watch(self, trainer):
        """Measures this trainer."""
        score = trainer._get_per_token_logps_and_entropies
        reference = self.timed("reference", score)
        generate = trainer.model.generate

        def timed_score(model, *arguments, **named):
            return (reference if model is trainer.ref_model else score)(model, *arguments, **named)

        def generate_drawn_lengths(*arguments, **named):
            end = EndAtDrawnLength(self.work.lengths(self.step), self.work.stop_id)
            return generate(*arguments, **named, logits_processor=self.transformers.LogitsProcessorList([end]))

        trainer._get_per_token_logps_and_entropies = timed_score
        trainer._generate = self.timed("generation", trainer._generate)
        if self.work.mixed:
            trainer.model.generate = generate_drawn_lengths

    def reward(self, completions, completion_ids, **_):
        check_lengths(map(len, completion_ids), self.work, self.step)
        return share_of_letter(completions)

    def callback(self):
        """A callback that waits for the turn between two steps."""
        clock = self

        class Turns(self.transformers.TrainerCallback):
            def on_train_begin(self, args, state, control, **_):
                control.should_training_stop = not clock.turn(None)
                clock.start = time.perf_counter()

            def on_step_end(self, args, state, control, **_):
                record = record_of(**clock.seconds, start=clock.start, device=args.device)
                clock.seconds = dict.fromkeys(clock.seconds, 0.0)
                clock.step += 1
                control.should_training_stop = not clock.turn(record)
                clock.start = time.perf_counter()
        return Turns()
