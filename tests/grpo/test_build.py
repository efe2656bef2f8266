"""What a config builds, and what is refused before the first step."""

import pytest
import torch

from core.model import MASKED_FILL, SEQUENCE_SCORER
from core.models import load_tokenizer, save_model
from grpo import build
from grpo.build import (
    build_evaluation,
    build_models,
    build_reference,
    check_kind,
    make_policy,
)
from grpo.policies.causal import CausalPolicy
from grpo.policies.fill import FillPolicy
from grpo.policies.prompt_fill import PromptFillPolicy
from tests.families import folder_maker, write_prose, write_sums
from tests.trainers import assembled
from tests.tiny import (
    CAUSAL,
    TOKENIZER,
    causal_model,
    causal_policy,
    config,
    consumer,
    fill_policy,
    judge,
    model,
    one_process,
    prompt_config,
    prompt_consumer,
    same,
    save,
)


@pytest.fixture(scope="module")
def checkpoints(tmp_path_factory):
    folder = tmp_path_factory.mktemp("checkpoints")
    save_model(str(folder / "causal"), causal_model(), CAUSAL)
    save_model(str(folder / "other causal"), causal_model(seed=3, n_layer=2), CAUSAL)
    for name, net in {"fill": model(), "other fill": model(seed=3), "deep fill": model(n_layer=2), "judge": judge(),
                      "gold": judge(seed=6), "small": judge(block_size=16),
                      "wide cls": model(SEQUENCE_SCORER, judge_head="cls")}.items():
        save(folder / name, net)
    return folder


def settings_of(checkpoints, **names):
    """Settings with the names of checkpoints as their paths."""
    return config(**{k: str(checkpoints / v) if k.endswith("_checkpoint") and isinstance(v, str) else v
                     for k, v in names.items()})


def built(checkpoints, data, **names):
    return build_models(settings_of(checkpoints, **names), data, one_process())


def text_data(dataset):
    return consumer(dataset, config())


def test_the_policy_is_of_the_kind_that_its_checkpoint_says(checkpoints, dataset, prompts):
    models = built(checkpoints, text_data(dataset), generator_checkpoint="fill", judge_checkpoint="judge",
                   gold_judge_checkpoint="gold")
    assert isinstance(models.policy, FillPolicy) and same(models.policy, fill_policy())
    assert same(models.judge.model, judge()) and same(models.gold_judge.model, judge(seed=6))
    assert models.judge.reads_ids and models.judge.tokenizer.description() == TOKENIZER.description()
    causal = built(checkpoints, prompt_consumer(prompts, config()), dataset=prompts, generator_checkpoint="causal")
    assert isinstance(causal.policy, CausalPolicy) and same(causal.policy, causal_policy())
    assert causal.judge is causal.gold_judge is None


def test_a_policy_has_the_precision_of_the_run():
    policy = make_policy(model(), TOKENIZER, config(grad_checkpoint=True), one_process("bfloat16"))
    assert policy.dtype == torch.bfloat16 and policy.model.grad_checkpoint


def test_a_reference_is_a_frozen_copy_of_the_policy_and_only_built_where_one_is_needed(monkeypatch):
    policy, moves = fill_policy(seed=1), []
    assert build_reference(config(kl_beta=0.0), policy, one_process()) is None
    reference = build_reference(config(kl_beta=0.1), policy, one_process())
    assert same(policy, reference) and not any(p.requires_grad for p in reference.parameters())
    with torch.no_grad():
        for p in policy.parameters():
            p.add_(1.0)
    assert same(reference, fill_policy(seed=1)) and not same(policy, reference)
    for mode, held in (("static", {torch.float32, torch.bfloat16}), ("ema", {torch.float32})):
        found = build_reference(config(reference_mode=mode), policy, one_process("bfloat16"))
        assert {p.dtype for p in found.parameters()} == held, "a moving mean needs float32"
    monkeypatch.setattr(FillPolicy, "to", lambda self, device: moves.append((self, torch.device(device))))
    offloaded = build_reference(config(ref_offload=True), policy, one_process())
    assert moves == [(offloaded, torch.device("cpu"))] and not any(p.requires_grad for p in offloaded.parameters())


def test_reference_checkpoint_is_the_reference(checkpoints, dataset, prompts):
    models = built(checkpoints, text_data(dataset), generator_checkpoint="fill", reference_checkpoint="other fill",
                   reference_mode="ema")
    assert same(models.reference, fill_policy(seed=3)) and same(models.policy, fill_policy())
    assert not any(p.requires_grad for p in models.reference.parameters())
    deeper = built(checkpoints, prompt_consumer(prompts, config()), dataset=prompts, generator_checkpoint="causal",
                   reference_checkpoint="other causal")
    assert deeper.reference.model.config.n_layer == 2


