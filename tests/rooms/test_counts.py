"""What a GPU would launch is counted without one, and stays below ceilings: what was won cannot go unnoticed."""

from dataclasses import replace

import pytest
import torch
from torch import nn
from torch.nn import functional as F

from bench import counts
from bench.fake_gpu import FakeGPU
from bench.random_models import SIZES, Size

ROOM = 1.03
MEASURED = {  # of 0.5B: operations, GB, passes over the logits beside products. A lower count is written down here
    "a token, 512 rows": (counts.count_token, {"rows": 512, "columns": 512}, 1169, 9.99, 5.0),
    "a token, 512 rows, top_p": (counts.count_token, {"rows": 512, "columns": 512, "top_p": 0.95}, 1185, 9.92, 7.0),
    "a greedy token, 512 rows": (counts.count_token, {"rows": 512, "columns": 512, "top_k": 1}, 1140, 8.10, 2.0),
    "a step": (counts.count_step, {"problems": 4}, 10114, 373.0, 12.0),
    "a step of an adapter": (counts.count_step, {"problems": 4, "lora_rank": 16}, 15749, 469.3, 12.0),
}
TINY = Size(hidden=32, inner=80, layers=2, heads=4, key_heads=2, vocabulary=100, prompt_length=17,
            completion_length=32)
QWEN3 = replace(TINY, head=16)  # its heads are wider than the states
WAYS = [(TINY, 0, False), (QWEN3, 0, False), (QWEN3, 4, False), (TINY, 0, True), (TINY, 4, True)]


@pytest.mark.slow
@pytest.mark.parametrize("name", MEASURED)
def test_operations_bytes_and_passes_stay_below_the_ceilings(name):
    pytest.importorskip("peft")
    count, arguments, operations, gigabytes, passes = MEASURED[name]
    size = SIZES["0.5B"]
    launches = counts.of_all_layers(count, size, **arguments)
    states = arguments.get("rows") or arguments["problems"] * counts.GROUP * size.completion_length
    found = (counts.total(launches), counts.total(launches, "bytes") / 1e9,
             counts.total(launches, "logits") / states / size.vocabulary)
    ceilings = operations, gigabytes, passes
    assert all(number <= ROOM * ceiling for number, ceiling in zip(found, ceilings, strict=True)), found


def test_operations_bytes_and_flops_are_those_counted_by_hand():
    with FakeGPU(vocabulary=7) as gpu:
        x = torch.zeros(3, 4).to("cuda")
        weight = nn.Parameter(torch.zeros(7, 4, device="cuda"))
        assert x.is_cuda and x.device.type == weight.device.type == "cuda" and x.cpu().device.type == "cpu"
        with gpu.recording(), torch.autocast("cuda", torch.bfloat16):
            y = (x + 1).view(12).view(3, 4)
            logits = F.linear(y, weight)                                             # (3, 7)
            logits.float().exp()
            logits.backward(torch.ones_like(logits))
    forward = [("add", 96, 0), ("_to_copy", 112 + 56, 0), ("_to_copy", 48 + 24, 0), ("mm", 24 + 56 + 42, 2 * 3 * 4 * 7),
               ("_to_copy", 42 + 84, 0), ("exp", 168, 0), ("ones_like", 42, 0), ("ones_like", 42, 0)]
    # The gradient of the weight: (7, 3) times (3, 4), then float32
    backward = [("mm", 42 + 24 + 56, 2 * 7 * 3 * 4), ("_to_copy", 56 + 112, 0)]
    launches = gpu.launches
    assert [(launch.name, launch.bytes, launch.flops) for launch in launches] == forward + backward
    assert [launch.kind for launch in launches] == ["elementwise", "head", "elementwise"] + ["head"] * 7
    assert [launch.logits for launch in launches] == [0, 0, 0, 0, 21, 21, 21, 21, 0, 0]


@pytest.mark.slow
@pytest.mark.parametrize("count, arguments", [
    (counts.count_token, {"rows": 8, "columns": 256}),
    (counts.count_step, {"problems": 1, "grad_checkpoint": True})])
def test_the_counts_of_all_layers_are_those_of_the_whole_model(count, arguments):
    size = replace(TINY, layers=5)
    assert counts.of_all_layers(count, size, **arguments) == count(size, **arguments)


@pytest.mark.slow
@pytest.mark.parametrize("size, rank, grad_checkpoint", WAYS)
def test_a_layer_keeps_the_bytes_of_the_formulas_of_the_page(size, rank, grad_checkpoint):
    """They are in the docstring of bench/counts.py."""
    pytest.importorskip("peft")
    two, three = (counts.count_kept(replace(size, layers=layers), 1, rank, grad_checkpoint)["bytes"]
                  for layers in (2, 3))
    C, inner, D = size.hidden, size.inner, size.head_size
    T, M = size.prompt_length - 1, size.completion_length
    queries, keys = size.heads * D, size.key_heads * D
    norms = 0 if size.head is None else queries + keys
    of_token = 18 * C + 6 * queries + 8 * inner + 14 * rank + 4 * norms if rank else (
        26 * C + 4 * queries + 8 * inner + 6 * norms)
    of_completion = of_token + 2 * (T + M)
    read = 4 * queries * counts.GROUP * (T + M)  # keys and values of all heads, for all tokens that are read
    expected = counts.GROUP * M * of_completion + T * (of_token + 4 * keys) + read
    if grad_checkpoint:
        expected = (counts.GROUP * M + T) * C * (2 if rank else 4)
    assert three - two == pytest.approx(expected, rel=0.15 if grad_checkpoint else 0.03)


@pytest.mark.slow
def test_the_script_prints_a_table_of_a_token_and_of_a_step_and_the_memory(capsys, monkeypatch):
    monkeypatch.setitem(counts.GOALS, ("mini", 8), 1000)
    monkeypatch.setitem(counts.SHARES, "mini", 0.2)
    sizes = ["--shapes=mini", "--rows=8", "--columns=256", "--batch_size=1", "--completion_length=8"]
    counts.main([*sizes, "--by_line=True"])
    rows = [line.split() for line in capsys.readouterr().out.splitlines()]
    for first in [i for i, row in enumerate(rows) if row[:1] == ["elementwise"]]:
        *parts, whole = (row[1:] for row in rows[first : first + 5])
        assert int(whole[0]) == sum(int(part[0]) for part in parts)
    counts.main([*sizes, "--memory=True"])
    without, checkpoint = (float(line.split("activations ")[1].split()[0]) for line in
                           capsys.readouterr().out.splitlines())
    assert checkpoint <= without
