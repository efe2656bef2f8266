"""Text of the user's own, in the forms in which people have it, becomes a dataset for the shipped models."""

import gzip

import pytest

from core.data_folder import load_meta
from tests.data.test_prepare import error, ids_in, run

PARAGRAPHS = [f"Paragraph {i * 7919 % 1000} is about\nthe number {i}, and no other." for i in range(200)]
TEXT = "\n\n".join(PARAGRAPHS) + "\n"


def prepared(folder, content, *more, name="my.txt"):
    """Prepares a file with this content. Returns ({split: text} of the dataset, what was printed)."""
    folder.joinpath(name).write_bytes(content if isinstance(content, bytes) else content.encode())
    out = run("char_diffusion", f"--input={folder / name}", f"--out={folder}/mine", *more)
    tokenizer = load_meta(folder / "mine")[1]
    return {split: tokenizer.decode(ids) for split, ids in ids_in(folder / "mine").items()}, out


@pytest.fixture(scope="module")
def plain(tmp_path_factory):
    """(the folder of the dataset of the text in a plain file, {split: text} of it)."""
    folder = tmp_path_factory.mktemp("plain")
    return folder / "mine", prepared(folder, TEXT)[0]


@pytest.mark.parametrize(("name", "content", "more"), [
    ("windows.txt", TEXT.replace("\n", "\r\n"), ()), ("unicode.txt", TEXT.encode("utf-16"), ()),
    ("packed.txt.gz", gzip.compress(TEXT.encode()), ()),
    ("german.txt", TEXT.replace("about", "\xe4bout").encode("cp1252"), ["--encoding=cp1252"])])
def test_the_same_text_in_another_form_gives_the_same_dataset(tmp_path, plain, name, content, more):
    text, out = prepared(tmp_path, content, *more, name=name)
    assert "paragraphs kept 200" in out and text == plain[1]


@pytest.mark.parametrize(("name", "content", "word"), [
    ("latin.txt", "na\xefve ".encode("latin-1") * 50, "encoding"),
    ("cut.gz", gzip.compress(TEXT.encode())[:-9], "again"),
    ("ru.txt", "\u041e\u043d \u0448\u0451\u043b.\n".encode() * 100, "--tokenizer=MODEL"),
    ("tiny.txt", b"One line.\nAnd another one.\n", "paragraph")])
def test_what_is_no_text_is_refused_with_a_remedy(tmp_path, monkeypatch, name, content, word):
    monkeypatch.chdir(tmp_path)
    (tmp_path / name).write_bytes(content)
    line = error("char_diffusion", f"--input={name}", "--out=x")
    assert name in line and word in line and not (tmp_path / "x").exists(), line
    assert "--out=FOLDER" in error("char_diffusion", f"--input={name}"), "the shipped text is never replaced"
