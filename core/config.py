"""Settings from config files and --key=value arguments, checked against a dataclass for each script."""

import ast
import dataclasses
import difflib
import inspect
import io
import json
import os
import pathlib
import runpy
import sys
import textwrap
import tokenize
import traceback
import types
import typing

ROOT = str(pathlib.Path(__file__).resolve().parents[1])
SYNONYMS = {"kl_coef": "kl_beta", "max_grad_norm": "grad_clip", "num_iterations": "max_iters",
            "rollout_batch_size": "batch_size", "num_generations": "group_size", "model_path": "generator_checkpoint",
            "output_dir": "out_dir"}  # the names of some keys in other projects
HELP_WIDTH = 120


class UsageError(ValueError):
    """A mistake in the command itself: exit code 2."""


@dataclasses.dataclass(frozen=True)
class RunConfig:
    """What every training script's config has."""

    # data
    dataset: str = "char_diffusion"        # a folder under data/, a folder of your own, or prompts:
                                           # a .jsonl, .json or .parquet file, or hf:owner/name
    block_size: int = 128                  # tokens per text
    # prompts
    template: str = "plain"                # how a prompt is rendered: plain, chat, math, code, or model: the chat
                                           # template of a Hugging Face tokenizer
    chat_template_kwargs: dict | None = None  # arguments of that chat template, such as {"enable_thinking": False}
    system_prompt: str | None = None       # the first message of every prompt; None: none
    # optimization
    batch_size: int = 64                   # texts per micro-batch and rank
    gradient_accumulation_steps: int = 1   # micro-batches per optimizer step
    max_iters: int = 2000                  # optimizer steps of the run
    optimizer: str = "muon"                # for the matrices of the blocks, AdamW for the rest; "adamw": for everything
    learning_rate: float = 3e-3            # the highest, reached after warmup_iters
    min_lr: float = 1e-4                   # the learning rate from lr_decay_iters on
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
    resume: bool = False                   # go on from out_dir/state.pt, bit for bit
    seed: int = 1337                       # of the data, of what is sampled, and of a new model
    # system
    device: str = "auto"                   # auto (cuda, else mps, else cpu), cpu, cuda, cuda:1, mps
    dtype: str = "auto"                    # float32, bfloat16; auto: bfloat16 on CUDA
    compile: bool = False                  # torch.compile: half a minute at the start, then faster; for long runs
    wandb_log: bool = False                # log to Weights & Biases as well
    wandb_project: str = "nano-grpo"       # the project of the run on Weights & Biases
    wandb_run_name: str | None = None      # the run's name on Weights & Biases; None: chosen by wandb

    def __post_init__(self):
        for key in ("block_size", "batch_size", "gradient_accumulation_steps", "max_iters", "log_interval",
                    "eval_interval", "save_interval", "max_bad_steps"):
            at_least(self, key, 1)
        at_least(self, "keep_checkpoints", 0)
        if self.seed < 0:
            raise ValueError(f"seed={self.seed} must not be negative")
        if self.learning_rate <= 0:
            raise ValueError(f"learning_rate={self.learning_rate} must be above 0")
        if self.min_lr > self.learning_rate:
            raise ValueError(f"min_lr={self.min_lr} is above learning_rate={self.learning_rate}, so the rate would "
                             f"rise; set min_lr={self.learning_rate / 10:g}")


def at_least(config, key, least):
    if getattr(config, key) < least:
        raise ValueError(f"{key}={getattr(config, key)} must be at least {least}")


