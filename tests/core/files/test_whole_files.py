"""Files on the disk: in which order, and what a full or read-only disk leaves."""

import errno
import os
import stat
import subprocess
import sys

import pytest

from core.files.whole_files import CannotWrite, replacing, writing
from tests.tiny import ROOT


def failing(code):
    def operation(*arguments, **settings):
        raise OSError(code, os.strerror(code))
    return operation


def test_a_file_is_on_the_disk_before_it_gets_its_name_and_the_name_after_it(tmp_path, monkeypatch):
    done = []
    for name in ("fsync", "replace"):
        real = getattr(os, name)
        monkeypatch.setattr(os, name, lambda *arguments, name=name, real=real: (done.append(name), real(*arguments))[1])
    with replacing(tmp_path / "new" / "a") as new, open(new, "w") as f:
        f.write("whole")
    assert done == ["fsync", "replace", "fsync"] and (tmp_path / "new" / "a").read_text() == "whole"


def test_a_link_in_the_place_of_the_new_file_is_replaced_and_what_it_names_is_left_alone(tmp_path):
    (tmp_path / "precious").write_text("mine")
    os.symlink(tmp_path / "precious", tmp_path / "a.tmp")
    with replacing(str(tmp_path / "a")) as new, open(new, "w") as f:
        f.write("whole")
    assert (tmp_path / "precious").read_text() == "mine" and (tmp_path / "a").read_text() == "whole"
    assert not (tmp_path / "a").is_symlink() and sorted(os.listdir(tmp_path)) == ["a", "precious"]


@pytest.mark.parametrize("error", [KeyboardInterrupt, ValueError])
def test_a_block_that_fails_leaves_the_file_as_it_was_and_nothing_else(tmp_path, error):
    (tmp_path / "a").write_text("before")
    with pytest.raises(error), replacing(str(tmp_path / "a")) as new:
        (tmp_path / new).write_text("half")
        raise error
    assert os.listdir(tmp_path) == ["a"] and (tmp_path / "a").read_text() == "before"


@pytest.mark.parametrize("code", ["ENOSPC", "EROFS"])
@pytest.mark.parametrize("operation", ["fsync", "replace"])
def test_what_the_disk_refuses_is_one_line_with_the_path_and_the_reason(tmp_path, monkeypatch, code, operation):
    (tmp_path / "a").write_text("before")
    code = getattr(errno, code)
    with monkeypatch.context() as patch, pytest.raises(CannotWrite) as error:
        patch.setattr(os, operation, failing(code))
        with replacing(str(tmp_path / "a")) as new, open(new, "w") as f:
            f.write("after")
    assert str(error.value) == f"{tmp_path}/a could not be written ({os.strerror(code)})"
    assert os.listdir(tmp_path) == ["a"] and (tmp_path / "a").read_text() == "before"


def test_a_file_has_the_mode_that_open_gives(tmp_path):
    (tmp_path / "plain").write_text("")
    with replacing(str(tmp_path / "private")) as new:
        os.close(os.open(new, os.O_CREAT | os.O_WRONLY, 0o600))
    assert stat.S_IMODE((tmp_path / "private").stat().st_mode) == stat.S_IMODE((tmp_path / "plain").stat().st_mode)


@pytest.mark.parametrize("error", [RuntimeError("out of memory"), OSError(errno.ENOENT, "gone"), BrokenPipeError()])
def test_other_errors_are_not_renamed(error):
    with pytest.raises(type(error)) as caught, writing("a"):
        raise error
    assert caught.value is error


FULL = """
import sys
sys.path.insert(0, {root!r})
import os, torch
from safetensors.torch import save_file
from core.files.whole_files import CannotWrite, replacing
big = torch.zeros(300_000)
for name, write in (("torch", lambda path: torch.save(big, open(path, "wb"))),
                    ("safetensors", lambda path: save_file({{"a": big}}, path)),
                    ("text", lambda path: open(path, "w").write("x" * 1_200_000))):
    try:
        with replacing(os.path.join({folder!r}, name)) as new:
            write(new)
    except CannotWrite as error:
        print(error)
print(os.listdir({folder!r}))
"""


@pytest.mark.slow
def test_on_a_full_disk_every_way_to_write_a_file_ends_in_the_same_line(tmp_path):
    in_space = ["unshare", "--user", "--mount", "--map-root-user", "sh", "-c"]
    mount = f"mount -t tmpfs -o size=512k none {tmp_path}"
    if subprocess.run([*in_space, mount], capture_output=True).returncode:
        pytest.skip("a user may not mount a small disk here")
    code = FULL.format(root=ROOT, folder=str(tmp_path))
    done = subprocess.run([*in_space, f'{mount} && exec "$@"', "sh", sys.executable, "-c", code], capture_output=True,
                          text=True)
    assert done.returncode == 0, done.stderr
    expected = [f"{tmp_path}/{name} could not be written (No space left on device)"
                for name in ("torch", "safetensors", "text")]
    assert done.stdout.split("\n")[:-1] == [*expected, "[]"], "no temporary file is left"
