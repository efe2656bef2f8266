"""The judge as a reward: a frozen model scores each text, or each token of it."""

from collections.abc import Iterable, Iterator

import torch
from torch import Tensor, nn

from core.distributed import autocast
from core.errors import Mistake
from core.judge import calculate_judge_scores, calculate_realness, log_odds, windowed_mean
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
        score, credit = self.models["judge_model"].score_and_credit(rollouts.texts, self.config.credit_window)
        score = score.masked_fill(score.isnan(), -torch.inf)  # NaN would skip the completion
        return Scored(score.view(-1, G), credit.view(-1, G, credit.shape[1]), {"judge": score})


class Judge:
    """A frozen judge with what it needs to read texts.

    model:     a sequence scorer in eval mode
    tokenizer: the one that it was trained with
    reads_ids: it has the generator's vocabulary and reads the texts' token ids; else prompt + completion, as texts
    dtype:     of its matrix products
    Texts of equal length are read together, without padding, and equal texts once: their scores have the same bits.
    """

    packed = False  # whether its weights are packed, see `pack`

    def __init__(self, model: nn.Module, tokenizer: Tokenizer, reads_ids: bool, dtype: torch.dtype = torch.float32):
        self.model, self.tokenizer = model, tokenizer
        self.reads_ids, self.dtype = reads_ids, dtype

    def pack(self) -> None:
        """Makes the judge multiply in bfloat16 with packed weights from now on, and do the rest in float32."""
        pack_in_bfloat16(self.model)
        self.packed, self.dtype = True, torch.float32

    @torch.no_grad()
    def scores(self, texts: Texts) -> torch.Tensor:
        """Score of each text, (N,) float32 on the judge's device.
        texts: has `tokens`, a list of N 1-D tensors of token ids, or `prompts` and `completions`, lists of N texts"""
        ids = self.token_ids(texts)
        scores = torch.empty(len(ids), device=self.device)
        for rows, batch, same in self.batches(ids):
            with autocast(self.device, self.dtype):
                scores[rows] = calculate_judge_scores(self.model, batch, self.tokenizer.cls_token_id)[same]
        return scores

    @torch.no_grad()
    def score_and_credit(self, texts: Texts, window: int) -> tuple[torch.Tensor, torch.Tensor]:
        """Score of each text, (N,), and the credit of each sampled token, (N, M): the mean, over the positions of its
        text at most `window` away, of the judge's log-odds that the token there is the true one.

        texts.place: (N, M) where in its text each sampled token is
        """
        scores = torch.empty(len(texts.place), device=self.device)                   # (N,)
        credit = torch.empty(texts.place.shape, device=self.device)                  # (N, M)
        place = texts.place.to(self.device, non_blocking=True)                       # (N, M)
        for rows, batch, same in self.batches(texts.tokens):
            with autocast(self.device, self.dtype):
                realness = calculate_realness(self.model, batch)                     # (n, T)
            near = windowed_mean(log_odds(realness), window)                         # (n, T)
            own = place[rows].clamp(max=batch.shape[1] - 1)                          # padding may lie behind the text
            scores[rows] = realness.mean(1)[same]
            credit[rows] = near[same].gather(1, own)
        return scores, credit

    def batches(self, texts: list) -> Iterator:
        """Yields for the texts of each length: their indices, the n that differ (n, T), and which of these each is."""
        room = self.model.longest_input - (self.model.judge_head == "cls")
        longest = max(map(len, texts))
        if longest > room:
            raise Mistake(f"judge_checkpoint reads {room} tokens, but a prompt with its completion has {longest}: "
                          "lower max_new_tokens or, in tokens, max_prompt_length, or take a judge with a larger "
                          "block_size")
        for length in sorted({len(ids) for ids in texts}):
            rows = [i for i, ids in enumerate(texts) if len(ids) == length]
            different, same = distinct(map(tuple, torch.stack([texts[i] for i in rows]).tolist()))
            yield [torch.tensor(x).to(self.device, non_blocking=True) for x in (rows, different, same)]

    @property
    def device(self) -> torch.device:
        return next(self.model.parameters()).device

    def token_ids(self, texts: Texts) -> list:
        """A list of N 1-D tensors: each text in the judge's vocabulary. An empty text is one pad token."""
        if self.reads_ids:
            ids = texts.tokens
        else:
            whole = map(str.__add__, texts.prompts, texts.completions)
            ids = [torch.tensor(self.tokenizer.encode(text)) for text in whole]
        return [x if len(x) else torch.tensor([self.tokenizer.pad_token_id]) for x in ids]


def distinct(items: Iterable) -> tuple[list, list]:
    """The items that differ, in the order in which they come, and a list: which of them each item equals."""
    number = {}
    same = [number.setdefault(item, len(number)) for item in items]
    return list(number), same
