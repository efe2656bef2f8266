"""Config files, --key=value, --help, and how a script ends."""

import dataclasses
import importlib.util
import json
import os
import pathlib
import re
import subprocess
import sys

import pytest

from core.config import HELP_WIDTH, RunConfig, UsageError, describe, help_lines, load_config, save_config
from core.pretrain_config import PretrainConfig

ROOT = pathlib.Path(__file__).resolve().parents[2]
CONFIGS = sorted({(str(path.relative_to(ROOT)), name) for folder in ("core", "grpo", "data")
                  for path in ROOT.joinpath(folder).rglob("*.py")
                  for name in re.findall(r"load_config\((\w+Config),", path.read_text())})


def load(*argv, cls=PretrainConfig):
    return load_config(cls, list(argv))[0]


def test_later_arguments_win_and_arithmetic_is_allowed(tmp_path):
    path = tmp_path / "c.py"
    path.write_text("_half = 0.5\ndropout = _half / 2\nn_layer = 4 * 3\nlearning_rate = 1\n")
    c = load("--n_layer=6", str(path), "--seed=7")
    assert (c.dropout, c.n_layer, c.learning_rate, c.seed) == (0.25, 12, 1.0, 7)
    assert type(c.learning_rate) is float
    assert load(str(path), "--n_layer=6").n_layer == 6


def test_literals_and_bare_words():
    c = load("--out_dir=a=b", "--init_from=x.safetensors", "--min_lr=1e-3", "--compile=True", "--dataset=123")
    assert (c.out_dir, c.init_from, c.min_lr, c.compile, c.dataset) == ("a=b", "x.safetensors", 1e-3, True, "123")
    assert load("--init_from=None").init_from is None
    assert load("--fill_checkpoints=['a', 'b']").fill_checkpoints == ("a", "b")


def test_one_word_for_a_list_is_refused_with_the_way_to_write_it():
    with pytest.raises(UsageError, match=r"""fill_checkpoints='a' must be .*; write fill_checkpoints="\('a',\)"$"""):
        load("--fill_checkpoints=a")


@pytest.mark.parametrize("argument, message", [
    ("--n_layers=4", "unknown key n_layers; did you mean n_layer"),
    ("--zzz=4", "unknown key zzz; --help"),
    ("--n_layer=four", "n_layer='four' must be int, not str"),
    ("--n_layer=4.5", "n_layer=4.5 must be int"),
    ("--lr_decay_iters=4.5", "lr_decay_iters=4.5 must be int or None"),
    ("--compile=1", "compile=1 must be bool"),
    ("--grad_clip=None", "grad_clip=None must be float"),
    ("--max_grad_norm=1", "did you mean grad_clip"),
    ("--n_layer", "write --key=value"),
    ("n_layer=4", "expected a config file")])
def test_a_mistake_is_named(argument, message):
    with pytest.raises(UsageError, match=message) as error:
        load(argument)
    assert "\n" not in str(error.value)


def test_a_mistake_in_a_file_names_the_file(tmp_path):
    (tmp_path / "c.py").write_text("import os\n")
    with pytest.raises(UsageError, match="c.py: unknown key os"):
        load(str(tmp_path / "c.py"))
    (tmp_path / "c.py").write_text("seed = 1\nn_layer = = 2\n")
    with pytest.raises(UsageError, match="c.py, line 2: "):
        load(str(tmp_path / "c.py"))
    with pytest.raises(FileNotFoundError, match="gone.py does not exist"):
        load("gone.py")


@pytest.mark.parametrize("key", ["block_size", "batch_size", "gradient_accumulation_steps", "max_iters",
                                 "log_interval", "eval_interval", "save_interval", "max_bad_steps"])
def test_counts_and_intervals_of_a_run_are_at_least_one(key):
    assert getattr(RunConfig(**{key: 1}), key) == 1
    with pytest.raises(ValueError, match=f"^{key}=0 must be at least 1$"):
        RunConfig(**{key: 0})


@pytest.mark.parametrize("setting, message", [
    ({"learning_rate": 0.0}, "learning_rate=0.0 must be above 0"), ({"seed": -1}, "seed=-1 must not be negative"),
    ({"learning_rate": -1e-3}, "learning_rate=-0.001 must be above 0"),
    ({"keep_checkpoints": -1}, "keep_checkpoints=-1 must be at least 0")])
def test_values_are_checked_before_anything_starts(setting, message):
    with pytest.raises(ValueError, match=message):
        RunConfig(**setting)


def test_the_difference_from_the_defaults_is_shown_with_its_origin(tmp_path):
    (tmp_path / "c.py").write_text("dropout = 0.5\nseed = 1337\n")
    config, origin = load_config(PretrainConfig, [str(tmp_path / "c.py"), "--n_layer=3"])
    lines = describe(config, origin)
    assert len(lines) == 2 and any("dropout = 0.5" in x and "default 0.0" in x and "c.py" in x for x in lines)
    save_config(config, tmp_path / "c.json")
    saved = json.loads((tmp_path / "c.json").read_text())
    assert saved["dropout"] == 0.5 and saved["n_layer"] == 3 and saved["fill_checkpoints"] == []
    assert set(saved) == {f.name for f in dataclasses.fields(PretrainConfig)}


