"""What a supervised run is built from, and the settings that do not fit together."""

import pytest
import torch

from core.model import LANGUAGE_MODEL, MASKED_FILL, SEQUENCE_SCORER, freeze
from core.models import load_model, load_tokenizer, save_model
from core.prompts import PromptConsumer
from core.supervised import build
from core.supervised.build import build_batches, build_data, build_model
from core.supervised.config import PretrainConfig
from core.supervised.loss import supervised_sums
from tests.families import adapter_folder, folder_maker, write_prose, write_sums
from tests.tiny import CAUSAL, TOKENIZER, causal_model, jsonl, model, one_process, same, save

DIST = one_process()


def config(dataset, **settings):
    return PretrainConfig(**{"dataset": dataset, "block_size": 32, "n_layer": 1, "n_embd": 16, "n_head": 2,
                             "batch_size": 3, "eval_batches": 2, "device": "cpu"} | settings)


def built(dataset, **settings):
    c = config(dataset, **settings)
    data = build_data(c, DIST)
    return c, data, build_model(c, data, DIST)


@torch.no_grad()
def test_a_dataset_of_prompts_trains_a_language_model_alone(prompts, tmp_path):
    with pytest.raises(ValueError, match="has prompts to complete: set mode='language_model'"):
        build_data(config(prompts), DIST)
    c, data, net = built(prompts, mode=LANGUAGE_MODEL)
    assert isinstance(data, PromptConsumer) and net.config.vocab_size == CAUSAL.vocab_size
    batches, evaluate = build_batches(c, data, DIST)
    input, target, mask = batches("train", 0)
    assert mask.any(1).all() and not mask.all() and input.shape == target.shape == mask.shape
    assert evaluate(net)["val_loss"] > 0
    folder = tmp_path / "lacking"
    folder.mkdir()
    for name in ("meta.json", "prompts.jsonl"):
        text = open(f"{prompts}/{name}").read()
        (folder / name).write_text(text.replace('"completion"', '"note"'))
    with pytest.raises(ValueError, match="no completion, which supervised training needs"):
        build_data(config(str(folder), mode=LANGUAGE_MODEL), DIST)


@pytest.mark.parametrize("mode", [MASKED_FILL, LANGUAGE_MODEL, SEQUENCE_SCORER])
def test_windows_are_those_of_the_mode(dataset, mode):
    _, data, net = built(dataset, mode=mode)
    batch = data.batch("train", 0)
    if mode == LANGUAGE_MODEL:
        assert batch["mask"].all() and (batch["input"][:, 1:] == batch["target"][:, :-1]).all()
    else:
        assert (batch["input"][batch["mask"]] == TOKENIZER.mask_token_id).all()
        assert (batch["input"] == batch["target"])[~batch["mask"]].all()
    assert net.config.mode == mode and net.config.block_size == 32 + (mode == SEQUENCE_SCORER), "a judge may read CLS"


def test_a_new_model_depends_on_the_seed_alone(dataset):
    a, b, c = (built(dataset, seed=seed)[2] for seed in (1, 1, 2))
    assert same(a, b) and not same(a, c)


def test_init_from_gives_its_weights_and_another_mode_a_new_output_layer(dataset, tmp_path):
    path = save(tmp_path / "g.safetensors", model(seed=4, block_size=32))
    start, _ = load_model(path)
    _, _, again = built(dataset, init_from=path, tied=False)
    assert same(start, again)
    _, _, scorer = built(dataset, init_from=path, mode=SEQUENCE_SCORER, tied=False)
    weights = scorer.state_dict()
    assert weights["head.weight"].shape == (1, 16)
    for name, x in start.state_dict().items():
        assert name == "head.weight" or torch.equal(weights[name], x)


@pytest.mark.parametrize("setting, found", [
    ("n_layer=2", "n_layer=1"), ("n_head=1", "n_head=2"), ("n_embd=32", "n_embd=16"), ("tied=True", "tied=False")])
