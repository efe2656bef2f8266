"""Text of the user's own, in the forms in which people have it, becomes a dataset for the shipped models."""

import gzip
import os
import re

import numpy as np
import pytest

from core.config import load_config
from core.dataset_consumer import DatasetConsumer
from core.files.model_file import read_header
from core.model import MASKED_FILL
from core.supervised.config import PretrainConfig
from core.tokenizer import load_meta
from grpo.grpo_config import GRPOConfig
from tests.data.test_prepare import prepare
from tests.tiny import ROOT, run_here

PARAGRAPHS = [f"Paragraph {i * 7919 % 1000} is about\nthe number {i}, and no other." for i in range(200)]
TEXT = "\n\n".join(PARAGRAPHS) + "\n"


def run(*arguments):
    return run_here("data/char_diffusion/prepare.py", *arguments)


def error(*arguments):
    """The one line that a refused text gets."""
    done = run(*arguments)
    lines = done.stderr.strip().split("\n")
    assert done.returncode in (1, 2) and len(lines) == 1 and lines[0].startswith("error: "), done
    return lines[0]


def prepared(folder):
    """{split: text} of a dataset."""
    tokenizer = load_meta(folder)[1]
    return {s: tokenizer.decode(np.fromfile(folder / f"{s}.bin", dtype=np.uint16)) for s in ("train", "val")}


@pytest.fixture(scope="module")
def plain_folder(tmp_path_factory):
    """The dataset of the text in a plain file."""
    folder = tmp_path_factory.mktemp("plain")
    (folder / "my.txt").write_text(TEXT)
    assert run(f"--input={folder}/my.txt", f"--out={folder}/mine").returncode == 0
    return folder / "mine"


@pytest.fixture
def plain(plain_folder):
    """What the text gives from a plain file."""
    return prepared(plain_folder)


@pytest.mark.parametrize(("name", "content", "more"), [
    ("windows.txt", TEXT.replace("\n", "\r\n").encode(), ()),
    ("old_mac.txt", TEXT.replace("\n", "\r").encode(), ()),
    ("notepad.txt", b"\xef\xbb\xbf" + TEXT.encode(), ()),
    ("unicode.txt", TEXT.encode("utf-16"), ()),
    ("packed.txt.gz", gzip.compress(TEXT.encode()), ()),
    ("german.txt", TEXT.replace("about", "\xe4bout").encode("cp1252"), ["--encoding=cp1252"])])
def test_the_same_text_in_another_form_gives_the_same_dataset(tmp_path, plain, name, content, more):
    (tmp_path / name).write_bytes(content)
    done = run(f"--input={tmp_path / name}", f"--out={tmp_path}/mine", *more)
    assert done.returncode == 0 and "paragraphs kept 200" in done.stdout, done.stderr
    assert prepared(tmp_path / "mine") == plain


def test_several_files_and_folders_give_what_one_file_gives(tmp_path, plain):
    inner = tmp_path / "texts" / "inner"
    inner.mkdir(parents=True)
    (inner / "b").write_text("\n\n".join(PARAGRAPHS[:80]))
    (tmp_path / "texts" / "z.md").write_text("\n\n".join(PARAGRAPHS[80:150]))
    (tmp_path / "texts" / "a.png").write_bytes(b"\x89PNG\r\n\0\0")
    (tmp_path / "texts" / ".hidden").write_text("hidden\n\nwords")
    (tmp_path / "c.txt").write_text("\n\n".join(PARAGRAPHS[150:]))
    done = run(f"--input={tmp_path}/texts", f"--input={tmp_path}/c.txt", f"--out={tmp_path}/mine")
    assert done.returncode == 0 and "2 text files; 1 left out, which are not UTF-8 text: ['a.png']" in done.stdout
    assert "source texts, c.txt" in done.stdout and prepared(tmp_path / "mine") == plain


