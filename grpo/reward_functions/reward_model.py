"""A reward model as a reward: a frozen classifier with one label, trained elsewhere, scores each completion."""

import torch
from torch.nn.utils.rnn import pad_sequence

from core.device import detect_dtype
from core.distributed import autocast
from core.errors import Mistake, others
from core.huggingface.files import check_weights, is_adapter, read_config
from core.huggingface.load import check_vocabulary, read_weights
from core.huggingface.model import most_tokens
from core.huggingface.tokenizer import load_huggingface_tokenizer
from core.models import freeze_and_cast, is_huggingface
from core.prompts import as_messages
from core.settings.optional import quiet_transformers
from grpo.reward_functions.judge import each_once
from grpo.reward_functions.registry import reward

BATCH = 16  # texts per forward pass
KEY = "reward_model_checkpoint"


@reward
def reward_model(*, texts, reward_scorer):
    """The score of reward_model_checkpoint for prompt and completion together; any number, and more is better."""
    return reward_scorer.scores(texts)


class RewardModel:
    """A frozen reward model and the way it reads texts.

    model:     a transformers model for sequence classification with one label, in eval mode
    tokenizer: its own, of transformers. With a chat template the model reads a chat: the record's messages, or its text
               as the user's message, then the completion as the assistant's. Without one it reads the rendered prompt
               and the completion
    dtype:     of its matrix products
    """

    def __init__(self, model, tokenizer, dtype):
        self.model = model
        self.tokenizer = tokenizer
        self.dtype = dtype
        self.pad = model.config.get_text_config().pad_token_id

    @torch.no_grad()
    def scores(self, texts):
        """Score of each text, (N,) float32 on the model's device. Raises Mistake if a text is too long for the model.
        texts: has prompts and completions (lists of N texts), and columns with the records' prompts under `prompt`"""
        room = min(most_tokens(self.model), self.tokenizer.model_max_length)
        distinct, index = each_once(self.token_ids(texts), room, KEY)
        device = next(self.model.parameters()).device
        # transformers finds the last token of a text by the pad token. If the config has none, it takes the last
        # column, where a shorter text of a padded batch has no token: such a model reads one text at a time
        size = 1 if self.pad is None else BATCH
        scores = []
        for start in range(0, len(distinct), size):
            batch = [torch.tensor(ids) for ids in distinct[start : start + size]]
            tokens = pad_sequence(batch, batch_first=True, padding_value=-1)         # (n, T)
            tokens = tokens.to(device, non_blocking=True)
            is_token = tokens >= 0                                                   # (n, T)
            input = tokens.masked_fill(~is_token, self.pad or 0)
            with autocast(device, self.dtype):
                output = self.model(input_ids=input, attention_mask=is_token.long())
            scores.append(output.logits[:, 0].float())
        index = index.to(device, non_blocking=True)
        return torch.cat(scores)[index]

    def token_ids(self, texts):
        """N lists of token ids. An empty text is one pad token."""
        if self.tokenizer.chat_template:
            encode = self.chat_ids
            prompts = texts.columns.get("prompt", texts.prompts)
        else:
            encode = self.text_ids
            prompts = texts.prompts
        ids = map(encode, prompts, texts.completions)
        return [found or [self.pad or 0] for found in ids]

    def text_ids(self, prompt, completion):
        """The token ids of a rendered prompt and its completion."""
        return self.tokenizer(prompt + completion)["input_ids"]

    def chat_ids(self, prompt, completion):
        """The token ids of a prompt and the assistant's answer. The only special tokens are the chat template's."""
        messages = as_messages(prompt)
        messages.append({"role": "assistant", "content": completion})
        with others(f"the chat template of {KEY} refuses a prompt", "change the prompt, or take a reward model whose "
                    "template accepts it"):
            chat = self.tokenizer.apply_chat_template(messages, tokenize=False)
        return self.tokenizer(chat, add_special_tokens=False)["input_ids"]


def load_reward_model(path, device="cpu", dtype=torch.float32):
    """Loads a RewardModel from a folder in Hugging Face format or hf:owner/name, in the precision of its file; in
    float32 on a GPU that would emulate bfloat16."""
    setting = f"{KEY}={path}"
    if not is_huggingface(path, KEY) or is_adapter(path):
        raise Mistake(f"{setting} is neither the folder of a model in Hugging Face format nor hf:owner/name; name one "
                      "of them")
    config = read_config(path, KEY)
    if config.num_labels != 1:
        raise Mistake(f"{setting} has {config.num_labels} labels, but a reward model has 1; name another model")
    check_weights(path, KEY, config)
    kind = quiet_transformers(path, KEY).AutoModelForSequenceClassification
    model = read_weights(kind, path, KEY, dtype="auto").to(device)
    if model.dtype == torch.bfloat16:
        model.to(detect_dtype("bfloat16", model.device))
    tokenizer = load_huggingface_tokenizer(path, KEY)
    check_vocabulary(model, tokenizer, setting)
    return RewardModel(freeze_and_cast(dtype, model), tokenizer.backend, dtype)