def load_config(cls, argv):
    """Builds the dataclass `cls` from config files and --key=value arguments; later arguments win.

    Returns (config, origin): origin maps each key that was set to the file or argument that set it.
    Raises UsageError for an unknown key or a wrong type, naming the file or argument and the nearest key.
    """
    if "--help" in argv or "-h" in argv:
        print("\n".join(help_lines(cls)))
        raise SystemExit(0)
    values, origin, hints = {}, {}, typing.get_type_hints(cls)
    for argument in argv:
        if argument.startswith("--"):
            key, equals, text = argument[2:].partition("=")
            if not equals:
                raise UsageError(f"{argument}: write --key=value")
            settings, where = {key: literal(text, hints.get(key))}, "command line"
        elif argument.endswith(".py"):
            settings, where = run_config_file(argument), argument
        else:
            raise UsageError(f"{argument}: expected a config file ending in .py, or --key=value")
        for key, value in settings.items():
            values[key], origin[key] = checked(key, value, hints, where), where
    return cls(**values), origin


def run_config_file(path):
    """The public names that the file assigns; it runs in a namespace of its own."""
    if not os.path.exists(path):
        raise FileNotFoundError(f"config file {path} does not exist")
    try:
        names = runpy.run_path(path)
    except SyntaxError as error:
        raise UsageError(f"{path}, line {error.lineno}: {error.msg}") from None
    return {key: value for key, value in names.items() if not key.startswith("_")}


def literal(text, hint):
    """The value of a Python literal; a bare word, or the text of a key that takes strings, is a string."""
    if hint is str:
        return text
    try:
        value = ast.literal_eval(text)
    except (ValueError, SyntaxError):
        return text
    others = [t for t in typing.get_args(hint) if t is not str]
    return value if value is None or str not in typing.get_args(hint) or type(value) in others else text


def allowed_types(hint):
    return typing.get_args(hint) if isinstance(hint, types.UnionType) else (hint,)


def type_name(hint):
    return " or ".join(t.__name__.replace("NoneType", "None") for t in allowed_types(hint))


def checked(key, value, hints, where):
    """`value` as the type of its key; the only conversions are int to float and list to tuple."""
    if key not in hints:
        near = SYNONYMS.get(key) or next(iter(difflib.get_close_matches(key, hints, n=1)), None)
        hint = f"; did you mean {near}?" if near in hints else "; --help lists the keys"
        raise UsageError(f"{where}: unknown key {key}{hint}")
    allowed = allowed_types(hints[key])
    if float in allowed and type(value) is int:
        value = float(value)
    if tuple in allowed and type(value) is list:
        value = tuple(value)
    if type(value) not in allowed:
        remedy = f'; write {key}="({value!r},)"' if tuple in allowed else ""
        raise UsageError(f"{where}: {key}={value!r} must be {type_name(hints[key])}, not {type(value).__name__}"
                         + remedy)
    return value


def class_comments(cls):
    """{field: (section, reason)} of the fields that the class itself declares.

    A comment on a line of its own starts a section. The comment after a field is its reason; comments further right on
    the next lines continue it. Where there is no source to read (a class typed into the interpreter) both are empty.
    """
    try:
        source = textwrap.dedent(inspect.getsource(cls))
    except (OSError, TypeError):
        return dict.fromkeys(cls.__dict__.get("__annotations__", {}), ("", ""))
    comments = [token for token in tokenize.generate_tokens(io.StringIO(source).readline)
                if token.type == tokenize.COMMENT]
    alone = {token.start[0]: token for token in comments if token.line.lstrip().startswith("#")}
    text = {token.start[0]: token.string.lstrip("# ") for token in comments}
    found = {}
    for node in (node for node in ast.parse(source).body[0].body if isinstance(node, ast.AnnAssign)):
        headings = [line for line, token in alone.items() if token.start[1] == node.col_offset and line < node.lineno]
        end = node.end_lineno + 1
        while end in alone and alone[end].start[1] > node.col_offset:
            end += 1
        reason = " ".join(text.get(line, "") for line in range(node.end_lineno, end))
        found[node.target.id] = (text[headings[-1]] if headings else ""), reason
    return found