def test_an_init_from_of_another_shape_is_refused(dataset, tmp_path, setting, found):
    path = save(tmp_path / "g.safetensors", model(block_size=32))
    name, value = setting.split("=")
    changes = {"tied": False} | {name: value == "True" if name == "tied" else int(value)}
    with pytest.raises(ValueError, match=f"init_from={path} has {found}, the config {value}; make them equal"):
        built(dataset, init_from=path, **changes)


def test_an_init_from_of_another_vocabulary_is_refused(dataset, tmp_path):
    path = str(tmp_path / "c.safetensors")
    save_model(path, causal_model(), CAUSAL)
    with pytest.raises(ValueError, match="init_from=.* has another vocabulary"):
        built(dataset, init_from=path)


@torch.no_grad()
def test_evaluation_is_the_mean_over_the_masked_tokens_of_validation(dataset):
    c, data, net = built(dataset)
    batches, evaluate = build_batches(c, data, DIST)
    losses, right = [], []
    for step in range(c.eval_batches):
        input, target, mask = batches("val", step)
        for i, t in mask.nonzero().tolist():
            logits = net(input[i : i + 1])[0, t]
            losses.append(float(-logits.log_softmax(-1)[target[i, t]]))
            right.append(float(logits.argmax() == target[i, t]))
    found = evaluate(net)
    assert found["val_loss"] == pytest.approx(sum(losses) / len(losses), rel=1e-4)
    assert found["val_accuracy"] == pytest.approx(sum(right) / len(right))


def test_a_judge_needs_generators_to_learn_from_and_reports_on_each(dataset, tmp_path):
    c, data, net = built(dataset, mode=SEQUENCE_SCORER)
    with pytest.raises(ValueError, match="fill_checkpoints is empty: name the generators"):
        build_batches(c, data, DIST)
    paths = [save(tmp_path / f"{i}.safetensors", model(seed=i)) for i in (0, 1)]
    batches, evaluate = build_batches(config(dataset, mode=SEQUENCE_SCORER, fill_checkpoints=tuple(paths)), data, DIST)
    filled, target, mask = batches("train", 0)
    assert torch.equal(filled[~mask], target[~mask]) and not torch.equal(filled, target)
    report = evaluate(freeze(net))
    assert set(report) == {f"{name}/{i}" for name in ("pearson", "spearman", "auc", "token_auc", "mean_score")
                           for i in (0, 1)}
    judge = save(tmp_path / "judge.safetensors", model(SEQUENCE_SCORER))
    with pytest.raises(ValueError, match="fill_checkpoints=.* has mode sequence_scorer, but masked_fill is needed"):
        build_batches(config(dataset, mode=SEQUENCE_SCORER, fill_checkpoints=(judge,)), data, DIST)


SUMS = [{"prompt": f"{a}+{b}=", "answer": str(a + b)} for a in range(5, 13) for b in range(5, 13)]


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """family -> the folder of a small random Hugging Face model."""
    pytest.importorskip("transformers")
    return folder_maker(tmp_path_factory.mktemp("families"))


def written(data, step=0):
    """The texts that a batch of training examples teaches, with the ids of their ends."""
    batch = data.batch("train", step)
    rows = [target[mask].tolist() for target, mask in zip(batch["target"], batch["mask"], strict=True)]
    return [data.tokenizer.decode(row) for row in rows], {row[-1] for row in rows}


def test_an_answer_is_what_a_model_learns_to_write_unless_there_is_a_completion(folder, tmp_path):
    records = [*SUMS, {"prompt": "1+1=", "answer": "2", "completion": "two", "split": "train"},
               {"prompt": "1+2=", "answer": 3, "split": "train"}]
    data = build_data(config(jsonl(tmp_path / "sums.jsonl", *records), init_from=folder("llama")), DIST)
    found = {r["prompt"]: r["completion"] for split in ("train", "val") for r in data.records[split]}
    assert found == {r["prompt"]: r["answer"] for r in SUMS} | {"1+1=": "two", "1+2=": "3"}
    texts, ends = written(data)
    assert set(texts) <= set(found.values()) and ends == {data.tokenizer.stop_token_id}


