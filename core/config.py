"""Plain-Python config files and --key=value, checked against one dataclass per script."""

import ast
import dataclasses
import difflib
import json
import os
import pathlib
import runpy
import sys
import traceback
import types
import typing

ROOT = str(pathlib.Path(__file__).resolve().parents[1])
SYNONYMS = {"kl_coef": "kl_beta", "max_grad_norm": "grad_clip", "num_iterations": "max_iters",
            "rollout_batch_size": "batch_size", "num_generations": "group_size", "model_path": "generator_checkpoint",
            "output_dir": "out_dir"}  # what other systems call a key of ours


class UsageError(ValueError):
    """The command was said wrong: exit code 2."""


def load_config(cls, argv):
    """Builds the dataclass `cls` from config files and --key=value arguments; later arguments win.

    Returns (config, origin): origin maps each key that was set to where it was set.
    Raises UsageError for an unknown key or a wrong type, naming the file or argument and the nearest key.
    """
    if "--help" in argv or "-h" in argv:
        print("\n".join(f"--{f.name}={f.default!r}" for f in dataclasses.fields(cls)))
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
    """A Python literal; a bare word, or anything meant for a string, is a string."""
    if hint is str:
        return text
    try:
        value = ast.literal_eval(text)
    except (ValueError, SyntaxError):
        return text
    return value if value is None or str not in typing.get_args(hint) else text


def checked(key, value, hints, where):
    """`value` as the type of its key; the only conversions are int to float and list to tuple."""
    if key not in hints:
        near = SYNONYMS.get(key) or next(iter(difflib.get_close_matches(key, hints, n=1)), None)
        hint = f"; did you mean {near}?" if near in hints else "; --help lists the keys"
        raise UsageError(f"{where}: unknown key {key}{hint}")
    hint = hints[key]
    allowed = typing.get_args(hint) if isinstance(hint, types.UnionType) else (hint,)
    if float in allowed and type(value) is int:
        value = float(value)
    if tuple in allowed and type(value) is list:
        value = tuple(value)
    if type(value) not in allowed:
        names = " or ".join(t.__name__.replace("NoneType", "None") for t in allowed)
        raise UsageError(f"{where}: {key}={value!r} must be {names}, not {type(value).__name__}")
    return value


def save_config(config, path):
    with open(path, "w") as f:
        json.dump(dataclasses.asdict(config), f, indent=1)


def describe(config, origin):
    """What differs from the defaults and where it was set, a line each."""
    default = {f.name: f.default for f in dataclasses.fields(config)}
    changed = [(k, v) for k, v in dataclasses.asdict(config).items() if k in origin and v != default[k]]
    width = max((len(f"{k} = {v!r}") for k, v in changed), default=0)
    return [f"{f'{k} = {v!r}':<{width}}  (default {default[k]!r}; {origin[k]})" for k, v in changed]


def is_ours(filename):
    """Whether a source file belongs to this repository, whatever links lead to it."""
    path = os.path.realpath(filename)
    return path.startswith(ROOT + os.sep) and "site-packages" not in path


def run_script(main):
    """Runs main(argv): a mistake of the user's is one line and exit code 1 (2 for usage), never a traceback.

    A ValueError or FileNotFoundError counts as the user's only if this repository's code raised it.
    """
    try:
        main(sys.argv[1:])
    except (ValueError, FileNotFoundError) as error:
        if not is_ours(traceback.extract_tb(error.__traceback__)[-1].filename):
            raise
        print(f"error: {error}", file=sys.stderr)
        raise SystemExit(2 if isinstance(error, UsageError) else 1) from None
    except KeyboardInterrupt:
        print("\ninterrupted", file=sys.stderr)
        raise SystemExit(130) from None
