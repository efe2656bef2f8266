"""What a run says that it is about to do."""

from dataclasses import replace

import pytest

from core.models import save_model
from core.prompts import SHORT
from grpo.plan import plan
from grpo.sandbox import run as sandbox
from tests.families import folder_maker, write_sums
from tests.grpo.trainers import assembled
from tests.tiny import CAUSAL, causal_model, jsonl, one_process, prompt_config


@pytest.fixture(scope="module")
def native(tmp_path_factory):
    """The path of a causal model of this project."""
    path = str(tmp_path_factory.mktemp("native") / "causal")
    save_model(path, causal_model(), CAUSAL)
    return path


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """family -> the folder of a small random Hugging Face model."""
    pytest.importorskip("transformers")
    return folder_maker(tmp_path_factory.mktemp("families"))


@pytest.fixture
def sums(tmp_path):
    return write_sums(tmp_path / "sums.jsonl")


def planned(c, dist=None):
    """(the lines that a run prints at its start, its Models, its data)."""
    data, models, scoring = assembled(c)
    return list(plan(c, {}, models, scoring, data, dist or one_process())), models, data


@pytest.mark.parametrize("system", ["Add.", "Add. " * SHORT])
def test_the_plan_shows_the_rendered_prompt_or_its_end_and_every_end_of_a_completion(folder, sums, system):
    """The text is what transformers' own chat template gives; qwen3's second end is in its generation_config alone."""
    import transformers
    c = prompt_config(dataset=sums, generator_checkpoint=folder("qwen3"), template="model", response_prefix="It is",
                      chat_template_kwargs={"enable_thinking": False}, system_prompt=system, max_prompt_length=4000)
    lines, models, data = planned(c)
    theirs = transformers.AutoTokenizer.from_pretrained(folder("qwen3"))
    messages = [{"role": "system", "content": system},
                {"role": "user", "content": data.records["train"][0]["prompt"]}]
    text = theirs.apply_chat_template(messages, tokenize=False, add_generation_prompt=True,
                                      enable_thinking=False) + "It is"
    assert text.endswith("<|im_start|>assistant\n<think></think>It is")
    assert f"the first prompt ends in {text[-SHORT:]!r}" in lines
    ends = [f"{theirs.convert_tokens_to_ids(name)} {name!r}" for name in ("<|endoftext|>", "<|im_end|>")]
    assert f"a completion ends with token {' or '.join(ends)}" in lines
    assert set(models.policy.tokenizer.stop_token_ids) == {int(end.split()[0]) for end in ends}
    ids = theirs(text, add_special_tokens=False).input_ids
    assert data.records["train"][0]["tokens"] == ids, "the template has the start token in its text"


def test_the_plan_says_under_what_code_runs_and_a_strict_run_refuses_less(native, tmp_path, monkeypatch):
    c = prompt_config(dataset=jsonl(tmp_path / "code.jsonl", *({"prompt": f"{i}+1=", "tests": "pass"}
                                                               for i in range(10, 40))),
                      generator_checkpoint=native, reward_functions=("code_execution",))
    under = lambda c: [line for line in planned(c)[0] if line.startswith("code runs under ")]
    assert len(under(c)) == 1 and under(replace(c, reward_functions=("length_penalty",))) == []
    monkeypatch.setattr(sandbox, "machine_parts", lambda: {"Landlock": "syscall 444: Function not implemented"})
    assert "; missing: Landlock (syscall 444: Function not implemented)" in under(c)[0]
    with pytest.raises(ValueError, match="^sandbox='Strict' needs what this machine does not offer: Landlock"):
        planned(replace(c, reward_settings={"sandbox": "Strict"}))
