"""What a supervised run is built from, and the settings that do not fit together."""

import pytest
import torch

from core.build import build_batches, build_data, build_model
from core.checkpoint_manager import freeze, load_model, save_model
from core.model import LANGUAGE_MODEL, MASKED_FILL, SEQUENCE_SCORER
from core.prompts import PromptConsumer
from core.pretrain_config import PretrainConfig
from tests.tiny import CAUSAL, TOKENIZER, causal_model, model, one_process, save, same

DIST = one_process()


def config(dataset, **settings):
    return PretrainConfig(**{"dataset": dataset, "block_size": 32, "n_layer": 1, "n_embd": 16, "n_head": 2,
                             "batch_size": 3, "eval_batches": 2, "device": "cpu"} | settings)


def built(dataset, **settings):
    c = config(dataset, **settings)
    data = build_data(c, DIST)
    return c, data, build_model(c, data)


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
    assert set(report) == {f"{name}/{i}" for name in ("pearson", "spearman", "auc", "mean_score") for i in (0, 1)}
    judge = save(tmp_path / "judge.safetensors", model(SEQUENCE_SCORER))
    with pytest.raises(ValueError, match="fill_checkpoints=.* has mode sequence_scorer, but masked_fill is needed"):
        build_batches(config(dataset, mode=SEQUENCE_SCORER, fill_checkpoints=(judge,)), data, DIST)
