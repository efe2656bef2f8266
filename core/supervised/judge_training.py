"""Training texts of a judge, filled in by frozen generators, and a report of how well it tells them from true ones."""

import math
from collections import defaultdict

import numpy as np
import torch

from core.data import masked_positions, unpack_batch
from core.distributions import draw_uniforms
from core.fill_in import fill_in, predict_and_sample_tokens
from core.judge import calculate_judge_scores, calculate_realness

NOISE = 1          # added to a seed, keeps the noise of training apart from other noise
REPORT_NOISE = 7   # the same for reports


@torch.no_grad()
def fill_once(model, input, mask, uniform, **sampling):
    """The completed texts (P, G, T) alone; input, mask: (P, T); the rest as in predict_and_sample_tokens."""
    position, hidden = masked_positions(mask, input.device)                          # (P, M) each
    target, _, _ = predict_and_sample_tokens(model, input, position, uniform, hidden, **sampling)
    return fill_in(input, position, hidden.to(input.device, non_blocking=True), target)


@torch.no_grad()
def filled_batch(data, fillers, device, config, split, step, micro=0):
    """A batch for a judge: windows of the corpus whose masked tokens a frozen generator has filled in.

    The generator of each row is drawn from `fillers`, its temperature from [fill_temperature_low,
    fill_temperature_high]. About clean_share of the rows keep their true text. A batch depends only on (seed, split,
    step) and the numbers of its problems, like those of the dataset.
    Returns the filled text (after CLS for a cls judge), the true text, and True where a token was masked
    """
    batch = data.batch(split, step, micro)
    input, target, mask = unpack_batch(batch, device)                                # (B, T) each
    noise = draw_uniforms(data.seed + NOISE, step, batch["number"], (1, input.shape[1] + 3))
    which = (noise[:, 0, -1] * len(fillers)).long()                                  # (B,) the generator of each row
    clean = (noise[:, 0, -2] < config.clean_share).to(device, non_blocking=True)     # (B,)
    span = config.fill_temperature_high - config.fill_temperature_low
    temperature = config.fill_temperature_low + span * noise[:, :1, -3]              # (B, 1)
    temperature = temperature.to(device, torch.float32, non_blocking=True)
    filled = target.clone()
    for i in which.unique():
        rows = which == i                                                            # (B,)
        own = rows.nonzero().squeeze(1).to(device, non_blocking=True)                # (b,)
        texts = fill_once(fillers[i], input[own], mask[rows], noise[rows, :, :-3], temperature=temperature[own])
        filled[own] = texts[:, 0]
    filled = torch.where(clean[:, None], target, filled)
    if config.judge_head == "cls":
        cls = torch.full_like(filled[:, :1], data.tokenizer.cls_token_id)
        filled = torch.cat((cls, filled), dim=1)
    return filled, target, mask


def average_ranks(x):
    """Rank of each value, from 1; equal values get the mean of their ranks."""
    _, inverse, counts = np.unique(x, return_inverse=True, return_counts=True)
    last = np.cumsum(counts)
    return (last - (counts - 1) / 2)[inverse]


def auc(positive, negative):
    """Probability that a positive score is above a negative one, a tie half (Mann-Whitney); NaN without both kinds."""
    if not len(positive) or not len(negative):
        return math.nan
    ranks = average_ranks(np.concatenate((positive, negative)))
    n = len(positive)
    return float((ranks[:n].sum() - n * (n + 1) / 2) / (n * len(negative)))


@torch.no_grad()
def judge_report(judge, data, filler, device, batches):
    """Measures how well the judge tells validation text from the same text filled in by one generator.

    data: a DatasetConsumer whose masks cover from little to much of a text
    Returns {"pearson", "spearman": correlations of 1 - score with the replaced share of a text, "auc": of true texts
    against texts with 30% filled in, "token_auc", not for a cls judge: of true against false tokens among those that
    were filled in, "mean_score": of the filled texts}
    """
    found = defaultdict(list)
    for step in range(batches):
        batch = data.batch("val", step)
        input, target, mask = unpack_batch(batch, device)
        noise = draw_uniforms(data.seed + REPORT_NOISE, step, batch["number"], (2, input.shape[1]))
        filled = fill_once(filler, input, mask, noise[:, :1], temperature=0.8)[:, 0]  # (B, T)
        thirty = noise[:, 1].argsort(1).argsort(1) < round(0.3 * input.shape[1])     # (B, T) a random 30%
        masked = target.masked_fill(thirty.to(device), data.tokenizer.mask_token_id)
        filled_30 = fill_once(filler, masked, thirty, noise[:, :1], temperature=0.8)[:, 0]
        for name, text in (("filled", filled), ("filled_30", filled_30), ("clean", target)):
            found[name].append(calculate_judge_scores(judge, text, data.tokenizer.cls_token_id))  # (B,)
        found["share"].append((filled != target).float().mean(1))                    # (B,)
        if judge.judge_head != "cls":
            is_true, mask = (filled == target), mask.to(device)                      # (B, T) each
            realness = calculate_realness(judge, filled)                             # (B, T)
            found["true_tokens"].append(realness[mask & is_true])
            found["false_tokens"].append(realness[mask & ~is_true])
    found = {name: torch.cat(parts).cpu().double().numpy() for name, parts in found.items()}
    shares, scores = found["share"], found["filled"]
    ranks = average_ranks(shares), average_ranks(1 - scores)
    report = {"pearson": float(np.corrcoef(shares, 1 - scores)[0, 1]),
              "spearman": float(np.corrcoef(*ranks)[0, 1]),
              "auc": auc(found["clean"], found["filled_30"]),
              "mean_score": float(scores.mean())}
    if judge.judge_head != "cls":
        report["token_auc"] = auc(found["true_tokens"], found["false_tokens"])
    return report
