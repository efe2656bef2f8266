"""GRPO on Hugging Face models: the first step, and whole runs from a folder and a file, as a user starts them."""

import json
import os
import re
import stat
import sys

import pytest
import torch

transformers = pytest.importorskip("transformers")

from core.files.json_lines import read_records
from core.huggingface.tokenizer import load_huggingface_tokenizer
from core.settings.script import exit_code
from grpo import train_grpo
from grpo.build import build_data, build_models
from grpo.grpo_config import GRPOConfig
from grpo.rewards import Scored
from tests.families import CAUSAL_FAMILIES, FILL_FAMILIES, adapter_folder, model_folder, write_prose, write_sums
from tests.tiny import grpo_step, jsonl, one_process, run_here, run_script, without_clock

pytestmark = pytest.mark.slow  # it is the number of them that takes the time

TRAIN = "grpo/train_grpo.py"
SMALL = {"batch_size": 4, "group_size": 4, "max_iters": 3, "eval_problems": 4, "eval_completions": 4, "log_interval": 1,
         "sample_interval": 3, "device": "cpu", "learning_rate": 1e-3, "min_lr": 1e-3, "warmup_iters": 0}
CAUSAL_RUN = SMALL | {"max_new_tokens": 6, "task_type": "general"}
FILL_RUN = SMALL | {"block_size": 16}
VOWELS = '''
from grpo.rewards import reward

@reward(low=0.0, high=1.0)
def vowels(prompts, completions, **columns):
    """The share of vowels among the characters."""
    return [sum(c in "aeiou" for c in text) / max(1, len(text)) for text in completions]
'''


@pytest.fixture(scope="module")
def world(tmp_path_factory):
    """name -> a path: a model of a family, a data set, rewards or an adapter, made when it is first needed."""
    root, made = tmp_path_factory.mktemp("world"), {}

    def make(name):
        if name == "sums":
            return write_sums(root / "sums.jsonl")
        if name == "rewards":
            (root / "vowels.py").write_text(VOWELS)
            return str(root / "vowels.py")
        if name.endswith(" adapter"):
            base = name.removesuffix(" adapter")
            return adapter_folder(root / name, of(base), task_type="CAUSAL_LM" if base in CAUSAL_FAMILIES else None)
        if name.startswith("prose of "):
            return write_prose(root / name, load_huggingface_tokenizer(of(name.removeprefix("prose of "))))
        return model_folder(root / name, name)

    def of(name):
        made[name] = made.get(name) or make(name)
        return made[name]
    return of


def settings_of(world, family, **more):
    """The settings of a small run of this family, with a reward that differs from completion to completion."""
    causal = family in CAUSAL_FAMILIES
    data = world("sums") if causal else world(f"prose of {family}")
    settings = {"generator_checkpoint": world(family), "dataset": data, "reward_file": world("rewards"),
                "reward_functions": ("vowels",)}
    return (CAUSAL_RUN if causal else FILL_RUN) | settings | more


def arguments(settings):
    return [f"--{key}={value}" for key, value in settings.items()]


@pytest.fixture
def launch(monkeypatch, capsys):
    """The command in this process: what it printed. The run must end well."""
    def launched(settings):
        capsys.readouterr()
        monkeypatch.setattr(sys, "argv", [TRAIN, *arguments(settings)])
        code = exit_code(train_grpo.main)
        out, err = capsys.readouterr()
        assert code == 0, err
        return out
    return launched


def steps(folder):
    """The records of optimizer steps in a run's metrics.jsonl, without times."""
    return [r for r in without_clock(read_records(os.path.join(folder, "metrics.jsonl"))) if "loss" in r]


def evaluations(folder):
    return [r for r in read_records(os.path.join(folder, "metrics.jsonl")) if any(k.startswith("eval/") for k in r)]


def random_rewards(rollouts):
    """A rewards object: different for all completions, the same whenever it is asked."""
    generator = torch.Generator().manual_seed(len(rollouts.target))
    return Scored(torch.rand(rollouts.problems, rollouts.group_size, generator=generator))


def first_step(c):
    """The metrics of the first optimizer step, the Models after it, and the data."""
    dist = one_process()
    data = build_data(c, dist)
    models = build_models(c, data, dist)
    return grpo_step(models.policy, models.reference, random_rewards, data, c), models, data


# --- the first step


