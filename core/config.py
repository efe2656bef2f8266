"""Settings from config files and --key=value arguments, checked against a dataclass for each script."""

import ast
import dataclasses
import difflib
import functools
import inspect
import json
import os
import re
import runpy
import types
import typing

from core.files import CONFIG, read_object
from core.settings.help import allowed_types, help_lines
from core.settings.ranges import check_choices, check_ranges, shown
from core.settings.user_code import guarded, naming_line_of, one_line


class UsageError(ValueError):
    """A mistake in the command itself: exit code 2."""


@dataclasses.dataclass(frozen=True)
class RunConfig:
    """The settings that every training script has."""

    # data
    dataset: str = "char_diffusion"        # a folder under data/, or of your own; or prompts: a .jsonl, .json or
                                           # .parquet file or hf:owner/name
    block_size: int = 128                  # tokens per text
    # prompts
    template: str = "plain"                # how a prompt is rendered: plain, chat, math, code, or model: the chat
                                           # template of a Hugging Face tokenizer
    chat_template_kwargs: dict | None = None  # arguments of that chat template, such as {"enable_thinking": False}
    system_prompt: str | None = None       # the first message of every prompt; None: none
    prompt_format: str | None = None       # the text around every prompt, as in "Question: {prompt}"; None: none
    max_prompt_length: int = 512           # tokens; longer training prompts are left out, validation prompts refused
    # optimization
    batch_size: int = 64                   # texts per micro-batch and rank
    gradient_accumulation_steps: int = 1   # micro-batches per optimizer step
    max_iters: int = 2000                  # optimizer steps of the run
    optimizer: str = "muon"                # for the matrices of the blocks, AdamW for the rest; "adamw": for everything
    learning_rate: float = 3e-3            # the highest, reached after warmup_iters
    min_lr: float | None = None            # the learning rate from lr_decay_iters on; None: a tenth of learning_rate
    warmup_iters: int = 50                 # steps in which the learning rate rises linearly
    lr_decay_iters: int | None = None      # the step at which the cosine decay ends; None: max_iters
    weight_decay: float = 0.1              # on matrices and embeddings, not on vectors
    beta1: float = 0.9                     # AdamW's decay of the mean gradient
    beta2: float = 0.95                    # AdamW's decay of the mean squared gradient
    grad_clip: float = 1.0                 # the largest norm of the gradient; 0.0: no limit
    max_bad_steps: int = 10                # non-finite steps in a row before the run stops
    # evaluation, logging, checkpoints
    log_interval: int = 50                 # steps between two console lines
    eval_interval: int = 500               # steps between two evaluations
    save_interval: int = 500               # steps between two checkpoints
    keep_checkpoints: int = 0              # numbered models to keep beside the latest
    out_dir: str = "out"                   # the folder of everything that the run writes
    resume: bool | str = False             # go on from out_dir/state.pt, bit for bit on a CPU, without a config file
                                           # with the settings of that run; auto: if there is a state
    seed: int = 1337                       # of the data, of what is sampled, and of a new model
    # system
    device: str = "auto"                   # auto (cuda, else mps, else cpu), cpu, cuda, cuda:1, mps
    dtype: str = "auto"                    # float32, bfloat16; auto: bfloat16 on CUDA, and for a judge of filled-in
                                           # text on a CPU that has avx512_bf16 (its scores move by less than .002)
    rank_timeout: float = 1800.0           # seconds in which every rank must take part in an exchange, else all end
    compile: bool = False                  # torch.compile: half a minute at the start, then faster; for long runs
    report_to: tuple[str, ...] = ()        # where the metrics go as well: wandb, tensorboard, trackio
    wandb_log: bool = False                # the same as wandb in report_to
    wandb_project: str = "nano-grpo"       # the project of the run in wandb and trackio
    wandb_run_name: str | None = None      # the run's name in wandb and trackio; None: they choose one

    def __post_init__(self):
        check_ranges(self, RANGES)
        check_choices(self, CHOICES)
        if self.min_lr is not None and self.min_lr > self.learning_rate:
            raise ValueError(f"min_lr={self.min_lr} is above learning_rate={self.learning_rate}; lower it, or set None")
        with guarded(f"chat_template_kwargs={shown(self.chat_template_kwargs)} is no JSON", "write a dict of texts"):
            json.dumps(self.chat_template_kwargs, allow_nan=False)  # for config.json

    @functools.cached_property
    def absolute_out_dir(self):
        """The path of out_dir, the same from its first use on: a user's class or reward may call os.chdir."""
        return os.path.abspath(self.out_dir)


COMMAND = "command line"  # where a setting was set
CODE = (types.ModuleType, types.FunctionType, types.BuiltinFunctionType, type)  # what a config file has for itself
WORD = re.compile(r"[\w.:/-]+")  # a text that can stand for a tuple of itself
CHOICES = {"template": ("plain", "chat", "math", "code", "model"), "optimizer": ("adamw", "muon"),
           "resume": (True, False, "auto"), "dtype": ("auto", "float32", "bfloat16")}
RANGES = {"block_size": "[2, 1e6]", "max_prompt_length": "[1, 1e6]", "batch_size": "[1, 1e6]",
          "gradient_accumulation_steps": "[1, 1e6]", "max_iters": "[0, 1e12]", "learning_rate": "(0, 1e3]",
          "min_lr": "[0, 1e3]", "warmup_iters": "[0, 1e12]", "lr_decay_iters": "[1, 1e12]", "weight_decay": "[0, 1e3]",
          "beta1": "[0, 1)", "beta2": "[0, 1)", "grad_clip": "[0, inf)", "max_bad_steps": "[1, 1e12]",
          "log_interval": "[1, 1e12]", "eval_interval": "[1, 1e12]", "save_interval": "[1, 1e12]",
          "keep_checkpoints": "[0, 1e6]", "rank_timeout": "[1, 1e6]", "seed": "[0, 1e18]"}  # of RunConfig


