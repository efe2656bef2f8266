"""A reward model as a reward: a frozen classifier with one label, trained elsewhere, scores each completion."""

import torch
from torch.nn.utils.rnn import pad_sequence

from core.device import detect_dtype
from core.distributed import autocast
from core.errors import others
from core.huggingface.files import check_weights, is_adapter, read_config, refuse
from core.huggingface.load import check_vocabulary, read_weights
from core.huggingface.model import most_tokens
from core.huggingface.tokenizer import load_huggingface_tokenizer
from core.models import freeze_in, is_huggingface
from core.prompts import as_messages
from core.settings.optional import quiet_transformers
from grpo.reward_functions.judge import distinct
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
    tokenizer: its own, of transformers. With a chat template it reads a chat: the record's messages, or its text as the
               user's, then the completion as the assistant's. Without, the rendered prompt and the completion
    dtype:     of its matrix products
    A model whose config has no pad token takes its score from the last token, so it reads each text alone.
    """

    def __init__(self, model, tokenizer, dtype):
        self.model, self.tokenizer, self.dtype = model, tokenizer, dtype
        self.pad = model.config.get_text_config().pad_token_id

    @torch.no_grad()
    def scores(self, texts):
        """Score of each text, (N,) float32 on the model's device. Raises Mistake if one is longer than it can read.
        texts: has prompts and completions (lists of N texts), and columns, whose "prompt" are the records' prompts"""
        ids, same = distinct(map(tuple, self.token_ids(texts)))  # equal texts get scores that are exactly equal
        room, longest = min(most_tokens(self.model), self.tokenizer.model_max_length), max(map(len, ids))
        refuse(KEY, (longest > room, f"reads {room} tokens, but a prompt with its completion has {longest}: lower "
                     "max_new_tokens or, in tokens, max_prompt_length, or take a reward model that reads longer texts"))
        device = next(self.model.parameters()).device
        order = sorted(range(len(ids)), key=lambda i: len(ids[i]))
        found = []
        for rows in torch.tensor(order).split(BATCH if self.pad is not None else 1):
            tokens = pad_sequence([torch.tensor(ids[i]) for i in rows], batch_first=True, padding_value=-1)  # (n, T)
            tokens = tokens.to(device, non_blocking=True)
            mask = tokens >= 0                                                       # (n, T)
            with autocast(device, self.dtype):
                read = self.model(input_ids=tokens.masked_fill(~mask, self.pad or 0), attention_mask=mask.long())
                found.append(read.logits[:, 0].float())
        place = torch.tensor(order).argsort()[same]
        return torch.cat(found)[place.to(device, non_blocking=True)]

    def token_ids(self, texts):
        """N lists of token ids. An empty text is one pad token."""
        if self.tokenizer.chat_template:
            ids = map(self.chat_ids, texts.columns.get("prompt", texts.prompts), texts.completions)
        else:
            pairs = zip(texts.prompts, texts.completions, strict=True)
            ids = [self.tokenizer(prompt + completion)["input_ids"] for prompt, completion in pairs]
        return [x or [self.pad or 0] for x in ids]

    def chat_ids(self, prompt, completion):
        """Token ids of a prompt and the assistant's answer, with the special tokens of the chat template alone."""
        messages = as_messages(prompt)
        with others(f"the chat template of {KEY} refuses a prompt", "change the prompt, or take a reward model whose "
                    "template accepts it"):
            chat = self.tokenizer.apply_chat_template([*messages, {"role": "assistant", "content": completion}],
                                                      tokenize=False)
        return self.tokenizer(chat, add_special_tokens=False)["input_ids"]


def load_reward_model(path, device="cpu", dtype=torch.float32):
    """A RewardModel from a folder in Hugging Face format or hf:owner/name, in the precision of its file; in float32 on
    a GPU that would emulate bfloat16."""
    named = f"{KEY}={path}"
    is_model = is_huggingface(path, KEY) and not is_adapter(path)
    refuse(named, (not is_model, "is not the folder of a model in Hugging Face format, nor hf:owner/name"))
    config = read_config(path, KEY)
    refuse(named, (config.num_labels != 1, f"has {config.num_labels} labels, but a reward model has 1"))
    check_weights(path, KEY, config)
    kind = quiet_transformers(path, KEY).AutoModelForSequenceClassification
    model = read_weights(kind, path, KEY, dtype="auto").to(device)
    if model.dtype == torch.bfloat16:
        model.to(detect_dtype("bfloat16", model.device))
    tokenizer = load_huggingface_tokenizer(path, KEY)
    check_vocabulary(model, tokenizer, named)
    return RewardModel(freeze_in(dtype, model), tokenizer.backend, dtype)
