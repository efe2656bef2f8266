"""Makes training texts for a judge with frozen generators, and measures how well it detects filled-in text."""

import math

import numpy as np
import torch

from core.data import masked_positions, unpack_batch
from core.distributions import draw_uniforms
from core.fill_in import fill_in, predict_and_sample_tokens
from core.judge import calculate_judge_scores, calculate_realness

NOISE = 1           # added to the seed, so that training uses different noise than other code
REPORT_NOISE = 7    # the same for reports
TEMPERATURE = 0.8   # of the fills in a report
HIDDEN_SHARE = 0.3  # of each text's tokens, hidden and filled in for the AUC of a report


@torch.no_grad()
def fill_in_one_pass(model, input, mask, uniform, temperature=1.0):
    """Fills in all masked tokens of every text G times, in one forward pass. Returns the texts (P, G, T).

    input, mask: (P, T), the mask on the CPU; uniform: (P, G, T) noise in [0, 1); temperature: a number or (P, 1)
    """
    position, hidden = masked_positions(mask, input.device)                          # (P, M) each
    target, _, _ = predict_and_sample_tokens(
        model, input, position, uniform, hidden, temperature=temperature)            # (P, G, M)
    hidden = hidden.to(input.device, non_blocking=True)
    return fill_in(input, position, hidden, target)


@torch.no_grad()
def filled_batch(data, fillers, device, config, split, step, micro=0):
    """Makes a batch for a judge: windows of the corpus, with masked tokens filled in by a frozen generator.

    The generator of each text is drawn from `fillers`, the temperature from [fill_temperature_low,
    fill_temperature_high]. About clean_share of the texts stay true, so that the judge also sees texts without false
    tokens. Like a batch of the dataset, the batch depends only on (seed, split, step) and the numbers of its problems.
    Returns the filled text (after CLS for a cls judge), the true text, and True where a token was masked
    """
    batch = data.batch(split, step, micro)
    number = batch["number"]                                                         # (B,)
    input, target, mask = unpack_batch(batch, device)                                # (B, T) each
    T = input.shape[1]
    # The first T columns are noise of the tokens, the last three of the text. New columns must be appended: the others
    # keep their places, so a run that is resumed with a later version gets the same texts
    noise = draw_uniforms(data.seed + NOISE, step, number, (1, T + 3))               # (B, 1, T + 3)
    uniform = noise[:, :, :T]                                                        # (B, 1, T)
    for_temperature, for_clean, for_filler = noise[:, 0, T:].unbind(1)               # (B,) each

    low = config.fill_temperature_low
    width = config.fill_temperature_high - low
    temperature = low + width * for_temperature                                      # (B,)
    temperature = temperature.to(device, torch.float32, non_blocking=True)
    temperature = temperature[:, None]                                               # (B, 1)

    filler_of_text = for_filler * len(fillers)
    filler_of_text = filler_of_text.long()                                           # (B,) index of its generator
    filled = target.clone()
    for i in filler_of_text.unique():
        rows = (filler_of_text == i).nonzero()[:, 0]                                 # (b,) texts of generator i
        # The mask and the noise are on the CPU, the texts on the device
        rows_on_device = rows.to(device, non_blocking=True)
        texts = fill_in_one_pass(
            fillers[i],
            input[rows_on_device],
            mask[rows],
            uniform[rows],
            temperature[rows_on_device])                                             # (b, 1, T)
        filled[rows_on_device] = texts[:, 0]

    is_clean = for_clean < config.clean_share                                        # (B,)
    is_clean = is_clean[:, None].to(device, non_blocking=True)
    filled = torch.where(is_clean, target, filled)
    if config.judge_head == "cls":
        cls = torch.full_like(filled[:, :1], data.tokenizer.cls_token_id)
        filled = torch.cat((cls, filled), dim=1)
    return filled, target, mask


def count_below(x, values):
    """Counts the `values` below each x; equal values count half. x, values: numpy arrays"""
    values = np.sort(values)
    below = np.searchsorted(values, x, "left")
    at_most = np.searchsorted(values, x, "right")
    return (below + at_most) / 2


