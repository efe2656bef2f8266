"""Supervised training: losses against loops and transformers, exact step counts, a resume to the last bit."""


import pytest
import torch

from core.logger import Logger
from core.model import SEQUENCE_SCORER
from core.supervised.build import build_batches, build_data, build_model
from core.supervised.config import PretrainConfig
from core.trainer import COLUMNS, Trainer, supervised_sums, training_step
from tests.families import folder_maker, write_sums
from tests.tiny import (
    Catcher, flat_gradient, jsonl, model, one_process, read_records, run_here, same,
    same_momentum, without_clock)


def micro_batches(rows=3):
    """Two micro-batches (input, target, mask)."""
    masks = [torch.rand(rows, 12) < 0.5 for _ in range(2)]
    for mask in masks:
        mask[:, 0] = True
    return [(torch.randint(0, 96, (rows, 12)), torch.randint(0, 96, (rows, 12)), mask) for mask in masks]


def test_the_gradient_is_that_of_the_mean_loss_over_all_micro_batches():
    net, parts, found = model(), micro_batches(), []
    together = [tuple(torch.cat(pair) for pair in zip(*parts, strict=True))]
    for cut in (parts, together):
        catcher = Catcher(net)
        metrics = training_step(net, cut, [catcher], 0.0, one_process())
        found.append((catcher.gradient, metrics))
    input, target, mask = together[0]
    loss = torch.nn.functional.cross_entropy(net(input)[mask], target[mask])
    loss.backward()
    for gradient, metrics in found:
        assert (gradient - flat_gradient(net)).norm() < 1e-4 * gradient.norm()
        assert metrics["loss"] == pytest.approx(float(loss.detach()), rel=1e-5)
        assert metrics["grad_norm"] == pytest.approx(float(flat_gradient(net).norm()), rel=1e-4)
        assert metrics["accuracy"] == pytest.approx(found[0][1]["accuracy"])


def train(dataset, out_dir, resume=False, **settings):
    c = PretrainConfig(**{"dataset": dataset, "out_dir": str(out_dir), "block_size": 32, "n_layer": 1, "n_embd": 16,
                          "n_head": 2, "batch_size": 4, "learning_rate": 1e-2, "lr_decay_iters": 6, "warmup_iters": 2,
                          "log_interval": 1, "eval_interval": 3, "save_interval": 3, "eval_batches": 2,
                          "dropout": 0.1, "device": "cpu", "max_iters": 6} | settings)
    dist = one_process()
    data = build_data(c, dist)
    batches, evaluation = build_batches(c, data, dist)
    trainer = Trainer(build_model(c, data, dist), c, batches, evaluation, data.tokenizer,
                      Logger(c.out_dir, c.max_iters, COLUMNS), dist)
    if resume:
        trainer.resume()
    trainer.run()
    return trainer


def test_a_resumed_run_equals_the_uninterrupted_one_bit_for_bit(dataset, tmp_path):
    whole = train(dataset, tmp_path / "whole", optimizer="muon")
    train(dataset, tmp_path / "cut", optimizer="muon", max_iters=3)
    resumed = train(dataset, tmp_path / "cut", optimizer="muon", resume=True)
    assert whole.step == resumed.step == 6 and same(whole.model, resumed.model)
    assert resumed.last_evaluation == whole.last_evaluation
    assert same_momentum(whole.optimizers, resumed.optimizers)
    of_whole, of_cut = (without_clock(read_records(tmp_path / name / "metrics.jsonl")) for name in ("whole", "cut"))
    assert of_whole == of_cut and len(of_whole) == 8, "six steps and two evaluations"


def test_supervised_losses_against_loops():
    tokens, target = torch.randint(0, 96, (2, 12)), torch.randint(0, 96, (2, 12))
    mask = torch.rand(2, 12) < 0.5
    mask[:, 3] = True
    net = model()
    loss, _, count = supervised_sums(net, tokens, target, mask)
    by_hand = -sum(net(tokens)[i, t].log_softmax(-1)[target[i, t]] for i in range(2) for t in range(12) if mask[i, t])
    torch.testing.assert_close(loss, by_hand)
    assert count == mask.sum()

    scorer = model(SEQUENCE_SCORER)
    shown = torch.where(mask, tokens, target)
    p = scorer(shown).sigmoid()
    by_hand = -sum((p[i, t] if shown[i, t] == target[i, t] else 1 - p[i, t]).log() for i in range(2) for t in range(12))
    loss, _, count = supervised_sums(scorer, shown, target, mask)
    torch.testing.assert_close(loss, by_hand, rtol=1e-4, atol=1e-4)
    assert count == 24

    scorer = model(SEQUENCE_SCORER, judge_head="cls")
    with_cls = torch.cat((torch.full((2, 1), 98), shown), 1)
    by_hand = 0.0
    for i in range(2):
        x = sum(int(a != b) for a, b in zip(shown[i], target[i], strict=True)) / 12
        by_hand = by_hand + (scorer(with_cls)[i].sigmoid() - (x**4 - 2 * x**3 + 2 * x)) ** 2
    torch.testing.assert_close(supervised_sums(scorer, with_cls, target, mask)[0], by_hand)


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """family -> the folder of a small random Hugging Face model."""
    pytest.importorskip("transformers")
    return folder_maker(tmp_path_factory.mktemp("families"))


