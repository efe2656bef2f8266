"""GRPO for a language model as one loop: sums with working-out, rewarded by functions of the text.

    python data/arithmetic/prepare.py && python grpo/plain_causal.py

Differences from grpo/plain.py: completions are sampled token by token, rewards read text, and there is no KL penalty.
grpo/train_grpo.py gives the same numbers (tests/exactness/test_plain.py). Shapes: P prompts of a step; G completions of
each, a group; N = P * G; T tokens of the longest prompt; M of the longest completion; V tokens to choose from.
"""

import os
import sys
from types import SimpleNamespace

import torch

sys.path.insert(0, os.path.dirname(os.path.dirname(os.path.abspath(__file__))))

from core.distributions import draw_uniforms
from core.generation import Stop, generate
from core.models import load_model
from core.optim import CosineLRScheduler, build_optimizers, set_learning_rate
from core.prompts import PromptConsumer
from grpo.losses import batch_std
from grpo.reward_functions.verify_math import math_format, math_number, math_working


def train(policy, P=32, G=8, max_new_tokens=48, steps=350, seed=1337, optimizer_name="muon"):
    """Trains the policy on rewards that are functions of text. Yields the metrics of each step."""
    N = P * G
    data = PromptConsumer("arithmetic", P, seed)
    stop = Stop(data.tokenizer)
    schedule = CosineLRScheduler(3e-4, 3e-5, warmup_iters=10, lr_decay_iters=steps)
    settings = SimpleNamespace(optimizer=optimizer_name, learning_rate=3e-4, weight_decay=0.1, beta1=0.9, beta2=0.95)
    optimizers = build_optimizers(policy, settings)

    for step in range(steps):

        # 1. Sample G completions of each prompt, token by token.
        batch = data.problems("train", step)
        prompt = torch.from_numpy(batch["input"])                                    # (P, T) padded on the left
        padding = torch.from_numpy(batch["padding"])                                 # (P,) tokens of padding
        noise = draw_uniforms(seed, step, batch["number"], (G, max_new_tokens))      # (P, G, max_new_tokens)
        completion = generate(policy, prompt, padding, noise, stop)
        tokens = completion.target                                                   # (N, M)
        mask = completion.mask                                                       # (N, M)
        length = mask.sum(1, keepdim=True)                                           # (N, 1)

        # 2. Reward: functions of prompts, completions and the fields of the records.
        texts = []                                                                   # N
        for row, is_token in zip(tokens, mask.bool(), strict=True):
            texts.append(stop.text(row[is_token].tolist()))
        answers = []                                                                 # N
        for record in batch["record"]:
            answers += [record["answer"]] * G
        form = torch.tensor(math_format([], texts))                                  # (N,)
        working = torch.tensor(math_working([], texts))                              # (N,)
        number = torch.tensor(math_number([], texts, answer=answers))                # (N,)
        reward = form + 5.0 * working + number                                       # (N,)

        # 3. Advantage: the reward minus the mean of its group, divided by the standard deviation of the whole step.
        reward = reward.view(P, G, 1)
        counted = torch.ones_like(reward)
        advantage = batch_std(reward, counted, total=lambda x: x).view(N, 1)         # (N, 1)

        # 4. Loss: more likely where the advantage is positive, less likely where it is negative. Its value is near 0,
        # as the advantages of a group sum to 0, but not its gradient: see grpo/plain.py.
        prompts = prompt.repeat_interleave(G, 0)                                     # (N, T)
        whole = torch.cat((prompts, tokens), 1)                                      # (N, T + M)
        h = policy.states(whole[:, :-1], padding=padding.repeat_interleave(G))       # (N, T + M - 1, C)
        h = h[:, prompt.shape[1] - 1:]                                               # (N, M, C)
        all_logp = policy.project(h).log_softmax(-1)                                 # (N, M, V)
        logp = all_logp.gather(2, tokens[..., None])[..., 0]                         # (N, M)
        ratio = (logp - logp.detach()).exp()                                         # (N, M)
        weight = mask / length / N                                                   # each completion counts the same
        loss = -(ratio * advantage * weight).sum()

        # 5. Step.
        loss.backward()
        grad_norm = torch.nn.utils.clip_grad_norm_(policy.parameters(), 1.0)
        set_learning_rate(optimizers, schedule.lr(step))
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()
        yield {
            "loss": loss.item(),
            "mean_reward": reward.mean().item(),
            "grad_norm": grad_norm.item(),
            "completion_length": mask.sum(1).mean().item()}


if __name__ == "__main__":
    generator, _ = load_model("data/arithmetic/pretrained/generator.safetensors")
    for step, metrics in enumerate(train(generator), 1):
        print(step, *(f"{name} {value:.4f}" for name, value in metrics.items()))
