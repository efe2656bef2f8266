"""The folders of untrusted code: what they may hold, and that nothing of them is left."""

import os
import subprocess
import sys

import pytest

from grpo.sandbox.run import holds_more, remove
from tests.tiny import ROOT


@pytest.fixture
def folder(tmp_path):
    (tmp_path / "folder").mkdir()
    return tmp_path / "folder"


def deepen(folder, levels, name="x"):
    """Makes folders in each other and returns a descriptor of the last."""
    inner = os.open(folder, os.O_RDONLY)
    for _ in range(levels):
        os.mkdir(name, dir_fd=inner)
        outer, inner = inner, os.open(name, os.O_RDONLY, dir_fd=inner)
        os.close(outer)
    return inner


def test_bytes_files_and_folders_are_counted(folder):
    (folder / "a" / "b").mkdir(parents=True)
    (folder / "a" / "b" / "full").write_bytes(bytes(100_000))
    (folder / "a" / "empty").touch()
    assert not holds_more(folder, 200_000, 4)
    assert holds_more(folder, 200_000, 3) and holds_more(folder, 90_000, 4)


def test_what_cannot_be_measured_holds_too_much(folder):
    os.close(deepen(folder, 20, "x" * 250))  # its path is longer than the system allows
    assert holds_more(folder, 1 << 30, 1000)


@pytest.mark.slow
def test_a_folder_is_removed_however_deep_and_with_whatever_rights(folder, tmp_path):
    outside = tmp_path / "outside"
    outside.mkdir(0o755)
    (outside / "kept").write_text("kept")
    last = deepen(folder, 1200)
    os.symlink(outside, "link", dir_fd=last)
    os.close(os.open("file", os.O_CREAT, dir_fd=last))
    os.close(last)
    os.close(deepen(folder, 20, "y" * 250))
    (folder / "link").symlink_to(outside)
    for rights in (0o000, 0o300, 0o500):
        (folder / f"{rights}" / "inner").mkdir(parents=True)
        (folder / f"{rights}" / "inner" / "file").touch()
        (folder / f"{rights}" / "inner").chmod(rights)
        (folder / f"{rights}").chmod(rights)
    folder.chmod(0o300)
    remove(folder)
    assert os.listdir(tmp_path) == ["outside"] and os.listdir(outside) == ["kept"]
    assert outside.stat().st_mode & 0o777 == 0o755


def test_a_link_in_the_place_of_the_folder_is_not_followed(tmp_path):
    (tmp_path / "outside").mkdir()
    (tmp_path / "outside" / "kept").touch()
    (tmp_path / "link").symlink_to(tmp_path / "outside")
    remove(tmp_path / "link")
    remove(tmp_path / "nothing")
    assert (tmp_path / "outside" / "kept").exists()


def test_folders_lie_in_one_that_goes_with_the_process_that_made_it(tmp_path):
    code = ("import os\nfrom grpo.sandbox.run import *\nempty_place()\nwith new_folder() as folder:\n"
            "    assert os.listdir(place()) == [os.path.basename(folder)]\nassert os.listdir(place()) == []\n"
            "os.mkdir(os.path.join(place(), 'left'))\nempty_place()\nassert os.listdir(place()) == []\n"
            "os.mkdir(os.path.join(place(), 'left'))\nassert os.listdir(os.environ['TMPDIR'])")
    subprocess.run([sys.executable, "-c", code], env={**os.environ, "TMPDIR": str(tmp_path)}, cwd=ROOT, check=True)
    assert list(tmp_path.iterdir()) == []
