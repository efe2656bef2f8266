"""The names of what a run writes."""

import pytest

from core.run.names import FOLDERS, STAYING, is_set_aside, shows_a_run


@pytest.mark.parametrize("name", [
    "state.pt", "state-000012.pt", "state.pt.tmp", "model.safetensors", "model", "model-000040", "model.tmp",
    "model-1234567.safetensors", "metrics.jsonl", "samples.jsonl", "starts.jsonl", "console.log", "config.json",
    "trackers.json", "report.html", "curves.png", "bad_steps", "events.out.tfevents.1700000000.host.0"])
def test_what_a_run_writes_is_set_aside(name):
    assert is_set_aside(name) and name not in STAYING


@pytest.mark.parametrize("name", [
    ".bashrc", "thesis.tex", "state.pt.old", "my-state.pt", "model-best.safetensors", "model.bin", "metrics.jsonl~",
    "tokenizer.json", "train.bin", "events", "previous", "lock", "wandb", "vllm-weights", "notes.tmp", "state-.pt"])
def test_nothing_else_is(name):
    assert not is_set_aside(name)


def test_a_folder_shows_a_run_by_what_only_runs_write():
    assert all(map(shows_a_run, ("state.pt", "state-000012.pt", "metrics.jsonl", "starts.jsonl")))
    assert not any(map(shows_a_run, ("config.json", "model.safetensors", "model", "trackers.json", *FOLDERS)))
