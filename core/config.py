"""Settings from config files and --key=value arguments, and RunConfig, which all training scripts share."""

import ast
import functools
import json
import math
import os
import re
import runpy
import types

from core.errors import HELP, Mistake, UsageError, others
from core.files import CONFIG, read_object
from core.settings.setting import Settings, changed, settings_of, shown

INTERVALS = {"log_interval": 10, "save_interval": 1, "sample_interval": 1}  # {interval: parts of eval_interval}
OF_TOKENIZER = ("model", "model_math", "model_code")  # templates that are the tokenizer's chat template
OF_CHAT_TEMPLATE = "template='model', 'model_math' or 'model_code'"
PROMPT_TEMPLATES = ("plain", "chat", "math", "code", *OF_TOKENIZER)  # see core/prompts.py
READ_AGAIN = "a new run sets aside the files of out_dir, but this one is read again; choose another out_dir"


class RunConfig(Settings):
    """The base of the configs of training scripts: what their shared settings need."""

    def features(self):
        yield self.has_adapter, "lora_rank above 0", "lora_alpha lora_targets"
        yield self.has_adapter, "lora_rank above 0 or lora_init_from", "load_in_4bit"
        yield self.trackers, "report_to='wandb' or 'trackio'", "wandb_project wandb_run_name"

    def conflicts(self):
        yield (self.prompt_format is not None and "{prompt}" not in self.prompt_format, "prompt_format",
               "must be the text around every prompt, as in 'Question: {prompt}'")
        yield (self.mask_low > self.mask_high, "mask_low mask_high",
               f"mask_low must be at most mask_high, and {self.mask_low:g} is above {self.mask_high:g}; change one")
        yield (self.lora_init_from and self.lora_rank, "lora_rank lora_init_from",
               "lora_rank is for a new adapter; leave it out")
        yield (self.lora_init_from and changed(self, "lora_alpha", "lora_targets"),
               "lora_alpha lora_targets lora_init_from",
               "lora_alpha and lora_targets are for a new adapter; leave them out")
        yield (self.min_lr is not None and self.min_lr > self.learning_rate, "min_lr",
               f"is above the peak of {self.learning_rate:g} (learning_rate); lower it, or set None")

    def __post_init__(self, origin):
        super().__post_init__(origin)
        for key, parts in INTERVALS.items():
            if getattr(self, key, 1) is None:
                vars(self)[key] = max(1, self.eval_interval // parts)

    @property
    def trackers(self):
        """The names of the trackers that the run reports to, each once."""
        names = ("wandb", *self.report_to) if self.wandb_log else self.report_to
        return list(dict.fromkeys(names))

    @property
    def has_adapter(self):
        """True if an adapter is trained in place of the weights."""
        return bool(self.lora_rank or self.lora_init_from)

    @property
    def asked_for(self):
        """The setting that asks for an adapter, for errors."""
        return f"lora_rank={self.lora_rank}" if self.lora_init_from is None else f"lora_init_from={self.lora_init_from}"

    @property
    def reference_adapter(self):
        """True if the reference needs an adapter of its own."""
        return False

    @functools.cached_property
    def absolute_out_dir(self):
        """The path of out_dir, the same from its first use on: a user's class or reward may call os.chdir."""
        return os.path.abspath(self.out_dir)


# Types and tuples of types, in the words of an error
TYPES = {bool: "True or False", int: "a whole number", float: "a number", str: "a text", dict: "a dict, {name: value}",
         types.NoneType: "None"}
LISTS = {str: "texts, such as ('a', 'b')", float: "numbers, such as (1.0, 0.5)"}
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
        print("\n".join(help_lines(cls, every="--help=all" in argv)))
        raise SystemExit(0)
    values, origin, known = {}, {}, settings_of(cls)
    for argument in argv:
        is_file = argument.endswith(".py") and ("=" not in argument or os.path.exists(argument))
        if not argument.startswith("--") and not is_file:
            from core.settings.other_names import wrong_form
            raise UsageError(wrong_form(argument, argv, known))
    given = [settings_in(argument, known) for argument in argv]
    check_keys(given, known)
    for where, settings in given:
        values |= settings
        origin |= dict.fromkeys(settings, where)
    for key in known:  # in the order of the page, so of several mistakes always the same comes first
        if key not in values:
            continue
        value = values[key]
        if origin[key] == COMMAND:
            value = literal(value, known[key])
        values[key] = checked(key, value, known, origin[key])
    resume = values.get("resume")
    if resume and all(argument.startswith("--") for argument in argv):
        folder = values.get("out_dir", cls.out_dir)
        path = os.path.join(folder, CONFIG)
        saved = {}
        if os.path.isfile(path) and (resume is True or lacks_model(known, values)):
            saved = saved_settings(known, path, values)
        saved["out_dir"] = folder  # it may have been moved since
        values = saved | values
        set_then = [key for key, value in saved.items() if value != getattr(cls, key)]  # it has every setting
        origin = dict.fromkeys(set_then, path) | origin
    lower_min_lr(values, origin)
    return cls(**values, origin=origin), origin


def lacks_model(known, values):
    """True if settings of GRPO name neither a model nor data. known: the settings of the script"""
    return "generator_checkpoint" in known and values.keys().isdisjoint(("generator_checkpoint", "dataset"))


def lower_min_lr(values, origin):
    """Makes min_lr a tenth of learning_rate, as by default, if the command line sets learning_rate below the min_lr of
    a file; `origin` says so."""
    of_file, rate = values.get("min_lr"), values.get("learning_rate")
    from_command = origin.get("learning_rate") == COMMAND and origin.get("min_lr") != COMMAND
    if from_command and of_file is not None and of_file > rate:
        values["min_lr"] = float(f"{rate / 10:g}")
        origin["min_lr"] = f"a tenth of learning_rate, which is below the {of_file:g} of {origin['min_lr']}"


def saved_settings(known, path, typed):
    """The settings in the config.json of a run, perhaps of an earlier version, that were not typed now."""
    from core.settings.other_names import with_settings_of_today
    saved = read_object(path, path, "name the config file of the run")
    saved = {key: value for key, value in saved.items() if key not in typed and key != "starts"}
    saved = with_settings_of_today(saved, path)
    check_keys([(path, saved)], known)
    return {key: checked(key, value, known, path) for key, value in saved.items()}


def settings_in(argument, known):
    """(place that errors name, {key: value, of the command line a text}) of an argument. Raises UsageError."""
    if argument.startswith("--"):
        key, equals, text = argument[2:].partition("=")
        return COMMAND, {key: text if equals else None}
    path = os.path.abspath(argument)  # the file may change the working directory
    names = run_config_file(argument)
    with open(path, "rb") as f:
        statements = list(statements_of(ast.parse(f.read()).body))
    imported = set()
    for node in statements:
        if isinstance(node, (ast.Import, ast.ImportFrom)):
            imported |= {alias.asname or alias.name for alias in node.names}
        elif isinstance(node, ast.AnnAssign) and node.value is None and isinstance(node.target, ast.Name):
            name = node.target.id  # `learning_rate: 1e-4` is an annotation in Python
            if name not in names and not name.startswith("_"):
                raise UsageError(f"{argument}: {name}: without = sets nothing; write {name} = VALUE")
    if imported:
        WITH_CODE.add(argument)
    settings = {}
    for name, value in names.items():  # a file may import settings, too
        is_table = isinstance(value, dict) and name in imported and name not in known
        is_helper = isinstance(value, CODE) and (name in imported or name not in known)
        if not is_table and not is_helper:
            settings[name] = value
    return argument, settings


def run_config_file(path):
    """The public names that a file assigns; it runs in a namespace of its own. Raises Mistake."""
    if not os.path.isfile(path):
        raise Mistake(f"{path} does not exist; correct the path")
    with others("it does not run", "correct it", place=path):
        names = runpy.run_path(path)
    if any(isinstance(x, CODE) and not name.startswith("__") for name, x in names.items()):
        WITH_CODE.add(path)
    return {name: value for name, value in names.items() if not name.startswith("_")}


def statements_of(nodes):
    """Yields the nodes of a syntax tree that run as a file runs: also those of if, try, with and loops, but none of
    functions and classes."""
    for node in nodes:
        if not isinstance(node, (ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)):
            yield node
            yield from statements_of(ast.iter_child_nodes(node))


def check_keys(given, known):
    """Raises UsageError with every key that is no setting. given: pairs (place, {key: value})"""
    if any(settings.keys() - known.keys() for _, settings in given):
        from core.settings.other_names import unknown_keys
        raise UsageError(unknown_keys(given, known))


def literal(text, setting):
    """The value of a Python literal; a bare word, or the text of a key that takes strings, is a string. None, of a key
    without a value, is True. setting: as in settings_of"""
    if text is None:
        return True
    try:
        value = ast.literal_eval(text)
    except (ValueError, SyntaxError):
        return text
    kinds, _ = setting
    if str in kinds and type(value) not in kinds:
        return text  # of str | None: 7 is the text "7"
    return value


def checked(key, value, known, where):
    """`value` as the type of its key. Conversions: int to float, list to tuple, the words of "a,b" to a tuple."""
    kinds, _ = known[key]
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
    what = " or ".join(TYPES[kind] for kind in kinds if kind is not tuple)
    if {int, float} <= kinds.keys():
        what = "a whole number, or a share between 0 and 1"
    elif item:
        what = LISTS[item]
    raise UsageError(f"{where}: {key}={shown(value)} must be {what}")


def as_float(value):
    """A whole number as a float, infinite if it is too large for one; another value as it is."""
    if type(value) is not int:
        return value
    if abs(value) < 1e300:
        return float(value)
    return math.inf if value > 0 else -math.inf


def changed_settings(config, origin):
    """{key: {"value", "default", "set in": the file or argument}} of the settings that differ from their defaults."""
    found = {}
    for key in changed(config, *origin):
        found[key] = {"value": getattr(config, key), "default": getattr(type(config), key), "set in": origin[key]}
    return found


def describe(config, origin):
    """The settings that differ from the defaults and where each was set, one line each."""
    return [f"{key} = {about['value']!r}".ljust(40) + f"  (default {about['default']!r}; {about['set in']})"
            for key, about in changed_settings(config, origin).items()]
