"""What a completion is worth. A reward is a row of REWARDS: rollouts in, one number per completion out."""

import torch

from core.judge import calculate_judge_scores


def judge_reward(rollouts, judge, tokenizer):
    """The frozen judge's score of each completed text, in [0, 1]."""
    return calculate_judge_scores(judge, rollouts.text, tokenizer.cls_token_id)


REWARDS = {"judge": judge_reward}


@torch.no_grad()
def compute_rewards(rollouts, judge, tokenizer, group_size):
    """Returns {name: (P, G) rewards}, a row per problem."""
    return {name: reward(rollouts, judge, tokenizer).float().view(-1, group_size) for name, reward in REWARDS.items()}
