"""The scripts that prepare datasets, run as a user would."""

import ast
import importlib.util
import os
import runpy
import sys

import numpy as np
import pytest

from core.files.records import RAW, read_records
from core.prompts import PromptConsumer
from core.tokenizer import load_meta
from grpo.reward_functions import verify_code, verify_math
from grpo.reward_functions.asserts import cut
from grpo.reward_functions.registry import REWARDS
from grpo.sandbox.run import run_tests
from tests.families import tokenizer_of
from tests.tiny import ROOT, TOKENIZER, jsonl, run_here, run_script, without_place, write_ranks


def prepare(name):
    """The prepare.py of a data set, as a module."""
    spec = importlib.util.spec_from_file_location(f"prepare_{name}", os.path.join(ROOT, "data", name, "prepare.py"))
    module = sys.modules[spec.name] = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def run(name, *arguments, start=run_here):
    return start(os.path.join("data", name, "prepare.py"), *arguments)


@pytest.mark.slow
@pytest.mark.parametrize(("name", "arguments", "reward"), [
    ("arithmetic", ["--problems=200"], verify_math.math_answer),
    ("countdown", ["--problems=100"], verify_math.countdown),
    ("code", ["--problems=116"], verify_code.code_correctness)])
def test_an_offline_generator_writes_what_its_reward_asks_for(tmp_path, name, arguments, reward):
    done = run(name, *arguments, f"--out={tmp_path}/d", start=run_script)
    assert done.returncode == 0 and "val records" in done.stdout, done.stderr
    before = (tmp_path / "d" / "prompts.jsonl").read_bytes()
    data = PromptConsumer(str(tmp_path / "d"), 4)
    records = data.records["train"] + data.records["val"]
    columns = {key: [r[key] for r in records] for key in records[0]}
    prompts, completions = columns.pop("prompt"), columns["completion"]
    assert set(reward(prompts, completions, **columns)) == {REWARDS[reward.__name__].high}
    prepare(name).main([*arguments, f"--out={tmp_path}/again"])
    assert (tmp_path / "again" / "prompts.jsonl").read_bytes() == before, "the same seed, the same problems"
    usage = run(name, "--problems=3", f"--out={tmp_path}/x")
    assert usage.returncode and "problems=3" in usage.stderr and len(usage.stderr.strip().split("\n")) == 1


def passes(path, code, tests):
    path.write_text(f"{code}\n{tests}\n")
    try:
        runpy.run_path(str(path))
    except AssertionError:
        return False
    return True


def one_off(code):
    """The code once for each of its integers, with that one raised by one."""
    integers = lambda tree: [n for n in ast.walk(tree) if isinstance(n, ast.Constant) and type(n.value) is int]
    for i in range(len(integers(ast.parse(code)))):
        tree = ast.parse(code)
        integers(tree)[i].value += 1
        yield ast.unparse(tree)


@pytest.mark.slow
def test_the_tests_of_a_function_pass_what_is_right_and_nothing_that_is_one_off(tmp_path):
    module = prepare("code")
    records = module.problems(5 * len(module.FAMILIES), seed=3)
    assert len(module.FAMILIES) >= 25 and len({r["prompt"] for r in records}) == len(records)
    for r in records:
        assert len(r["prompt"]) <= 85 and len(r["completion"]) <= 120 and r["completion"] == r["answer"]
        assert r["completion"].startswith(f"def {r['entry_point']}(") and f"{r['entry_point']}(" in r["prompt"]
        assert passes(tmp_path / "code.py", r["completion"], r["tests"]), r
        for wrong in one_off(r["completion"]):
            assert not passes(tmp_path / "code.py", wrong, r["tests"]), f"{wrong}\n{r['tests']}"
    for r in records[::29]:
        claims = cut(r["tests"])
        assert run_tests(r["completion"], claims) == "passed"
        assert run_tests(r["completion"].replace("return", "return None or not"), claims) == "failed"
    with pytest.raises(ValueError, match="problems=1000000 must be 20 to"):
        module.problems(10**6, seed=0)


