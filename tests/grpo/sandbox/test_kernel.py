"""What the parts of the kernel's protection are asked for. That they hold is in test_run_attacks.py."""

import os
import subprocess
import sys

import pytest

from grpo.sandbox import kernel
from grpo.sandbox.run import FOLDER_BYTES, machine_parts, run_tests
from tests.tiny import ROOT

linux = pytest.mark.skipif(sys.platform != "linux", reason="only Linux has these calls")


def run_python(code, *arguments):
    """What a fresh interpreter prints that has imported grpo/sandbox/kernel.py."""
    path = os.path.join(ROOT, "grpo", "sandbox")
    head = f"import sys\nsys.path.insert(0, {path!r})\nimport kernel\n"
    return subprocess.run([sys.executable, "-c", head + code, *arguments], capture_output=True, text=True)


@pytest.mark.parametrize("version, rights, size", [(1, 13, 8), (3, 15, 8), (4, 15, 16), (6, 16, 24), (9, 16, 24)])
@linux
def test_landlock_is_asked_for_all_rights_that_its_version_knows(monkeypatch, version, rights, size):
    asked, added = [], []

    def call(name, number, *arguments):
        if number == kernel.CREATE_RULESET and arguments[0] is not None:
            asked.append(arguments[0])
            return os.open(os.devnull, os.O_RDONLY)
        if number == kernel.ADD_RULE:
            added.append(int.from_bytes(arguments[2][:8], sys.byteorder))
        return version

    monkeypatch.setattr(kernel, "call", call)
    kernel.restrict_files()
    assert len(asked[0]) == size and int.from_bytes(asked[0][:8], sys.byteorder) == 2 ** rights - 1
    assert all(0 < right < 2 ** rights for right in added), "a right that the version does not know is an error"
    assert sum(right & 1 << 8 > 0 for right in added) == 1, "files are made in one folder alone"


@linux
def test_root_keeps_no_capability():
    done = run_python("kernel.drop_privileges()\nprint(open('/proc/self/status').read())")
    lines = dict(line.split(":\t") for line in done.stdout.splitlines() if line.startswith(("Cap", "NoNew")))
    assert int(lines["CapEff"], 16) == int(lines["CapPrm"], 16) == 0 and lines["NoNewPrivs"] == "1"


@linux
def test_a_child_whose_parent_has_ended_before_ends_at_once():
    code = "import os\nkernel.end_with(int(sys.argv[1]))\nprint('goes on')"
    assert run_python(code, "1" if os.getpid() != 1 else "2").stdout == ""
    assert run_python(code.replace("int(sys.argv[1])", "os.getppid()")).stdout == "goes on\n"


@pytest.mark.skipif(bool(machine_parts()["namespaces"]), reason="no namespaces")
def test_with_namespaces_the_folder_is_in_memory_and_limited():
    code = "import os\nfound = os.statvfs('.')\nroot = os.statvfs('/')"
    tests = (f"assert found.f_blocks * found.f_frsize == {FOLDER_BYTES}\n"
             f"assert found.f_files == {kernel.FILES} and root.f_flag & os.ST_RDONLY")
    assert run_tests(code, "import os\n" + tests) == "passed"
