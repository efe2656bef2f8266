"""The judge as a reward: a frozen model scores each text, or each token of it."""

from itertools import groupby

import torch
from torch import Tensor, nn

from core.distributed import autocast
from core.errors import Mistake
from core.judge import calculate_realness, log_odds, windowed_mean
from core.performance.prepacked import pack_in_bfloat16
from core.tokenizer import Tokenizer
from grpo.reward_functions.registry import reward
from grpo.rewards import Rewards
from grpo.rollout import Rollouts, Scored, Texts


@reward(0, 1)
def judge(*, texts: Texts, judge_model: "Judge") -> Tensor:
    """The frozen judge's score of prompt and completion together: 1 looks written by a human."""
    return judge_model.scores(texts)


class TokenRewards(Rewards):
    """The judge as the only reward, with a credit for each token (credit_window)."""

    @torch.no_grad()
    def __call__(self, rollouts: Rollouts) -> Scored:
        G = rollouts.group_size
        judge_model = self.models["judge_model"]
        score, credit = judge_model.read(rollouts.texts, self.config.credit_window)
        score = score.masked_fill(score.isnan(), -torch.inf)  # NaN would skip the completion
        reward = score.view(-1, G)                                                   # (P, G)
        credit = credit.unflatten(0, reward.shape)                                   # (P, G, M)
        return Scored(reward, credit, {"judge": score})


class Judge:
    """A frozen judge and the way it reads texts.

    model:     a sequence scorer in eval mode
    tokenizer: the tokenizer of its training
    reads_ids: it has the generator's vocabulary and reads the texts' token ids; else it encodes prompt + completion
    dtype:     of its matrix products
    """

    def __init__(
            self,
            model: nn.Module,
            tokenizer: Tokenizer,
            reads_ids: bool,
            dtype: torch.dtype = torch.float32):
        self.model = model
        self.tokenizer = tokenizer
        self.reads_ids = reads_ids
        self.dtype = dtype

    @property
    def device(self) -> torch.device:
        return next(self.model.parameters()).device

    def pack(self) -> None:
        """Makes the judge multiply in bfloat16 with packed weights from now on, and do the rest in float32."""
        pack_in_bfloat16(self.model)
        self.dtype = torch.float32

    def scores(self, texts: Texts) -> Tensor:
        """Score of each text, (N,) float32 on the judge's device."""
        scores, _ = self.read(texts)
        return scores

    @torch.no_grad()
    def read(self, texts: Texts, window: int | None = None) -> tuple[Tensor, Tensor | None]:
        """The score of each text, (N,), and with a window the credit of each sampled token, (N, M): the judge's mean
        log-odds that the tokens are true, over the positions of the text at most `window` away.

        texts: has `tokens`, a list of N 1-D tensors of token ids, or `prompts` and `completions`, lists of N texts;
        with a window also `place`, (N, M), the position of each sampled token in its text, and texts of one length
        """
        room = self.model.longest_input
        if self.model.judge_head == "cls":  # CLS precedes the text
            room -= 1
        distinct, index = each_once(self.token_ids(texts), room, "judge_checkpoint")
        index = index.to(self.device, non_blocking=True)
        scores = []
        credit = []
        # Texts of different lengths are never in one batch: padding would change the last bits of a score
        for _, group in groupby(distinct, key=len):
            batch = torch.tensor(list(group))                                        # (n, T)
            batch = batch.to(self.device, non_blocking=True)
            with autocast(self.device, self.dtype):
                realness = calculate_realness(self.model, batch, self.tokenizer.cls_token_id)
            scores.append(realness.mean(1))
            if window is not None:
                credit.append(windowed_mean(log_odds(realness), window))             # (n, T)
        scores = torch.cat(scores)[index]
        if window is None:
            return scores, None
        credit = torch.cat(credit)[index]                                            # (N, T)
        place = texts.place.to(self.device, non_blocking=True)
        return scores, credit.gather(1, place)

    def token_ids(self, texts: Texts) -> list[list[int]]:
        """The token ids of N texts in the judge's vocabulary. An empty text is one pad token."""
        if self.reads_ids:
            ids = [tokens.tolist() for tokens in texts.tokens]
        else:
            pairs = zip(texts.prompts, texts.completions, strict=True)
            ids = [self.tokenizer.encode(prompt + completion) for prompt, completion in pairs]
        return [x or [self.tokenizer.pad_token_id] for x in ids]


def each_once(texts: list[list[int]], room: int, key: str) -> tuple[list, Tensor]:
    """Returns the distinct texts, shortest first, and (N,) the index of each text among them. Raises Mistake if a text
    has more than `room` tokens, the limit of the model of the setting `key`.

    The last bits of a score depend on the place in the batch. If equal completions were read at two places, their group
    would seem to differ, and dividing by its tiny standard deviation would make a large advantage of rounding errors.
    """
    texts = list(map(tuple, texts))
    longest = max(map(len, texts))
    if longest > room:
        raise Mistake(f"{key} reads {room} tokens, but a prompt with its completion has {longest}: lower "
                      "max_new_tokens or, in tokens, max_prompt_length, or take a model that reads longer texts")
    distinct = sorted(dict.fromkeys(texts), key=len)  # a set would have no order, and so no repeatable batches
    place = {text: i for i, text in enumerate(distinct)}
    return distinct, torch.tensor([place[text] for text in texts])
