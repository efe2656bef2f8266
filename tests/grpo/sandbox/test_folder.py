"""The folders of untrusted code: what they may hold, and that nothing of them is left."""

import contextlib
import errno
import os

import pytest

from grpo.sandbox import folder as module
from grpo.sandbox.folder import empty_place, holds_more, new_folder, place, remove


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


@pytest.mark.parametrize(("number", "verdict"), [(errno.EACCES, True), (errno.ENOENT, False), (errno.EMFILE, None)])
def test_a_folder_that_cannot_be_listed_holds_too_much_unless_it_is_gone_or_the_machine_is_full(
        folder, monkeypatch, number, verdict):
    def scandir(path):
        raise OSError(number, os.strerror(number))

    monkeypatch.setattr(module.os, "scandir", scandir)
    with contextlib.nullcontext() if verdict is not None else pytest.raises(OSError):
        assert holds_more(folder, 1 << 30, 1000) == verdict


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


def test_folders_lie_in_one_that_goes_with_the_process_that_made_it(monkeypatch, tmp_path):
    at_exit = []
    monkeypatch.setattr(module.atexit, "register", lambda function, path: at_exit.append(lambda: function(path)))
    monkeypatch.setattr(module, "PLACE", [])
    empty_place()
    monkeypatch.setattr(module.tempfile, "tempdir", str(tmp_path))
    with new_folder() as folder:
        assert os.path.dirname(folder) == place() == str(next(tmp_path.iterdir()))
    assert not os.path.exists(folder) and os.path.exists(place())
    os.mkdir(os.path.join(place(), "left"))
    empty_place()
    assert os.listdir(place()) == []
    at_exit[0]()
    assert list(tmp_path.iterdir()) == []
