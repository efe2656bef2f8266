"""Text of the user's own, in the forms in which people have it, becomes a dataset for the shipped models."""

import gzip
import re

import pytest

from core.data_folder import load_meta
from tests.data.test_prepare import error, ids_in, run
from tests.tiny import run_here

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


RUSSIAN = "\u041e\u043d \u0448\u0451\u043b, \u043d\u0435 \u0433\u043b\u044f\u0434\u044f.\n" * 100


@pytest.mark.parametrize(("name", "content", "arguments", "message"), [
    ("latin.txt", "na\xefve ".encode("latin-1") * 50, "--input=latin.txt", "is not utf-8 text; if it is text, name its enc"),
    ("cut.gz", gzip.compress(TEXT.encode())[:-9], "--input=cut.gz", "cut.gz is a damaged gzip file .*; get it again"),
    ("ru.txt", RUSSIAN, "--input=ru.txt", "ru.txt: 1200 of 1800 characters .*--tokenizer=MODEL"),
    ("tiny.txt", "One line.\nAnd another one.\n", "--input=tiny.txt", "tiny.txt is too short: no paragraph")])
def test_what_is_no_text_is_refused_with_a_remedy(tmp_path, monkeypatch, name, content, arguments, message):
    monkeypatch.chdir(tmp_path)
    (tmp_path / name).write_bytes(content if isinstance(content, bytes) else content.encode())
    line = error("char_diffusion", *arguments.split(), "--out=x")
    assert re.search(message, line) and not (tmp_path / "x").exists(), line
    assert "needs --out=FOLDER" in error("char_diffusion", f"--input={name}"), "the shipped text is never replaced"


SHIPPED = "data/char_diffusion/pretrained"


@pytest.mark.slow
def test_the_shipped_models_learn_a_text_of_ones_own(tmp_path, plain):
    few = [f"--dataset={plain[0]}", "--max_iters=1", "--warmup_iters=0", "--batch_size=2", "--eval_batches=1",
           "--device=cpu"]
    paths = {name: f"{tmp_path}/{name}.safetensors" for name in ("generator", "judge")}
    for name, more in (("generator", []), ("judge", [f"--fill_checkpoints=['{paths['generator']}']"])):
        done = run_here("core/pretrain.py", f"config/pretrain_{name}.py", *few, *more, f"--init_from={SHIPPED}/{name}.safetensors", f"--export={paths[name]}",
                        f"--out_dir={tmp_path}/out-{name}")
        assert done.returncode == 0, done.stderr
    done = run_here("grpo/train_grpo.py", "config/grpo_example.py", f"--dataset={plain[0]}", "--dry_run=True",
                    *(f"--{name}_checkpoint={path}" for name, path in paths.items()), "--device=cpu")
    assert done.returncode == 0 and "everything is in place" in done.stdout, done.stderr
