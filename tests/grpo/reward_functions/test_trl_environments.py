"""Classes written for TRL's environment_factory are played as TRL plays them."""

import asyncio
import json
import random
import time
from types import SimpleNamespace

import pytest
import torch

pytest.importorskip("transformers")

from core.files.records import RAW
from core.generation import Stop
from core.models import load_model, load_tokenizer
from core.prompts import PromptConsumer, PromptFormat
from core.settings.user_code import event_loop
from grpo import environments
from grpo.environments import environment, find_environment
from grpo.policies.causal import CausalPolicy
from grpo.policies.environment_calls import Environments, environments_of
from grpo.policies.turns import Episodes
from grpo.reward_functions.trl_environments import with_tools
from grpo.scoring import score
from tests.families import model_folder
from tests.tiny import jsonl, prompt_config

SHOP = '''
import random

class Shop:
    """A stock of apples, as for TRL's environment_factory."""
    def reset(self, **columns):
        self.apples, self.columns = random.randint(10, 99), columns
        return f" There are {self.apples}."

    def buy(self, number: int) -> int:
        """
        Buys apples.

        Args:
            number: how many

        Returns:
            those that are left
        """
        if number > self.apples:
            raise ValueError(f"there are {self.apples}")
        self.apples -= number
        return self.apples

    async def look(self) -> str:
        """Looks how many there are."""
        return f"{self.apples} apples"

    def _hidden(self):
        return 1

    def get_reward(self):
        return 1 / (1 + self.apples)
'''
TEMPLATE = (  # as that of Qwen 3: tools in the system message, their results in a message of the user
    "{% if tools %}<|im_start|>system\nTools: {% for t in tools %}{{ t | tojson }}\n{% endfor %}"
    'Write <tool_call>\n{"name": ..., "arguments": {...}}\n</tool_call><|im_end|>\n{% endif %}'
    "{% for m in messages %}{% if m.role == 'tool' %}"
    "{% if loop.first or messages[loop.index0 - 1].role != 'tool' %}<|im_start|>user{% endif %}"
    "\n<tool_response>\n{{ m.content }}\n</tool_response>"
    "{% if loop.last or messages[loop.index0 + 1].role != 'tool' %}<|im_end|>\n{% endif %}"
    "{% else %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n{% endif %}{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}")


@pytest.fixture
def shop(tmp_path, monkeypatch):
    """A config with the class in a file, and the problems of a small chat model whose template knows tools."""
    monkeypatch.setattr(environments, "ENVIRONMENTS", {})
    (tmp_path / "shop.py").write_text(SHOP)
    path = model_folder(str(tmp_path / "qwen3"), "qwen3")
    tokenizer = load_tokenizer(path)
    tokenizer.backend.chat_template = TEMPLATE
    c = prompt_config(environment="Shop", environment_file=str(tmp_path / "shop.py"), template="model", group_size=2,
                      batch_size=2, max_new_tokens=1200, reward_functions=("environment",), max_prompt_length=1200)
    data = PromptConsumer(jsonl(tmp_path / "p.jsonl", *({"prompt": f"Buy {i}.", "more": i, "split": "train" if i else "val"} for i in range(3))),
                          2, format=PromptFormat("model"), tokenizer=tokenizer)
    return SimpleNamespace(c=c, tokenizer=tokenizer, problems=data.problems("train", 0), path=path)


def call(name, **arguments):
    return f"<tool_call>\n{json.dumps({'name': name, 'arguments': arguments})}\n</tool_call>"


def played(shop, *turns):
    """The Episodes of completions in which the policy writes these turns, each with the end token of the template."""
    stop = Stop(shop.tokenizer)
    episodes = Episodes(shop.problems, 0, shop.c, stop, environments_of(shop.c))
    N, L = episodes.given.shape
    target, live, texts = torch.zeros(N, L, dtype=torch.long), list(range(N)), [[] for _ in range(N)]
    for turn in turns:
        ids = shop.tokenizer.encode(turn + "<|im_end|>")
        ends = {}
        for n in live:
            begin = episodes.begin[n][-1]
            target[n, begin : begin + len(ids)] = torch.tensor(ids)
            ends[n] = begin + len(ids) - 1
        over = episodes(target, ends)
        live = [n for n in live if n not in over]
        for n in live:
            given = episodes.given[n, ends[n] + 1 : episodes.begin[n][-1]]
            texts[n].append(given.tolist())
    return episodes, texts