@pytest.mark.parametrize("lora", [0, 4], ids=["full", "lora"])
@pytest.mark.parametrize("family", [*CAUSAL_FAMILIES, *FILL_FAMILIES])
def test_at_step_0_the_policy_is_its_reference_and_the_sampler_agrees_with_the_scorer(family, lora, world):
    if lora:
        pytest.importorskip("peft")
    metrics, models, _ = first_step(GRPOConfig(**settings_of(world, family, lora_rank=lora, kl_beta=0.1)))
    assert models.reference is not None
    assert metrics["mean_kl"] == 0.0, "to the last bit"
    assert metrics["mismatch_max"] < 2e-5 and metrics["mismatch_kl"] < 1e-9 and metrics["ratio_minus_one"] < 1e-5
    assert metrics["grad_norm"] > 1e-3


@pytest.mark.parametrize("estimator", ["trajectory", "coupled"])
def test_a_fill_in_model_writes_in_several_passes(estimator, world):
    c = GRPOConfig(**settings_of(world, "modernbert", unmask_steps=3, fill_estimator=estimator, top_p=1.0))
    metrics, _, _ = first_step(c)
    assert metrics["mean_kl"] == 0.0 and metrics["grad_norm"] > 1e-3
    assert (metrics["mismatch_max"] < 2e-5) == (estimator == "trajectory"), "the others are estimates"


@pytest.mark.parametrize("family", ["llama", "gemma3", "bert"])
def test_the_first_ratio_of_rescored_rollouts_is_one(family, world):
    metrics, _, _ = first_step(GRPOConfig(**settings_of(world, family, ppo_epochs=2)))
    assert metrics["kl_to_old"] == metrics["clip_fraction"] == 0.0 and metrics["grad_norm"] > 1e-3


@pytest.mark.parametrize("family, settings", [("llama", {}), ("gpt2", {}), ("bert", {}), ("llama", {"lora_rank": 4})],
                         ids=str)
def test_a_step_moves_what_is_trained_and_nothing_else(family, settings, world):
    _, models, _ = first_step(c := GRPOConfig(**settings_of(world, family, **settings)))
    untouched = build_models(c, build_data(c, one_process()), one_process()).policy
    before = dict(untouched.model.net.named_parameters())
    moved = {name for name, p in models.policy.model.net.named_parameters() if not torch.equal(p, before[name])}
    adapters, layers = ({name for name in before if mark in name} for mark in ("lora_", "layer" if family != "gpt2" else
                                                                               ".h."))
    assert moved == adapters if c.lora_rank else layers <= moved and len(layers) >= 18
    assert not models.reference.model.training


@pytest.mark.parametrize("family", ["llama", "gpt2", "qwen2", "gemma3"])
def test_a_whole_step_embeds_only_tokens_of_its_texts_and_the_filler(family, world):
    """A pad id need not have a row in the embedding: gpt2 and llama have no pad token at all."""
    c, dist = GRPOConfig(**settings_of(world, family, max_new_tokens=5, kl_beta=0.1)), one_process()
    data = build_data(c, dist)
    models, embedded, texts = build_models(c, data, dist), set(), set()
    for policy in (models.policy, models.reference):
        policy.model.net.get_input_embeddings().register_forward_pre_hook(
            lambda _, inputs: embedded.update(inputs[0].flatten().tolist()))

    def noting(rollouts):
        texts.update(token for text in rollouts.texts.tokens for token in text.tolist())
        return random_rewards(rollouts)

    metrics = grpo_step(models.policy, models.reference, noting, data, c)
    ends = set(models.policy.tokenizer.stop_token_ids)
    assert metrics["grad_norm"] > 0 and embedded <= texts | ends | {models.policy.tokenizer.pad_token_id}
    assert max(embedded) < models.policy.model.vocabulary


def test_the_gradient_of_a_step_does_not_depend_on_how_it_is_computed(world):
    for family in ("qwen3", "modernbert"):
        found = []
        for settings in ({}, {"grad_checkpoint": True}, {"batch_size": 2, "gradient_accumulation_steps": 2}):
            metrics, models, _ = first_step(GRPOConfig(**settings_of(world, family, **settings)))
            found.append(metrics["grad_norm"])
        assert max(found) - min(found) < 1e-5 * max(found), found


# --- whole runs


def answers_that_are_likely(folder, path):
    """Prompts whose answer is the likeliest next token of the model, as transformers finds it."""
    net = transformers.AutoModelForCausalLM.from_pretrained(folder).eval()
    tokenizer, records = transformers.AutoTokenizer.from_pretrained(folder), []
    for a in range(140):
        prompt = f"the answer of {a} is"
        with torch.no_grad():
            token = int(net(torch.tensor([tokenizer(prompt).input_ids])).logits[0, -1].argmax())
        answer = tokenizer.decode([token]).strip()
        if answer.isascii() and answer.isprintable() and answer:
            records.append({"prompt": prompt, "answer": answer})
    assert len(records) > 30
    return jsonl(path, *records)


