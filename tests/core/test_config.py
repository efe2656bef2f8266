"""Config files and --key=value."""

import dataclasses
import json

import pytest

from core.config import UsageError, load_config
from core.settings.user_code import UserCodeError
from core.supervised.config import PretrainConfig


JUDGE = "--mode=sequence_scorer"


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
    assert load(JUDGE, "--fill_checkpoints=['a', 'b']").fill_checkpoints == ("a", "b")


def test_one_word_for_a_list_stands_for_itself_and_several_are_refused(tmp_path):
    (tmp_path / "c.py").write_text("mode, fill_checkpoints = 'sequence_scorer', 'a'\n")
    assert load(JUDGE, "--fill_checkpoints=a").fill_checkpoints == load(str(tmp_path / "c.py")).fill_checkpoints == ("a",)
    with pytest.raises(UsageError, match="fill_checkpoints='a,b' must be tuple"):
        load("--fill_checkpoints=a,b")


def test_a_folder_alone_resumes_with_the_settings_of_its_run(tmp_path):
    first = PretrainConfig(n_layer=2, seed=7, out_dir=str(tmp_path), mode="sequence_scorer", fill_checkpoints=("a",),
                           report_to=("wandb",), wandb_project="p")
    (tmp_path / "config.json").write_text(json.dumps(dataclasses.asdict(first) | {"starts": []}))
    command = ["--resume=True", f"--out_dir={tmp_path}", "--seed=9"]
    assert load(*command) == dataclasses.replace(first, resume=True, seed=9)
    assert load("--resume=auto", *command[1:]).fill_checkpoints == load(*command[1:]).fill_checkpoints == ()
    (tmp_path / "c.py").touch()
    assert load(str(tmp_path / "c.py"), *command).fill_checkpoints == ()
    (tmp_path / "config.json").write_text('{"one_that_left": 1}')
    with pytest.raises(UsageError):
        load(*command)


@pytest.mark.parametrize("argument, message", [
    ("--n_layers=4", "unknown key n_layers; did you mean n_layer"), ("--zzz=4", "unknown key zzz; .*--help"),
    ("--n_layer=four", "n_layer='four' must be int"), ("--n_layer", "n_layer=True must be int"),
    ("n_layer=4", "expected a config file")])
def test_a_mistake_is_named(argument, message):
    with pytest.raises(UsageError, match=message):
        load(argument)


@pytest.mark.parametrize(("text", "error", "message"), [
    ("n_layerz = 4\n", UsageError, "c.py: unknown key n_layerz; did you mean n_layer"),
    ("seed = 1\nn_layer = = 2\n", UserCodeError, "c.py, line 2: "),
    ("seed = 1\n\nbatch_size = 1 // 0\n", UserCodeError, "c.py, line 3: batch_size = 1 // 0: ZeroDivisionError: .* by"),
    ("import neighbour_that_fails\n", UserCodeError, "neighbour_that_fails.py, line 2: 1 / 0: ZeroDivisionError")])
def test_a_mistake_in_a_file_is_its_own_line_and_the_error(tmp_path, monkeypatch, text, error, message):
    monkeypatch.syspath_prepend(tmp_path)
    (tmp_path / "neighbour_that_fails.py").write_text("\n1 / 0\n")
    (tmp_path / "c.py").write_text(text)
    with pytest.raises(error, match=message) as found:
        load(str(tmp_path / "c.py"))
    assert "\n" not in str(found.value)
