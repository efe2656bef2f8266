"""Supervised training: losses and validation against loops and transformers, a resume to the last bit."""

import math
from functools import partial

import pytest
import torch

from core.data import unpack_batch
from core.errors import Mistake
from core.logger import Logger
from core.model import LANGUAGE_MODEL, MASKED_FILL, SEQUENCE_SCORER
from core.models import load_model
from core.optim import build_optimizers
from core.supervised.build import build_batches, build_data, build_model
from core.supervised.config import PretrainConfig
from core.supervised.judge_training import judge_report
from core.trainer import COLUMNS, Trainer, supervised_sums, training_step
from tests.families import folder_maker, write_sums
from tests.tiny import (
    TOKENIZER, Catcher, flat_gradient, jsonl, model, one_process, optimizer_state, read_records, run_here, run_script,
    same, same_momentum, save, without_clock)


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


def make_trainer(dataset, out_dir, **settings):
    c = PretrainConfig(**{"dataset": dataset, "out_dir": str(out_dir), "block_size": 32, "n_layer": 1, "n_embd": 16,
                          "n_head": 2, "batch_size": 4, "learning_rate": 1e-2, "lr_decay_iters": 6, "warmup_iters": 2,
                          "log_interval": 1, "eval_interval": 3, "save_interval": 3, "eval_batches": 2,
                          "dropout": 0.1, "device": "cpu", "max_iters": 6} | settings)
    dist = one_process()
    data = build_data(c, dist)
    batches, evaluation = build_batches(c, data, dist)
    return Trainer(build_model(c, data, dist), c, batches, evaluation, data.tokenizer,
                   Logger(c.out_dir, c.max_iters, COLUMNS), dist)


def train(dataset, out_dir, resume=False, **settings):
    trainer = make_trainer(dataset, out_dir, **settings)
    if resume:
        trainer.resume()
    trainer.run()
    return trainer


@pytest.fixture
def of_a_judge(tmp_path):
    """Settings of a judge that learns from two generators."""
    fillers = tuple(save(tmp_path / f"{seed}.safetensors", model(seed=seed)) for seed in (1, 2))
    return {"mode": SEQUENCE_SCORER, "fill_checkpoints": fillers, "gradient_accumulation_steps": 2}


RUNS = {
    "generator": {"optimizer": "muon"}, "language model": {"mode": LANGUAGE_MODEL, "optimizer": "adamw"},
    "judge": {"judge_head": "realness"}, "cls judge": {"judge_head": "cls", "optimizer": "adamw"}}


@pytest.mark.parametrize("kind", RUNS)
def test_a_resumed_run_equals_the_uninterrupted_one_bit_for_bit(dataset, tmp_path, of_a_judge, kind):
    settings = RUNS[kind] | (of_a_judge if "judge" in kind else {})
    whole = train(dataset, tmp_path / "whole", **settings)
    train(dataset, tmp_path / "cut", **settings, max_iters=3)
    resumed = train(dataset, tmp_path / "cut", **settings, resume=True)
    assert whole.step == resumed.step == 6 and same(whole.model, resumed.model)
    assert resumed.last_evaluation == whole.last_evaluation
    assert same_momentum(whole.optimizers, resumed.optimizers)
    of_whole, of_cut = (without_clock(read_records(tmp_path / name / "metrics.jsonl")) for name in ("whole", "cut"))
    assert of_whole == of_cut and len(of_whole) == 8, "six steps and two evaluations"


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["generator", "judge"])
def test_two_ranks_equal_one_with_twice_the_batch(dataset, tmp_path, of_a_judge, kind):
    settings = RUNS[kind] | (of_a_judge if kind == "judge" else {})
    settings |= {"dataset": dataset, "block_size": 32, "n_layer": 1, "n_embd": 16, "n_head": 2, "warmup_iters": 0,
                 "log_interval": 1, "eval_batches": 2, "max_iters": 3, "device": "cpu"}

    def launch(run, name, **more):
        more = settings | {"out_dir": tmp_path / name} | more
        done = run("core/pretrain.py", *(f"--{key}={value}" for key, value in more.items()))
        assert done.returncode == 0, done.stderr
        return [record for record in read_records(tmp_path / name / "metrics.jsonl") if "lr" in record]

    one = launch(run_here, "one", batch_size=8)
    two = launch(partial(run_script, ranks=2), "two", batch_size=4)
    for found, expected in zip(two, one, strict=True):
        for name in ("loss", "accuracy", "grad_norm"):
            assert found[name] == pytest.approx(expected[name], rel=1e-4)