def test_a_text_without_line_ends_is_cut_between_words_and_kept_whole(tmp_path):
    text = " ".join(f"word{i}" for i in range(5000)) + " " + "x" * 1000
    (tmp_path / "my.txt").write_text(text)
    done = run(f"--input={tmp_path}/my.txt", f"--out={tmp_path}/mine")
    assert done.returncode == 0, done.stderr
    parts = prepared(tmp_path / "mine")
    assert parts["val"] and set((parts["train"] + " " + parts["val"]).split()) >= set(text.split()[:-1])
    pieces = prepare("char_diffusion").blocks(text)
    assert "".join(pieces) == text and max(map(len, pieces)) <= 401


def test_what_the_vocabulary_lacks_is_named_and_a_text_that_lacks_too_much_is_refused(tmp_path):
    (tmp_path / "some.txt").write_text(TEXT + "\u2603" * 3 + "\xdf, caf\xe9\n", encoding="utf-8")
    done = run(f"--input={tmp_path}/some.txt", f"--out={tmp_path}/mine")
    assert done.returncode == 0 and "are left out ('\u2603' 3, '\xdf' 1)" in done.stdout, done.stderr
    assert "characters folded 1, characters dropped 4" in done.stdout
    line = "\u041e\u043d \u0448\u0451\u043b, \u043d\u0435 \u0433\u043b\u044f\u0434\u044f.\n"
    (tmp_path / "russian.txt").write_text(line * 100, encoding="utf-8")
    message = error(f"--input={tmp_path}/russian.txt", f"--out={tmp_path}/x")
    assert "russian.txt: 1200 of 1800 characters" in message and "--tokenizer=MODEL" in message
    assert not (tmp_path / "x").exists()


def test_a_short_text_is_refused_or_told_the_block_size_that_fits(tmp_path):
    (tmp_path / "tiny.txt").write_text("One line.\nAnd another one.\n")
    assert "tiny.txt is too short: no paragraph" in error(f"--input={tmp_path}/tiny.txt", f"--out={tmp_path}/x")
    (tmp_path / "none.txt").write_text(" \n")
    assert "none.txt has no text in it" in error(f"--input={tmp_path}/none.txt", f"--out={tmp_path}/x")
    (tmp_path / "short.txt").write_text("\n\n".join(PARAGRAPHS[:25]))
    done = run(f"--input={tmp_path}/short.txt", f"--out={tmp_path}/mine")
    count = len(prepared(tmp_path / "mine")["val"])
    assert f"short.txt is short: {count} validation tokens; train with a block_size below {count - 1}" in done.stdout
    DatasetConsumer(str(tmp_path / "mine"), MASKED_FILL, count - 2, 4).batch("val", 0)
    with pytest.raises(ValueError, match="val.bin has .* use a longer text or a smaller block_size"):
        DatasetConsumer(str(tmp_path / "mine"), MASKED_FILL, count - 1, 4)


def test_a_text_that_says_little_is_prepared_with_a_word_about_it(tmp_path):
    (tmp_path / "short.txt").write_text("\n".join([TEXT] * 3))
    done = run(f"--input={tmp_path}/short.txt", f"--out={tmp_path}/mine")
    assert done.returncode == 0 and "400 of 600 paragraphs repeat others and are left out" in done.stdout, done
    assert re.search(r"short.txt has \d+ characters to train on .* fewer than 20000", done.stdout)
    (tmp_path / "enough.txt").write_text("\n\n".join(f"{paragraph} {i}" * 5 for i, paragraph in enumerate(PARAGRAPHS)))
    assert "fewer than" not in run(f"--input={tmp_path}/enough.txt", f"--out={tmp_path}/enough").stdout
    assert error(f"{tmp_path}/short.txt").endswith(f"write --input={tmp_path}/short.txt --out=data/mine")


def test_of_few_paragraphs_one_is_for_validation_at_least(tmp_path, monkeypatch):
    module = prepare("char_diffusion")
    monkeypatch.setattr(module, "is_validation", lambda paragraph: False)
    (tmp_path / "my.txt").write_text("\n\n".join(PARAGRAPHS[:22]))
    module.main([f"--input={tmp_path}/my.txt", f"--out={tmp_path}/mine"])
    assert prepared(tmp_path / "mine")["val"].strip() == PARAGRAPHS[21].strip()


