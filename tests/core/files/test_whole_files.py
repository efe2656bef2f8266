"""Files on the disk: in which order, and what a full or read-only disk leaves."""

import os
import stat
import subprocess
import sys

import pytest

from core.files.whole_files import CannotWrite, replacing
from tests.tiny import ROOT


def test_a_file_is_on_the_disk_before_it_gets_its_name_and_has_the_mode_that_open_gives(tmp_path, monkeypatch):
    done = []
    for name in ("fsync", "replace"):
        real = getattr(os, name)
        monkeypatch.setattr(os, name, lambda *arguments, name=name, real=real: (done.append(name), real(*arguments))[1])
    (tmp_path / "plain").write_text("")
    with replacing(tmp_path / "new" / "a") as new:
        os.close(os.open(new, os.O_CREAT | os.O_WRONLY, 0o600))
    assert done == ["fsync", "replace"]
    assert stat.S_IMODE((tmp_path / "new" / "a").stat().st_mode) == stat.S_IMODE((tmp_path / "plain").stat().st_mode)


@pytest.mark.parametrize("error, ends", [
    (KeyboardInterrupt(), KeyboardInterrupt), (ValueError("x"), ValueError),
    (OSError(28, "No space left on device"), CannotWrite)], ids=repr)
def test_a_block_that_fails_leaves_the_file_as_it_was_and_nothing_else(tmp_path, error, ends):
    (tmp_path / "a").write_text("before")
    with pytest.raises(ends) as found, replacing(str(tmp_path / "a")) as new:
        (tmp_path / new).write_text("half")
        raise error
    assert os.listdir(tmp_path) == ["a"] and (tmp_path / "a").read_text() == "before"
    assert ends is not CannotWrite or str(found.value) == f"{tmp_path}/a could not be written (No space left on device)"


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
def test_on_a_full_disk_every_way_to_write_a_file_ends_in_a_line(tmp_path):
    in_space = ["unshare", "--user", "--mount", "--map-root-user", "sh", "-c"]
    mount = f"mount -t tmpfs -o size=512k none {tmp_path}"
    if subprocess.run([*in_space, mount], capture_output=True).returncode:
        pytest.skip("a user may not mount a small disk here")
    code = FULL.format(root=ROOT, folder=str(tmp_path))
    done = subprocess.run([*in_space, f'{mount} && exec "$@"', "sh", sys.executable, "-c", code], capture_output=True,
                          text=True)
    assert done.returncode == 0, done.stderr
    *lines, left = done.stdout.split("\n")[:-1]
    assert left == "[]", "no temporary file is left"
    for name, line in zip(("torch", "safetensors", "text"), lines, strict=True):
        assert line.startswith(f"{tmp_path}/{name} could not be written (") and "No space left on device" in line