def field_comments(cls):
    """{field: (section, reason)}: the class's own sections first; its bases' fields join the section of that name.

    A field that a class declares again is in the class's own section; without a comment it has the base's reason.
    """
    found = {}
    for base in cls.__mro__:
        if dataclasses.is_dataclass(base):
            for name, (section, reason) in class_comments(base).items():
                first, own_reason = found.get(name, (section, ""))
                found[name] = first, own_reason or reason
    return found


def default_of(field):
    if field.default_factory is not dataclasses.MISSING:
        return field.default_factory()
    return field.default


def help_lines(cls):
    """What --help prints: for each section its keys with their defaults, types and reasons."""
    hints, fields = typing.get_type_hints(cls), {f.name: f for f in dataclasses.fields(cls)}
    comments = {name: about for name, about in field_comments(cls).items() if name in fields}
    settings = {name: f"--{name}" + ("" if (default := default_of(f)) is dataclasses.MISSING else f"={default!r}")
                for name, f in fields.items()}
    wide, typed = (max(map(len, column), default=0) for column in (settings.values(), map(type_name, hints.values())))
    lines = ["Arguments: config files ending in .py and --key=value, in any order; a later one wins."]
    for section in dict.fromkeys(section for section, _ in comments.values()):
        lines += ["", section] if section else [""]
        for name in (name for name, about in comments.items() if about[0] == section):
            start = f"  {settings[name]:<{wide}}  {type_name(hints[name]):<{typed}}  "
            lines += textwrap.wrap(comments[name][1], HELP_WIDTH, initial_indent=start,
                                   subsequent_indent=" " * len(start)) or [start.rstrip()]
    return lines


def save_config(config, path):
    with open(path, "w") as f:
        json.dump(dataclasses.asdict(config), f, indent=1)


def describe(config, origin):
    """The settings that differ from the defaults and where each was set, one line each."""
    default = {f.name: default_of(f) for f in dataclasses.fields(config)}
    changed = [(k, v) for k, v in dataclasses.asdict(config).items() if k in origin and v != default[k]]
    width = max((len(f"{k} = {v!r}") for k, v in changed), default=0)
    return [f"{f'{k} = {v!r}':<{width}}  (default {default[k]!r}; {origin[k]})" for k, v in changed]


def is_ours(filename):
    """Whether a source file belongs to this repository, whatever links lead to it."""
    path = os.path.realpath(filename)
    return path.startswith(ROOT + os.sep) and "site-packages" not in path


def exit_code(main):
    """Calls main(argv) and returns the exit code; a mistake of the user's and an interrupt are one line on stderr.

    A ValueError or FileNotFoundError counts as the user's only if this repository's code raised it. A script that does
    not know --help itself prints its docstring.
    """
    try:
        main(sys.argv[1:])
    except (ValueError, FileNotFoundError) as error:
        if isinstance(error, UsageError) and {"--help", "-h"} & set(sys.argv):
            print(sys.modules[main.__module__].__doc__.strip())
            return 0
        if not is_ours(traceback.extract_tb(error.__traceback__)[-1].filename):
            raise
        print(f"error: {error}", file=sys.stderr)
        return 2 if isinstance(error, UsageError) else 1
    except KeyboardInterrupt:
        print("\ninterrupted", file=sys.stderr)
        return 130
    except SystemExit as stop:
        return stop.code
    return 0


def stdout_is_closed():
    """Whether nobody reads the output any more. (If somebody does, they get an empty line.)"""
    try:
        print(flush=True)
    except BrokenPipeError:
        return True
    return False


def run_script(main):
    """Runs main(argv): a mistake of the user's is one line and exit code 1 (2 for usage), never a traceback.

    Output that is piped into a program that stops reading, such as head, ends the script quietly with exit code 141,
    as the signal SIGPIPE would. Output is flushed here: at the interpreter's exit it is too late to handle the error.
    """
    try:
        code = exit_code(main)
        sys.stdout.flush()
    except BrokenPipeError:
        if not stdout_is_closed():
            raise
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())  # for what Python flushes at its exit
        code = 141
    if code:
        raise SystemExit(code)
