"""The template of prompts where the user sets none, and the tags that a reward looks for but no prompt names."""

import os

from core.checkpoint_manager import states
from core.errors import Mistake
from core.files import CONFIG, read_object
from core.models import load_tokenizer
from core.prompts import MATH, MODEL_TEMPLATES, prefill
from core.settings.setting import check_values
from grpo.reward_functions.presets import PRESET_TEMPLATE
from grpo.rewards import REWARDS


def with_template_of_prompts(config, origin):
    """The config of a run on prompts with a template: the one that it sets, or that of the run which it resumes, or
    that of task_type. If the config sets none, `origin` gets the place from which it comes."""
    if config.template is None:
        template, where = template_of(config)
        if template != "plain":
            origin["template"] = where
        config = config.varied(template=template)
        check_values(config, origin)  # config.json may have been changed
    if config.template not in MODEL_TEMPLATES and config.chat_template_kwargs:
        raise Mistake(f"chat_template_kwargs={config.chat_template_kwargs} is for template='model', 'model_math' "
                      f"or 'model_code', not {config.template!r}; leave it out")
    return config


def template_of(config):
    """(template, where it comes from) of a run that sets none."""
    path = os.path.join(config.absolute_out_dir, CONFIG)
    if config.resume and states(config.absolute_out_dir) and os.path.exists(path):
        return read_object(path, path, "delete it").get("template") or "plain", path
    template = PRESET_TEMPLATE.get(config.task_type, "plain")
    if template != "plain":
        tokenizer = load_tokenizer(config.generator_checkpoint, "generator_checkpoint")
        template = of_tokenizer(template, tokenizer)
    return template, f"that of task_type={config.task_type!r}"


def of_tokenizer(name, tokenizer):
    """The name of the template with these rules that suits a tokenizer: its own chat template, if it has one."""
    return f"model_{name}" if tokenizer.has_chat_template else name


def unnamed_tags(rewards, data):
    """Yields a line with the tags that rewards with a weight look for, if no training prompt names them."""
    texts = [record["text"] + prefill(record["prompt"]) for record in data.records["train"]]
    text = "\n".join([*texts, data.format.response_prefix])
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
            template = f"set template={of_tokenizer('math', data.tokenizer)!r}, or "
        yield (f"no prompt names tags that these rewards look for: {', '.join(found)}; {template}name them in "
               "system_prompt or prompt_format, unless the model has learned them")