def test_the_prompt_has_the_tools_and_the_text_of_reset_and_a_group_starts_alike(shop):
    episodes, _ = played(shop, "nothing")
    from transformers.utils import get_json_schema
    made = find_environment("Shop", shop.c.environment_file).played
    schemas = [get_json_schema(getattr(made(), name)) for name in ("buy", "look")]  # as TRL makes them
    stocks = set()
    for p, record in enumerate(episodes.problems["record"]):
        own = [episodes.environments.of[episodes.keys[n]].own for n in (2 * p, 2 * p + 1)]
        assert own[0].apples == own[1].apples and own[0].columns["more"] == record["more"]
        stocks.add(own[0].apples)
        messages = [{"role": "user", "content": f"Buy {record['more']}. There are {own[0].apples}."}]
        assert record["prompt"] == messages
        assert record["text"] == shop.tokenizer.backend.apply_chat_template(messages, tools=schemas, tokenize=False, add_generation_prompt=True)
        assert record["tokens"] == shop.tokenizer.encode(record["text"])
    assert len(stocks) == 2 and random.random() != random.random()


@pytest.mark.parametrize("template", ["short", "qwen2_5", "qwen3", "qwen3_instruct_2507"])
def test_results_of_tools_stand_where_trl_puts_them(shop, template):
    trl = pytest.importorskip("trl")
    of_training = None
    if template != "short":
        shop.tokenizer.backend.chat_template = getattr(trl.chat_template_utils, f"{template}_chat_template")
    if template == "qwen3":  # which changes earlier turns; TRL takes another one then
        of_training = trl.chat_template_utils.qwen3_training_chat_template
    several = call("buy", number=3) + call("look")
    wrong = call("buy", number=1000) + call("sell", number=1) + call("buy", count=1) + "<tool_call>no json</tool_call>"
    episodes, texts = played(shop, "I buy. " + several, wrong, "That is all.")
    trainer = SimpleNamespace(processing_class=shop.tokenizer.backend, chat_template=of_training, chat_template_kwargs={},
                              _is_vlm=False, _tokenizer=shop.tokenizer.backend)
    shop.tokenizer.backend.eos_token = "<|im_end|>"
    for n, answers in enumerate(texts):
        left = episodes.environments.of[episodes.keys[n]].own.apples
        results = [[("buy", str(left)), ("look", f"{left} apples")],
                   [("buy", str({"error": f"there are {left}"})), ("sell", str({"error": "Tool sell not found."})),
                    ("buy", answers and None)]]
        assert len(answers) == 2
        first = [{"role": "tool", "name": name, "content": content} for name, content in results[0]]
        assert answers[0] == trl.GRPOTrainer._get_tool_suffix_ids(trainer, first)
        second = shop.tokenizer.backend.decode(answers[1])
        for _, content in results[1][:2]:
            assert f"<tool_response>\n{content}\n</tool_response>" in second
        assert "unexpected keyword argument 'count'" in second and second.count("<tool_response>") == 3
        assert episodes.columns()["environment_reward"][n] == pytest.approx(1 / (1 + left))
    sums = episodes.close()
    assert sums["environment/calls"] == (5 * len(texts), len(texts)) and sums["environment/failures"] == (3 * len(texts), len(texts))


def test_a_policy_samples_and_scores_with_tools_alike(shop):
    policy = CausalPolicy(load_model(shop.path)[0], shop.tokenizer)
    policy.model.longest_input = 4000
    c = prompt_config(**vars(shop.c) | {"max_new_tokens": 24})
    rollouts = policy.sample(shop.problems, 0, c)
    torch.testing.assert_close(score(policy, rollouts, c.temperature).logp, rollouts.old_logp, rtol=0, atol=1e-4)
    assert all("Tools: " in prompt for prompt in rollouts.texts.prompts)