@pytest.mark.slow
def test_equation_lines_are_true_and_on_one_side_each(tmp_path):
    done = run("equations", "--largest=30", "--copies=3", f"--out={tmp_path}", start=run_script)
    assert done.returncode == 0 and "lines" in done.stdout, done.stderr
    lines = {}
    for split in ("train", "val"):
        text = TOKENIZER.decode(np.fromfile(tmp_path / f"{split}.bin", dtype=np.uint16).tolist())
        lines[split] = set(text.strip().split("\n"))
        assert all(verify_math.is_true(line) for line in lines[split])
    assert len(lines["train"] | lines["val"]) == 31 * 31 and not lines["train"] & lines["val"]
    assert 0.05 < len(lines["val"]) / 31**2 < 0.2


@pytest.mark.slow
def test_gsm8k_becomes_prompts_with_working_out(tmp_path):
    train = jsonl(tmp_path / "train.jsonl", {
        "question": "Ann\u2019s 3 and 4?", "answer": "3+4=$<<3+4=7>>7.\nSo <<7*200=1400>>1,400.\n#### 1,400"},
        *({"question": f"What is {i}?", "answer": f"It is {i}.\n#### {i}"} for i in range(30)))
    test = jsonl(tmp_path / "test.jsonl", {"question": "Less than 0?", "answer": "Minus 5\n#### -5"})
    files = [f"--train={train}", f"--test={test}", "--tokenizer=char", f"--out={tmp_path}/d"]
    done = run("gsm8k", *files, start=run_script)
    assert done.returncode == 0 and "characters folded 1, characters dropped 0" in done.stdout, done.stderr
    records = without_place(read_records(str(tmp_path / "d" / "prompts.jsonl")))
    assert records[0] == {"prompt": "Ann\u2019s 3 and 4?", "answer": "1400", "split": "train", "completion":
                          "<start_working_out>3+4=$7.\nSo 1,400.<end_working_out><SOLUTION>1400</SOLUTION>"}
    assert [r["split"] for r in records] == ["train"] * 31 + ["val"] and records[-1]["answer"] == "-5"
    assert verify_math.math_format(None, [r["completion"] for r in records]) == [3.0] * 32
    assert prepare("gsm8k").TAGS == prepare("arithmetic").TAGS and list(prepare("gsm8k").TAGS[1:]) == verify_math.TAGS
    for answer in ("It is 2.", "#### two", "####"):
        jsonl(tmp_path / "test.jsonl", {"question": "a", "answer": "b #### 1"}, {"question": "b", "answer": answer})
        with pytest.raises(ValueError, match="test.jsonl, line 2: .*'#### ' and a number"):
            prepare("gsm8k").main(files)


def test_gsm8k_without_a_network_names_the_way_out(tmp_path, monkeypatch):
    monkeypatch.setenv("https_proxy", "http://127.0.0.1:9")
    done = run("gsm8k", "--tokenizer=char", f"--out={tmp_path}/d")
    assert done.returncode == 1 and done.stderr.startswith("error: could not download https://raw")
    assert "--train=FILE --test=FILE" in done.stderr and len(done.stderr.strip().split("\n")) == 1
    assert not (tmp_path / "d").exists()
    assert run("gsm8k", "--train=a.jsonl").returncode == 2


