"""Completions of several turns by a vLLM server: a turn is a request of its own, with all tokens before it."""

import torch


def play(episodes, rows, room, ask):
    """Plays episodes to their end.

    episodes: of N completions, as grpo.policies.turns.Episodes
    rows: their first turns, N tuples (ids, log-probabilities, whether it was cut)
    room: the most tokens of a completion, answers included
    ask: {completion: its ids so far} -> {completion: its next turn, as in rows}
    Returns N such tuples of whole completions. The log-probability of a token of an answer is 0.
    """
    whole = [(list(ids), list(logp), cut) for ids, logp, cut in rows]
    target = torch.zeros(len(rows), room, dtype=torch.long)
    live = [n for n, (_, _, cut) in enumerate(whole) if not cut]
    while live:
        for n in live:
            ids = whole[n][0]
            target[n, : len(ids)] = torch.tensor(ids)
        ends = {n: len(whole[n][0]) - 1 for n in live}
        over = set(episodes(target, ends))
        so_far = {}
        for n in live:
            if n not in over:
                ids = answered(whole, n, episodes.given[n])
                if len(ids) < room:
                    so_far[n] = ids
        live = []
        for n, (ids, logp, cut) in ask(so_far).items():
            before, logp_before, _ = whole[n]
            whole[n] = before + ids, logp_before + logp, cut
            if not cut:
                live.append(n)
    return whole


def answered(whole, n, given):
    """Appends the tokens of an answer to completion n. Returns its ids; without a further turn, it has been cut.

    given: (room,) tokens of answers by column, -1 elsewhere
    """
    ids, logp, _ = whole[n]
    answer = given[len(ids) :]
    answer = answer[answer >= 0].tolist()
    whole[n] = ids + answer, logp + [0.0] * len(answer), True
    return whole[n][0]