REFUSED = {
    "a judge as generator": ("text", {"generator_checkpoint": "judge"},
                             "generator_checkpoint=.* has mode sequence_scorer, but masked_fill or language_model"),
    "passes": ("prompts", {"generator_checkpoint": "causal", "unmask_steps": 2}, "unmask_steps"),
    "truncated": ("text", {"generator_checkpoint": "fill", "mask_truncated": True}, "mask_truncated"),
    "other vocabulary": ("prompts", {"generator_checkpoint": "fill"}, "another vocabulary"),
    "moving to another shape": ("text", {"generator_checkpoint": "fill", "reference_checkpoint": "deep fill",
                                         "reference_mode": "ema"}, "another shape than the generator"),
    "credit of cls": ("text", {"generator_checkpoint": "fill", "judge_checkpoint": "wide cls", "credit_window": 4},
                      "use credit_window=None"),
    "small judge": ("text", {"generator_checkpoint": "fill", "judge_checkpoint": "small"},
                    "judge_checkpoint=.*block_size=16, but needs 32"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_models_and_settings_that_do_not_fit_are_refused(checkpoints, dataset, prompts, name):
    kind, settings, message = REFUSED[name]
    data = text_data(dataset) if kind == "text" else prompt_consumer(prompts, config())
    settings = {"dataset": dataset if kind == "text" else prompts} | settings
    with pytest.raises(ValueError, match=message) as error:
        built(checkpoints, data, **settings)
    assert "\n" not in str(error.value)


def test_a_generator_needs_a_dataset_of_its_kind(tmp_path, prompts):
    fill = str(tmp_path / "fill.safetensors")
    save_model(fill, model(tokenizer=CAUSAL), CAUSAL)
    text = config(generator_checkpoint=fill, dataset=str(tmp_path), block_length=4)
    with pytest.raises(ValueError, match="block_length is not for fill-in"):
        check_kind(text, MASKED_FILL, "running text")
    c = prompt_config(generator_checkpoint=fill, dataset=str(prompts), block_length=4, kl_beta=0.0)
    models = build_models(c, prompt_consumer(prompts, c), one_process())
    assert type(models.policy) is PromptFillPolicy


def test_held_out_problems_are_the_same_for_every_seed_and_batch_size(dataset):
    models = build.Models(fill_policy(), None, None, None)
    both = []
    for settings in ({"seed": 1, "batch_size": 4}, {"seed": 2, "batch_size": 3}):
        evaluation = build.fill_in_evaluation(config(dataset=dataset, eval_problems=20, **settings), models)
        both.append([tuple(row) for _, batch in evaluation.batches for row in batch["input"].tolist()])
    assert both[0] == both[1] and len(set(both[0])) == 20


# Hugging Face models


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """family -> the folder of a small random Hugging Face model."""
    pytest.importorskip("transformers")
    return folder_maker(tmp_path_factory.mktemp("families"))


@pytest.fixture
def sums(tmp_path):
    return write_sums(tmp_path / "sums.jsonl")


REFUSED_MODELS = {
    "a reward model as generator": ({"generator_checkpoint": "llama_reward"},
                                    "is a reward model or classifier .*name it in reward_model_checkpoint"),
    "no room": ({"generator_checkpoint": "llama", "max_new_tokens": 500}, "do not fit the 128 tokens that the model"),
    "long block": ({"generator_checkpoint": "bert", "block_size": 127}, "block_size=127 is larger than the 126 tokens"),
}


@pytest.mark.parametrize("name", REFUSED_MODELS)
def test_hugging_face_models_and_settings_that_do_not_fit_are_one_line(checkpoints, folder, sums, tmp_path, name):
    settings, message = REFUSED_MODELS[name]
    settings = {key: (str(checkpoints / x) if x == "causal" else folder(x)) if key.endswith("checkpoint") else x
                for key, x in settings.items()}
    fills = "bert" == REFUSED_MODELS[name][0]["generator_checkpoint"]
    data_of = write_prose(tmp_path / "prose", load_tokenizer(folder("bert"))) if fills else sums
    c = prompt_config(dataset=data_of, **settings)
    with pytest.raises((ValueError, FileNotFoundError), match=message) as error:
        data, models, scoring = assembled(c)
        build_evaluation(c, models, scoring, data)
    assert "\n" not in str(error.value)