@pytest.mark.parametrize("lora, start", [(0, run_script), (8, run_here)], ids=["full", "lora"])
def test_a_run_from_nothing_but_a_folder_and_a_file(lora, start, world, tmp_path):
    """The command of the documentation: it learns, evaluates, and saves what transformers or peft opens."""
    if lora:
        peft = pytest.importorskip("peft")
    folder, out = world("llama"), tmp_path / "out"
    data = answers_that_are_likely(folder, tmp_path / "my.jsonl")
    more = {"lora_rank": lora} if lora else {}
    done = start(TRAIN, f"--generator_checkpoint={folder}", f"--dataset={data}", "--reward_functions=('exact_match',)",
                 *arguments(SMALL | more | {"max_new_tokens": 1, "max_iters": 12, "group_size": 16, "temperature": 1.0,
                                            "learning_rate": 5e-3, "eval_problems": 8, "eval_completions": 8,
                                            "out_dir": out, "top_p": 1.0, "kl_beta": 0.01}))
    assert done.returncode == 0, done.stderr
    for expected in ("held out | greedy_accuracy 1.0000", "the first prompt ends in", "'</s>'",
                     "exact_match", "trained" if lora else "M parameters"):
        assert expected in done.stdout, expected
    before, after = evaluations(out)[0], evaluations(out)[-1]
    assert after["eval/sampled_accuracy"] > before["eval/sampled_accuracy"] + 0.1
    assert all(r["mismatch_max"] < 1e-4 for r in steps(out))
    net = transformers.AutoModelForCausalLM.from_pretrained(folder if lora else str(out / "model")).eval()
    if lora:
        net = peft.PeftModel.from_pretrained(net, str(out / "model")).eval()
        assert "model.safetensors" not in os.listdir(out / "model")
    tokenizer = transformers.AutoTokenizer.from_pretrained(str(out / "model"))
    record = json.loads(open(data).readline())
    start = transformers.AutoModelForCausalLM.from_pretrained(folder).eval()
    ids = torch.tensor([tokenizer(record["prompt"]).input_ids])
    with torch.no_grad():
        chances = [m(ids).logits[0, -1].softmax(-1) for m in (start, net)]
    assert tokenizer.decode([int(chances[1].argmax())]).strip() == record["answer"]
    assert float(chances[1].max()) > float(chances[0].max()) + 0.05, "surer of what was rewarded"
    card = (out / "model" / "README.md").read_text()
    assert f"| sampled_accuracy | {before['eval/sampled_accuracy']:.4f} | {after['eval/sampled_accuracy']:.4f} |" in card
    assert str(out) not in card and str(folder) not in card
    code, loaded = re.search("```python\n(.*?)```", card, re.DOTALL)[1], {}
    name = os.path.basename(folder)
    exec(code.replace('"FOLDER"', repr(str(out / "model"))).replace(f'"{name}"', repr(folder)), loaded)
    with torch.no_grad():
        assert torch.equal(loaded["model"](ids).logits, net(ids).logits)
    modes = {stat.S_IMODE(path.stat().st_mode) for path in (*(out / "model").iterdir(), out / "state.pt")}
    assert len(modes) == 1, "safetensors files are as readable as the others"


def test_a_fill_in_run_against_a_detector_of_replaced_tokens(world, launch, tmp_path):
    settings = settings_of(world, "bert", judge_checkpoint=world("electra_judge"), reward_functions=("judge",),
                           out_dir=tmp_path / "out", max_iters=8, learning_rate=1e-2, group_size=8)
    out = launch(settings)
    assert "sequence_scorer" in out and "1 x judge [0, 1]" in out
    before, after = evaluations(tmp_path / "out")[0], evaluations(tmp_path / "out")[-1]
    assert 0 < before["eval/judge"] < after["eval/judge"] < 1
    net = transformers.AutoModelForMaskedLM.from_pretrained(str(tmp_path / "out" / "model"))
    start = transformers.AutoModelForMaskedLM.from_pretrained(world("bert"))
    moved = [name for name, p in net.state_dict().items() if not torch.equal(p, start.state_dict()[name])]
    assert len(moved) > 10
    shown = [json.loads(line) for line in open(tmp_path / "out" / "samples.jsonl")]
    assert shown and all("_" in r["problem"] and "[" not in r["best"] + r["problem"] for r in shown)


RESUMED = [("llama", {}), ("llama", {"lora_init_from": "llama adapter"}), ("bert", {}),
           ("llama", {"lora_rank": 4, "reference_mode": "periodic", "reference_update_freq": 1})]


