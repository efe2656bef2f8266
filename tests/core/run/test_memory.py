"""The memory that a process has needed and can have."""

import torch

from core.run import memory
from core.run.memory import memory_in_use, memory_limit


def test_a_container_has_less_memory_than_its_machine(tmp_path, monkeypatch):
    limit = tmp_path / "memory.max"
    monkeypatch.setattr(memory, "LIMITS", (str(limit), str(tmp_path / "gone")))
    whole = memory_limit(torch.device("cpu"))
    limit.write_text("max\n")
    assert memory_limit(torch.device("cpu")) == whole > memory_in_use(torch.device("cpu")) > 10
    limit.write_text("50000000\n")
    assert memory_limit(torch.device("cpu")) == 50
    monkeypatch.delattr(memory.os, "sysconf")
    assert memory_limit(torch.device("cpu")) is None, "a system that does not tell"
