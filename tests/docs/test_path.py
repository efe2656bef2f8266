"""How much a reader has to hold: the files that one step of the main job runs through."""

import os
import pathlib
import sys

import pytest

from grpo.train_grpo import main
from tests.tiny import ROOT

PATH_FILES, PATH_LINES = 17, 2690  # at most


@pytest.fixture(scope="module")
def called(tmp_path_factory):
    """[(file, function)] in the order of their first calls in one step of the main job."""
    order, in_step = {}, False

    def note(frame, event, arg):
        nonlocal in_step
        code = frame.f_code
        if event in ("call", "return") and code.co_filename.startswith((f"{ROOT}/core/", f"{ROOT}/grpo/")):
            if code.co_name == "train_step":
                in_step = event == "call"
            if in_step and event == "call":
                order.setdefault((os.path.relpath(code.co_filename, ROOT), code.co_name))

    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(ROOT)
        sys.setprofile(note)
        try:
            main(["config/grpo_example.py", "--max_iters=1", "--batch_size=2", "--group_size=4", "--eval_problems=2",
                  "--eval_interval=9", "--sample_interval=9", "--dtype=float32",
              f"--out_dir={tmp_path_factory.mktemp('path')}"])
        finally:
            sys.setprofile(None)
    return list(order)


@pytest.mark.slow
def test_a_step_of_the_main_job_runs_through_few_files(called):
    files = {file for file, _ in called}
    lines = sum(len(pathlib.Path(ROOT, file).read_text().splitlines()) for file in files)
    assert len(files) <= PATH_FILES and lines <= PATH_LINES, (len(files), lines, sorted(files))
