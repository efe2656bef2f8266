"""Supervised training as a user starts it."""

import os

import pytest
import torch

from core.files.json_lines import read_records
from core.models import load_model
from core.pretrain import main
from tests.families import model_folder
from tests.tiny import jsonl, model, run_here, run_script, same, save, without_clock

pytestmark = pytest.mark.slow


def command(dataset, out_dir, *arguments):
    return [f"--dataset={dataset}", f"--out_dir={out_dir}", "--block_size=32", "--n_layer=1", "--n_embd=16",
            "--n_head=2", "--batch_size=8", "--lr_decay_iters=20", "--log_interval=5", "--eval_interval=10",
            "--save_interval=10", "--eval_batches=2", "--device=cpu", *arguments]


def launch(dataset, out_dir, *arguments, start=run_here):
    return start("core/pretrain.py", *command(dataset, out_dir, *arguments))


def pretrain(dataset, out_dir, *arguments, **settings):
    """The metrics of a run."""
    done = launch(dataset, out_dir, *arguments, **settings)
    assert done.returncode == 0, done.stderr
    return read_records(os.path.join(out_dir, "metrics.jsonl"))


@pytest.mark.parametrize("optimizer, start", [("muon", run_script), ("adamw", run_here)])
def test_pretraining_learns_and_resumes_bit_for_bit(dataset, tmp_path, optimizer, start):
    run = lambda name, *more, **settings: pretrain(dataset, tmp_path / name, f"--optimizer={optimizer}",
                                                   "--learning_rate=1e-2", *more, **settings)
    whole = run("whole", "--max_iters=20", start=start)
    run("cut", "--max_iters=10")
    resumed = run("cut", "--max_iters=20", "--resume=True")
    assert without_clock(whole) == without_clock(resumed)
    losses = [r["loss"] for r in whole if "loss" in r]
    assert losses[-1] < losses[0] - 0.3
    a, b = (load_model(str(tmp_path / name / "model.safetensors"))[0] for name in ("whole", "cut"))
    assert same(a, b)


@pytest.mark.parametrize("mode", ["realness", "cls", "language_model"])
def test_the_other_modes_train(dataset, tmp_path, mode):
    generator = save(tmp_path / "g.safetensors", model(n_layer=1, block_size=32))
    judging = ("--mode=sequence_scorer", f"--judge_head={mode}", f"--fill_checkpoints=['{generator}']",
               f"--init_from={generator}")
    records = pretrain(dataset, tmp_path / "out", "--max_iters=10",
                       *(("--mode=language_model",) if mode == "language_model" else judging))
    assert records[-1].keys() >= ({"val_loss"} if mode == "language_model" else {"auc/0", "pearson/0", "spearman/0"})
    net, _ = load_model(str(tmp_path / "out" / "model.safetensors"))
    assert net.config.mode == ("language_model" if mode == "language_model" else "sequence_scorer")


def test_an_earlier_run_is_set_aside_even_if_the_new_one_starts_from_its_model(dataset, tmp_path):
    pretrain(dataset, tmp_path / "out", "--max_iters=2")
    done = launch(dataset, tmp_path / "out", "--max_iters=1", f"--init_from={tmp_path}/out/model.safetensors")
    assert done.returncode == 0 and "held an earlier run, which is now in" in done.stdout, done.stderr
    assert load_model(str(tmp_path / "out" / "previous" / "1" / "model.safetensors"))[1]["step"] == 2
    assert load_model(str(tmp_path / "out" / "model.safetensors"))[1]["step"] == 1
    assert "masked_fill: " in done.stdout and "8 windows x 1 accumulation x 1 ranks = 8 per step" in done.stdout


@pytest.mark.parametrize("setting, message", [
    ("--mode=sequence_scorer", "fill_checkpoints is empty"), ("--dataset=nowhere", "dataset not prepared"),
    ("--resume=True", "resume=True, but"), ("--n_layers=2", "did you mean n_layer")])
def test_a_mistake_is_one_clear_line(dataset, tmp_path, setting, message):
    done = launch(dataset, tmp_path / "out", setting)
    errors = done.stderr.strip().split("\n")
    assert done.returncode in (1, 2) and len(errors) == 1 and message in errors[0], done.stderr


@pytest.fixture(scope="module")
def llama(tmp_path_factory):
    pytest.importorskip("transformers")
    return model_folder(tmp_path_factory.mktemp("models") / "llama", "llama", n_layer=1, scale=3.0)