def test_a_record_without_anything_to_learn_is_refused_with_its_line(folder, tmp_path):
    path = jsonl(tmp_path / "sums.jsonl", *SUMS[:3], {"prompt": "1+1="}, *SUMS[3:])
    with pytest.raises(ValueError, match="sums.jsonl, line 4: no completion, which supervised training needs"):
        build_data(config(path, init_from=folder("llama")), DIST)


@torch.no_grad()
def test_a_native_model_brings_its_tokenizer_to_a_file_of_records(tmp_path):
    path, data = str(tmp_path / "g.safetensors"), jsonl(tmp_path / "sums.jsonl", *SUMS)
    save_model(path, causal_model(block_size=32), CAUSAL)
    c, data, net = built(data, init_from=path, mode=LANGUAGE_MODEL, tied=False)
    assert data.tokenizer.description() == CAUSAL.description() and same(net, load_model(path)[0])
    assert build_batches(c, data, DIST)[1](net)["val_loss"] > 0
    with pytest.raises(ValueError, match="has prompts but no tokenizer"):
        build_data(config(str(tmp_path / "sums.jsonl"), mode=LANGUAGE_MODEL), DIST)


@pytest.mark.parametrize("rank", [0, 4], ids=["full", "lora"])
def test_a_hugging_face_model_learns_the_completions_with_the_loss_of_transformers(folder, tmp_path, rank):
    """One batch: cross-entropy of completion and end alone, as transformers has it from labels, and its gradient."""
    import transformers
    if rank:
        pytest.importorskip("peft")
    c, data, net = built(write_sums(tmp_path / "sums.jsonl"), init_from=folder("llama"), lora_rank=rank)
    input, target, mask = build_batches(c, data, DIST)[0]("train", 0)
    sums = supervised_sums(net, input, target, mask)
    (sums["loss"] / sums["count"]).backward()
    theirs = transformers.AutoModelForCausalLM.from_pretrained(folder("llama")).eval()
    labels = torch.where(mask, target, -100)                                         # (B, T) of the next token
    labels = torch.cat((torch.full_like(labels[:, :1], -100), labels), 1)
    whole = torch.cat((input, target[:, -1:]), 1)
    loss = theirs(whole, labels=labels).loss
    loss.backward()
    torch.testing.assert_close(sums["loss"] / sums["count"], loss, rtol=1e-5, atol=0)
    assert sums["count"] == mask.sum()
    trained = {name: p.grad for name, p in net.net.named_parameters() if p.requires_grad}
    assert len(trained) > 8 and all("lora_" in name for name in trained) == bool(rank)
    if not rank:
        for name, p in theirs.named_parameters():
            torch.testing.assert_close(trained[name], p.grad, rtol=1e-4, atol=1e-5)


def test_the_mode_is_that_of_the_folder(folder, tmp_path):
    _, data, net = built(write_sums(tmp_path / "sums.jsonl"), init_from=folder("gpt2"))  # the default is masked_fill
    assert net.mode == LANGUAGE_MODEL and isinstance(data, PromptConsumer)
    prose = write_prose(tmp_path / "prose", load_tokenizer(folder("bert")))
    c, data, net = built(prose, init_from=folder("bert"), mode=LANGUAGE_MODEL)
    batch = data.batch("train", 0)
    assert net.mode == MASKED_FILL and (batch["input"][batch["mask"]] == data.tokenizer.mask_token_id).all()
    assert build_batches(c, data, DIST)[1](net)["val_loss"] > 0
    with pytest.raises(ValueError, match="has prompts to complete: use a causal model"):
        build_data(config(write_sums(tmp_path / "sums.jsonl"), init_from=folder("bert")), DIST)


