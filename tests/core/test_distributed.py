"""Devices, types, and a single process; several ranks are tested in tests/grpo/test_ranks.py."""

import pathlib

import pytest
import torch

from core.distributed import LONGEST_WAIT, Distributed, OtherRank, detect_device, detect_dtype
from tests.tiny import ROOT, model


def test_devices_and_types():
    assert detect_device("cpu") == torch.device("cpu")
    assert detect_dtype("auto", torch.device("cpu")) == torch.float32
    for call in (lambda: detect_device("gpu"), lambda: detect_dtype("float16", torch.device("cpu"))):
        with pytest.raises(ValueError):
            call()
    if not torch.cuda.is_available():
        with pytest.raises(ValueError, match="device='auto'"):
            detect_device("cuda")


def test_an_apple_gpu_that_is_not_there_is_one_line(monkeypatch):
    monkeypatch.setattr(torch.backends.mps, "is_available", lambda: False)
    with pytest.raises(ValueError, match="device='mps', but torch sees no Apple GPU; use device='auto'"):
        detect_device("mps")


def test_more_ranks_than_gpus_are_refused(monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    assert detect_device("auto", local_rank=1) == torch.device("cuda", 1)
    assert detect_device("cuda:0", local_rank=1) == torch.device("cuda", 0), "the one that was named"
    for name, rank in (("cuda", 2), ("cuda:5", 0)):
        with pytest.raises(ValueError, match=f"GPU {max(rank, 5 * (name != 'cuda'))} is asked for, but there are 2"):
            detect_device(name, rank)


def test_there_is_one_device_detection():
    users = [str(p.relative_to(ROOT)) for folder in ("core", "grpo") for p in pathlib.Path(ROOT, folder).rglob("*.py")
             if "cuda.is_available" in p.read_text()]
    assert users == ["core/distributed.py"]


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_autocast_computes_in_the_type_that_was_asked_for(dtype):
    dist = Distributed("cpu", dtype)
    assert dist.dtype == getattr(torch, dtype) and dist.device == torch.device("cpu")
    with dist.autocast():
        assert (torch.ones(2, 2) @ torch.ones(2, 2)).dtype == dist.dtype
    assert not torch.is_autocast_enabled("cpu")


def test_a_single_process_is_the_whole_world():
    dist, net, x = Distributed("cpu"), model(), torch.tensor([1.0, 2.0])
    assert dist.is_main and (dist.rank, dist.world) == (0, 1)
    assert torch.equal(dist.total(x), x) and torch.equal(dist.largest(x), x) and dist.gather({"a": 1}) == [{"a": 1}]
    weights = [p.clone() for p in net.parameters()]
    net.head.weight.grad = torch.ones_like(net.head.weight)
    dist.sum_gradients(net.parameters())
    dist.broadcast(net.parameters())
    dist.barrier()
    for p, before in zip(net.parameters(), weights, strict=True):
        assert torch.equal(p, before)
        assert p.grad.sum() == (p.numel() if p is net.head.weight else 0), "a missing gradient counts as zero"
    dist.close()


@pytest.mark.parametrize("text, words", [
    ("[pair.cc:538] Connection closed by peer [127.0.0.1]:4711\nmore", "another rank did: see its error .*4711"),
    ("Timed out waiting 5000ms for recv operation", "another rank did not answer for rank_timeout=5 seconds")])
def test_what_goes_wrong_between_ranks_is_one_line(text, words):
    with pytest.raises(OtherRank, match=f"^rank 0 ended because {words}") as error:
        with Distributed("cpu", timeout=5.0).ending_together():
            raise RuntimeError(text)
    assert "\n" not in str(error.value)


def test_who_waited_in_a_barrier_is_told_how_long_that_was():
    with pytest.raises(OtherRank, match="another rank did not answer for 12 hours") as error:
        with Distributed("cpu", timeout=5.0).ending_together(LONGEST_WAIT):
            raise RuntimeError("Timed out waiting 43200000ms for recv operation")
    assert "rank_timeout" not in str(error.value)


def test_ranks_must_resume_from_the_same_step():
    class OfTwo(Distributed):
        """A rank of two, the other of which has the number 8."""
        agree = lambda self, number: max(number, 8 if number >= 0 else -8)

    OfTwo("cpu").check_same_step(8, "out")
    for step, words in ((5, "steps 5 to 8"), (9, "steps 8 to 9")):
        with pytest.raises(ValueError, match=f"resumes from step {step}, but the ranks have {words}: out_dir=out must"):
            OfTwo("cpu").check_same_step(step, "out")


def test_errors_of_the_rank_itself_are_not_blamed_on_others():
    for error in (torch.OutOfMemoryError("x"), ValueError("x"), NotImplementedError("x")):
        with pytest.raises(type(error)) as caught, Distributed("cpu").ending_together():
            raise error
        assert caught.value is error


def test_where_a_block_computes_as_well_only_errors_of_an_exchange_are_blamed_on_others():
    for words in ("shapes do not fit", "no such file: /data/igloo/model.pt"):
        with pytest.raises(RuntimeError, match=f"^{words}$"), Distributed("cpu").ending_together(computing=True):
            raise RuntimeError(words)
    for error in (RuntimeError("[gloo/transport/tcp/pair.cc:538] Connection closed by peer"),
                  torch.distributed.DistNetworkError("closed")):
        with pytest.raises(OtherRank), Distributed("cpu").ending_together(computing=True):
            raise error


def test_a_single_process_agrees_with_itself_and_closes_after_a_block():
    with Distributed("cpu") as dist:
        assert dist.agree(15) == 15 and dist.agree(False) == 0
