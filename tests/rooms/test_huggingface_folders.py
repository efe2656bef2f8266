"""Folders in Hugging Face format: what a model is for, code that is never run, and files that change whole."""

import os
import subprocess
import sys

import pytest
import torch

transformers, yaml = pytest.importorskip("transformers"), pytest.importorskip("yaml")

from core import export
from core.errors import Mistake
from core.files import write_json
from core.huggingface.files import writing_folder
from core.huggingface.load import mode_of, wrap
from core.huggingface.tokenizer import load_huggingface_tokenizer
from core.model import LANGUAGE_MODEL, MASKED_FILL
from core.models import load_model, save_model
from core.settings.optional import say_opening
from core.supervised.config import PretrainConfig
from tests.families import base_model, model_folder, spoiled
from tests.tiny import CAUSAL, Cut, causal_model, contents, cut_after, run_here


@pytest.fixture(scope="module")
def llama(tmp_path_factory):
    return model_folder(tmp_path_factory.mktemp("families") / "llama", "llama")


@pytest.mark.parametrize("kind, written_by, mode", [
    ("Bert", "BertLMHeadModel", LANGUAGE_MODEL), ("Bert", "BertForPreTraining", MASKED_FILL),
    ("Bert", "BertModel", MASKED_FILL), ("Electra", "ElectraForMaskedLM", MASKED_FILL),
    ("Roberta", "RobertaForCausalLM", LANGUAGE_MODEL), ("GPT2", "GPT2Model", LANGUAGE_MODEL),
    ("Llama", "LlamaForSequenceClassification", None), ("ViT", "ViTForImageClassification", None),
    ("T5", "T5ForConditionalGeneration", None), ("Bart", None, None)])
def test_the_class_that_wrote_a_model_decides_what_it_is_for_before_its_family(kind, written_by, mode):
    config = getattr(transformers, f"{kind}Config")(architectures=written_by and [written_by])
    if mode is None:
        with pytest.raises(Mistake, match="key=path"):
            mode_of(config, "path", "key")
    else:
        assert mode_of(config, "path", "key") == mode


def opened(path):
    """transformers' own model and tokenizer of a folder."""
    return base_model(path), transformers.AutoTokenizer.from_pretrained(path)


@pytest.mark.parametrize("family", ["llama", "qwen3"])
@pytest.mark.parametrize("lora", [False, True])
def test_an_object_of_transformers_or_peft_is_the_model_of_its_folder(family, lora, tmp_path):
    path = model_folder(tmp_path / "model", family)
    net, backend = opened(path)
    net.bfloat16().save_pretrained(path)
    net = transformers.AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32 if lora else torch.bfloat16)
    if lora:
        peft = pytest.importorskip("peft")
        net = peft.get_peft_model(net, peft.LoraConfig(r=2, target_modules="all-linear"))
    model, tokenizer = wrap(net, backend)
    own = load_huggingface_tokenizer(path)
    assert tokenizer.description()["vocabulary"] == own.description()["vocabulary"]
    assert tokenizer.stop_token_ids == own.stop_token_ids and not model.training and model.net is net
    trained = {name for name, p in net.named_parameters() if p.requires_grad}
    assert all(("lora_" in name) == lora for name in trained)
    assert all(p.dtype == torch.float32 for p in model.parameters())
    tokens = torch.arange(12).view(2, 6)
    assert torch.equal(model(tokens), load_model(path)[0](tokens)), "a new adapter adds nothing"


def test_an_object_that_is_no_language_model_or_has_another_tokenizer_is_refused(tmp_path):
    net, backend = opened(model_folder(tmp_path / "llama", "llama"))
    for family in ("bert", "llama_reward"):
        with pytest.raises(Mistake, match="model="):
            wrap(*opened(model_folder(tmp_path / family, family)))
    backend.add_tokens([f"<{i}>" for i in range(900)])
    with pytest.raises(Mistake, match="tokenizer"):
        wrap(net, backend)
    net, backend = opened(str(tmp_path / "llama"))
    net.generation_config.eos_token_id = 100_000
    with pytest.raises(Mistake, match="100000"):
        wrap(net, backend)


