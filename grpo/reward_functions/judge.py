"""The judge as a reward: a frozen model scores each text, or each token of it."""

import torch

from core.distributed import autocast
from core.judge import calculate_judge_scores, calculate_realness
from core.performance.judge_reading import (
    AUTO,
    LEAST_SHARE,
    MEASURED,
    PLAIN,
    READINGS,
    choose_reading,
    obstacle,
    prepared,
)
from grpo.reward_functions.registry import reward


@reward(0, 1)
def judge(*, texts, judge_model):
    """The frozen judge's score of prompt and completion together: 1 looks written by a human."""
    return judge_model.scores(texts)


class Judge:
    """A frozen judge and the way it reads texts.

    model:     a sequence scorer in eval mode
    tokenizer: the tokenizer that the judge was trained with
    reads_ids: True if the judge has the generator's vocabulary: it then reads the token ids of the texts as they are.
               False: it reads prompt + completion, encoded by its own tokenizer
    dtype:     of its matrix products, unless its reading has one of its own
    reading:   the way in which it is read, a name in READINGS (core/performance/judge_reading.py)
    Texts of equal length are read together, without padding: the other texts of a call do not change a score. Equal
    texts are read once, so that their scores are equal to the last bit, whatever the precision.
    """

    setting = "judge_checkpoint"  # names the model, for errors

    def __init__(self, model, tokenizer, reads_ids, dtype=torch.float32):
        self.model, self.tokenizer, self.reads_ids, self.dtype = model, tokenizer, reads_ids, dtype
        self.reading, self.reader = PLAIN, model

    def scores(self, texts):
        """Score of each text, (N,) float32 on the judge's device.

        texts: has `tokens`, a list of N 1-D tensors of token ids, or `prompts` and `completions`, lists of N texts
        Raises ValueError if a text is longer than the judge can read.
        """
        scores = []
        for rows, batch in self.batches(texts):
            batch, same = distinct_rows(batch)                                       # (n, T), (N,)
            with self.autocast(batch.device):
                found = calculate_judge_scores(self.reader, batch, self.tokenizer.cls_token_id)
            scores.append((rows, found[same]))
        return in_order(scores)

    @torch.no_grad()
    def score_and_credit(self, texts, window, told_window=None, mask=None, told=None):
        """Score of each text, (N,), and the credit of each sampled token, (N, M).

        The credit of a token is the mean, over the positions of its text at most `window` away, of the judge's
        log-odds that the token there is the true one. texts.place: (N, M) where in its text each sampled token is.
        Needs a judge with reads_ids=True that scores every position.

        told: (N,) bool, the texts that a told judge reads with the knowledge which tokens were sampled: mask (N, M), 0
        on padding. There only the sampled tokens count, and those at most `told_window` away. None: no text
        """
        scores, credits = [], []
        for rows, batch in self.batches(texts):
            T = batch.shape[1]
            place = texts.place[rows].to(batch.device).clamp(max=T - 1)              # padding may lie behind the text
            knows, filled = torch.zeros_like(batch[:, :1]), torch.zeros_like(batch)  # (N, 1), (N, T)
            if told is not None:
                knows = told[rows].to(batch)[:, None]
                filled = filled.scatter_add(1, place, mask[rows].to(batch)).clamp(max=1) * knows
            together, same = distinct_rows(torch.cat((batch, filled, knows), 1))     # (n, 2 T + 1), (N,)
            batch, filled, knows = together.split((T, T, 1), 1)
            filled, knows = filled > 0, knows > 0
            with self.autocast(batch.device):
                realness = calculate_realness(self.reader, batch, filled if told is not None else None)  # (n, T)
            odds = log_odds(realness)
            near, counted = windowed_mean(odds, window), torch.ones_like(odds)       # (n, T) each
            if told is not None:
                counted = torch.where(knows, filled.float(), counted)
                share = windowed_mean(filled.float(), told_window).clamp(min=1e-6)
                near = torch.where(knows, windowed_mean(odds * filled, told_window) / share, near)
            scores.append((rows, ((realness * counted).sum(1) / counted.sum(1))[same]))
            credits.append((rows, near[same].gather(1, place)))                      # (N, M)
        return in_order(scores), in_order(credits)

    def autocast(self, device):
        return autocast(device, self.dtype if self.reading == PLAIN else torch.float32)

    def check_reading(self, reading):
        """Raises ValueError if this judge cannot be read in this way here."""
        if problem := obstacle(self.model, reading):
            raise ValueError(f"judge_reading={reading!r} is not possible: {problem}; use judge_reading='plain'")

    def read_in(self, reading):
        """From now on texts are read in this way. Raises ValueError if it is not possible here."""
        self.check_reading(reading)
        self.reading, self.reader = reading, prepared(self.model, reading)

    def fastest_reading(self, texts, names):
        """As core.performance.judge_reading.choose_reading, which see; texts: the sample texts, as for `scores`."""
        def scores(reader):
            dtype = self.dtype if reader is self.model else torch.float32
            return Judge(reader, self.tokenizer, self.reads_ids, dtype).scores(texts)

        return choose_reading(self.model, scores, names)

    def batches(self, texts):
        """Yields (rows, token ids (n, T)): the texts of each length and their indices."""
        texts = self.token_ids(texts)
        room, longest = self.room(), max(map(len, texts))
        if longest > room:
            raise ValueError(f"judge_checkpoint reads {room} tokens, but a prompt with its completion has {longest}: "
                             "lower max_new_tokens or max_prompt_length, or take a judge with a larger block_size")
        device = next(self.model.parameters()).device
        for length in sorted({len(ids) for ids in texts}):
            rows = [i for i, ids in enumerate(texts) if len(ids) == length]
            yield rows, torch.stack([texts[i] for i in rows]).to(device)

    def room(self):
        """The most tokens of a text."""
        return self.model.longest_input - (self.model.judge_head == "cls")

    def shares_tokens(self, tokenizer):
        """Whether the judge has the generator's tokens; the generator's tokenizer is not asked."""
        return self.reads_ids

    def token_ids(self, texts):
        """A list of N 1-D tensors: each text in the judge's vocabulary. An empty text is one pad token."""
        empty = torch.tensor([self.tokenizer.pad_token_id])
        if self.reads_ids:
            return [ids if len(ids) else empty.to(ids.device) for ids in texts.tokens]
        encoded = [self.tokenizer.encode(prompt + completion)
                   for prompt, completion in zip(texts.prompts, texts.completions, strict=True)]
        return [torch.tensor(ids) if ids else empty for ids in encoded]


