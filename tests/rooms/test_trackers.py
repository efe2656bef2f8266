"""Trackers: each is read back with its own reader; one that dies does not stop a run."""

import json
import os
import struct
import subprocess
import sys

import pytest

from core.errors import Mistake
from core.trackers import check_trackers
from tests.tiny import ROOT, config, read_records

RUN = """
import json, os, signal, sys, time
sys.path.insert(0, sys.argv[1])
from core.supervised.config import PretrainConfig
from core.logger import Logger
from core.trackers import Trackers
settings, end = json.loads(sys.argv[2])
config = PretrainConfig(**settings | {"report_to": tuple(settings["report_to"])})
os.makedirs(config.out_dir, exist_ok=True)
logger = Logger(config.out_dir, 4, ("loss",))
logger.trackers = Trackers(config, logger.say)
logger.start()
for step in range(1, 5):
    logger.log(step, {"loss": 0.5 + step, "lr": float("nan")})
    if step % 2 == 0:
        logger.log(step, {"eval/judge": 0.5 - step}, show=False)
        logger.say("a secret question")
if end == "service killed":
    children = open(f"/proc/self/task/{os.getpid()}/children").read().split()
    os.kill(next(int(id) for id in children if "wandb-core" in open(f"/proc/{id}/cmdline").read()), signal.SIGKILL)
    for step in range(5, 8):
        time.sleep(0.2)
        logger.log(step, {"loss": 0.5 + step})
logger.close()
print("the run has ended")
"""


def run(folder, name, end="", **settings):
    """A run of four steps with a tracker, in a process of its own. Returns its output."""
    settings |= {"out_dir": str(folder / "out"), "report_to": [name]}
    env = os.environ | {"WANDB_MODE": "offline", "TRACKIO_DIR": str(folder / "trackio")}
    done = subprocess.run([sys.executable, "-c", RUN, ROOT, json.dumps([settings, end])], env=env, capture_output=True,
                          text=True, timeout=100)
    assert "the run has ended" in done.stdout, done.stderr
    return done.stdout


def read_wandb(folder):
    """An offline run, with wandb's own messages: a file in the format of LevelDB's log."""
    from wandb.proto.wandb_internal_pb2 import Record
    rows = []
    for path in sorted(folder.glob("out/wandb/offline-run-*/*.wandb")):
        content, place, parts = path.read_bytes(), 7, b""
        while place + 7 <= len(content):
            if 32768 - place % 32768 < 7:
                place += 32768 - place % 32768
                continue
            length, kind = struct.unpack("<HB", content[place + 4: place + 7])
            parts += content[place + 7: place + 7 + length]
            place += 7 + length
            if kind in (1, 4):  # the whole of a record, or its end
                items, parts = Record.FromString(parts).history.item, b""
                rows.append({("/".join(item.nested_key) or item.key): json.loads(item.value_json) for item in items})
    return {name: [(row["_step"], row[name]) for row in rows if name in row] for name in ("loss", "eval/judge")}


def read_tensorboard(folder):
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator
    reader = EventAccumulator(str(folder / "out"), size_guidance={"scalars": 0}).Reload()
    return {name: [(x.step, x.value) for x in reader.Scalars(name)] for name in ("loss", "eval/judge")}


def read_trackio(folder):
    code = ("import json; from trackio.sqlite_storage import SQLiteStorage as s; from trackio import Api\n"
            "names = [r.name for r in Api().runs('nano-grpo')]\n"
            "print(json.dumps([names, s.get_logs('nano-grpo', names[0])]))")
    done = subprocess.run([sys.executable, "-c", code], env=os.environ | {"TRACKIO_DIR": str(folder / "trackio")},
                          capture_output=True, text=True)
    names, rows = json.loads(done.stdout.splitlines()[-1])
    assert len(names) == 1
    return {name: [(row["step"], row[name]) for row in rows if name in row] for name in ("loss", "eval/judge")}


READERS = {"wandb": read_wandb, "tensorboard": read_tensorboard, "trackio": read_trackio}


@pytest.mark.slow
@pytest.mark.parametrize("name", READERS)
def test_a_tracker_shows_what_was_logged_and_no_text_is_sent(tmp_path, name):
    pytest.importorskip(name)
    run(tmp_path, name, system_prompt="a secret instruction", prompt_format="secret {prompt}")
    assert READERS[name](tmp_path) == {"loss": [(step, 0.5 + step) for step in range(1, 5)],
                                       "eval/judge": [(step, 0.5 - step) for step in (2, 4)]}
    for path in tmp_path.rglob("*"):
        assert path.name in ("metrics.jsonl", "console.log") or path.is_dir() or b"secret" not in path.read_bytes()


@pytest.mark.slow
def test_a_wandb_whose_service_dies_does_not_stop_the_run(tmp_path):
    assert run(tmp_path, "wandb", end="service killed").count("wandb failed (") == 1
    assert [r["step"] for r in read_records(str(tmp_path / "out" / "metrics.jsonl"))][-3:] == [5, 6, 7]


def test_wandb_log_asks_for_wandb_and_a_missing_package_is_named_with_its_command(monkeypatch):
    c = config(wandb_log=True, report_to=("tensorboard", "wandb"))
    assert c.trackers == ["wandb", "tensorboard"]
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    with pytest.raises(Mistake, match="pip install wandb"):
        check_trackers(c)
