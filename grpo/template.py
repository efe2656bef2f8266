"""The template of prompts where the user sets none, and the tags that a reward looks for but no prompt names."""

import os

from core.checkpoint_manager import states
from core.errors import Mistake
from core.files import CONFIG, read_object
from core.models import load_tokenizer
from core.prompts import MODEL, RULES, prefill
from core.settings.setting import check_values
from grpo.reward_functions.settings import PRESET_TEMPLATE
from grpo.rewards import REWARDS

FORM = ("template", "system_prompt", "prompt_format")  # what a resumed run keeps unless the command sets it


def with_template(config, origin):
    """The config of a run on prompts with a template: the one that it sets, or that of the run which it resumes, or
    that of task_type. `origin` then says which."""
    if config.template is None:
        origin.pop("template", None)
        changes, where = form_of_run(config, origin) or form_of_task(config)
        for key, value in changes.items():
            if where is not None and value != getattr(config, key):
                origin[key] = f"{where}, before that of {origin[key]}" if key in origin else where
        config = config.varied(**changes)
        check_values(config)  # a config.json may have been changed
    if config.template != MODEL and vars(config).get("chat_template_kwargs"):
        raise Mistake(f"chat_template_kwargs={config.chat_template_kwargs} is for template='model', not for "
                      f"{config.template!r}; leave it out")
    return config


def form_of_task(config):
    """({setting: value}, who has set them) of a new run."""
    name = PRESET_TEMPLATE.get(config.task_type)
    if name is None:
        return {"template": "plain"}, None
    where = f"that of task_type={config.task_type!r}"
    tokenizer = load_tokenizer(config.generator_checkpoint, "generator_checkpoint")
    if not getattr(tokenizer, "has_chat_template", False):
        return {"template": name}, where
    changes = {"template": MODEL} | place_rules(RULES[name], config, tokenizer)
    if "prompt_format" in changes:
        where += ", with its rules in the user's message: the tokenizer's chat template shows no system message"
    return changes, where


def place_rules(rules, config, tokenizer):
    """The settings by which a chat template shows rules: one system message of them and system_prompt or, where it
    shows no system message, the beginning of the user's."""
    parts = [rules, config.system_prompt] if config.system_prompt else [rules]
    text = "\n\n".join(parts)
    turns = [{"role": "system", "content": text}, {"role": "user", "content": "?"}]
    try:
        shown = tokenizer.render_chat(turns, **config.chat_template_kwargs or {})
    except Mistake:  # such as Gemma's: system role not supported
        shown = ""
    if text.strip() in shown:
        return {"system_prompt": text}
    return {"system_prompt": None, "prompt_format": f"{text}\n\n{config.prompt_format or '{prompt}'}"}


def form_of_run(config, origin):
    """The same of the run that is resumed; None if none is. What the command sets is kept, behind the rules if the run
    had them."""
    path = os.path.join(config.absolute_out_dir, CONFIG)
    if not config.resume or not states(config.absolute_out_dir) or not os.path.exists(path):
        return None
    saved = {"template": "plain"} | read_object(path, path, "delete it")
    own = [key for key in FORM if key in origin]
    changes = {key: saved.get(key) for key in FORM if key not in own}
    rules = RULES.get(PRESET_TEMPLATE.get(config.task_type))
    had_rules = rules is not None and rules in f"{saved.get('system_prompt')} {saved.get('prompt_format')}"
    if had_rules and saved["template"] == MODEL and own:
        tokenizer = load_tokenizer(config.generator_checkpoint, "generator_checkpoint")
        changes |= place_rules(rules, config, tokenizer)
    return changes, path


def unnamed_tags(rewards, data):
    """Yields a line with the tags that rewards with a weight look for, if no training prompt names them."""
    texts = [record["text"] + prefill(record["prompt"]) for record in data.records["train"]]
    texts.append(data.format.response_prefix)
    found = []
    for name, weight in zip(rewards.names, rewards.weights, strict=True):
        tags = [tag for tag in REWARDS[name].tags if not any(tag in text for text in texts)]
        if tags and weight:
            found.append(f"{name} {' '.join(tags)}")
    if found:
        yield (f"no prompt names tags that these rewards look for: {', '.join(found)}; set template='math', or name "
               "them in system_prompt or prompt_format, unless the model has learned them")
