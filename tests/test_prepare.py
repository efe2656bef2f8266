"""The scripts that prepare prompts, run as a user would."""

import ast
import importlib.util
import os
import runpy
import sys

import pytest

from core.prompts import PromptConsumer, read_records
from core.tokenizer import load_meta
from grpo import verifiers
from grpo.reward_registry import REWARDS
from grpo.sandbox import run_tests
from tests.test_prompts import jsonl, without_place, write_ranks
from tests.tiny import ROOT, run_script


def prepare(name):
    """The prepare.py of a data set, as a module."""
    spec = importlib.util.spec_from_file_location(f"prepare_{name}", os.path.join(ROOT, "data", name, "prepare.py"))
    module = sys.modules[spec.name] = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def run(name, *arguments, **environment):
    return run_script(os.path.join("data", name, "prepare.py"), *arguments, **environment)


@pytest.mark.parametrize(("name", "arguments", "reward"), [
    ("arithmetic", ["--problems=200"], verifiers.math_answer), ("countdown", ["--problems=100"], verifiers.countdown),
    ("code", ["--problems=116"], verifiers.code_correctness)])
def test_an_offline_generator_writes_what_its_reward_asks_for(tmp_path, name, arguments, reward):
    done = run(name, *arguments, f"--out={tmp_path}/d")
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
        assert run_tests(r["completion"], r["tests"]) == "passed"
        assert run_tests(r["completion"].replace("return", "return None or not"), r["tests"]) == "failed"
    with pytest.raises(ValueError, match="problems=1000000 must be 20 to"):
        module.problems(10**6, seed=0)


def test_gsm8k_becomes_prompts_with_working_out(tmp_path):
    train = jsonl(tmp_path / "train.jsonl", {
        "question": "Ann\u2019s 3 and 4?", "answer": "3+4=$<<3+4=7>>7.\nSo <<7*200=1400>>1,400.\n#### 1,400"},
        *({"question": f"What is {i}?", "answer": f"It is {i}.\n#### {i}"} for i in range(30)))
    test = jsonl(tmp_path / "test.jsonl", {"question": "Less than 0?", "answer": "Minus 5\n#### -5"})
    files = [f"--train={train}", f"--test={test}", "--tokenizer=char", f"--out={tmp_path}/d"]
    done = run("gsm8k", *files)
    assert done.returncode == 0 and "characters folded 1, characters dropped 0" in done.stdout, done.stderr
    records = without_place(read_records(str(tmp_path / "d" / "prompts.jsonl")))
    assert records[0] == {"prompt": "Ann\u2019s 3 and 4?", "answer": "1400", "split": "train", "completion":
                          "<start_working_out>3+4=$7.\nSo 1,400.<end_working_out><SOLUTION>1400</SOLUTION>"}
    assert [r["split"] for r in records] == ["train"] * 31 + ["val"] and records[-1]["answer"] == "-5"
    assert verifiers.math_format(None, [r["completion"] for r in records]) == [3.0] * 32
    assert prepare("gsm8k").TAGS == prepare("arithmetic").TAGS and list(prepare("gsm8k").TAGS[1:]) == verifiers.TAGS
    for answer in ("It is 2.", "#### two", "####"):
        jsonl(tmp_path / "test.jsonl", {"question": "a", "answer": "b #### 1"}, {"question": "b", "answer": answer})
        with pytest.raises(ValueError, match="test.jsonl, line 2: .*'#### ' and a number"):
            prepare("gsm8k").main(files)


def test_gsm8k_without_a_network_names_the_way_out(tmp_path):
    done = run("gsm8k", "--tokenizer=char", f"--out={tmp_path}/d", https_proxy="http://127.0.0.1:9")
    assert done.returncode == 1 and done.stderr.startswith("error: could not download https://raw")
    assert "--train=FILE --test=FILE" in done.stderr and len(done.stderr.strip().split("\n")) == 1
    assert not (tmp_path / "d").exists()
    assert run("gsm8k", "--train=a.jsonl").returncode == 2


def test_your_own_prompts_become_a_dataset(tmp_path):
    path = jsonl(tmp_path / "mine.jsonl", {"question": "2+2?", "answer": 4, "level": 1, "split": "val"},
                 {"prompt": [{"role": "user", "content": "caf\u00e9 \u4e2d"}], "answer": "a", "completion": "b\u2026"},
                 {"prompt": "Sing."})
    done = run("custom", f"--input={path}", f"--out={tmp_path}/d")
    assert "completions 2" in done.stdout and "characters folded 2, characters dropped 1" in done.stdout, done.stderr
    records = without_place(read_records(str(tmp_path / "d" / "prompts.jsonl")))
    assert [r.get("completion") for r in records] == ["4", "b\u2026", None]
    assert records[0] == {"prompt": "2+2?", "answer": "4", "level": 1, "completion": "4", "split": "val"}
    ranks = write_ranks(tmp_path / "ranks", b"th")
    prepare("custom").main([f"--input={path}", f"--out={tmp_path}/d", f"--tokenizer={ranks}"])
    assert "characters_folded" not in load_meta(tmp_path / "d")[0]
    assert load_meta(tmp_path / "d")[1].encode("th") == [256]
    for arguments, message in (([], "--input=FILE"), (["--input=gone.jsonl"], "gone.jsonl does not exist")):
        done = run("custom", *arguments, f"--out={tmp_path}/x")
        assert done.returncode and message in done.stderr and len(done.stderr.strip().split("\n")) == 1
