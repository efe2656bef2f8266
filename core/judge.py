"""The judge: how it scores a text, the texts that it is trained on, and how well it detects filled-in text."""

import math

import numpy as np
import torch

from core.dataset_consumer import unpack_batch
from core.distributions import draw_uniforms
from core.fill_in import fill_once

CHUNK = 16  # texts per forward pass on a CPU, where more of them do not fit into its cache
LARGE_CHUNK = 64  # likewise on a GPU: a bound on memory


def in_chunks(text):
    """The rows of text, as many at a time as a judge reads fast."""
    return text.split(CHUNK if text.device.type == "cpu" else LARGE_CHUNK)


@torch.no_grad()
def calculate_realness(judge, text, filled=None):
    """The judge's probability that each token of text (N, T) is the true one, (N, T).

    filled: (N, T) bool, the tokens that were filled in, for a judge with judge_head="told"; None: it is not told
    """
    read = text if filled is None else judge.mark(text, filled)
    return torch.cat([judge(part).sigmoid() for part in in_chunks(read)])


@torch.no_grad()
def calculate_judge_scores(judge, text, cls_token_id):
    """Score of each text in [0, 1]; 1 means that it looks written by a human.

    A realness judge gives the mean, over positions, of the probability that the token is the true one. A cls judge
    reads CLS + text and gives 1 - its estimate of how much of the text was replaced.
    text: (N, T) completed tokens
    Returns (N,) float32
    """
    if judge.judge_head == "cls":
        text = torch.cat((torch.full_like(text[:, :1], cls_token_id), text), dim=1)  # (N, 1 + T)
        return torch.cat([1 - judge(part).sigmoid() for part in in_chunks(text)])
    return calculate_realness(judge, text).mean(1)


class FilledText:
    """Training batches of a judge: windows of the corpus whose masked tokens a frozen generator has filled in.

    batch(split, step, micro) returns (input, target, mask): the filled text (after CLS for a cls judge), the true text,
    and True where a token was masked. The generator of each row is drawn from `fillers`, its temperature from
    [temperature_low, temperature_high]. About clean_share of the rows keep their true text. A batch depends only on
    (seed, split, step) and the numbers of its problems, like those of the dataset.
    """

    def __init__(self, data, fillers, device, judge_head="realness", clean_share=0.1, temperature_low=0.7,
                 temperature_high=1.0, noise_seed=1):
        self.data, self.fillers, self.device, self.judge_head = data, fillers, device, judge_head
        self.clean_share, self.noise_seed = clean_share, noise_seed
        self.temperature_low, self.temperature_high = temperature_low, temperature_high

    @torch.no_grad()
    def batch(self, split, step, micro=0):
        batch = self.data.batch(split, step, micro)
        input, target, mask = unpack_batch(batch, self.device)                       # (B, T)
        noise = draw_uniforms(self.data.seed + self.noise_seed, step, batch["number"], (1, input.shape[1] + 3))
        which = (noise[:, 0, -1] * len(self.fillers)).long()                         # (B,) the generator of each row
        clean = (noise[:, 0, -2] < self.clean_share).to(self.device)                 # (B,)
        span = self.temperature_high - self.temperature_low
        temperature = (self.temperature_low + span * noise[:, 0, -3]).float()        # (B,)
        filled = target.clone()
        for i, filler in enumerate(self.fillers):
            rows = (which == i).nonzero().squeeze(1)
            if len(rows):
                filled[rows] = fill_once(filler, input[rows.to(self.device)], mask[rows], noise[rows, :, :-3],
                                         temperature[rows, None, None].to(self.device))[:, 0]
        filled = torch.where(clean[:, None], target, filled)
        if self.judge_head == "cls":
            filled = torch.cat((torch.full_like(filled[:, :1], self.data.tokenizer.cls_token_id), filled), dim=1)
        return filled, target, mask


def average_ranks(x):
    """Rank of each value, from 1; equal values get the mean of their ranks."""
    _, inverse, counts = np.unique(x, return_inverse=True, return_counts=True)
    last = np.cumsum(counts)
    return (last - (counts - 1) / 2)[inverse]


def auc(positive, negative):
    """Probability that a positive score is higher than a negative one; a tie counts half (Mann-Whitney). NaN without
    scores of both kinds."""
    if not len(positive) or not len(negative):
        return math.nan
    ranks = average_ranks(np.concatenate((positive, negative)))
    n = len(positive)
    return float((ranks[:n].sum() - n * (n + 1) / 2) / (n * len(negative)))


def judge_report(judge, data, filler, device, batches=8, temperature=0.8):
    """How well the judge tells validation text from the same text filled in by one generator.

    data: a DatasetConsumer whose masks cover from little to much of a text
    Returns {"pearson", "spearman": correlations of 1 - score with the replaced share of a text, "auc": of true texts
    against texts with 30% filled in, "token_auc": of true against false tokens among those that were filled in,
    "told_token_auc": the same for a judge that is told which these are, "mean_score": of the filled texts}
    """
    shares, scores, clean, filled_30, token_aucs = [], [], [], [], {}
    cls = data.tokenizer.cls_token_id
    for step in range(batches):
        batch = data.batch("val", step)
        input, target, mask = unpack_batch(batch, device)
        noise = draw_uniforms(data.seed + 7, step, batch["number"], (2, input.shape[1]))
        text = fill_once(filler, input, mask, noise[:, :1], temperature)[:, 0]
        for name, filled in known_fills(judge, mask.to(device)).items():
            found = token_aucs.setdefault(name, ([], []))
            realness = calculate_realness(judge, text, filled)
            for part, chosen in zip(found, (mask & (text == target).cpu(), mask & (text != target).cpu()), strict=True):
                part.append(realness.cpu()[chosen])
        shares.append((text != target).float().mean(1).cpu())
        scores.append(calculate_judge_scores(judge, text, cls).cpu())
        thirty = noise[:, 1].argsort(1).argsort(1) < round(0.3 * input.shape[1])     # (B, T) a random 30%
        masked = target.masked_fill(thirty.to(device), data.tokenizer.mask_token_id)
        text = fill_once(filler, masked, thirty, noise[:, :1], temperature)
        filled_30.append(calculate_judge_scores(judge, text[:, 0], cls).cpu())
        clean.append(calculate_judge_scores(judge, target, cls).cpu())
    shares, scores, clean, filled_30 = (torch.cat(x).double().numpy() for x in (shares, scores, clean, filled_30))
    return {"pearson": float(np.corrcoef(shares, 1 - scores)[0, 1]),
            "spearman": float(np.corrcoef(average_ranks(shares), average_ranks(1 - scores))[0, 1]),
            "auc": auc(clean, filled_30), "mean_score": float(scores.mean()),
            **{name: auc(*(torch.cat(x).double().numpy() for x in found)) for name, found in token_aucs.items()}}


def known_fills(judge, filled):
    """{name of a metric: what the judge is told} of the ways in which this judge can be asked about single tokens."""
    if judge.judge_head == "cls":
        return {}
    return {"token_auc": None} | ({"told_token_auc": filled} if judge.judge_head == "told" else {})