def with_second_adapter(peft, net):
    net.add_adapter("second", peft.LoraConfig(target_modules=["q_proj"]))
    net.set_adapter("second")


@pytest.mark.parametrize(("kind", "name", "settings", "change"), [
    ("LoraConfig", "mine", {}, None), ("IA3Config", "default", {"feedforward_modules": []}, None),
    ("LoraConfig", "default", {"use_dora": True}, None),
    ("LoraConfig", "default", {"modules_to_save": ["lm_head"]}, None),
    ("LoraConfig", "default", {"inference_mode": True}, None), ("LoraConfig", "default", {}, with_second_adapter),
    ("LoraConfig", "default", {}, lambda peft, net: net.requires_grad_())])
def test_an_adapter_of_which_a_save_would_not_write_what_is_trained_is_refused(kind, name, settings, change, llama):
    peft = pytest.importorskip("peft")
    net, backend = opened(llama)
    net = peft.get_peft_model(net, getattr(peft, kind)(target_modules=["q_proj"], **settings), adapter_name=name)
    if change is not None:
        change(peft, net)
    with pytest.raises(Mistake, match="LoRA adapter 'default'"):
        wrap(net, backend)


def test_what_is_no_model_or_tokenizer_of_transformers_or_is_frozen_is_refused(llama):
    net, backend = opened(llama)
    for one, other in (("owner/name", backend), (net.model, backend), (torch.nn.Linear(2, 2), backend), (net, "x"),
                       (net.requires_grad_(False), backend)):
        with pytest.raises(Mistake):
            wrap(one, other)


HUB = "hf:owner/name"


@pytest.mark.parametrize("more", [
    f"--dataset={HUB}", f"--generator_checkpoint={HUB}", f"--reference_checkpoint={HUB}",
    f"--teacher_checkpoint={HUB} --kl_beta=0.0", f"--judge_checkpoint={HUB} --reward_functions=judge",
    f"--reward_model_checkpoint={HUB} --reward_functions=reward_model", f"--init_from={HUB}",
    f"--generator_checkpoint={{llama}} --lora_init_from={HUB}"])
@pytest.mark.parametrize("rank", [0, 1])
def test_a_name_of_the_hub_is_said_once_and_on_rank_0_alone_before_a_library_opens_it(
        more, rank, llama, prompts, tmp_path, monkeypatch):
    datasets, peft = map(pytest.importorskip, ("datasets", "peft"))
    printed = []

    def unreachable(*names, **settings):
        printed.append(sys.stdout.getvalue())
        raise OSError("no network")

    find = transformers.utils.cached_file
    monkeypatch.setattr(transformers.utils, "cached_file", lambda name, *file, **settings: (
        unreachable() if name == "owner/name" else find(name, *file, **settings)))
    monkeypatch.setattr(datasets, "load_dataset", unreachable)
    save_model(str(tmp_path / "g.safetensors"), causal_model(), CAUSAL)
    more = more.format(llama=llama).split()
    monkeypatch.setenv("RANK", str(rank))
    monkeypatch.setattr("core.distributed.variable", lambda name, default: default)  # no other rank is waited for
    say_opening.cache_clear()
    base = [f"--dataset={prompts}", f"--out_dir={tmp_path}/out", "--device=cpu"]
    if more[0].startswith("--init_from"):
        done = run_here("core/pretrain.py", *base, *more)
    else:
        done = run_here("grpo/train_grpo.py", *base, f"--generator_checkpoint={tmp_path}/g.safetensors",
                        "--reward_functions=length_penalty", *more)
    assert done.returncode == 1 and "no network" in done.stderr and len(printed) == 1
    name = next(argument for argument in more if argument.endswith(HUB)).removeprefix("--")
    assert [name in line for line in printed[0].splitlines()] == [True] * (1 - rank)