def fine_tune(folder, data, out_dir, *arguments):
    """The metrics of a run that starts from a Hugging Face folder and a file of records, and nothing else."""
    main([f"--init_from={folder}", f"--dataset={data}", f"--out_dir={out_dir}", "--optimizer=adamw", "--batch_size=16",
          "--learning_rate=1e-2", "--block_size=64", "--warmup_iters=2", "--lr_decay_iters=30", "--log_interval=5",
          "--eval_interval=10", "--save_interval=10", "--eval_batches=2", "--device=cpu", *arguments])
    return read_records(os.path.join(out_dir, "metrics.jsonl"))


@pytest.mark.parametrize("rank", [0, 8], ids=["full", "lora"])
def test_a_hugging_face_model_is_fine_tuned_on_answers(llama, tmp_path, capsys, rank):
    """It learns, resumes bit for bit, and its folder is one that transformers, or peft, opens."""
    transformers = pytest.importorskip("transformers")
    records = [{"prompt": f"{a}+{b}=", "answer": "the fox"} for a in range(5, 13) for b in range(5, 13)]
    data, lora = jsonl(tmp_path / "my.jsonl", *records), [f"--lora_rank={rank}"] if rank else []
    whole = fine_tune(llama, data, tmp_path / "whole", "--max_iters=30", *lora)
    out = capsys.readouterr().out
    assert "language_model: " in out and "a completion ends with token" in out
    assert "the first prompt ends in '" in out
    fine_tune(llama, data, tmp_path / "cut", "--max_iters=20", *lora)
    cut = fine_tune(llama, data, tmp_path / "cut", "--max_iters=30", "--resume=True", *lora)
    assert without_clock(whole) == without_clock(cut)
    assert whole[-1]["val_accuracy"] == 1.0, "it learned what all records have in common"

    tokenizer = transformers.AutoTokenizer.from_pretrained(str(tmp_path / "whole" / "model"))
    ids = tokenizer("7+8=", return_tensors="pt").input_ids
    writes = lambda net: net.eval().generate(input_ids=ids, max_new_tokens=12, do_sample=False, pad_token_id=0)[
        0, ids.shape[1] :]
    base = transformers.AutoModelForCausalLM.from_pretrained(llama)
    assert tokenizer.decode(writes(base), skip_special_tokens=True) != "the fox"
    net = base if rank else transformers.AutoModelForCausalLM.from_pretrained(str(tmp_path / "whole" / "model"))
    if rank:
        peft = pytest.importorskip("peft")
        net = peft.PeftModel.from_pretrained(net, str(tmp_path / "whole" / "model"))
        assert "model.safetensors" not in os.listdir(tmp_path / "whole" / "model")
        state = torch.load(tmp_path / "cut" / "state.pt", weights_only=True)["model"]
        assert state and all("lora_" in name for name in state)
    written = writes(net)
    assert int(written[-1]) == tokenizer.eos_token_id and tokenizer.decode(written[:-1]) == "the fox"


def test_the_exported_folder_of_a_fine_tuned_model_is_in_float16(llama, tmp_path):
    transformers = pytest.importorskip("transformers")
    data = jsonl(tmp_path / "my.jsonl", *({"prompt": f"{a}", "completion": "fox"} for a in range(99)))
    fine_tune(llama, data, tmp_path / "out", "--max_iters=1", f"--export={tmp_path / 'shipped'}")
    shipped, own = (transformers.AutoModelForCausalLM.from_pretrained(str(tmp_path / name), dtype="auto").state_dict()
                    for name in ("shipped", "out/model"))
    assert all(p.dtype == torch.float16 and torch.equal(p, own[name].half()) for name, p in shipped.items())
    assert own["lm_head.weight"].dtype == torch.float32


@pytest.mark.parametrize("settings, message", [
    (["--dropout=0.1"], "dropout=0.1 is for new models"),
    (["--block_size=129"], "block_size=129 is larger than the 128"),
    (["--template=model"], "has no chat template"), (["--dataset=gone.jsonl"], "dataset=gone.jsonl does not exist"),
    (["--init_from=gone", "--mode=language_model"], "init_from=gone does not exist")])
def test_a_mistake_in_fine_tuning_is_one_clear_line(llama, tmp_path, settings, message):
    data = jsonl(tmp_path / "my.jsonl", *({"prompt": f"{a}", "completion": "fox"} for a in range(99)))
    with pytest.raises((ValueError, FileNotFoundError), match=message) as error:
        fine_tune(llama, data, tmp_path / "out", *settings)
    assert "\n" not in str(error.value) and not (tmp_path / "out").exists()