def average_ranks(x):
    """Ranks the values from 1; equal values get the mean of their ranks."""
    # Each value counts itself as half, so the smallest value has a count of 0.5
    return count_below(x, x) + 0.5


def auc(positive, negative):
    """Probability that a positive score exceeds a negative one; ties count half (Mann-Whitney). NaN if one is empty."""
    pairs = len(positive) * len(negative)
    if pairs == 0:
        return math.nan
    won = count_below(positive, negative).sum()
    return float(won / pairs)


def correlation(x, y):
    return float(np.corrcoef(x, y)[0, 1])


@torch.no_grad()
def judge_report(judge, data, filler, dist, batches):
    """Measures how well the judge distinguishes validation texts from the same texts filled in by one generator.

    data: a DatasetConsumer that masks different shares of the texts; dist: the ranks, which share the batches
    Returns a dict:
        "pearson", "spearman": correlations of 1 - score with the replaced share of a filled text
        "auc": true texts against texts with 30% of their tokens filled in
        "token_auc": true against false tokens, among the filled-in tokens; not for a cls judge
        "mean_score": mean score of the filled texts
    """
    cls = data.tokenizer.cls_token_id
    has_realness = judge.judge_head != "cls"  # realness of every token

    def read(step):
        """Returns {name: a tensor} of a batch. Texts are filled in at the masks of the data; for `score_of_30`, at
        other masks."""
        found = {}
        batch = data.batch("val", step)
        input, target, mask = unpack_batch(batch, dist.device)                       # (B, T) each
        T = mask.shape[1]
        seed = data.seed + REPORT_NOISE
        noise = draw_uniforms(seed, step, batch["number"], (2, T))                   # (B, 2, T)
        # Both fills share their noise: they are compared with true text, not with each other
        uniform = noise[:, :1]                                                       # (B, 1, T)
        filled = fill_in_one_pass(filler, input, mask, uniform, TEMPERATURE)
        filled = filled[:, 0]                                                        # (B, T)
        is_true = filled == target                                                   # (B, T)
        is_replaced = ~is_true
        realness = calculate_realness(judge, filled, cls)                            # (B, T); for a cls judge (B, 1)
        found["replaced_share"] = is_replaced.float().mean(1)                        # (B,)
        found["score"] = realness.mean(1)  # as calculate_judge_scores, without a second read of the texts
        if has_realness:
            was_masked = mask.to(dist.device)
            found["realness_of_true"] = realness[was_masked & is_true]
            found["realness_of_false"] = realness[was_masked & is_replaced]

        # For the AUC, HIDDEN_SHARE of the columns of every text are hidden, chosen at random, so that the AUC does not
        # depend on the masks of the data
        columns = noise[:, 1].argsort(1)                                             # (B, T)
        columns = columns[:, : round(HIDDEN_SHARE * T)]
        hidden = torch.zeros_like(mask).scatter(1, columns, True)                    # (B, T)
        masked = target.masked_fill(hidden.to(dist.device), data.tokenizer.mask_token_id)
        filled_30 = fill_in_one_pass(filler, masked, hidden, uniform, TEMPERATURE)
        filled_30 = filled_30[:, 0]                                                  # (B, T)
        found["score_of_30"] = calculate_judge_scores(judge, filled_30, cls)
        found["score_of_true"] = calculate_judge_scores(judge, target, cls)
        return found

    parts = dist.map(read, range(batches))
    x = {name: joined([part[name] for part in parts]) for name in parts[0]}
    estimate = 1 - x["score"]
    rank = average_ranks(x["replaced_share"])
    rank_of_estimate = average_ranks(estimate)
    report = {
        "pearson": correlation(x["replaced_share"], estimate),
        "spearman": correlation(rank, rank_of_estimate),
        "auc": auc(x["score_of_true"], x["score_of_30"]),
        "mean_score": float(x["score"].mean())}
    if has_realness:
        report["token_auc"] = auc(x["realness_of_true"], x["realness_of_false"])
    return report


def joined(parts):
    """Joins the tensors of several batches into one float64 numpy array."""
    return torch.cat(parts).cpu().double().numpy()