def test_code_of_a_folder_is_never_run(llama, tmp_path):
    own = {"model_type": "mine", "auto_map": {"AutoConfig": "mine.Mine", "AutoModelForCausalLM": "mine.Model"}}
    path = spoiled(tmp_path / "code", llama, **own)
    with open(os.path.join(path, "mine.py"), "w") as f:
        f.write(f"open({str(tmp_path / 'it_ran')!r}, 'w')\n")
    with pytest.raises(Mistake, match="code"):
        load_model(path)
    assert not os.path.exists(tmp_path / "it_ran")


KERNELS = """
import subprocess
import sys
sys.path.insert(0, sys.argv[2])  # where the package kernels is installed
if sys.argv[3] == "ours":
    from core.models import load_model
    load_model(sys.argv[1], key="generator_checkpoint")
else:
    import transformers
    transformers.AutoModelForCausalLM.from_pretrained(sys.argv[1])
"""


@pytest.mark.slow
@pytest.mark.parametrize("who", ["ours", "transformers"])
def test_a_kernel_of_the_hub_is_never_fetched(who, llama, tmp_path):
    """The package that fetches them leaves a trace here. transformers alone asks it for what the config names."""
    package = tmp_path / "packages" / "kernels"
    (tmp_path / "packages" / "kernels-0.18.2.dist-info").mkdir(parents=True)
    (tmp_path / "packages" / "kernels-0.18.2.dist-info" / "METADATA").write_text("Name: kernels\nVersion: 0.18.2\n")
    package.mkdir()
    (package / "__init__.py").write_text(f"""
def get_kernel(*args, **settings):
    open({str(tmp_path / 'fetched')!r}, "w")
    raise RuntimeError("fetched")

def __getattr__(name):
    if name.startswith("get"):
        return get_kernel
    return type(name, (), {{}}) if name[0].isupper() else lambda *a: lambda f: f
""")
    path = spoiled(tmp_path / "model", llama, attn_implementation="kernels-community/flash-attn2")
    arguments = (path, str(tmp_path / "packages"), who)
    done = subprocess.run((sys.executable, "-c", KERNELS, *arguments), capture_output=True, text=True)
    assert done.returncode != 0
    assert os.path.exists(tmp_path / "fetched") == (who == "transformers"), done.stderr


def card_of(folder):
    """(the front matter of a model card, its text)."""
    text = (folder / "README.md").read_text("utf-8")
    _, front, body = text.split("---\n", 2)
    return yaml.safe_load(front), body


def saved_in_a_run(folder, base, lora=False, **changes):
    """Saves a model beside the settings of a run that has evaluated it at step 7. Returns its folder."""
    settings = {"dataset": "/home/al smith/my.jsonl", "objective": "dr_grpo", "reward_functions": ["brief"],
                "starts": [{"commit": "0ld"}, {"commit": "c0de"}]}
    write_json(folder / "config.json", settings)
    model, _ = load_model(base, adapter=PretrainConfig(lora_rank=4 if lora else 0))
    tokenizer = load_huggingface_tokenizer(base)
    vars(tokenizer).update(changes)
    save_model(str(folder / "model"), model, tokenizer, step=7, **{"eval/a": 0.5, "eval/b": 1e-9})
    return folder / "model"


@pytest.mark.parametrize("lora", [False, True])
def test_the_card_of_a_model_says_what_was_trained_and_an_export_keeps_what_its_owner_added(lora, llama, tmp_path):
    if lora:
        pytest.importorskip("peft")
    folder = saved_in_a_run(tmp_path, llama, lora)
    front, body = card_of(folder)
    assert front == {"library_name": "peft" if lora else "transformers", "tags": ["nano-grpo"]}
    assert len(body.strip().split("\n")) <= 10
    for words in ("model: llama", "my.jsonl", "dr_grpo", "brief", "steps: 7", "eval/a 0.5000", "c0de", "licence"):
        assert words in body, words
    for words in ("al smith", str(tmp_path), os.path.dirname(llama), "0ld"):
        assert words not in body, words
    with open(folder / "README.md", "a", encoding="utf-8") as f:
        f.write("Made by \u00c4nne, library_name: mine.\n")
    export.main([f"--checkpoint={folder}", f"--out={tmp_path}/merged"])
    merged, of_merged = card_of(tmp_path / "merged")
    assert merged == front | {"library_name": "transformers"} and of_merged.startswith(body)
    assert "\u00c4nne, library_name: mine." in of_merged
    ids = torch.arange(8)[None]
    for path in (folder, tmp_path / "merged"):
        opened = transformers.AutoModelForCausalLM.from_pretrained(path)
        torch.testing.assert_close(opened(ids).logits, load_model(llama)[0](ids), rtol=1e-4, atol=1e-4)