def load_config(cls, argv):
    """Builds the dataclass `cls` from config files and --key=value arguments; later arguments win.

    --resume=True with --out_dir and no config file takes the settings from config.json in that folder.
    Returns (config, origin): origin maps each key that was set to the file or argument that set it.
    Raises UsageError for an unknown key or a wrong type, naming the file or argument and the nearest key.
    """
    if {"--help", "-h"} & set(argv):
        print("\n".join(help_lines(cls)))
        raise SystemExit(0)
    values, origin, in_files = {}, {}, {}
    hints = typing.get_type_hints(cls)
    for argument in argv:
        where, settings = settings_in(argument, hints)
        for key, value in settings.items():
            values[key] = checked(key, value, hints, where)
            origin[key] = where
        if where != COMMAND:
            in_files |= {key: values[key] for key in settings}
    path = os.path.join(values.get("out_dir", ""), CONFIG)
    alone = "out_dir" in values and all(argument.startswith("--") for argument in argv)
    if values.get("resume") is True and alone and os.path.isfile(path):
        saved = read_object(path, path, "name the config file of the run")
        in_files = {key: checked(key, value, hints, path) for key, value in saved.items() if key in hints}
        values, origin = in_files | values, dict.fromkeys(in_files, path) | origin
    if origin.get("reward_functions") == COMMAND and values["reward_functions"] != in_files.get("reward_functions"):
        for key in ("reward_weights", "success_reward"):  # of other rewards
            if origin.get(key, COMMAND) != COMMAND:
                del values[key], origin[key]
    return cls(**values), origin


def settings_in(argument, hints):
    """The settings of an argument and the place that errors name: (place, {key: value}). Raises UsageError."""
    if argument.startswith("--"):
        key, equals, text = argument[2:].partition("=")
        if not equals and bool in allowed_types(hints.get(key)):
            text = "True"
        elif not equals and key in hints:
            raise UsageError(f"{argument}: write {argument}=VALUE")
        return COMMAND, {key: literal(text, hints.get(key))}
    if not argument.endswith(".py"):
        raise UsageError(f"{argument}: expected a config file ending in .py, or --key=value")
    names = run_config_file(argument)
    return argument, {name: x for name, x in names.items() if name in hints or not isinstance(x, CODE)}


def run_config_file(path):
    """The public names that a file assigns; it runs in a namespace of its own. Raises UserCodeError."""
    if not os.path.isfile(path):
        raise FileNotFoundError(f"config file {path} does not exist; correct the path")
    try:
        with naming_line_of(run_config_file):
            names = runpy.run_path(path)
    except SyntaxError as error:  # without a line: bytes that are no text
        raise ValueError(f"{path} is not a Python file ({one_line(error)}); save it as UTF-8") from None
    return {name: value for name, value in names.items() if not name.startswith("_")}


def unknown_key(key, hints):
    """The error about a key that is no setting: a name of another project, a slip of the pen, or neither."""
    from core.settings.other_names import settings_of
    if settings := settings_of(key, hints):
        return f"unknown key {key}; did you mean {' or '.join(settings)}? docs/coming_from.md says what differs"
    if near := difflib.get_close_matches(key, hints, n=1, cutoff=0.85):
        return f"unknown key {key}; did you mean {near[0]}?"
    return f"unknown key {key}; --help lists the keys, docs/coming_from.md what other projects call them"


def literal(text, hint):
    """The value of a Python literal; a bare word, or the text of a key that takes strings, is a string."""
    try:
        value = ast.literal_eval(text)
    except (ValueError, SyntaxError):
        return text
    allowed = {typing.get_origin(t) or t for t in allowed_types(hint)}
    if str in allowed and type(value) not in allowed:
        return text  # of str | None: 7 is the text "7"
    return value


def checked(key, value, hints, where):
    """`value` as the type of its key. Conversions: int to float, list to tuple, one word to a tuple of that word."""
    if key not in hints:
        raise UsageError(f"{where}: {unknown_key(key, hints)}")
    kinds = {typing.get_origin(t) or t: typing.get_args(t) for t in allowed_types(hints[key])}
    item = kinds[tuple][0] if tuple in kinds else None
    if item and type(value) is list:
        value = tuple(value)
    if item is str and str not in kinds and type(value) is str and WORD.fullmatch(value):
        value = (value,)
    if float in kinds and type(value) is int:
        value = float(value)
    if item is float and type(value) is tuple:
        value = tuple(float(x) if type(x) is int else x for x in value)
    if type(value) in kinds and (type(value) is not tuple or {item}.issuperset(map(type, value))):
        return value
    raise UsageError(f"{where}: {key}={shown(value)} must be {inspect.formatannotation(hints[key])}")


def changed_settings(config, origin):
    """{key: {"value", "default", "set in": the file or argument}} of the settings that differ from their defaults."""
    changed = {}
    for key, where in origin.items():
        value, default = getattr(config, key), getattr(type(config), key)
        if value != default:
            changed[key] = {"value": value, "default": default, "set in": where}
    return changed


def describe(config, origin):
    """The settings that differ from the defaults and where each was set, one line each."""
    lines = []
    for key, about in changed_settings(config, origin).items():
        setting = f"{key} = {about['value']!r}"
        lines.append(f"{setting:<40}  (default {about['default']!r}; {about['set in']})")
    return lines
