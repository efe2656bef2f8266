"""Training texts of a judge, filled in by frozen generators, and a report of how well it tells them from true ones."""

import math

import numpy as np
import torch

from core.data import masked_positions, unpack_batch
from core.distributions import draw_uniforms
from core.fill_in import fill_in, predict_and_sample_tokens
from core.judge import calculate_judge_scores, calculate_realness

NOISE = 1           # added to a seed, keeps the noise of training apart from other noise
REPORT_NOISE = 7    # the same for reports
TEMPERATURE = 0.8   # of the fills of a report
HIDDEN_SHARE = 0.3  # of each text's tokens, which a generator fills in for the AUC of a report


@torch.no_grad()
def fill_once(model, input, mask, uniform, **sampling):
    """The completed texts (P, G, T). input, mask: (P, T); the rest as in predict_and_sample_tokens."""
    position, hidden = masked_positions(mask, input.device)                          # (P, M) each
    target, _, _ = predict_and_sample_tokens(model, input, position, uniform, hidden, **sampling)
    hidden = hidden.to(input.device, non_blocking=True)
    return fill_in(input, position, hidden, target)


@torch.no_grad()
def filled_batch(data, fillers, device, config, split, step, micro=0):
    """A batch for a judge: windows of the corpus whose masked tokens a frozen generator has filled in.

    The generator of each text is drawn from `fillers`, its temperature from [fill_temperature_low,
    fill_temperature_high]. About clean_share of the texts stay true, so that the judge also learns that a text may have
    no false token. A batch depends only on (seed, split, step) and the numbers of its problems, like those of the
    dataset.
    Returns the filled text (after CLS for a cls judge), the true text, and True where a token was masked
    """
    batch = data.batch(split, step, micro)
    input, target, mask = unpack_batch(batch, device)                                # (B, T) each
    T = input.shape[1]
    noise = draw_uniforms(data.seed + NOISE, step, batch["number"], (1, T + 3))
    # Columns are added only at the end: those before them keep their numbers, and so the texts of earlier versions
    of_tokens, of_temperature, of_clean, of_filler = noise.split((T, 1, 1, 1), dim=2)
    low = config.fill_temperature_low
    temperature = low + (config.fill_temperature_high - low) * of_temperature[:, 0]  # (B, 1)
    temperature = temperature.to(device, torch.float32, non_blocking=True)
    filler_of_text = of_filler[:, 0, 0] * len(fillers)                               # (B,)
    filler_of_text = filler_of_text.long()
    filled = target.clone()
    for number in filler_of_text.unique():
        rows = (filler_of_text == number).nonzero()[:, 0]                            # (b,) on the CPU, as the mask is
        own = rows.to(device, non_blocking=True)
        filler = fillers[number]
        texts = fill_once(filler, input[own], mask[rows], of_tokens[rows], temperature=temperature[own])
        filled[own] = texts[:, 0]
    is_clean = of_clean[:, 0] < config.clean_share                                   # (B, 1)
    is_clean = is_clean.to(device, non_blocking=True)
    filled = torch.where(is_clean, target, filled)
    if config.judge_head == "cls":
        cls = torch.full_like(filled[:, :1], data.tokenizer.cls_token_id)
        filled = torch.cat((cls, filled), dim=1)
    return filled, target, mask


def count_below(x, values):
    """The number of `values` below each x, an equal one counting half. x, values: numpy arrays"""
    values = np.sort(values)
    below = np.searchsorted(values, x, "left")
    at_most = np.searchsorted(values, x, "right")
    return (below + at_most) / 2


def average_ranks(x):
    """Rank of each value, from 1; equal values get the mean of their ranks."""
    return count_below(x, x) + 0.5  # a value is not below itself, but counts half


def auc(positive, negative):
    """Probability that a positive score is above a negative one, a tie half (Mann-Whitney); NaN without both kinds."""
    pairs = len(positive) * len(negative)
    if pairs == 0:
        return math.nan
    won = count_below(positive, negative).sum()
    return float(won / pairs)


def correlation(x, y):
    return float(np.corrcoef(x, y)[0, 1])


@torch.no_grad()
def judge_report(judge, data, filler, device, batches):
    """Measures how well the judge tells validation text from the same text filled in by one generator.

    data: a DatasetConsumer whose masks cover from little to much of a text
    Returns {"pearson", "spearman": correlations of 1 - score with the replaced share of a text, "auc": of true texts
    against texts with 30% filled in, "token_auc", not for a cls judge: of true against false tokens among those that
    were filled in, "mean_score": of the filled texts}
    """
    cls = data.tokenizer.cls_token_id

    def refilled(text, hidden, uniform):
        """The texts (B, T), each with a token of the filler's in every hidden place."""
        masked = text.masked_fill(hidden.to(device), data.tokenizer.mask_token_id)
        texts = fill_once(filler, masked, hidden, uniform, temperature=TEMPERATURE)
        return texts[:, 0]

    of_texts = []
    of_tokens = []
    for step in range(batches):
        batch = data.batch("val", step)
        _, target, mask = unpack_batch(batch, device)                                # (B, T) each
        T = mask.shape[1]
        noise = draw_uniforms(data.seed + REPORT_NOISE, step, batch["number"], (2, T))
        uniform = noise[:, :1]                                                       # (B, 1, T)
        filled = refilled(target, mask, uniform)                                     # (B, T)
        is_true = filled == target                                                   # (B, T)
        realness = calculate_realness(judge, filled, cls)

        # Every text has the same number of hidden tokens here, so that the AUC does not depend on the masks of the data
        order = noise[:, 1].argsort(1).argsort(1)
        hidden = order < round(HIDDEN_SHARE * T)                                     # (B, T)
        filled_30 = refilled(target, hidden, uniform)

        share = (~is_true).float().mean(1)                                           # (B,) replaced
        score_of_true = calculate_judge_scores(judge, target, cls)
        score_of_30 = calculate_judge_scores(judge, filled_30, cls)
        of_texts.append(torch.stack((share, realness.mean(1), score_of_true, score_of_30)))
        if judge.judge_head != "cls":
            was_masked = mask.to(device)
            of_tokens.append(torch.stack((realness[was_masked], is_true[was_masked])))

    share, score, score_of_true, score_of_30 = joined(of_texts)                      # (N,) each
    replaced = 1 - score  # in the judge's opinion
    spearman = correlation(average_ranks(share), average_ranks(replaced))
    report = {
        "pearson": correlation(share, replaced),
        "spearman": spearman,
        "auc": auc(score_of_true, score_of_30),
        "mean_score": float(score.mean())}
    if of_tokens:
        realness, is_true = joined(of_tokens)
        report["token_auc"] = auc(realness[is_true == 1], realness[is_true == 0])
    return report


def joined(parts):
    """Tensors (k, n) of several batches as one numpy array (k, N) in float64."""
    return torch.cat(parts, 1).cpu().double().numpy()
