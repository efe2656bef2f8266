"""The parts that a supervised run is built from, and settings that do not fit together."""

import pytest
import torch

from core.model import SEQUENCE_SCORER, freeze
from core.models import load_model, load_tokenizer, save_model
from core.supervised.build import build_batches, build_data, build_model
from core.supervised.config import PretrainConfig
from core.trainer import supervised_sums
from tests.families import folder_maker, write_prose, write_sums
from tests.tiny import CAUSAL, causal_model, jsonl, model, one_process, same, save

DIST = one_process()
REPORT = {"pearson", "spearman", "auc", "token_auc", "mean_score"}


def config(dataset, **settings):
    return PretrainConfig(**{"dataset": str(dataset), "block_size": 32, "n_layer": 1, "n_embd": 16, "n_head": 2,
                             "batch_size": 3, "eval_batches": 2, "device": "cpu"} | settings)


def built(dataset, **settings):
    """(config, data, model, batches, evaluate) of a run."""
    c = config(dataset, **settings)
    data = build_data(c, DIST)
    return c, data, build_model(c, data, DIST), *build_batches(c, data, DIST)


def refused(words, dataset, **settings):
    with pytest.raises(ValueError, match=words) as error:
        built(dataset, **settings)
    assert "\n" not in str(error.value)


@pytest.fixture(scope="module")
def generator(tmp_path_factory):
    """The file of a fill-in model."""
    return save(tmp_path_factory.mktemp("models") / "g.safetensors", model(seed=4, block_size=32))


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """family -> the folder of a small random Hugging Face model."""
    pytest.importorskip("transformers")
    return folder_maker(tmp_path_factory.mktemp("families"))


@pytest.fixture(scope="module")
def sums(tmp_path_factory):
    """A file of records."""
    return write_sums(tmp_path_factory.mktemp("sums") / "sums.jsonl")


def test_init_from_gives_its_weights_and_another_mode_a_new_output_layer(dataset, generator):
    start, _ = load_model(generator)
    assert same(start, built(dataset, init_from=generator, tied=False)[2])
    scorer = built(dataset, init_from=generator, mode=SEQUENCE_SCORER, fill_checkpoints=(generator,))[2].state_dict()
    assert scorer["head.weight"].shape == (1, 16)
    for name, x in start.state_dict().items():
        assert name == "head.weight" or torch.equal(scorer[name], x)


def test_evaluation_is_the_mean_over_the_masked_tokens_of_validation(dataset):
    c, _, net, batches, evaluate = built(dataset)
    losses, right = [], []
    for step in range(c.eval_batches):
        input, target, mask = batches("val", step)
        for i, t in mask.nonzero().tolist():
            logits = net(input[i : i + 1])[0, t]
            losses.append(float(-logits.log_softmax(-1)[target[i, t]].detach()))
            right.append(float(logits.argmax() == target[i, t]))
    found = evaluate(net)
    assert found["val_loss"] == pytest.approx(sum(losses) / len(losses), rel=1e-4)
    assert found["val_accuracy"] == pytest.approx(sum(right) / len(right))


@pytest.mark.parametrize("settings, words", [
    ({"init_from": "g", "tied": True}, "init_from=.* has tied=False, the config True; make them equal"),
    ({"init_from": "causal"}, "init_from=.* has another vocabulary"),
    ({"init_from": "g", "lora_rank": 4}, "lora_rank=4 is for Hugging Face models: set init_from to a folder"),
    ({"mode": SEQUENCE_SCORER}, "fill_checkpoints is empty: name the generators"),
    ({"mode": SEQUENCE_SCORER, "fill_checkpoints": ("judge",)},
     "fill_checkpoints=.* has mode sequence_scorer, but masked_fill is needed")], ids=str)
def test_models_that_do_not_fit_the_config_are_refused(dataset, tmp_path, monkeypatch, settings, words):
    monkeypatch.chdir(tmp_path)
    save("g", model(block_size=32))
    save("judge", model(SEQUENCE_SCORER))
    save_model("causal", causal_model(), CAUSAL)
    refused(words, dataset, **{"tied": False} | settings)


SUMS = [{"prompt": f"{a}+{b}=", "answer": str(a + b)} for a in range(5, 13) for b in range(5, 13)]


@pytest.mark.parametrize("records, settings, words", [
    (SUMS, {"mode": SEQUENCE_SCORER}, "has prompts to complete"),
    (SUMS, {"init_from": "bert"}, "has prompts, but"),
    ([*SUMS[:3], {"prompt": "1+1="}, *SUMS[3:]], {"init_from": "llama"},
     "sums.jsonl, line 4: no completion, which supervised training needs")])
def test_records_that_cannot_be_learned_are_refused(folder, tmp_path, records, settings, words):
    path = jsonl(tmp_path / "sums.jsonl", *records)
    refused(words, path, **{key: folder(x) if key == "init_from" else x for key, x in settings.items()})


@pytest.mark.parametrize("rank", [0, 4], ids=["full", "lora"])
def test_a_hugging_face_model_learns_the_completions_with_the_loss_of_transformers(folder, sums, rank):
    """One batch: cross-entropy of completion and end alone, as transformers has it from labels, and its gradient."""
    import transformers
    if rank:
        pytest.importorskip("peft")
    _, _, net, batches, _ = built(sums, init_from=folder("llama"), lora_rank=rank)
    input, target, mask = batches("train", 0)
    found = supervised_sums(net, input, target, mask)
    (found["loss"] / found["count"]).backward()
    theirs = transformers.AutoModelForCausalLM.from_pretrained(folder("llama")).eval()
    labels = torch.where(mask, target, -100)                                         # (B, T) of the next token
    labels = torch.cat((torch.full_like(labels[:, :1], -100), labels), 1)
    loss = theirs(torch.cat((input, target[:, -1:]), 1), labels=labels).loss
    loss.backward()
    torch.testing.assert_close(found["loss"] / found["count"], loss, rtol=1e-5, atol=0)
    assert found["count"] == mask.sum()
    trained = {name: p.grad for name, p in net.net.named_parameters() if p.requires_grad}
    assert len(trained) > 8 and all("lora_" in name for name in trained) == bool(rank)
    if not rank:
        for name, p in theirs.named_parameters():
            torch.testing.assert_close(trained[name], p.grad, rtol=1e-4, atol=1e-5)


def test_a_detector_of_replaced_tokens_learns_from_the_fills_of_generators(folder, tmp_path):
    prose = write_prose(tmp_path / "prose", load_tokenizer(folder("bert")))
    _, data, net, batches, evaluate = built(prose, init_from=folder("electra_judge"), fill_checkpoints=(folder("bert"),))
    filled, target, mask = batches("train", 0)
    assert torch.equal(filled[~mask], target[~mask]) and not torch.equal(filled, target)
    assert not (filled == data.tokenizer.mask_token_id).any(), "it reads filled texts, not masks"
    theirs = torch.nn.functional.binary_cross_entropy_with_logits(-net(filled), (filled != target).float(), reduction="sum")
    torch.testing.assert_close(supervised_sums(net, filled, target, mask)["loss"], theirs, rtol=1e-5, atol=0)
    assert set(evaluate(freeze(net))) == {f"{name}/0" for name in REPORT}