def test_a_detector_of_replaced_tokens_learns_from_the_fills_of_generators(folder, tmp_path):
    prose = write_prose(tmp_path / "prose", load_tokenizer(folder("bert")))
    c, data, net = built(prose, init_from=folder("electra_judge"), fill_checkpoints=(folder("bert"),))
    batches, evaluate = build_batches(c, data, DIST)
    filled, target, mask = batches("train", 0)
    assert torch.equal(filled[~mask], target[~mask]) and not torch.equal(filled, target)
    assert not (filled == data.tokenizer.mask_token_id).any(), "it reads filled texts, not masks"
    sums = supervised_sums(net, filled, target, mask)
    logits = net.net(torch.cat([filled.new_tensor(data.tokenizer.start_ids).expand(3, -1), filled,
                                filled.new_tensor(data.tokenizer.end_ids).expand(3, -1)], 1)).logits[:, 1:-1]
    replaced = (filled != target).float()
    theirs = torch.nn.functional.binary_cross_entropy_with_logits(logits, replaced, reduction="sum")
    torch.testing.assert_close(sums["loss"], theirs, rtol=1e-5, atol=0)
    assert set(evaluate(freeze(net))) == {"pearson/0", "spearman/0", "auc/0", "token_auc/0", "mean_score/0"}


@pytest.mark.parametrize("settings, message", [
    ({"dropout": 0.1}, "dropout=0.1 is for new models; set dropout=0.0 with init_from="),
    ({"block_size": 129}, "block_size=129 is larger than the 128 of init_from="),
    ({"lora_rank": 4, "lora_targets": ("nothing",)}, "lora_targets=.*does not fit the model")], ids=str)
def test_settings_that_do_not_suit_a_hugging_face_model_are_refused(folder, prompts, settings, message):
    pytest.importorskip("peft")
    with pytest.raises(ValueError, match=message) as error:
        built(prompts, init_from=folder("llama"), **settings)
    assert "\n" not in str(error.value)


def test_the_learning_rates_of_new_models_are_refused_for_large_pretrained_ones(folder, prompts, monkeypatch):
    built(prompts, init_from=folder("llama"), learning_rate=3e-3)
    monkeypatch.setattr(build, "LARGE_MODEL", 1000)
    with pytest.raises(ValueError, match="learning_rate=0.003 .* set optimizer='adamw', learning_rate=1e-5"):
        built(prompts, init_from=folder("llama"), learning_rate=3e-3)
    built(prompts, init_from=folder("llama"), learning_rate=1e-4)


def test_an_export_never_replaces_a_model_of_another_kind(folder, prompts, tmp_path):
    pytest.importorskip("peft")
    adapter = adapter_folder(tmp_path / "adapter", folder("llama"))
    for path, rank in ((adapter, 0), (folder("llama"), 4)):
        with pytest.raises(ValueError, match=f"export={path} holds an? (adapter|model) .*name another"):
            built(prompts, init_from=folder("llama"), lora_rank=rank, export=path)


def test_an_adapter_is_not_a_model_to_put_another_adapter_on(folder, prompts, tmp_path):
    pytest.importorskip("peft")
    adapter = adapter_folder(tmp_path / "adapter", folder("llama"))
    with pytest.raises(ValueError, match="is an adapter: to train it further, set init_from to the model"):
        built(prompts, init_from=adapter, lora_rank=4)


def test_an_adapter_needs_a_hugging_face_model(dataset, prompts, tmp_path):
    path = save(tmp_path / "g.safetensors", model(block_size=32))
    for data, settings in ((dataset, {"init_from": path, "tied": False}), (prompts, {"mode": LANGUAGE_MODEL})):
        with pytest.raises(ValueError, match="lora_rank=4 is for Hugging Face models: set init_from to a folder"):
            built(data, lora_rank=4, **settings)