@pytest.mark.parametrize("mode", [MASKED_FILL, LANGUAGE_MODEL])
def test_the_validation_numbers_are_those_of_a_loop_over_all_batches(dataset, tmp_path, mode):
    """The mean over all tokens of all batches, without dropout."""
    trainer = train(dataset, tmp_path, mode=mode, max_iters=2, dropout=0.5)
    data, losses, correct = build_data(trainer.config, one_process()), [], 0
    for step in range(2):
        input, target, mask = unpack_batch(data.batch("val", step), "cpu")
        for text, true, counts in zip(input, target, mask, strict=True):
            logits = trainer.model.eval()(text[None])[0].detach()
            for t in counts.nonzero().flatten().tolist():
                losses.append(float(logits[t].logsumexp(0) - logits[t, true[t]]))
                correct += int(logits[t].argmax() == true[t])
    expected = {"val_loss": sum(losses) / len(losses), "val_accuracy": correct / len(losses)}
    assert trainer.last_evaluation == pytest.approx(expected, rel=1e-5)
    assert read_records(tmp_path / "metrics.jsonl")[-1] == {"step": 2} | trainer.last_evaluation
    if mode == MASKED_FILL:
        assert len(losses) % 8, "texts have different numbers of masked tokens"


def test_every_generator_of_a_judge_has_its_own_report(dataset, tmp_path, of_a_judge):
    trainer = train(dataset, tmp_path / "out", **of_a_judge, max_iters=1)
    data, expected = build_data(trainer.config, one_process()), {}
    for i, path in enumerate(of_a_judge["fill_checkpoints"]):
        filler, _ = load_model(path)
        report = judge_report(trainer.model.eval(), data, filler, one_process(), batches=2)
        expected |= {f"{name}/{i}": value for name, value in report.items()}
    assert trainer.last_evaluation == expected and len(expected) == 10
    assert expected["mean_score/0"] != expected["mean_score/1"]


def test_a_step_that_is_not_finite_is_skipped_and_the_next_one_is_taken():
    net = model()
    optimizers = build_optimizers(net, PretrainConfig(learning_rate=1e-2))
    good, _ = micro_batches()
    input, target, mask = good
    weights = mask.float()
    weights[1, 0] = torch.inf
    before = {name: p.clone() for name, p in net.weights().items()}
    metrics = training_step(net, [good, (input, target, weights)], optimizers, 1.0, one_process())
    assert metrics["skipped_steps"] == 1 and not math.isfinite(metrics["loss"])
    assert all(torch.equal(p, before[name]) for name, p in net.weights().items()) and not optimizer_state(optimizers)
    metrics = training_step(net, [good], optimizers, 1.0, one_process())
    assert metrics["skipped_steps"] == 0 and math.isfinite(metrics["loss"])
    assert not torch.equal(net.weights()["head.weight"], before["head.weight"])


def test_a_run_whose_steps_are_all_skipped_ends_and_counts_them(dataset, tmp_path):
    trainer = make_trainer(dataset, tmp_path, max_bad_steps=3, max_iters=9)
    batches = trainer.batches

    def spoiled(split, step, micro):
        input, target, mask = batches(split, step, micro)
        return input, target, mask * (torch.inf if step > 0 else 1.0)

    trainer.batches = spoiled
    with pytest.raises(Mistake, match="max_bad_steps=3"):
        trainer.run()
    steps = [record for record in read_records(tmp_path / "metrics.jsonl") if "lr" in record]
    assert trainer.step == 4 and [record["skipped_steps"] for record in steps] == [0, 1, 2]


@pytest.mark.parametrize("start, mode", [
    (MASKED_FILL, MASKED_FILL), (LANGUAGE_MODEL, MASKED_FILL), (MASKED_FILL, SEQUENCE_SCORER)])
def test_a_new_model_starts_from_the_weights_of_another_but_for_an_output_layer_of_another_kind(
        dataset, tmp_path, of_a_judge, start, mode):
    given = model(start, seed=7)
    path, more = save(tmp_path / "start.safetensors", given), of_a_judge if mode == SEQUENCE_SCORER else {}
    size = {"n_layer": 1, "n_embd": 16, "n_head": 2, "tied": False, "mode": mode, "dropout": 0.0}
    fresh = make_trainer(dataset, tmp_path, **more | size).model
    found = make_trainer(dataset, tmp_path, **more | size, init_from=path).model
    for name, p in found.weights().items():
        source = given if name != "head.weight" or mode == start else fresh
        assert torch.equal(p, source.weights()[name]), name
    assert found.mode == mode and not same(found, fresh)