@pytest.mark.parametrize("rank", [0, 4], ids=["full", "lora"])
def test_a_hugging_face_model_learns_the_completions_with_the_loss_of_transformers(folder, tmp_path, rank):
    """One batch: cross-entropy of completion and end alone, as transformers has it from labels, and its gradient."""
    import transformers
    if rank:
        pytest.importorskip("peft")
    c = PretrainConfig(dataset=write_sums(tmp_path / "sums.jsonl"), block_size=32, batch_size=3, device="cpu",
                       init_from=folder("llama"), lora_rank=rank)
    data = build_data(c, one_process())
    net = build_model(c, data, one_process())
    input, target, mask = build_batches(c, data, one_process())[0]("train", 0)
    total, _, count = supervised_sums(net, input, target, mask)
    found = total / count
    found.backward()
    theirs = transformers.AutoModelForCausalLM.from_pretrained(folder("llama")).eval()
    labels = torch.where(mask, target, -100)                                         # (B, T) of the next token
    labels = torch.cat((torch.full_like(labels[:, :1], -100), labels), 1)
    loss = theirs(torch.cat((input, target[:, -1:]), 1), labels=labels).loss
    loss.backward()
    torch.testing.assert_close(found, loss, rtol=1e-5, atol=0)
    trained = {name: p.grad for name, p in net.net.named_parameters() if p.requires_grad}
    assert len(trained) > 8 and all("lora_" in name for name in trained) == bool(rank)
    for name, p in () if rank else theirs.named_parameters():
        torch.testing.assert_close(trained[name], p.grad, rtol=1e-4, atol=1e-5)


@pytest.mark.slow
@pytest.mark.parametrize("rank", [0, 8], ids=["full", "lora"])
def test_a_hugging_face_model_is_fine_tuned_resumed_bit_for_bit_and_opened_by_its_library(folder, tmp_path, rank):
    transformers = pytest.importorskip("transformers")
    records = [{"prompt": f"{a}+{b}=", "answer": "the fox"} for a in range(5, 13) for b in range(5, 13)]
    llama = folder("llama")
    settings = {"dataset": jsonl(tmp_path / "my.jsonl", *records), "block_size": 64, "batch_size": 16,
                "lr_decay_iters": 30, "warmup_iters": 2, "log_interval": 5, "eval_interval": 10, "eval_batches": 2,
                "device": "cpu", "init_from": llama, "optimizer": "adamw", "learning_rate": 1e-2, "lora_rank": rank}

    def launch(name, **more):
        more = settings | {"out_dir": tmp_path / name} | more
        done = run_here("core/pretrain.py", *(f"--{key}={value}" for key, value in more.items()))
        assert done.returncode == 0, done.stderr
        return without_clock(read_records(tmp_path / name / "metrics.jsonl"))

    whole = launch("whole", max_iters=30)
    launch("cut", max_iters=20)
    assert launch("cut", max_iters=30, resume=True) == whole
    assert whole[-1]["val_accuracy"] == 1.0, "it learned what all records have in common"
    auto, path = transformers.AutoModelForCausalLM, str(tmp_path / "cut" / "model")
    if rank:
        net = pytest.importorskip("peft").PeftModel.from_pretrained(auto.from_pretrained(llama), path)
    else:
        net = auto.from_pretrained(path)
    tokenizer = transformers.AutoTokenizer.from_pretrained(path)
    ids = tokenizer("7+8=", return_tensors="pt").input_ids
    found = net.eval().generate(input_ids=ids, max_new_tokens=12, do_sample=False, pad_token_id=0)[0, ids.shape[1] :]
    assert tokenizer.decode(found) == "the fox" + tokenizer.eos_token
