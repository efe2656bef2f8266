"""The main job as one loop: a generator fills in hidden characters, and a judge says which of them look true.

    python data/char_diffusion/prepare.py && python grpo/plain.py    # 4 to 5 minutes, 2 CPU cores

No trainer, no checkpoints, no options. It uses the same parts as grpo/train_grpo.py, which gives the same numbers
(tests/exactness/test_plain.py). Shapes: P problems of a step, texts with hidden characters; G completions of each, a
group; N = P * G; T characters of a text; M hidden characters; V characters to choose from.
"""

import os
import sys
from types import SimpleNamespace

import torch

sys.path.insert(0, os.path.dirname(os.path.dirname(os.path.abspath(__file__))))

from core.data import DatasetConsumer, masked_positions, unpack_batch
from core.distributions import draw_uniforms
from core.fill_in import fill_in, predict_and_sample_tokens
from core.judge import calculate_realness, log_odds, windowed_mean
from core.model import MASKED_FILL, freeze
from core.models import load_model
from core.optim import CosineLRScheduler, build_optimizers, set_learning_rate
from grpo.losses import batch_std, exact_kl

PRETRAINED = "data/char_diffusion/pretrained"
KL_BETA = 0.15  # weight of the KL: how much it costs to move away from the reference
WINDOW = 2      # a character's reward is the judge's opinion of the text up to two characters away


def train(policy, judge, P=16, G=8, T=128, steps=450, seed=1337):
    """Trains the policy, a generator, on rewards of the judge. Yields the metrics of each step."""
    N = P * G
    reference = policy.frozen()  # a frozen copy of the initial policy
    masks = {"random": 1.0, "span": 1.0}
    data = DatasetConsumer("char_diffusion", MASKED_FILL, T, P, seed, masks=masks)
    schedule = CosineLRScheduler(4e-4, 2e-5, warmup_iters=10, lr_decay_iters=steps)
    adamw = SimpleNamespace(optimizer="adamw", learning_rate=4e-4, weight_decay=0.1, beta1=0.9, beta2=0.95)
    optimizer, = build_optimizers(policy, adamw)

    for step in range(steps):

        # 1. Sample G completions of each problem.
        # One forward serves a whole group: the hidden characters are drawn independently, from the same logits.
        batch = data.problems("train", step)
        input, _, hidden = unpack_batch(batch, "cpu")                                # (P, T) each
        position, is_hidden = masked_positions(hidden, "cpu")                        # (P, M) each; False: padding
        noise = draw_uniforms(seed, step, batch["number"], (G, T))                   # (P, G, T)
        with torch.no_grad():
            tokens, _, _ = predict_and_sample_tokens(policy, input, position, noise, hidden=is_hidden)
            texts = fill_in(input, position, is_hidden, tokens)                      # (P, G, T)

        # 2. Reward: how sure the judge is that the characters around a sampled character are true.
        with torch.no_grad():
            realness = calculate_realness(judge, texts.flatten(0, 1))                # (N, T) probabilities
        opinion = windowed_mean(log_odds(realness), WINDOW)                          # (N, T) log-odds
        place = position.repeat_interleave(G, 0)                                     # (N, M)
        reward = opinion.gather(1, place).view(P, G, -1)                             # (P, G, M)

        # 3. Advantage: the reward minus the mean of its group, divided by the standard deviation of the whole step.
        sampled = is_hidden[:, None].expand_as(reward).float()                       # (P, G, M) 0 on padding
        advantage = batch_std(reward * sampled, sampled, total=lambda x: x)          # (P, G, M); total: over ranks

        # 4. Loss: more likely where the advantage is positive, less likely where it is negative.
        # Its value is near 0: the ratio is 1, and the advantages of a group sum to 0. Its gradient is not: each
        # advantage multiplies the gradient of its own ratio, which equals the gradient of logp.
        all_logp = policy(input, position).log_softmax(-1)                           # (P, M, V)
        logp = all_logp.gather(2, tokens.mT).mT                                      # (P, G, M)
        ratio = (logp - logp.detach()).exp()                                         # (P, G, M)
        length = sampled.sum(2, keepdim=True)                                        # (P, G, 1)
        weight = sampled / length / N                                                # each completion counts the same
        pg_loss = -(ratio * advantage * weight).sum()

        # 5. The KL keeps the policy near the reference. It is exact, over all V characters, not an estimate.
        with torch.no_grad():
            ref_logp = reference(input, position).log_softmax(-1)                    # (P, M, V)
        kl = exact_kl(all_logp, ref_logp)[:, None]                                   # (P, 1, M)
        kl_penalty = KL_BETA * (kl * weight).sum()
        loss = kl_penalty + pg_loss

        # 6. Step.
        loss.backward()
        grad_norm = torch.nn.utils.clip_grad_norm_(policy.parameters(), 1.0)
        set_learning_rate([optimizer], schedule.lr(step))
        optimizer.step()
        optimizer.zero_grad()
        mean_kl = (kl * sampled).sum() / sampled.sum()
        yield {
            "loss": loss.item(),
            "mean_reward": realness.mean().item(),
            "grad_norm": grad_norm.item(),
            "mean_kl": mean_kl.item()}


if __name__ == "__main__":
    generator, _ = load_model(f"{PRETRAINED}/generator.safetensors")
    judge, _ = load_model(f"{PRETRAINED}/small_judge.safetensors")
    for step, metrics in enumerate(train(generator, freeze(judge)), 1):
        print(step, *(f"{name} {value:.4f}" for name, value in metrics.items()))
