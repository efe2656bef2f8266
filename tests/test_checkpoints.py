"""Files: whole or not at all, safe to load, and clear about what is wrong with them."""

import json
import os

import pytest
import torch

from core.checkpoint_manager import CheckpointManager, load_model, load_tokenizer, save_model, set_aside
from core.logger import Logger, format_number, read_records
from core.model import MASKED_FILL, SEQUENCE_SCORER
from core.scheduler import CosineLRScheduler
from core.tokenizer import CharTokenizer
from tests.tiny import TOKENIZER, judge, model, save


def test_a_model_file_is_all_that_is_needed_to_use_the_model(tmp_path):
    net, tokens = model(), torch.randint(0, 96, (2, 9))
    path = str(tmp_path / "deep" / "m.safetensors")
    save_model(path, net, TOKENIZER, step=7)
    loaded, facts = load_model(path, mode=MASKED_FILL, tokenizer=TOKENIZER)
    assert torch.equal(net(tokens), loaded(tokens)) and facts == {"step": 7} and not loaded.training
    assert load_tokenizer(path).description() == TOKENIZER.description()
    save_model(path, net, TOKENIZER, torch.float16)
    half, _ = load_model(path)
    assert next(half.parameters()).dtype == torch.float32
    torch.testing.assert_close(half(tokens), net(tokens), rtol=0.05, atol=0.05)
    assert os.listdir(tmp_path / "deep") == ["m.safetensors"]