@pytest.mark.parametrize(("name", "content", "more", "message"), [
    ("latin.txt", "na\xefve ".encode("latin-1") * 50, [], "latin.txt is not utf-8 text; if it is text, name its enc"),
    ("photo.jpg", b"\xff\xd8\xff\0\0", ["--encoding=cp1252"], "photo.jpg is not cp1252 text; .*text as a .txt"),
    ("cut.gz", gzip.compress(TEXT.encode())[:-9], [], "cut.gz is a damaged gzip file .*; get it again"),
    ("fine.txt", TEXT.encode(), ["--encoding=klingon"], "--encoding=klingon is not .*; try cp1252 or utf-16"),
    ("fine.txt", TEXT.encode(), ["--input=gone.txt"], "--input=gone.txt does not exist; name a file or a folder"),
    ("inner/a.png", b"\0", ["--input=."], "--input=. has no text file, but 1 others; name another folder or a file")])
def test_what_is_not_text_is_refused_with_a_remedy(tmp_path, monkeypatch, name, content, more, message):
    monkeypatch.chdir(tmp_path)
    (tmp_path / name).parent.mkdir(exist_ok=True)
    (tmp_path / name).write_bytes(content)
    own = [] if "--input=." in more else [f"--input={name}"]
    line = error(*own, *more, "--out=x")
    assert re.search(message, line), line


def test_text_of_ones_own_never_replaces_the_shipped_text(tmp_path):
    (tmp_path / "my.txt").write_text(TEXT)
    assert "needs --out=FOLDER, such as --out=data/mine" in error(f"--input={tmp_path}/my.txt")


@pytest.mark.parametrize("key", ["checkpoint", "fill_checkpoints"])
def test_the_remedy_for_a_missing_model_names_files_that_exist(key):
    with pytest.raises(FileNotFoundError, match=f"^{key}=out-x/model.safetensors does not exist; correct the") as error:
        read_header("out-x/model.safetensors", key)
    named = re.findall(r"(?:config|data)/[\w/.]+\.(?:py|safetensors)", str(error.value))
    assert named and all(os.path.exists(os.path.join(ROOT, path)) for path in named)


def test_the_configs_for_adapted_models_start_from_the_shipped_ones():
    generator, judge = (load_config(PretrainConfig, [f"config/adapt_{name}.py"])[0] for name in ("generator", "judge"))
    example, _ = load_config(GRPOConfig, ["config/grpo_example.py"])
    assert (generator.init_from, judge.init_from) == (example.generator_checkpoint, example.judge_checkpoint)
    assert judge.fill_checkpoints == (generator.export,) and generator.dataset == judge.dataset


@pytest.mark.slow
def test_the_shipped_models_learn_a_text_of_ones_own(tmp_path, plain_folder):
    few = [f"--dataset={plain_folder}", "--max_iters=2", "--warmup_iters=0", "--batch_size=4", "--eval_batches=1",
           "--device=cpu"]
    paths = {name: f"{tmp_path}/{name}.safetensors" for name in ("generator", "judge")}
    for name, more in (("generator", []), ("judge", [f"--fill_checkpoints=['{paths['generator']}']"])):
        done = run_here("core/pretrain.py", f"config/adapt_{name}.py", *few, *more, f"--export={paths[name]}",
                        f"--out_dir={tmp_path}/out-{name}")
        assert done.returncode == 0, done.stderr
    done = run_here("grpo/train_grpo.py", "config/grpo_example.py", f"--dataset={plain_folder}", "--dry_run=True",
                    *(f"--{name}_checkpoint={path}" for name, path in paths.items()), "--device=cpu")
    assert done.returncode == 0 and "everything is in place" in done.stdout, done.stderr