@pytest.mark.slow
def test_your_own_prompts_become_a_dataset(tmp_path):
    path = jsonl(tmp_path / "mine.jsonl", {"question": "2+2?", "answer": 4, "level": 1, "split": "val"},
                 {"prompt": [{"role": "user", "content": "caf\u00e9 \u4e2d"}], "answer": "a", "completion": "b\u2026"},
                 {"prompt": "Sing."})
    done = run("custom", f"--input={path}", f"--out={tmp_path}/d", start=run_script)
    assert "completions 2" in done.stdout and "characters folded 2, characters dropped 1" in done.stdout, done.stderr
    records = without_place(read_records(str(tmp_path / "d" / "prompts.jsonl")))
    assert [r.get("completion") for r in records] == ["4", "b\u2026", None]
    assert records[0] == {"prompt": "2+2?", "answer": "4", RAW: 4, "level": 1, "completion": "4", "split": "val"}
    ranks = write_ranks(tmp_path / "ranks", b"th")
    prepare("custom").main([f"--input={path}", f"--out={tmp_path}/d", f"--tokenizer={ranks}"])
    assert "characters_folded" not in load_meta(tmp_path / "d")[0]
    assert load_meta(tmp_path / "d")[1].encode("th") == [256]
    for arguments, message in (([], "--input=FILE"), (["--input=gone.jsonl"], "gone.jsonl does not exist")):
        done = run("custom", *arguments, f"--out={tmp_path}/x")
        assert done.returncode and message in done.stderr and len(done.stderr.strip().split("\n")) == 1


def test_prompts_need_a_tokenizer_with_an_end(tmp_path):
    pytest.importorskip("transformers")
    tokenizer_of("words").save_pretrained(str(tmp_path / "bert"))
    path = jsonl(tmp_path / "mine.jsonl", {"prompt": "a", "answer": 4}, {"prompt": "b", "split": "val"})
    with pytest.raises(ValueError, match=f"tokenizer={tmp_path}/bert has no token that ends a completion; name that of"):
        prepare("custom").main([f"--input={path}", f"--out={tmp_path}/d", f"--tokenizer={tmp_path}/bert"])
    assert not (tmp_path / "d").exists()


def test_prose_keeps_prose():
    text = ("Short.\n\n" + "This is a paragraph of plain words that goes on for\n    more than one line of text.\n\n"
            + "x = {1: 2, 3: 4} " * 9)
    assert list(prepare("char_diffusion").prose(text)) == [
        "This is a paragraph of plain words that goes on for more than one line of text.\n"]


def test_docstrings_are_found_wherever_they_are():
    source = '"""module"""\nclass A:\n  """klass"""\n  async def f(self):\n    """method"""\nx = """not one"""'
    assert sorted(prepare("char_diffusion").docstrings(source)) == ["klass", "method", "module"]
    assert prepare("char_diffusion").docstrings("print 'python 2'") == []


def test_a_paragraph_has_one_side_however_it_is_wrapped():
    is_validation = prepare("char_diffusion").is_validation
    paragraphs = [f"Paragraph {i} about something or other" for i in range(3000)]
    sides = [is_validation(p) for p in paragraphs]
    assert 0.07 < np.mean(sides) < 0.13
    assert sides == [is_validation("  " + p.upper().replace(" ", "\n") + "\n") for p in paragraphs]


@pytest.mark.slow
def test_prepare_splits_your_text_without_leaking(tmp_path):
    paragraphs = [f"Verse {i * 7919 % 1000},\nsaid voice {i}.\n" for i in range(400)]
    (tmp_path / "my.txt").write_text("\n".join(paragraphs + paragraphs[:50]))
    done = run("char_diffusion", f"--input={tmp_path}/my.txt", f"--out={tmp_path}/mine", start=run_script)
    assert done.returncode == 0 and "paragraphs kept 400" in done.stdout, done.stderr
    meta, tokenizer = load_meta(tmp_path / "mine")
    text = {s: tokenizer.decode(np.fromfile(tmp_path / "mine" / f"{s}.bin", dtype=np.uint16)) for s in ("train", "val")}
    assert meta["train_tokens"] == len(text["train"]) and meta["val_tokens"] == len(text["val"]) > 0
    for p in paragraphs:
        assert (p in text["train"]) != (p in text["val"])
    first = (tmp_path / "mine" / "train.bin").read_bytes()
    assert run("char_diffusion", f"--input={tmp_path}/my.txt", f"--out={tmp_path}/mine").returncode == 0
    assert (tmp_path / "mine" / "train.bin").read_bytes() == first
    assert not list((tmp_path / "mine").glob("*.tmp"))


