"""Devices and types."""

import pytest
import torch

from core.device import detect_device, detect_dtype


def test_devices_and_types(monkeypatch):
    assert detect_device("auto") == torch.device("cpu") and detect_dtype("auto", torch.device("cpu")) == torch.float32
    with pytest.raises(ValueError, match="device='cuda' is no device of this machine; set auto or one of: cpu"):
        detect_device("cuda")
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    assert detect_device("auto", local_rank=1) == torch.device("cuda", 1)
    assert detect_device("cuda:0", local_rank=1) == torch.device("cuda", 0), "the one that was named"
    with pytest.raises(ValueError, match="GPU 2 is asked for, but there are 2"):
        detect_device("cuda", 2)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    with pytest.raises(ValueError, match="start fewer ranks"):
        detect_device("cuda", local_rank=1)
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "3")  # a launcher shows each rank one GPU
    assert {detect_device(name, local_rank=3) for name in ("auto", "cuda", "cuda:0")} == {torch.device("cuda", 0)}
    monkeypatch.setattr(torch.cuda, "is_bf16_supported", lambda including_emulation=True: including_emulation)
    assert detect_dtype("auto", torch.device("cuda", 0)) == torch.float32, "bfloat16 would be emulated"


def test_a_gpu_that_torch_cannot_use_is_named(tmp_path, monkeypatch):
    monkeypatch.setattr("core.device.NVIDIA", str(tmp_path))  # a path that exists
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    with pytest.raises(ValueError, match="device='auto' .*set device='cpu'"):
        detect_device("auto")
    assert detect_device("cpu") == torch.device("cpu")
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    assert detect_device("auto") == torch.device("cpu"), "the GPU was hidden"
