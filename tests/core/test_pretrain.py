"""Supervised training as a user starts it."""

import os

import pytest
import torch

from core.models import load_model
from core.pretrain import main
from tests.families import model_folder
from tests.tiny import ROOT, jsonl, model, read_records, run_here, save, without_clock

pytestmark = pytest.mark.slow


def launch(dataset, out_dir, *arguments, start=run_here):
    return start("core/pretrain.py", f"--dataset={dataset}", f"--out_dir={out_dir}", "--block_size=32", "--n_layer=1",
                 "--n_embd=16", "--n_head=2", "--batch_size=8", "--lr_decay_iters=20", "--log_interval=5",
                 "--eval_interval=10", "--save_interval=10", "--eval_batches=2", "--device=cpu", *arguments)


def pretrain(dataset, out_dir, *arguments, **settings):
    """The metrics of a run, and the model that it wrote."""
    done = launch(dataset, out_dir, *arguments, **settings)
    assert done.returncode == 0, done.stderr
    return read_records(out_dir / "metrics.jsonl"), load_model(str(out_dir / "model.safetensors"))[0]


@pytest.mark.parametrize("head", ["realness", "cls", None])
def test_the_other_modes_train(dataset, tmp_path, head):
    mode, keys, more = "language_model", {"val_loss"}, ()
    if head is not None:
        path = save(tmp_path / "g.safetensors", model(n_layer=1, block_size=32))
        more = (f"--judge_head={head}", f"--fill_checkpoints=['{path}']", f"--init_from={path}")
        mode, keys = "sequence_scorer", {"auc/0", "pearson/0", "spearman/0"}
    records, net = pretrain(dataset, tmp_path / "out", "--max_iters=2", f"--mode={mode}", *more)
    assert records[-1].keys() >= keys and net.config.mode == mode


def test_a_missing_dataset_that_has_a_prepare_py_is_built_and_a_dry_run_says_so(tmp_path):
    (tmp_path / "sums").mkdir()
    (tmp_path / "sums" / "prepare.py").write_text("import os, runpy, sys\n"
        f"sys.argv[1:] = ['--problems=60', '--digits=1', '--working=False', *sys.argv[1:]]\n"
        f"runpy.run_path({os.path.join(ROOT, 'data/arithmetic/prepare.py')!r}, run_name='__main__')\n")
    arguments = "--mode=language_model", "--max_iters=1"
    done = launch(tmp_path / "sums", tmp_path / "out", *arguments, "--dry_run")
    assert done.returncode == 0 and "would be built by" in done.stdout and "nothing was built or trained" in done.stdout, done.stderr
    assert not (tmp_path / "sums" / "meta.json").exists()
    done = launch(tmp_path / "sums", tmp_path / "out", *arguments)
    assert done.returncode == 0 and "meta.json is missing; building it with" in done.stdout, done.stderr
    assert (tmp_path / "out" / "model.safetensors").exists()


@pytest.fixture(scope="module")
def llama(tmp_path_factory):
    pytest.importorskip("transformers")
    return model_folder(tmp_path_factory.mktemp("models") / "llama", "llama", n_layer=1, scale=3.0)


def fine_tune(folder, data, out_dir, *arguments):
    """The metrics of a run that starts from a Hugging Face folder and a file of records, and nothing else."""
    main([f"--init_from={folder}", f"--dataset={data}", f"--out_dir={out_dir}", "--optimizer=adamw", "--batch_size=16",
          "--learning_rate=1e-2", "--block_size=64", "--warmup_iters=2", "--lr_decay_iters=30", "--log_interval=5",
          "--eval_interval=10", "--save_interval=10", "--eval_batches=2", "--device=cpu", *arguments])
    return read_records(out_dir / "metrics.jsonl")


@pytest.mark.parametrize("rank", [0, 8], ids=["full", "lora"])
def test_a_hugging_face_model_is_fine_tuned_on_answers(llama, tmp_path, capsys, rank):
    """It learns, resumes bit for bit, and its folder is one that transformers, or peft, opens. Its export is in
    float16."""
    transformers = pytest.importorskip("transformers")
    auto, folder = transformers.AutoModelForCausalLM, str(tmp_path / "cut" / "model")
    records = [{"prompt": f"{a}+{b}=", "answer": "the fox"} for a in range(5, 13) for b in range(5, 13)]
    data = jsonl(tmp_path / "my.jsonl", *records)
    more = (f"--lora_rank={rank}",) if rank else (f"--export={tmp_path / 'shipped'}",)
    whole = fine_tune(llama, data, tmp_path / "whole", "--max_iters=30", *more)
    out = capsys.readouterr().out
    assert "language_model: " in out and "the first prompt ends in '" in " ".join(out.split())
    fine_tune(llama, data, tmp_path / "cut", "--max_iters=20", *more)
    cut = fine_tune(llama, data, tmp_path / "cut", "--max_iters=30", "--resume=True", *more)
    assert without_clock(whole) == without_clock(cut)
    assert whole[-1]["val_accuracy"] == 1.0, "it learned what all records have in common"
    if rank:
        net = pytest.importorskip("peft").PeftModel.from_pretrained(auto.from_pretrained(llama), folder)
        state = torch.load(tmp_path / "cut" / "state.pt", weights_only=True)["model"]
        assert state and all("lora_" in name for name in state)
    else:
        net = auto.from_pretrained(folder)
        shipped = auto.from_pretrained(str(tmp_path / "shipped"), dtype="auto").state_dict()
        assert all(torch.equal(p, net.state_dict()[name].half()) for name, p in shipped.items())
    tokenizer = transformers.AutoTokenizer.from_pretrained(folder)
    ids = tokenizer("7+8=", return_tensors="pt").input_ids
    found = net.eval().generate(input_ids=ids, max_new_tokens=12, do_sample=False, pad_token_id=0)[0, ids.shape[1] :]
    assert tokenizer.decode(found) == "the fox" + tokenizer.eos_token