def test_prepare_says_what_is_wrong(tmp_path):
    (tmp_path / "empty.txt").write_text("\u4e2d\u6587\n\u4e2d\n")
    for arguments, code, message in ((["--input=nowhere.txt"], 1, "nowhere.txt does not exist"),
                                     ([f"--input={tmp_path}/empty.txt"], 1, "3 of 5 characters are not in"),
                                     (["--source=wikipedia"], 2, "python, shakespeare"),
                                     (["--colour=red"], 2, "--input=")):
        done = run("char_diffusion", *arguments, f"--out={tmp_path}/x")
        assert done.returncode == code and message in done.stderr and "Traceback" not in done.stderr
        assert len(done.stderr.strip().split("\n")) == 1 and not (tmp_path / "x").exists()


def test_a_failed_download_names_the_way_out(monkeypatch):
    import urllib.error

    def refuse(*_, **__):
        raise urllib.error.URLError("no network")

    corpus = prepare("char_diffusion")
    monkeypatch.setattr(corpus.urllib.request, "urlopen", refuse)
    with pytest.raises(ValueError, match="--input=FILE"):
        corpus.read_source({"source": "shakespeare"})


def test_prose_in_the_word_pieces_of_a_model(tmp_path):
    pytest.importorskip("transformers")
    tokenizer_of("words").save_pretrained(str(tmp_path / "model"))
    tokenizer_of("bytes").save_pretrained(str(tmp_path / "causal"))
    paragraphs = [f"the quick brown fox number {i} jumps over the caf\u00e9" for i in range(60)]
    (tmp_path / "text").write_text("\n\n".join([*paragraphs, paragraphs[3]]))
    arguments = [f"--input={tmp_path}/text", f"--out={tmp_path}/d"]
    prepare("char_diffusion").main([*arguments, f"--tokenizer={tmp_path}/model"])
    meta, t = load_meta(str(tmp_path / "d"))
    assert meta["paragraphs_kept"] == 60 and "characters_folded" not in meta
    bare = lambda text: t.backend(text, add_special_tokens=False)["input_ids"]
    written = {split: np.fromfile(tmp_path / "d" / f"{split}.bin", dtype=np.uint16).tolist()
               for split in ("train", "val")}
    assert sorted(written["train"] + written["val"]) == sorted(i for text in paragraphs for i in bare(text))
    assert meta["unknown_pieces"] == sum(ids.count(t.backend.unk_token_id) for ids in written.values()) >= 0
    held_out = [text for text in paragraphs if prepare("char_diffusion").is_validation(text)]
    assert held_out and written["val"] == [i for text in held_out for i in bare(text)]
    with pytest.raises(ValueError, match="tokenizer=.*causal has no mask token, which filling in needs; .*BERT's"):
        prepare("char_diffusion").main([*arguments, f"--tokenizer={tmp_path}/causal"])
    with pytest.raises(ValueError, match="needs --out=FOLDER: the folder of this file is for characters"):
        prepare("char_diffusion").main([f"--tokenizer={tmp_path}/model"])


def test_your_own_prompts_may_have_the_tokenizer_of_a_model_or_be_conversations(tmp_path):
    pytest.importorskip("transformers")
    tokenizer_of("chat").save_pretrained(str(tmp_path / "model"))
    turns = [{"role": "user", "content": "1+1?"}, {"role": "assistant", "content": "2"}]
    path = jsonl(tmp_path / "mine.jsonl", {"messages": turns, "split": "val"}, {"prompt": "2+2?", "answer": 4})
    prepare("custom").main([f"--input={path}", f"--out={tmp_path}/d", f"--tokenizer={tmp_path}/model"])
    records = without_place(read_records(str(tmp_path / "d" / "prompts.jsonl")))
    assert records[0] == {"prompt": turns[:1], "completion": "2", "split": "val"} and records[1]["completion"] == "4"
    assert load_meta(str(tmp_path / "d"))[1].encode("1+1?") == tokenizer_of("chat").encode("1+1?")
