"""Which device and precision a run takes."""

import pytest
import torch

from core.device import detect_device, detect_dtype


@pytest.fixture
def two_gpus(monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    return monkeypatch


def test_without_a_gpu_a_run_is_on_the_cpu_in_float32():
    assert detect_device("auto") == torch.device("cpu") and detect_dtype("auto", torch.device("cpu")) == torch.float32


def test_each_rank_has_its_own_gpu_and_one_that_is_not_there_is_refused(two_gpus):
    assert detect_device("auto", local_rank=1) == torch.device("cuda", 1)
    assert detect_device("cuda:0", local_rank=1) == torch.device("cuda", 0), "the one that was named"
    with pytest.raises(ValueError, match="GPU 2"):
        detect_device("cuda", 2)
    two_gpus.setattr(torch.cuda, "device_count", lambda: 1)
    two_gpus.setenv("CUDA_VISIBLE_DEVICES", "3")  # a launcher shows each rank one GPU
    assert {detect_device(name, local_rank=3) for name in ("auto", "cuda", "cuda:0")} == {torch.device("cuda", 0)}


def test_bfloat16_is_taken_only_where_it_is_not_emulated(two_gpus):
    two_gpus.setattr(torch.cuda, "is_bf16_supported", lambda including_emulation=True: including_emulation)
    assert detect_dtype("auto", torch.device("cuda", 0)) == torch.float32


def test_a_gpu_that_torch_cannot_use_is_not_passed_over_in_silence(tmp_path, monkeypatch):
    monkeypatch.setattr("core.device.NVIDIA", str(tmp_path))  # a path that exists
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    with pytest.raises(ValueError, match="device='auto'"):
        detect_device("auto")
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    assert detect_device("auto") == torch.device("cpu"), "the GPU was hidden"