def choose_readings(judges, readings, sample, share, dist):
    """Decides how judges read their texts, alike on all ranks. Returns lines that tell the user.

    judges:   {name: Judge or None}
    readings: {name: a key of READINGS, or AUTO: rank 0 measures; the later ones take the choice of the first, unless
              it changes their scores}
    sample:   a function that returns texts such as those of the run; share: how many times these the run reads
    """
    names, lines, texts = MEASURED, [], None
    for key, judge in judges.items():
        if judge is None:
            continue
        choice = readings[key]
        if choice == AUTO:
            line, found = "plainly", torch.zeros(1, dtype=torch.long, device=dist.device)
            if dist.is_main and share >= LEAST_SHARE and not all(obstacle(judge.model, name) for name in names):
                texts = texts or sample()
                choice, line = judge.fastest_reading(texts, names)
                found.fill_(list(READINGS).index(choice))
            dist.broadcast([found])
            choice = list(READINGS)[int(found)]
            names = [choice]
            if dist.is_main:
                lines.append(f"{key.replace('_', ' ')} is read {line}")
        judge.read_in(choice)
    return lines


def distinct(items):
    """The items that differ, in the order in which they come, and a list: which of them each item equals."""
    number = {}
    same = [number.setdefault(item, len(number)) for item in items]
    return list(number), same


def distinct_rows(rows):
    """The same for the rows of a tensor (N, T): (n, T) and (N,)."""
    found, same = distinct(map(tuple, rows.tolist()))
    return rows.new_tensor(found), torch.tensor(same, device=rows.device)


def in_order(parts):
    """[(rows, values of these rows)] as one tensor in the order of the rows."""
    rows, values = [i for part in parts for i in part[0]], torch.cat([part[1] for part in parts])
    joined = torch.empty_like(values)
    joined[torch.tensor(rows, device=values.device)] = values
    return joined


def log_odds(probability):
    """Clamped, so that one token on which the judge is certain does not outweigh all others."""
    return probability.clamp(1e-3, 1 - 1e-3).logit()


def windowed_mean(x, width):
    """Mean of x (N, T) over the positions at most `width` away, those inside the text. Returns (N, T)."""
    T = x.shape[1]
    total = torch.cat((torch.zeros_like(x[:, :1]), x.cumsum(1)), dim=1)              # (N, T + 1)
    place = torch.arange(T, device=x.device)
    low, high = (place - width).clamp(min=0), (place + width + 1).clamp(max=T)       # (T,)
    return (total[:, high] - total[:, low]) / (high - low)