def test_a_wrong_file_is_named_with_what_was_found(tmp_path):
    generator, scorer = save(tmp_path / "g.safetensors", model()), save(tmp_path / "j.safetensors", judge())
    with pytest.raises(ValueError, match=f"judge_checkpoint={generator} has mode masked_fill, but sequence_scorer"):
        load_model(generator, mode=SEQUENCE_SCORER, key="judge_checkpoint")
    with pytest.raises(ValueError, match="has another vocabulary"):
        load_model(scorer, tokenizer=CharTokenizer("abc"))
    with pytest.raises(FileNotFoundError, match="generator_checkpoint=nowhere"):
        load_model("nowhere", key="generator_checkpoint")
    whole = open(generator, "rb").read()
    for cut in (0, 5, len(whole) // 2, len(whole) - 1):
        (tmp_path / "cut").write_bytes(whole[:cut])
        with pytest.raises(ValueError, match="cut is damaged or cut short"):
            load_model(str(tmp_path / "cut"))
    from safetensors.torch import save_file
    save_file({"x": torch.zeros(1)}, tmp_path / "foreign")
    with pytest.raises(ValueError, match="not one that this project wrote"):
        load_model(str(tmp_path / "foreign"))


def test_state_round_trip_and_keep(tmp_path):
    manager = CheckpointManager(str(tmp_path / "out"), keep=2)
    net = model(seed=1)
    optimizer = torch.optim.AdamW(net.parameters())
    net(torch.zeros(1, 4, dtype=torch.long)).sum().backward()
    optimizer.step()
    for step in (1, 2, 3):
        manager.save(step, net, [optimizer], TOKENIZER, {"val_loss": 1.5}, before={"x": 0.5})
    assert sorted(os.listdir(tmp_path / "out")) == ["model-000002.safetensors", "model-000003.safetensors",
                                                   "model.safetensors", "state.pt"]
    other = model(seed=2)
    fresh = torch.optim.AdamW(other.parameters())
    state = manager.load(other, [fresh])
    assert torch.equal(fresh.state_dict()["state"][0]["exp_avg"], optimizer.state_dict()["state"][0]["exp_avg"])
    assert state["step"] == 3 and state["before"] == {"x": 0.5}
    assert all(torch.equal(a, b) for a, b in zip(net.state_dict().values(), other.state_dict().values(), strict=True))
    assert load_model(str(tmp_path / "out" / "model.safetensors"))[1] == {"step": 3, "val_loss": 1.5}
    whole = (tmp_path / "out" / "state.pt").read_bytes()
    (tmp_path / "out" / "state.pt").write_bytes(whole[: len(whole) // 2])
    with pytest.raises(ValueError, match="state.pt is damaged or cut short"):
        manager.load(other, [fresh])
    os.remove(tmp_path / "out" / "state.pt")
    with pytest.raises(FileNotFoundError, match="resume=True"):
        manager.load(other, [fresh])


def test_state_is_loaded_without_running_code(tmp_path):
    class Bomb:
        def __reduce__(self):
            return os.mkdir, (str(tmp_path / "boom"),)

    os.makedirs(tmp_path / "out")
    torch.save({"step": 1, "model": Bomb()}, tmp_path / "out" / "state.pt")
    with pytest.raises(ValueError, match="damaged"):
        CheckpointManager(str(tmp_path / "out")).load(model(), [])
    assert not (tmp_path / "boom").exists()


def test_schedule_warms_up_decays_and_stays():
    lr = CosineLRScheduler(1.0, 0.1, warmup_iters=4, lr_decay_iters=14).lr
    assert [lr(s) for s in range(4)] == [0.25, 0.5, 0.75, 1.0]
    assert lr(4) == 1.0 and abs(lr(9) - 0.55) < 1e-12 and abs(lr(14) - 0.1) < 1e-12 and lr(99) == lr(14)


def test_metrics_survive_a_crash_and_a_resume(tmp_path, capsys):
    logger = Logger(str(tmp_path), 10, ("loss",))
    logger.start()
    for step in (1, 2, 3):
        logger.log(step, {"loss": step / 8, "other": 5})
    with open(logger.path, "a") as f:
        f.write('{"step": 4, "lo')
    assert [r["step"] for r in read_records(logger.path)] == [1, 2, 3]
    logger.start(2)
    logger.log(3, {"loss": 0.5})
    assert [json.loads(x) for x in open(logger.path)] == [
        {"step": 1, "loss": 0.125, "other": 5}, {"step": 2, "loss": 0.25, "other": 5}, {"step": 3, "loss": 0.5}]
    lines = capsys.readouterr().out.rstrip().split("\n")
    assert lines[0].split() == ["step", "loss", "eta"] and lines[1].split()[:2] == ["1", "0.1250"]
    assert len(lines) == 5 and len(set(map(len, lines))) == 1, "one line of names, then aligned numbers"


def test_numbers_that_are_not_finite_are_logged_as_valid_json(tmp_path, capsys):
    logger = Logger(str(tmp_path), 10, ("loss", "grad_norm"))
    logger.start()
    logger.log(1, {"loss": float("nan"), "grad_norm": float("inf")})
    record = json.loads(open(logger.path).read(), parse_constant=pytest.fail)
    assert record == {"step": 1, "loss": None, "grad_norm": None}
    assert "nan" in (shown := capsys.readouterr().out) and "inf" in shown


def test_an_earlier_run_is_set_aside_and_not_overwritten(tmp_path):
    (tmp_path / "state.pt").write_text("old")
    assert set_aside(str(tmp_path)) and os.listdir(tmp_path) == ["previous"]
    assert (tmp_path / "previous" / "state.pt").read_text() == "old"
    assert not set_aside(str(tmp_path)) and not set_aside(str(tmp_path / "nowhere"))


def test_a_state_of_another_model_is_refused(tmp_path):
    manager, net = CheckpointManager(str(tmp_path)), model()
    manager.save(1, net, [torch.optim.AdamW(net.parameters())], TOKENIZER, {})
    for other, kind in ((model(n_layer=2), torch.optim.AdamW), (model(), torch.optim.SGD)):
        with pytest.raises(ValueError, match="another model or optimizer.*config.json"):
            manager.load(other, [kind(other.parameters())])


def test_a_failing_dashboard_does_not_stop_the_run(tmp_path, capsys):
    class Broken:
        def log(self, *_, **__):
            raise DashboardError("connection lost")

        finish = log

    class DashboardError(Exception):
        """As wandb.Error is: no OSError, no RuntimeError."""

    logger = Logger(str(tmp_path), 10, ("loss",), Broken())
    logger.wandb_errors = (DashboardError,)
    logger.close()
    logger.wandb_run = Broken()
    logger.start()
    logger.log(1, {"loss": 1.0})
    logger.log(2, {"loss": 1.0})
    assert len(read_records(logger.path)) == 2 and capsys.readouterr().out.count("wandb failed (connection lost)") == 2


def test_numbers_are_short():
    assert [format_number(x) for x in (3, 1e-5, 0.0, 0.25, 31234.7)] == ["3", "1.0e-05", "0.0000", "0.2500", "31234"]