def test_a_card_names_a_base_model_of_the_hub_and_a_folder_without_a_run_has_a_card_too(llama, tmp_path):
    front, body = card_of(saved_in_a_run(tmp_path, llama, path="hf:owner/name"))
    assert front["base_model"] == "owner/name" and "base model: owner/name\n" in body
    net, backend = opened(llama)
    for name, written in ((llama, "llama"), ("owner/name", "owner/name"), ("", "unknown")):
        net.name_or_path = name
        folder = tmp_path / f"of {written.partition('/')[0]}"
        save_model(str(folder), *wrap(net, backend), step=20)
        front, body = card_of(folder)
        assert front.get("base_model") == (name if "owner" in name else None)
        assert f"base model: {written}\n" in body and "steps: 20; last evaluation: none\n" in body
    save_model(str(tmp_path / "synced"), *wrap(net, backend))
    assert not (tmp_path / "synced" / "README.md").exists(), "weights for a sampler have none"
    export.main([f"--checkpoint={llama}", f"--out={tmp_path}/alone/hf"])
    save_model(str(tmp_path / "ours.safetensors"), causal_model(), CAUSAL, step=3, val_loss=0.125)
    export.main([f"--checkpoint={tmp_path}/ours.safetensors", f"--out={tmp_path}/ours"])
    for name in ("alone/hf", "ours"):
        front, body = card_of(tmp_path / name)
        assert front["library_name"] == "transformers" and str(tmp_path) not in body
    assert "0.1250" in body


def test_a_model_is_saved_with_a_card_whatever_lies_beside_it_and_in_it(llama, tmp_path):
    net, backend = opened(llama)
    net.name_or_path = "/models/mine/"
    written = {"damaged": b"{", "a list": b"[]", "no text": b"\xff", "half": b'{"dataset": "\\udcff.jsonl"}'}
    for name, content in written.items():
        (tmp_path / name).mkdir()
        (tmp_path / name / "config.json").write_bytes(content)
    (tmp_path / "folder" / "config.json").mkdir(parents=True)
    for name in (*written, "folder"):
        folder = tmp_path / name / "model"
        save_model(str(folder), *wrap(net, backend), step=3, note="mine", **{"eval/a": float("nan")})
        _, body = card_of(folder)
        assert "steps: 3; last evaluation: eval/a nan\n" in body and "base model: mine" in body
        assert "?.jsonl" in body or name != "half"
        (folder / "README.md").write_bytes(b"library_name: peft\n\xff")
        export.main([f"--checkpoint={folder}", f"--out={tmp_path / name / 'exported'}"])
        assert (tmp_path / name / "exported" / "README.md").read_bytes().startswith(b"library_name: transformers\n")


def fill(folder, text, *names):
    folder.mkdir(exist_ok=True)
    for name in names:
        (folder / name).write_text(text)


@pytest.mark.parametrize("count", range(7))
def test_weights_change_last_so_that_an_interrupted_change_leaves_the_old_ones_whole(tmp_path, monkeypatch, count):
    names = ("tokenizer.json", "config.json", "model.safetensors")
    fill(tmp_path / "old", "1", *names, "notes.txt")
    cut_after(monkeypatch, count)
    for _ in range(2):
        try:
            with writing_folder(str(tmp_path / "old")):
                fill(tmp_path / "old.tmp", "2", *names)
        except Cut:
            assert contents(tmp_path / "old")["model.safetensors"] == "1" and count < 6
        monkeypatch.undo()
    assert contents(tmp_path / "old") == dict.fromkeys(names, "2") | {"notes.txt": "1"}