@pytest.mark.parametrize("family, more", RESUMED, ids=str)
def test_a_resumed_run_is_the_run_that_was_not_interrupted_to_the_last_bit(family, more, world, launch, tmp_path):
    if "lora_init_from" in more:
        more = {"lora_init_from": world(more["lora_init_from"])}
    settings = settings_of(world, family, ppo_epochs=2, kl_beta=0.05, lr_decay_iters=5, eval_interval=100, **more)
    launch(settings | {"max_iters": 5, "out_dir": tmp_path / "whole"})
    launch(settings | {"max_iters": 3, "out_dir": tmp_path / "cut"})  # within an iteration
    launch(settings | {"max_iters": 5, "out_dir": tmp_path / "cut", "resume": True})
    whole, cut = ([{k: v for k, v in r.items() if k != "skipped_steps"} for r in steps(tmp_path / name)]
                  for name in ("whole", "cut"))
    assert [r["step"] for r in whole] == [1, 2, 3, 4, 5] and whole == cut
    states = [torch.load(tmp_path / name / "state.pt", weights_only=True)["model"] for name in ("whole", "cut")]
    assert states[0].keys() == states[1].keys() and all(torch.equal(p, states[1][name])
                                                        for name, p in states[0].items())
    assert all(("lora_" in name) == any(key.startswith("lora") for key in more) for name in states[0])
    assert any(r["mean_kl"] > 0 for r in whole)


@pytest.mark.parametrize("family, more", [("llama", {"lora_rank": 4}), ("bert", {})], ids=str)
def test_two_ranks_equal_one(family, more, world, launch, tmp_path):
    settings = settings_of(world, family, kl_beta=0.05, eval_interval=100, grad_clip=1.0, **more)
    launch(settings | {"max_iters": 1, "out_dir": tmp_path / "first"})
    launch(settings | {"out_dir": tmp_path / "one"})
    done = run_script(TRAIN, *arguments(settings | {"batch_size": 2, "out_dir": tmp_path / "two"}), ranks=2)
    assert done.returncode == 0, done.stderr
    one, two = steps(tmp_path / "one"), steps(tmp_path / "two")
    for key in ("loss", "mean_reward", "std_reward", "entropy", "grad_norm", "unique_completions", "mean_log_prob"):
        assert two[0][key] == pytest.approx(one[0][key], rel=2e-5, abs=2e-6), key
    first, last, other = (torch.load(tmp_path / name / "state.pt", weights_only=True)["model"]
                          for name in ("first", "one", "two"))
    flat = lambda weights: torch.cat([p.flatten().float() for p in weights.values()])
    assert last.keys() == other.keys()
    apart, travelled = (flat(last) - flat(other)).norm(), (flat(last) - flat(first)).norm()
    assert apart < 0.02 * travelled and travelled > 0


# --- what does not fit: one line each, before the first step


@pytest.mark.parametrize("changes, words", [
    ({"generator_checkpoint": "no_such_folder"}, "generator_checkpoint=no_such_folder"),
    ({"dataset": "no_such_file.jsonl"}, "no_such_file.jsonl"),
    ({"lora_rank": 4, "load_in_4bit": True}, "load_in_4bit=True needs a CUDA GPU"),
    ({"lora_rank": 4, "lora_targets": "('nothing',)"}, "lora_targets"),
    ({"template": "model"}, "template"),
    ({"max_new_tokens": 500}, "max_new_tokens=500"),
    ({"unmask_steps": 2}, "unmask_steps=2")], ids=str)
def test_a_mistake_is_one_line(changes, words, world, monkeypatch, capsys, tmp_path):
    settings = settings_of(world, "llama", out_dir=tmp_path / "out") | changes
    monkeypatch.setattr(sys, "argv", [TRAIN, *arguments(settings)])
    assert exit_code(train_grpo.main) == 1
    out, err = capsys.readouterr()
    line, = [line for line in err.strip().split("\n") if "it/s]" not in line]
    assert line.startswith("error: ") and words in line
    assert not (tmp_path / "out").exists()


def test_a_dry_run_shows_the_prompt_the_ends_and_what_is_trained(world, launch, tmp_path):
    out = launch(settings_of(world, "qwen3", out_dir=tmp_path / "out", lora_rank=4, template="model", dry_run=True,
                             chat_template_kwargs="{'enable_thinking': False}"))
    for expected in ("<|im_start|>assistant", "<think></think>", "'<|im_end|>'", "'<|endoftext|>'", " M of them trained",
                     "lora_rank = 4", "nothing was trained"):
        assert expected in out, expected
    assert not (tmp_path / "out").exists()
