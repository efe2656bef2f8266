"""What is known without another machine: training needs nothing that Windows lacks, and what does says so."""

import pytest

from tests.tiny import run_script

WITHOUT = """
import os, runpy, signal, sys
import matplotlib.pyplot, multiprocessing.pool, torch.distributed
for name in ("fcntl", "resource", "pwd", "grp", "termios"):
    sys.modules[name] = None
for name in ("fork", "killpg", "uname", "getuid", "getgid", "sysconf", "sched_getaffinity", "O_NOFOLLOW"):
    delattr(os, name)
for name in ("SIGKILL", "SIGALRM", "SIGHUP", "SIGUSR1"):
    delattr(signal, name)
sys.argv = sys.argv[1:]
runpy.run_path(sys.argv[0], run_name="__main__")
"""


@pytest.mark.slow
def test_fill_in_training_needs_nothing_that_windows_lacks(tmp_path, dataset):
    (tmp_path / "without.py").write_text(WITHOUT)
    done = run_script(tmp_path / "without.py", "grpo/train_grpo.py", "config/grpo_example.py", f"--dataset={dataset}",
                      "--gold_judge_checkpoint=None", "--max_iters=1", "--eval_problems=2", "--eval_completions=2",
                      "--batch_size=1", "--group_size=2", "--dtype=float32", "--device=cpu",
                      f"--out_dir={tmp_path}/out")
    assert done.returncode == 0 and (tmp_path / "out" / "report.html").exists(), done.stderr
