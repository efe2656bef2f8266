"""The check of a GPU, on the CPU."""

import re

import pytest
import torch

from grpo.tools import gpu_check


def rows_of(out):
    return [[cell.strip() for cell in line.split("|")[1:-1]] for line in out.strip().split("\n")]


@pytest.mark.slow
def test_a_quick_check_prints_a_table_of_golden_runs_and_of_steps_of_each_way_to_train(capsys):
    pytest.importorskip("peft")
    gpu_check.main(["--quick=True"])
    rows = rows_of(capsys.readouterr().out)
    assert all(len(row) == 2 for row in rows)
    golden, steps = rows[3:5], rows[5:]
    assert all(found.startswith("1 ") for _, found in golden)
    assert len({what for what, _ in steps}) == len(gpu_check.WAYS)
    for _, found in steps:
        sampled, trained = re.findall(r"([\d,]+) t", found)
        assert int(sampled.replace(",", "")) > 0 and int(trained.replace(",", "")) > 0, found


def test_without_a_gpu_nothing_is_measured_and_a_script_that_fails_or_a_lack_of_memory_is_a_row(capsys, monkeypatch):
    gpu_check.main([])
    assert len(rows_of(capsys.readouterr().out)) == 4

    def lacks_memory(*arguments):
        raise torch.OutOfMemoryError

    monkeypatch.setattr(gpu_check, "take_steps", lacks_memory)
    monkeypatch.setattr(gpu_check, "ROOT", "/")
    gpu_check.main(["--quick=True"])
    rows = rows_of(capsys.readouterr().out)
    assert len(rows) == 3 + 2 + len(gpu_check.WAYS) and all("golden.py" in found for _, found in rows[3:5])