def test_what_cannot_be_played_is_refused(shop, tmp_path):
    others = TEMPLATE.replace("<tool_call>", "<call>"), TEMPLATE.replace('"arguments": {...}', "<function=name>")
    for template, backend in (("chat", TEMPLATE), *(("model", other) for other in others)):
        shop.tokenizer.backend.chat_template = backend
        c = prompt_config(**vars(shop.c) | {"template": template})
        with pytest.raises(ValueError, match="^environment: it has tools, and prompts with template=.* do not say how to call them between"):
            Episodes(shop.problems, 0, c, Stop(shop.tokenizer), environments_of(c))
    for name, old, new, words in (("a", "get_reward", "reward", "neither @environment nor the method get_reward"),
                                  ("b", "number: how many", "", "buy is no tool .*; give it types and a docstring with Args:")):
        path = tmp_path / f"{name}.py"
        path.write_text(SHOP.replace(old, new))
        with pytest.raises(ValueError, match=words):
            find_environment("Shop", str(path))


def test_a_tokenizer_that_leaves_out_the_tags_of_calls_is_refused(shop):
    shop.tokenizer.backend.add_special_tokens({"additional_special_tokens": ["<tool_call>"]})
    with pytest.raises(ValueError, match="the tokenizer leaves <tool_call> out of what it decodes"):
        PromptFormat("model").with_tools(find_environment("Shop", shop.c.environment_file).tools, shop.tokenizer)


class Dice:
    """It gets columns by name, draws in its tool, and may wait for ever."""
    def reset(self, question, solution):
        self.seen, self.rolled = (question, solution), []

    def roll(self, wait: bool) -> int:
        """
        Rolls.

        Args:
            wait: whether it never ends
        """
        if wait:
            time.sleep(1000)
        self.rolled.append(random.random())
        return len(self.rolled)

    async def hold(self):
        """Holds the event loop."""
        time.sleep(3)

    async def wait(self):
        """Waits for ever, and lets others run."""
        await asyncio.sleep(1000)

    async def look(self) -> int:
        """Looks how often it was rolled."""
        return len(self.rolled)

    def get_reward(self):
        return 0.0


def test_a_class_gets_the_fields_of_its_file_and_what_its_tools_draw_is_the_same_for_a_group():
    record = {"prompt": "6*7=", "answer": "42", RAW: 42}
    played = [with_tools(Dice)(seed) for seed in (1, 1, 2)]
    for one in played:
        one.reset(record)
        assert one.own.seen == ("6*7=", 42)
    for _ in range(2):
        before = random.getstate()
        for one in played:
            one.step(call("roll", wait=False))
        assert random.getstate() == before
    first, second, other = (one.own.rolled for one in played)
    assert first == second != other and len(set(first)) == 2


def test_a_tool_that_never_ends_ends_its_episode_and_later_tools_are_called(monkeypatch):
    for tool, place in ((call("roll", wait=True), "time.sleep(1000)"), (call("wait"), "Dice"), (call("hold"), "Dice")):
        loop = event_loop()
        state = random.getstate()
        monkeypatch.setattr(environments, "ENVIRONMENTS", {"Dice": environment(with_tools(Dice))})
        pool = Environments("Dice", None, 0.2)
        pool.call({key: ("begin", 0, {"prompt": "a", "answer": "b"}) for key in (0, 1)})
        began = time.monotonic()
        found = pool.call({0: ("step", 3 * tool), 1: ("step", call("roll", wait=False) + call("look"))})
        assert f"{place}: OutOfTime: it was not done after 0.2 seconds" in str(found[0])
        assert [message["content"] for message in found[1][0]] == ["1", "1"] and time.monotonic() - began < 2.5
        assert (event_loop() is loop) == (tool != call("hold")) and random.getstate() == state
