"""Text of the user's own, in the forms in which people have it, becomes a dataset for the shipped models."""

import gzip

import pytest

from core.data_folder import load_meta
from tests.data.test_prepare import ids_in, run

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
