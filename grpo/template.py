"""Chooses the template of prompts if the user sets none, and finds tags that a reward needs but no prompt names."""

import contextlib
import os
from dataclasses import replace

from core.checkpoint_manager import states
from core.errors import Mistake
from core.files import CONFIG, read_object
from core.models import load_tokenizer
from core.prompts import MATH, MODEL_TEMPLATES, prefill
from core.settings.setting import check_values
from grpo.reward_functions.presets import PRESET_TEMPLATE
from grpo.rewards import REWARDS


def with_template_of_prompts(config, origin):
    """Returns the config of a run on prompts with its template: the config's own, the resumed run's, or the template of
    task_type. `origin` gets the source of a template that the config does not set."""
    if config.template is None:
        template, source = default_template(config)
        if template != "plain":
            origin["template"] = source
        config = config.varied(template=template)
        check_values(config, origin)  # config.json may have been changed
    if config.template not in MODEL_TEMPLATES and config.chat_template_kwargs:
        raise Mistake(f"chat_template_kwargs={config.chat_template_kwargs} is for template='model', 'model_math' "
                      f"or 'model_code', not {config.template!r}; leave it out")
    return config


def default_template(config):
    """(template, its source in words) for a run that sets no template."""
    path = os.path.join(config.absolute_out_dir, CONFIG)
    if config.resume and states(config.absolute_out_dir) and os.path.exists(path):
        saved = read_object(path, path, "delete it")
        return saved.get("template") or "plain", path
    template = PRESET_TEMPLATE.get(config.task_type, "plain")
    if template != "plain":
        tokenizer = load_tokenizer(config.generator_checkpoint, "generator_checkpoint")
        template = template_for(template, tokenizer)
    return template, f"that of task_type={config.task_type!r}"


def template_for(task, tokenizer):
    """The name of the template with the rules of a task: on the chat template of the tokenizer, if it has one."""
    if tokenizer.has_chat_template:
        return f"model_{task}"
    return task


def unread_arguments(data):
    """Yields a line with the chat_template_kwargs if the first prompt is the same without them."""
    given = data.format.chat_template_kwargs
    if not given:
        return
    first = data.records["train"][0]
    without = replace(data.format, chat_template_kwargs=None)
    with contextlib.suppress(Mistake):  # the template may demand them
        text, _ = without.encode(first["prompt"], data.tokenizer)
        if text == first["text"]:
            yield (f"chat_template_kwargs: the first prompt is the same without {', '.join(given)}: the chat template "
                   "does not read this, or has these values anyway")


def unnamed_tags(rewards, data):
    """Yields a line with the tags that rewards with a weight look for, if no training prompt names them."""
    texts = [data.format.response_prefix]
    for record in data.records["train"]:
        texts.append(record["text"] + prefill(record["prompt"]))
    text = "\n".join(texts)
    found = []
    missing = set()
    for name, weight in zip(rewards.names, rewards.weights, strict=True):
        tags = [tag for tag in REWARDS[name].tags if tag not in text]
        if tags and weight:
            found.append(f"{name} {' '.join(tags)}")
            missing.update(tags)
    if found:
        template = ""
        if all(tag in MATH for tag in missing):
            name = template_for("math", data.tokenizer)
            template = f"set template={name!r}, or "
        yield (f"no prompt names tags that these rewards look for: {', '.join(found)}; {template}name them in "
               "system_prompt or prompt_format, unless the model has learned them")
