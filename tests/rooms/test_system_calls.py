"""The filter of system calls, run here by a small model of the kernel's filter machine, on both architectures."""

import os
import struct
from types import SimpleNamespace

import pytest

from grpo.sandbox import kernel
from grpo.sandbox.kernel import ALLOW, ARCHITECTURES, EQUAL, KILL, LOAD, REFUSE, TABLE, filter_program

MACHINES = {"x86_64": 0xC000003E, "aarch64": 0xC00000B7}
# Argument lists with which a call is allowed, and with which it would reach others
HERE = os.getpid()
CHECKED = {"kill": ([HERE], [1], [0], [2 ** 64 - 1]), "tgkill": ([HERE], [1]),
           "prlimit64": ([0], [1], [os.getppid()]), "socketpair": ([1], [2]),
           "sendto": ([5, 0, 1, 0, 0, 0], [5, 0, 1, 0, 1 << 32, 110]), "fcntl": ([3, 4], [3, 8]),
           "ioctl": ([0, 0x5401], [0, 0x5412])}


def answer(program, architecture, number, *arguments):
    """What a filter returns for a system call."""
    data = struct.pack("=IIQ6Q", number, architecture, 0, *arguments, *[0] * (6 - len(arguments)))
    lines, place, value = list(struct.iter_unpack("=HBBI", program)), 0, 0
    while True:
        code, if_true, if_false, operand = lines[place]
        place += 1
        if code == LOAD:
            value = struct.unpack_from("=I", data, operand)[0]
        elif code == EQUAL:
            place += if_true if value == operand else if_false
        else:
            return operand


@pytest.mark.parametrize("machine", MACHINES)
def test_calls_in_the_table_are_allowed_and_all_others_refused(machine, monkeypatch):
    monkeypatch.setattr(kernel.os, "uname", lambda: SimpleNamespace(machine=machine))
    program, fields = filter_program(), TABLE.split()
    numbers = zip(fields[::3], fields[ARCHITECTURES[machine][0] :: 3], strict=True)
    known = {int(number): name for name, number in numbers if number != "-"}
    assert {answer(program, x, 0) == KILL for name, x in MACHINES.items() if name != machine} == {True}
    for number in range(600):
        allowed, *refused = CHECKED.get(known.get(number), ([9],))
        expected = ALLOW if number in known else REFUSE
        assert answer(program, MACHINES[machine], number, *allowed) == expected, number
        for arguments in refused:
            assert answer(program, MACHINES[machine], number, *arguments) == REFUSE, number
