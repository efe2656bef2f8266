"""The filter of system calls, run here by a small model of the kernel's filter machine, on both architectures."""

import os
import struct
from types import SimpleNamespace

import pytest

from grpo.sandbox import kernel
from grpo.sandbox.kernel import ALLOW, ARCHITECTURES, EQUAL, KILL, LOAD, REFUSE, TABLE, filter_program

MACHINES = {"x86_64": 0xC000003E, "aarch64": 0xC00000B7}


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


def numbers(machine):
    column = ARCHITECTURES[machine][0]
    fields = TABLE.split()
    return {name: int(x) for name, x in zip(fields[::3], fields[column::3], strict=True) if x != "-"}


@pytest.fixture(params=MACHINES)
def machine(request, monkeypatch):
    monkeypatch.setattr(kernel.os, "uname", lambda: SimpleNamespace(machine=request.param))
    return request.param


# Argument lists with which a call is allowed, and with which it would reach others
HERE = os.getpid()
CHECKED = {"kill": ([HERE], [1], [0], [2 ** 64 - 1]), "tgkill": ([HERE], [1]),
           "prlimit64": ([0], [1], [os.getppid()]), "socketpair": ([1], [2]),
           "sendto": ([5, 0, 1, 0, 0, 0], [5, 0, 1, 0, 1 << 32, 110]), "fcntl": ([3, 4], [3, 8]),
           "ioctl": ([0, 0x5401], [0, 0x5412])}


def test_calls_in_the_table_are_allowed_and_all_others_refused(machine):
    program = filter_program()
    assert {answer(program, x, 0) == KILL for name, x in MACHINES.items() if name != machine} == {True}
    known = {number: name for name, number in numbers(machine).items()}
    for number in range(600):
        if known.get(number) not in CHECKED:
            assert answer(program, MACHINES[machine], number, 9) == (ALLOW if number in known else REFUSE), number


def test_calls_that_reach_others_are_allowed_on_oneself_alone(machine):
    program, known = filter_program(), numbers(machine)
    for name, (allowed, *refused) in CHECKED.items():
        assert answer(program, MACHINES[machine], known[name], *allowed) == ALLOW, name
        for arguments in refused:
            assert answer(program, MACHINES[machine], known[name], *arguments) == REFUSE, name
