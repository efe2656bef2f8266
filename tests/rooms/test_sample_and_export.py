"""core/sample.py samples as training does and as transformers does; core/export.py writes what transformers opens."""

import pytest
import torch

from core import sample
from core.config import run_config_file
from core.fill_in import UNMASK_ORDERS
from core.generation import generate
from core.logger import visible
from core.model import LANGUAGE_MODEL
from core.models import save_model
from tests.families import model_folder
from tests.tiny import (
    CAUSAL, causal_model, model, prompt_config, prompt_fill_policy, run_here, sampled)


def printed(capsys, path, text, *arguments):
    """What a call prints."""
    sample.main([f"--checkpoint={path}", f"--text={text}", *arguments, "--device=cpu"])
    return capsys.readouterr().out


OWN_ORDERS = """
import torch
from core.fill_in import UNMASK_ORDERS
UNMASK_ORDERS["backwards"] = lambda noise: torch.linspace(1, 0, noise.shape[-1]).expand_as(noise)
UNMASK_ORDERS["unlikely_first"] = lambda logp, ids: logp.gather(1, ids)
"""


@pytest.mark.parametrize("order", ["left_to_right", "confidence", "backwards", "unlikely_first"])
def test_the_order_of_the_passes_is_that_of_training(tmp_path, capsys, prompts, order, monkeypatch):
    """The likeliest tokens depend on the order alone, which is not random here. A config may add one."""
    for name in ("backwards", "unlikely_first"):
        monkeypatch.setitem(UNMASK_ORDERS, name, None)
    (tmp_path / "own.py").write_text(OWN_ORDERS)
    run_config_file(str(tmp_path / "own.py"))
    path = str(tmp_path / "any_order.safetensors")
    policy = prompt_fill_policy(seed=1, n_layer=2)
    save_model(path, policy.model, CAUSAL)
    c = prompt_config(max_new_tokens=9, unmask_steps=3, unmask_order=order, seed=0, group_size=2,
                      top_k=1)
    with torch.no_grad():
        rollouts = sampled(policy, prompts, c)
    for prompt, ids in zip(rollouts.texts.prompts[::2], rollouts.target[::2].tolist(), strict=True):
        out = printed(capsys, path, prompt + "_" * 9, "--num_samples=1", "--temperature=1e-5", "--unmask_steps=3",
                      f"--unmask_order={order}", f"{tmp_path}/own.py")
        assert out == visible(prompt + CAUSAL.decode(ids), kept="\n") + "\n"


def test_the_folder_of_a_run_is_sampled_from_by_its_model(tmp_path, capsys):
    path = tmp_path / "run" / "model.safetensors"
    path.parent.mkdir()
    save_model(str(path), causal_model(block_size=256), CAUSAL)
    (tmp_path / "run" / "state.pt").touch()
    (tmp_path / "run" / "config.json").write_text('{"template": "math"}')
    assert printed(capsys, path, "1+1=") == printed(capsys, tmp_path / "run", "1+1=") != ""


@pytest.mark.parametrize("more, text", [
    ((), "System: Answer with one fenced block of Python code.\n\nUser: 1+1=\n\nAssistant: "),
    (("--template=plain",), "1+1")])
def test_a_prompt_has_the_template_of_the_run_that_trained_the_model(tmp_path, capsys, monkeypatch, more, text):
    path = str(tmp_path / "model.safetensors")
    save_model(path, causal_model(block_size=256), CAUSAL)
    (tmp_path / "config.json").write_text('{"template": "code", "system_prompt": null, "prompt_format": "{prompt}="}')
    read = []
    monkeypatch.setattr(sample, "generate", lambda model, prompt, *others, **sampling: (
        read.append(prompt) or generate(model, prompt, *others, **sampling)))
    printed(capsys, path, "1+1", "--max_new_tokens=2", *more)
    assert read[0].tolist() == [CAUSAL.encode(text)]


def test_a_hugging_face_model_completes_a_text_as_transformers_does(tmp_path, capsys):
    transformers = pytest.importorskip("transformers")
    path = model_folder(tmp_path, "qwen3")  # which has a chat template
    net = transformers.AutoModelForCausalLM.from_pretrained(path)
    tokenizer = transformers.AutoTokenizer.from_pretrained(path)
    inputs = tokenizer.apply_chat_template([{"role": "user", "content": "the quick"}], add_generation_prompt=True,
                                           return_dict=True, return_tensors="pt")
    start = inputs["input_ids"].shape[1]
    ids = net.generate(**inputs, do_sample=False, max_new_tokens=8, pad_token_id=0)[0, start:]
    text = tokenizer.decode(ids, skip_special_tokens=True)
    found = printed(capsys, path, "the quick", "--max_new_tokens=8", "--temperature=1e-4", "--num_samples=1")
    assert found == visible(f"the quick\n{text}", kept="\n\t") + "\n"


def test_the_export_is_a_folder_that_transformers_opens(tmp_path):
    transformers = pytest.importorskip("transformers")
    causal = str(tmp_path / "causal.safetensors")
    save_model(causal, model(LANGUAGE_MODEL, tokenizer=CAUSAL, tied=True), CAUSAL)
    done = run_here("core/export.py", f"--checkpoint={causal}", f"--out={tmp_path}/hf", "--dtype=bfloat16")
    assert done.returncode == 0, done.stderr
    assert transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "hf").dtype == torch.bfloat16