def test_the_export_is_the_final_model_in_half_precision(dataset, tmp_path):
    trainer = train(dataset, tmp_path / "out", export=str(tmp_path / "shipped.safetensors"))
    shipped, facts = load_model(str(tmp_path / "shipped.safetensors"))
    for name, p in trainer.model.weights().items():
        assert torch.equal(shipped.weights()[name], p.half().float()), name
    assert facts == {"step": 6} | trainer.last_evaluation


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

    taught = 3 * torch.randn(2, 12)  # log-odds of a teacher
    distance = [abs(float(scorer(shown)[i, t].detach() - taught[i, t])) for i in range(2) for t in range(12)]
    loss, correct, count = supervised_sums(scorer, shown, taught, mask)
    assert float(loss.detach()) == pytest.approx(sum(x * x / 4 if x < 2 else x - 1 for x in distance), rel=1e-4)
    assert count == 24 and correct == sum((p > 0.5) == (taught.sigmoid() > 0.5)).sum()

    scorer = model(SEQUENCE_SCORER, judge_head="cls")
    with_cls = torch.cat((torch.full((2, 1), 98), shown), 1)
    by_hand = 0.0
    for i in range(2):
        x = sum(int(a != b) for a, b in zip(shown[i], target[i], strict=True)) / 12
        by_hand = by_hand + (scorer(with_cls)[i].sigmoid() - (x**4 - 2 * x**3 + 2 * x)) ** 2
    torch.testing.assert_close(supervised_sums(scorer, with_cls, target, mask)[0], by_hand)


def test_accuracy_counts_what_was_predicted_right():
    """Of tokens by their weights, of a judge's positions on their side of one half, of a cls judge within a tenth."""
    tokens, target, weights = torch.randint(0, 96, (3, 12)), torch.randint(0, 96, (3, 12)), torch.rand(3, 12)
    weights = weights.masked_fill(weights < 0.3, 0.0)
    net = model()
    target[:, ::2] = net(tokens).argmax(-1)[:, ::2]
    loss, correct, count = supervised_sums(net, tokens, target, weights)
    counted = [(i, t) for i in range(3) for t in range(12) if weights[i, t] > 0]
    hits = [weights[i, t] for i, t in counted if net(tokens)[i, t].argmax() == target[i, t]]
    assert float(correct) == pytest.approx(float(sum(hits)), rel=1e-5) and 0 < len(hits) < len(counted) < 36
    surprise = [-weights[i, t] * net(tokens)[i, t].log_softmax(0)[target[i, t]] for i, t in counted]
    assert float(loss.detach()) == pytest.approx(float(sum(surprise).detach()), rel=1e-5)
    assert float(count) == pytest.approx(float(weights.sum()), rel=1e-5)

    shown = torch.where(weights > 0, tokens, target)
    scorer = model(SEQUENCE_SCORER)
    _, correct, count = supervised_sums(scorer, shown, target, weights)
    hits = [bool(scorer(shown)[i, t].sigmoid() > 0.5) == bool(shown[i, t] == target[i, t])
            for i in range(3) for t in range(12)]
    assert int(correct) == sum(hits) and 0 < sum(hits) < int(count) == 36

    texts = torch.randint(0, 96, (40, 12))
    with_cls = torch.cat((torch.full((40, 1), TOKENIZER.cls_token_id), texts), 1)
    true = torch.where(torch.rand(40, 12) < torch.rand(40, 1), 96, texts)  # of each text another share is replaced
    scorer = model(SEQUENCE_SCORER, judge_head="cls", scale=2.0)
    _, correct, count = supervised_sums(scorer, with_cls, true, None)
    hits, shares = 0, texts.ne(true).float().mean(1).tolist()
    for x, estimate in zip(shares, scorer(with_cls).sigmoid().tolist(), strict=True):
        hits += abs(estimate - (x**4 - 2 * x**3 + 2 * x)) < 0.1
    assert int(correct) == hits and 0 < hits < int(count) == 40


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
