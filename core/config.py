"""Settings from config files and --key=value arguments, and RunConfig, which all training scripts share."""

import ast
import functools
import inspect
import json
import os
import re
import runpy
import types
import typing

from core.errors import HELP, Mistake, UsageError, others
from core.files import CONFIG, read_object
from core.settings.setting import Settings, allowed_types, defaults, load_class, setting, shown


INTERVALS = {"log_interval": 10, "save_interval": 1, "sample_interval": 1}  # {interval: parts of eval_interval}
PROMPT_TEMPLATES = ("plain", "chat", "math", "code", "model", "model_math", "model_code")  # see core/prompts.py


class MaskConfig(Settings):
    """The settings of masking, for all scripts that mask text."""

    excludes = (("mask_low>mask_high", "", "it must be at most mask_high"),)

    masks: dict | None = setting(
        None, "how text is masked: {name: weight} of random, in_lines, span, line or your @mask functions; "
        "None: random and span, 1.0 each")
    mask_low: float = setting(0.2, "smallest masked share of a text; drawn for each text", "(0, 1]")
    mask_high: float = setting(0.5, "largest masked share of a text", "(0, 1]")


class RunConfig(Settings):
    """The settings that every training script has."""

    rooms = {"core.huggingface.settings:LoraConfig": "lora_rank lora_init_from",
             "core.huggingface.settings:ChatTemplateConfig": "template=model template=model_math template=model_code "
                                                             "task_type=math task_type=reasoning task_type=code",
             "core.trackers:TrackerConfig": "wandb_log report_to"}
    excludes = (("min_lr>learning_rate", "", "the learning rate would rise; lower it, or set None"),)
    has_adapter = False  # LoRA's is in its room

    dataset: str = setting(
        "char_diffusion", "a folder (a name in data/ or a path), a .jsonl, .json, .csv or .parquet file of "
        "prompts, or hf:owner/name")
    block_size: int = setting(128, "tokens per text", "[2, 1e6]")
    template: str = setting(
        "plain", "how prompts are rendered: plain, chat, math, code, model (the tokenizer's chat template), or that "
        "with the rules of a task, model_math, model_code", PROMPT_TEMPLATES)
    system_prompt: str | None = setting(None, "the first message of every prompt")
    prompt_format: str | None = setting(
        None, "the text around every prompt, as in 'Question: {prompt}'", re.compile(r"(?s).*\{prompt}.*"))
    max_prompt_length: int | float = setting(
        512, "tokens; longer training prompts are left out, validation prompts refused. Or a share such as 0.9: "
        "training prompts above that percentile of their lengths are left out", "[1, 1e6] or a share in (0, 1)")
    batch_size: int = setting(64, "problems per micro-batch on each rank", "[1, 1e6]")
    gradient_accumulation_steps: int = setting(1, "micro-batches per optimizer step", "[1, 1e6]")
    max_iters: int = setting(2000, "optimizer steps of the run", "[0, 1e12]")
    optimizer: str = setting("muon", "adamw, or muon (Muon for weight matrices, AdamW for the rest)", ("adamw", "muon"))
    learning_rate: float = setting(3e-3, "the peak learning rate", "(0, 1e3]")
    min_lr: float | None = setting(
        None, "the learning rate from lr_decay_iters on; None: a tenth of learning_rate", "[0, 1e3]")
    warmup_iters: int = setting(50, "steps of linear warmup", "[0, 1e12]")
    lr_decay_iters: int | None = setting(None, "the step at which cosine decay ends; None: max_iters", "[1, 1e12]")
    weight_decay: float = setting(0.1, "applied to matrices and embeddings only", "[0, 1e3]")
    beta1: float = setting(0.9, "AdamW's decay of the mean gradient", "[0, 1)")
    beta2: float = setting(0.95, "AdamW's decay of the mean squared gradient", "[0, 1)")
    grad_clip: float = setting(1.0, "largest gradient norm; 0.0 turns clipping off", "[0, inf)")
    max_bad_steps: int = setting(
        5, "steps in a row with a number that is not finite, or without any reward, before the run stops", "[1, 1e12]")
    eval_interval: int = setting(500, "steps between two evaluations", "[1, 1e12]")
    log_interval: int | None = setting(
        None, "steps between two console lines; None: a tenth of eval_interval", "[1, 1e12]")
    save_interval: int | None = setting(None, "steps between two checkpoints; None: eval_interval", "[1, 1e12]")
    out_dir: str = setting("out", "the folder of everything that the run writes")
    resume: bool | str = setting(
        False, "True: continue from out_dir/state.pt, without a config file with its saved settings; "
        "auto: only if there is one", (True, False, "auto"))
    seed: int = setting(1337, "of data order, sampling and new weights", "[0, 1e18]")
    device: str = setting("auto", "auto (cuda, else mps for Hugging Face models, else cpu), cpu, cuda, cuda:1, mps")
    dtype: str = setting("auto", "float32 or bfloat16; auto: bfloat16 on GPUs that compute in it",
                         ("auto", "float32", "bfloat16"))
    compile: bool = setting(False, "torch.compile: half a minute at the start, then faster; for long runs")
    report_to: tuple[str, ...] = setting((), "trackers: wandb, tensorboard, trackio")
    wandb_log: bool = setting(False, "the same as wandb in report_to")

    def __post_init__(self):
        super().__post_init__()
        for key, parts in INTERVALS.items():
            if getattr(self, key, 1) is None:
                vars(self)[key] = max(1, self.eval_interval // parts)

    @functools.cached_property
    def absolute_out_dir(self):
        """The path of out_dir, the same from its first use on: a user's class or reward may call os.chdir."""
        return os.path.abspath(self.out_dir)


COMMAND = "command line"  # where a setting was set
CODE = (types.ModuleType, types.FunctionType, types.BuiltinFunctionType, type)  # what a config file has for itself
WITH_CODE = set()  # the config files that define or import something, such as an objective
WORD = re.compile(r"[\w.:/-]+")  # a text that can stand for a tuple of itself
NAMES = re.compile(f"{WORD.pattern}(, ?{WORD.pattern})*")  # one that can stand for the tuple of its names
TEXTS = "stop_sequences"  # a tuple of texts, not of names: a comma may be a part of one


def load_config(cls, argv):
    """Builds the dataclass `cls` from config files and --key=value arguments; later arguments win.

    Without a config file --resume=True takes the settings from config.json in out_dir. In GRPO auto does if there is
    one, and the command names no model and no data. A learning_rate of the command may lower min_lr (lower_min_lr).
    Returns (config, origin): origin maps each key that was set to the file or argument that set it.
    Raises UsageError for an unknown key or a wrong type, naming the file or argument and the nearest key.
    """
    if not HELP.isdisjoint(argv):
        from core.settings.help import help_lines
        print("\n".join(help_lines(cls, with_rooms="--help=all" in argv)))
        raise SystemExit(0)
    values, origin = {}, {}
    for argument in argv:
        is_file = argument.endswith(".py") and ("=" not in argument or os.path.exists(argument))
        if not argument.startswith("--") and not is_file:
            from core.settings.other_names import wrong_form
            raise UsageError(wrong_form(argument, argv, functools.partial(hints_of, cls)))
    given = [settings_in(argument, defaults(cls)) for argument in argv]
    hints = hints_of(cls, {key for _, settings in given for key in settings})
    check_keys(given, hints)
    for where, settings in given:
        for key, value in settings.items():
            value = literal(value, hints.get(key)) if where == COMMAND else value
            values[key] = checked(key, value, hints, where)
            origin[key] = where
    resume = values.get("resume")
    if resume and all(argument.startswith("--") for argument in argv):
        folder = values.get("out_dir", cls.out_dir)
        path = os.path.join(folder, CONFIG)
        saved = {}
        if os.path.isfile(path) and (resume is True or lacks_model(hints, values)):
            saved = saved_settings(cls, path)
        saved["out_dir"] = folder  # it may have been moved since
        values = saved | values
        origin = dict.fromkeys(saved, path) | origin
    lower_min_lr(values, origin)
    return cls(**values), origin


def lacks_model(hints, values):
    """True if settings of GRPO name neither a model nor data. hints: {setting: type}"""
    return "generator_checkpoint" in hints and values.keys().isdisjoint(("generator_checkpoint", "dataset"))


def lower_min_lr(values, origin):
    """Makes min_lr a tenth of learning_rate, as by default, if the command line sets learning_rate below the min_lr of
    a file; `origin` says so."""
    of_file, rate = values.get("min_lr"), values.get("learning_rate")
    from_command = origin.get("learning_rate") == COMMAND and origin.get("min_lr") != COMMAND
    if from_command and of_file is not None and of_file > rate:
        values["min_lr"] = float(f"{rate / 10:g}")
        origin["min_lr"] = f"a tenth of learning_rate, which is below the {of_file:g} of {origin['min_lr']}"


def saved_settings(cls, path):
    """The settings in the config.json of a run."""
    saved = read_object(path, path, "name the config file of the run")
    saved.pop("starts", None)
    hints = hints_of(cls, saved.keys())
    check_keys([(path, saved)], hints)
    return {key: checked(key, value, hints, path) for key, value in saved.items()}


def hints_of(cls, keys):
    """{setting: type} of a config, with those of rooms until all keys are known."""
    hints = typing.get_type_hints(cls)
    for room in cls.rooms:
        if not keys <= hints.keys():
            hints |= typing.get_type_hints(load_class(room))
    return hints


def settings_in(argument, known):
    """(place that errors name, {key: value, of the command line a text}) of an argument. Raises UsageError."""
    if argument.startswith("--"):
        key, equals, text = argument[2:].partition("=")
        return COMMAND, {key: text if equals else None}
    path = os.path.abspath(argument)  # the file may change the working directory
    names = run_config_file(argument)
    with open(path, "rb") as f:
        tree = ast.parse(f.read())
    for name in names_without_value(tree.body):
        if name not in names and not name.startswith("_"):
            raise UsageError(f"{argument}: {name}: without = sets nothing; write {name} = VALUE")
    return argument, {name: x for name, x in names.items() if name in known or not isinstance(x, CODE)}


def run_config_file(path):
    """The public names that a file assigns; it runs in a namespace of its own. Raises Mistake."""
    if not os.path.isfile(path):
        raise Mistake(f"{path} does not exist; correct the path")
    with others("it does not run", "correct it", place=path):
        names = runpy.run_path(path)
    if any(isinstance(x, CODE) and not name.startswith("__") for name, x in names.items()):
        WITH_CODE.add(path)
    return {name: value for name, value in names.items() if not name.startswith("_")}


def names_without_value(lines):
    """Yields the names of lines such as `learning_rate: 1e-4`, which are annotations in Python and assign nothing.
    lines: nodes of the syntax tree of a file"""
    for line in lines:
        if isinstance(line, ast.AnnAssign) and line.value is None and isinstance(line.target, ast.Name):
            yield line.target.id
        elif not isinstance(line, (ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)):
            yield from names_without_value(ast.iter_child_nodes(line))  # of if, try, with and loops


def check_keys(given, hints):
    """Raises UsageError with every key that is no setting. given: pairs (place, {key: value})"""
    if any(settings.keys() - hints.keys() for _, settings in given):
        from core.settings.other_names import unknown_keys
        raise UsageError(unknown_keys(given, hints))


def literal(text, hint):
    """The value of a Python literal; a bare word, or the text of a key that takes strings, is a string. None, of a key
    without a value, is True."""
    if text is None:
        return True
    try:
        value = ast.literal_eval(text)
    except (ValueError, SyntaxError):
        return text
    allowed = allowed_types(hint)
    if str in allowed and type(value) not in allowed:
        return text  # of str | None: 7 is the text "7"
    return value


def checked(key, value, hints, where):
    """`value` as the type of its key. Conversions: int to float, list to tuple, the words of "a,b" to a tuple."""
    kinds = allowed_types(hints[key])
    if type(value) is dict:
        with others(f"{where}: {key}={shown(value)} cannot be kept", "use texts, numbers, lists, True, False and None"):
            json.dumps(value)
    item = kinds[tuple][0] if tuple in kinds else None
    if item and type(value) is list:
        value = tuple(value)
    if item is str and type(value) is str and (WORD if key == TEXTS else NAMES).fullmatch(value):
        value = tuple(re.split(", ?", value))
    if float in kinds and int not in kinds:
        value = as_float(value)
    if item is float and type(value) in (int, float):
        value = (value,)
    if item is float and type(value) is tuple:
        value = tuple(map(as_float, value))
    if type(value) in kinds and (type(value) is not tuple or {item}.issuperset(map(type, value))):
        return value
    what = "True or False" if bool in kinds else inspect.formatannotation(hints[key])
    if {int, float} <= kinds.keys():
        what = "a whole number, or a share between 0 and 1"
    if item is str:
        what += ", such as ('a', 'b')"
    raise UsageError(f"{where}: {key}={shown(value)} must be {what}")


def as_float(value):
    """A whole number as a float, if it can be one; another value as it is."""
    return float(value) if type(value) is int and abs(value) < 1e300 else value


def changed_settings(config, origin):
    """{key: {"value", "default", "set in": the file or argument}} of the settings that differ from their defaults."""
    changed = {}
    for key, where in origin.items():
        value = getattr(config, key)
        default = getattr(type(config), key, value)
        if value != default:
            changed[key] = {"value": value, "default": default, "set in": where}
    return changed


def describe(config, origin):
    """The settings that differ from the defaults and where each was set, one line each."""
    return [f"{key} = {about['value']!r}".ljust(40) + f"  (default {about['default']!r}; {about['set in']})"
            for key, about in changed_settings(config, origin).items()]