@dataclasses.dataclass(frozen=True)
class Shared:
    """What the two example configs below share."""

    # data
    folder: str = "here"        # where texts are
    # system
    device: str | None = None   # cpu or cuda


@dataclasses.dataclass(frozen=True)
class Example(Shared):
    # model
    width: int = 8              # of the hidden states: a reason that goes on and on for so long that it needs
                                # a second line of its own
    rate: float = 0.5           # how fast

    # system
    device: str | None = "cpu"
    names: tuple = ()           # of people, in the order (first, last)


def test_help_shows_sections_defaults_types_and_reasons(capsys):
    with pytest.raises(SystemExit) as stop:
        load("--width=4", "--help", cls=Example)
    first, *lines = capsys.readouterr().out.rstrip("\n").split("\n")
    assert stop.value.code == 0 and "--key=value" in first
    assert lines == [
        "", "model",
        "  --width=8        int          of the hidden states: a reason that goes on and on for so long that it "
        "needs a second",
        "                                line of its own",
        "  --rate=0.5       float        how fast",
        "", "system",
        "  --device='cpu'   str or None  cpu or cuda",
        "  --names=()       tuple        of people, in the order (first, last)",
        "", "data",
        "  --folder='here'  str          where texts are"]


def test_help_works_without_sections_defaults_or_source():
    names = dataclasses.field(default_factory=list)
    small = dataclasses.make_dataclass("small", [("size", int), ("names", list, names)])
    assert [line.split() for line in help_lines(small)[2:]] == [["--size", "int"], ["--names=[]", "list"]]


@pytest.mark.parametrize(("path", "name"), CONFIGS)
def test_every_key_of_every_script_has_a_reason(path, name):
    spec = importlib.util.spec_from_file_location(f"config_of_{path.replace('/', '_')[:-3]}", ROOT / path)
    module = sys.modules[spec.name] = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    lines = help_lines(getattr(module, name))
    fields = dataclasses.fields(getattr(module, name))
    line = re.compile(r"  --(\w+)=(.+?)  +(str or tuple|str|int|float|bool|tuple|dict)( or None)?  +(\S.*)")
    shown = [line.fullmatch(x) for x in lines if x.startswith("  --")]
    assert all(shown) and {match[1] for match in shown} == {field.name for field in fields}
    assert len(shown) == len(fields) and max(map(len, lines)) <= HELP_WIDTH == 120


SCRIPT = """
import sys
sys.path.insert(0, {root!r})
from core.config import run_script
def main(argv):
    {body}
run_script(main)
"""


def script(tmp_path, body):
    (tmp_path / "script.py").write_text(SCRIPT.format(root=str(ROOT), body=body))
    return tmp_path / "script.py"


@pytest.mark.parametrize("options", ["", "-u"])
def test_a_script_piped_into_head_ends_quietly(tmp_path, options):
    path = script(tmp_path, "[print('line', i) for i in range(200000)]")
    done = subprocess.run(["bash", "-c", f"{sys.executable} {options} {path} | head -n 1; exit ${{PIPESTATUS[0]}}"],
                          capture_output=True, text=True, timeout=60)
    assert (done.stdout, done.stderr, done.returncode) == ("line 0\n", "", 141)


@pytest.mark.parametrize("body", ["print('a line'); sys.stdin.read()",
                                  "print('usage'); sys.stdin.read(); sys.exit(0)"])
def test_a_pipe_that_closes_before_the_last_flush_ends_the_script_quietly(tmp_path, body):
    child = subprocess.Popen([sys.executable, script(tmp_path, body)], stdin=subprocess.PIPE, stdout=subprocess.PIPE,
                             stderr=subprocess.PIPE, env={**os.environ, "PYTHONUNBUFFERED": ""})
    child.stdout.close()
    child.stdin.close()
    assert child.stderr.read() == b"" and child.wait(60) == 141
    child.stderr.close()


def test_another_broken_pipe_is_not_hidden(tmp_path):
    path = script(tmp_path, "raise BrokenPipeError('a worker is gone')")
    done = subprocess.run([sys.executable, path], capture_output=True, text=True, timeout=60)
    assert done.returncode == 1 and "BrokenPipeError: a worker is gone" in done.stderr


def test_a_script_ends_with_the_code_that_its_main_asks_for(tmp_path):
    ours = "from core.config import load_config, run_config_file; "
    for body, code, message in (("pass", 0, ""), ("sys.exit(3)", 3, ""), ("int('x')", 1, "Traceback"),
                                ("raise KeyboardInterrupt", 130, "interrupted"),
                                (ours + "load_config(int, ['x'])", 2, "error: x: expected"),
                                (ours + "run_config_file('no.py')", 1, "error: config")):
        done = subprocess.run([sys.executable, script(tmp_path, body)], capture_output=True, text=True, timeout=60)
        assert done.returncode == code and message in done.stderr and (message or not done.stderr)
        assert message == "Traceback" or "Traceback" not in done.stderr


def test_a_learning_rate_that_would_rise_is_refused():
    with pytest.raises(ValueError, match="min_lr=0.0001 is above learning_rate=1e-05.*; set min_lr=1e-06"):
        RunConfig(learning_rate=1e-5)
    assert RunConfig(learning_rate=1e-4).min_lr == 1e-4
