"""Settings from config files and --key=value arguments, and RunConfig, which all training scripts share."""

import ast
import functools
import json
import math
import os
import re
import runpy
import symtable
import types

from core.best import NEITHER_IS_BETTER
from core.errors import HELP, Mistake, UsageError, others
from core.files import CONFIG, read_object
from core.settings.setting import Settings, changed, settings_of, shown

OF_TOKENIZER = ("model", "model_math", "model_code")  # templates that render with the tokenizer's chat template
OF_CHAT_TEMPLATE = "template='model', 'model_math' or 'model_code'"
PROMPT_TEMPLATES = ("plain", "chat", "math", "code", *OF_TOKENIZER)  # see core/prompts.py
READ_AGAIN = "a new run sets aside the files of out_dir, but this one is read again; choose another out_dir"


class RunConfig(Settings):
    """The base of the configs of training scripts: rules and defaults of the settings that they share."""

    steps_of_an_iteration = 1  # optimizer steps between two rounds of sampling

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
        yield (NEITHER_IS_BETTER.fullmatch(self.keep_best or ""), "keep_best",
               "cannot choose the best model, because neither more nor less of it is better; name another metric")

    def __post_init__(self, origin):
        super().__post_init__(origin)
        if self.log_interval is None:
            vars(self)["log_interval"] = max(1, self.eval_interval // 10)
        if self.save_interval is None:
            vars(self)["save_interval"] = self.eval_interval

    def evaluations(self, steps):
        """The number of evaluations that are due within the first `steps` steps. The last step has one in any case."""
        return steps // self.eval_interval

    @property
    def trackers(self):
        """The names of the trackers that the run reports to, each once."""
        names = self.report_to
        if self.wandb_log:
            names = ("wandb", *names)
        return list(dict.fromkeys(names))

    @property
    def has_adapter(self):
        """True if an adapter is trained in place of the weights."""
        return bool(self.lora_rank or self.lora_init_from)

    @property
    def adapter_setting(self):
        """The setting that asks for an adapter, for errors."""
        if self.lora_init_from is None:
            return f"lora_rank={self.lora_rank}"
        return f"lora_init_from={self.lora_init_from}"

    @property
    def reference_adapter(self):
        """True if the reference needs an adapter of its own."""
        return False

    @functools.cached_property
    def absolute_out_dir(self):
        """The path of out_dir, resolved only once: a user's class or reward may call os.chdir later."""
        return os.path.abspath(self.out_dir)


TYPES = {  # {type: its name in errors}
    bool: "True or False",
    int: "a whole number",
    float: "a number",
    str: "a text",
    dict: "a dict, {name: value}",
    types.NoneType: "None"}
TUPLES = {  # {type of the items: the name of the tuple in errors}
    str: "texts, such as ('a', 'b')",
    float: "numbers, such as (1.0, 0.5)"}
COMMAND = "command line"  # the origin of settings that no file sets
CODE = (types.ModuleType, types.FunctionType, types.BuiltinFunctionType, type)  # helpers of a config file
WITH_CODE = set()  # the config files that import something, perhaps to add an objective; a resume needs them again
WORD = re.compile(r"[\w.:/-]+")  # `a` may stand for ("a",)
NAMES = re.compile(f"{WORD.pattern}(, ?{WORD.pattern})*")  # `a,b` may stand for ("a", "b")
TEXTS = "stop_sequences"  # its texts may contain commas; other tuples of texts hold names


def load_config(cls, argv):
    """Builds the dataclass `cls` from config files and --key=value arguments; later arguments win.

    Without a config file --resume=True takes the settings from config.json in out_dir. So does --resume=auto of GRPO if
    that file exists and the command names no model and no data. A learning_rate in the command may lower min_lr.
    Returns (config, origin): origin maps each key that was set to the file or argument that set it.
    Raises UsageError for an unknown key or a wrong type, naming the file or argument and the nearest key.
    """
    if not HELP.isdisjoint(argv):
        from core.settings.help import help_lines
        print("\n".join(help_lines(cls, every="--help=all" in argv)))
        raise SystemExit(0)
    known = settings_of(cls)
    files = [argument for argument in argv if not argument.startswith("--")]
    for file in files:
        is_assignment = "=" in file and not os.path.exists(file)
        if is_assignment or not file.endswith(".py"):
            from core.settings.other_names import wrong_form
            raise UsageError(wrong_form(file, argv, known))
    given = [settings_in(argument, known) for argument in argv]
    check_keys(given, known)
    values = {}
    origin = {}
    for place, settings in given:
        values |= settings
        origin |= dict.fromkeys(settings, place)
    for key in known:  # in the order of the class, so that the same mistake is always reported first
        if key in values:
            values[key] = checked(key, values[key], known, origin[key])
    if values.get("resume") and not files:
        add_saved_settings(cls, values, origin)
    lower_min_lr(values, origin)
    return cls(**values, origin=origin), origin


def settings_in(argument, known):
    """Returns the settings of an argument: (the place to name in errors, {key: value}). Raises UsageError.

    A value of the command line is a text, or True for a key without a value.
    """
    if argument.startswith("--"):
        key, equals, value = argument[2:].partition("=")
        if not equals:
            value = True
        return COMMAND, {key: value}
    path = os.path.abspath(argument)  # running the file may change the working directory
    names = run_config_file(argument)
    with open(path, "rb") as f:
        source = f.read()
    imported = set()
    for symbol in symtable.symtable(source, argument, "exec").get_symbols():
        name = symbol.get_name()
        if symbol.is_imported():
            imported.add(name)
        # `learning_rate: 1e-4` is a type hint to Python, and would be ignored silently
        if symbol.is_annotated() and name not in names and not name.startswith("_"):
            raise UsageError(f"{argument}: {name}: without = sets nothing; write {name} = VALUE")
    if imported:
        WITH_CODE.add(argument)
    settings = {}
    for name, value in names.items():
        # A file may import settings, and also the functions and tables that it needs
        is_code = isinstance(value, CODE)
        if name in known:
            is_helper = is_code and name in imported
        else:
            is_imported_table = isinstance(value, dict) and name in imported
            is_helper = is_code or is_imported_table
        if not is_helper:
            settings[name] = value
    return argument, settings


def run_config_file(path):
    """Runs a config file in a namespace of its own. Returns the public names that it assigns. Raises Mistake."""
    if not os.path.isfile(path):
        raise Mistake(f"{path} does not exist; correct the path")
    with others("it does not run", "correct it", place=path):
        names = runpy.run_path(path)
    return {name: value for name, value in names.items() if not name.startswith("_")}


def check_keys(given, known):
    """Raises UsageError naming all keys that are not settings. given: pairs (place, {key: value})"""
    for _, settings in given:
        if not settings.keys() <= known.keys():
            from core.settings.other_names import unknown_keys
            raise UsageError(unknown_keys(given, known))


def add_saved_settings(cls, values, origin):
    """Adds the saved settings of the run in out_dir, perhaps of an earlier version, to `values`, whose settings win."""
    known = settings_of(cls)
    out_dir = values.get("out_dir", cls.out_dir)
    values["out_dir"] = out_dir  # the folder may have been moved since it was saved
    path = os.path.join(out_dir, CONFIG)
    if not os.path.isfile(path):
        return
    # resume='auto' may begin a new run, so a command that names its model or data brings all its settings itself
    is_of_grpo = "generator_checkpoint" in known
    is_complete = "generator_checkpoint" in values or "dataset" in values
    if values["resume"] == "auto" and (is_complete or not is_of_grpo):
        return
    from core.settings.other_names import with_settings_of_today
    saved = read_object(path, path, "name the config file of the run")
    saved.pop("starts", None)
    for key in values:
        saved.pop(key, None)
    saved = with_settings_of_today(saved, path)
    check_keys([(path, saved)], known)
    for key, value in saved.items():
        if key not in values:
            values[key] = checked(key, value, known, path)
            if values[key] != getattr(cls, key):  # config.json has every setting, also those at their default
                origin[key] = path


def lower_min_lr(values, origin):
    """Makes min_lr a tenth of learning_rate, as by default, if the command line sets learning_rate below the min_lr of
    a file, and records this in `origin`."""
    min_lr = values.get("min_lr")
    if min_lr is None or origin.get("learning_rate") != COMMAND:
        return
    place = origin.get("min_lr")
    if place != COMMAND and min_lr > values["learning_rate"]:
        lower = values["learning_rate"] / 10
        values["min_lr"] = float(f"{lower:g}")
        origin["min_lr"] = f"a tenth of learning_rate, which is below the {min_lr:g} of {place}"


def checked(key, value, known, place):
    """Converts a value to the type of its setting: command-line text to a Python literal, int to float, list to tuple,
    "a,b" to a tuple. Raises UsageError if the type still does not fit. known: from settings_of"""
    kinds, _ = known[key]
    if place == COMMAND and type(value) is str:
        value = literal(value, kinds)
    if type(value) is dict:
        with others(f"{place}: {key}={shown(value)} cannot be kept", "use texts, numbers, lists, True, False and None"):
            json.dumps(value)
    item = None  # the type of the items of a tuple
    if tuple in kinds:
        item = kinds[tuple][0]
        value = as_tuple(key, value, item)
    if float in kinds and int not in kinds:
        value = as_float(value)
    fits = type(value) in kinds
    if fits and type(value) is tuple:
        fits = all(type(x) is item for x in value)
    if fits:
        return value
    if item is not None:
        what = TUPLES[item]
    elif {int, float} <= kinds.keys():
        what = "a whole number, or a share between 0 and 1"
    else:
        what = " or ".join(TYPES[kind] for kind in kinds)
    raise UsageError(f"{place}: {key}={shown(value)} must be {what}")


def literal(text, kinds):
    """Evaluates a Python literal. Returns the text itself if it is no literal, or if the setting takes texts but not
    values of this type."""
    try:
        value = ast.literal_eval(text)
    except (ValueError, SyntaxError):
        return text
    if str in kinds and type(value) not in kinds:
        return text  # for str | None, 7 is the text "7"
    return value


def as_tuple(key, value, item):
    """Converts a list, a number or comma-separated names to a tuple; returns other values unchanged.
    item: the type of the items"""
    if type(value) is list:
        value = tuple(value)
    if item is str and type(value) is str:
        pattern = WORD if key == TEXTS else NAMES
        if pattern.fullmatch(value):
            return tuple(re.split(", ?", value))
    if item is float:
        if type(value) in (int, float):
            value = (value,)
        if type(value) is tuple:
            return tuple(map(as_float, value))
    return value


def as_float(value):
    """Converts int to float, or to infinity, which no interval contains, if it is too large; keeps other values."""
    if type(value) is not int:
        return value
    try:
        return float(value)
    except OverflowError:
        return math.inf if value > 0 else -math.inf


def changed_settings(config, origin):
    """Returns {key: {"value", "default", "set in": file or argument}} for settings that differ from their defaults."""
    found = {}
    for key in changed(config, *origin):
        found[key] = {
            "value": getattr(config, key),
            "default": getattr(type(config), key),
            "set in": origin[key]}
    return found


def describe(config, origin):
    """Lists the settings that differ from the defaults, and where each was set, one per line."""
    lines = []
    for key, about in changed_settings(config, origin).items():
        setting = f"{key} = {about['value']!r}"
        lines.append(f"{setting:<32}  (default {about['default']!r}; {about['set in']})")
    return lines
