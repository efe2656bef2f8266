# %% [markdown]
"""GRPO in one file: a small transformer learns to add two numbers, first from examples, then from rewards alone.

    python docs/grpo_in_one_file.py

It needs torch alone and two minutes on two CPU cores; VS Code and Jupytext open it as a notebook. The equations and the
order are those of DeepSeekMath (Shao et al. 2024, arXiv 2402.03300, section 4.1 and Algorithm 1). Shapes stand at the
end of a line:

    P problems of a step, G completions of each (a group), N = P * G completions, L tokens of a completion, V tokens
"""

# %%
import copy
import itertools

import torch
from torch import nn
from torch.nn import functional as F

VOCABULARY = "0123456789+=;"  # ';' ends a completion
END = VOCABULARY.index(";")
PROMPT, ANSWER = 6, 4  # tokens of "07+85=", and at most of "92;"
WIDTH, HEADS, LAYERS = 96, 4, 3

GROUP = 8         # G, completions of a problem
PROBLEMS = 32     # P, problems of a step
CLIP = 0.2        # epsilon in equation 3: how far the ratio counts
KL_BETA = 0.01    # beta in equation 3: how much the KL to the reference costs
INNER_STEPS = 2   # mu in Algorithm 1: optimizer steps on the same completions
LEARNING_RATE = 3e-4


# %% [markdown]
# 1. The policy: a causal transformer. Token t sees the tokens up to t, and its logits predict token t + 1.
# %%
class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.norm1, self.norm2 = nn.LayerNorm(WIDTH), nn.LayerNorm(WIDTH)
        self.qkv, self.out = nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(WIDTH, WIDTH)
        self.mlp = nn.Sequential(nn.Linear(WIDTH, 4 * WIDTH), nn.GELU(), nn.Linear(4 * WIDTH, WIDTH))

    def forward(self, x):
        rows, length, _ = x.shape
        q, k, v = self.qkv(self.norm1(x)).view(rows, length, 3, HEADS, -1).permute(2, 0, 3, 1, 4)
        attended = F.scaled_dot_product_attention(q, k, v, is_causal=True)            # (rows, HEADS, length, head)
        x = x + self.out(attended.transpose(1, 2).reshape(rows, length, WIDTH))
        return x + self.mlp(self.norm2(x))


class Policy(nn.Module):
    def __init__(self):
        super().__init__()
        self.token, self.position = nn.Embedding(len(VOCABULARY), WIDTH), nn.Embedding(PROMPT + ANSWER, WIDTH)
        self.blocks = nn.ModuleList(Block() for _ in range(LAYERS))
        self.norm, self.head = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, len(VOCABULARY))

    def forward(self, tokens):
        """(rows, length) token ids -> (rows, length, V) logits of the token after each."""
        x = self.token(tokens) + self.position(torch.arange(tokens.shape[1]))
        for block in self.blocks:
            x = block(x)
        return self.head(self.norm(x))


# %% [markdown]
# 2. The task. A reward is a function that checks a completion; here it is 1 for the right sum and 0 for any other text.
# %%
def encode(text):
    return [VOCABULARY.index(c) for c in text]


def prompts_of(pairs):
    """[(a, b)] -> (P, PROMPT) token ids."""
    return torch.tensor([encode(f"{a:02d}+{b:02d}=") for a, b in pairs])


def answers_of(pairs):
    """[(a, b)] -> (P, ANSWER) token ids of the sum and ';', filled up with ';'."""
    return torch.tensor([encode(f"{a + b};".ljust(ANSWER, ";")) for a, b in pairs])


def rewards_of(pairs, completions):
    """[(a, b)] and their (P * G, L) completions -> (P, G) rewards."""
    correct = completions.view(len(pairs), -1, ANSWER) == answers_of(pairs)[:, None]  # (P, G, L)
    return correct.all(-1).float()


# %% [markdown]
# 3. Sampling: G completions of every prompt, one token at a time.
# %%
@torch.no_grad()
def sample(policy, prompts, group=GROUP, greedy=False):
    """(P, PROMPT) -> completions (N, L), filled up with ';', and their mask (N, L): 1 up to the first ';'."""
    tokens = prompts.repeat_interleave(group, 0)                                      # (N, PROMPT)
    ended = torch.zeros(len(tokens), dtype=torch.bool)
    mask = []
    for _ in range(ANSWER):
        probabilities = policy(tokens)[:, -1].softmax(-1)                             # (N, V)
        next_token = probabilities.argmax(-1) if greedy else torch.multinomial(probabilities, 1)[:, 0]
        mask.append(~ended)                      # the first ';' is the policy's own choice and is trained like the rest
        next_token = next_token.masked_fill(ended, END)
        ended = ended | (next_token == END)
        tokens = torch.cat((tokens, next_token[:, None]), 1)
    return tokens[:, PROMPT:], torch.stack(mask, 1).float()


def log_probabilities(policy, prompts, completions):
    """log pi(o_t | q, o_<t) of every token of the completions: (P, PROMPT), (N, L) -> (N, L)."""
    group = len(completions) // len(prompts)
    tokens = torch.cat((prompts.repeat_interleave(group, 0), completions), 1)         # (N, PROMPT + L)
    logits = policy(tokens[:, :-1])[:, PROMPT - 1:]                                   # (N, L, V)
    return logits.log_softmax(-1).gather(-1, completions[..., None])[..., 0]


# %% [markdown]
# 4. The algorithm.
# %%
def advantages_of(rewards):
    """How much better each completion is than its group (section 4.1.2): (P, G) -> (N, 1).

    The group's mean is the baseline, so no value network is needed. A group of equal rewards teaches nothing: its
    advantages are 0.
    """
    centred = rewards - rewards.mean(1, keepdim=True)
    return (centred / (rewards.std(1, keepdim=True) + 1e-4)).view(-1, 1)


def grpo_loss(logp, old_logp, ref_logp, advantages, mask):
    """The loss that equation 3 maximises the negative of; (N, L) each, advantages (N, 1).

    old_logp: of the policy that wrote the completions; ref_logp: of the reference. Both are constants.
    In the first inner step the loss is near 0: every ratio is 1, and the advantages of a group sum to 0. Its gradient
    is not: that of the ratio is the gradient of logp, and each completion's is multiplied by its own advantage.
    """
    ratio = (logp - old_logp).exp()                                                   # (N, L), 1 in the first step
    clipped = ratio.clamp(1 - CLIP, 1 + CLIP)
    surrogate = torch.min(ratio * advantages, clipped * advantages)                   # no gain from going further
    x = ref_logp - logp
    kl = ratio * (x.exp() - x - 1)               # equation 4, never negative; with the ratio its gradient is the KL's
    term = surrogate - KL_BETA * kl                                                   # (N, L)
    per_completion = (term * mask).sum(1) / mask.sum(1)                               # 1/|o| sum over its tokens
    return -per_completion.mean()                                                     # 1/G sum, and mean over problems


def grpo_step(policy, reference, optimizer, pairs):
    """Lines 5 to 11 of Algorithm 1: sample, score, compare, and train INNER_STEPS times. Returns the mean reward."""
    prompts = prompts_of(pairs)
    completions, mask = sample(policy, prompts)
    rewards = rewards_of(pairs, completions)
    advantages = advantages_of(rewards)
    with torch.no_grad():
        old_logp = log_probabilities(policy, prompts, completions)
        ref_logp = log_probabilities(reference, prompts, completions)
    for _ in range(INNER_STEPS):
        loss = grpo_loss(log_probabilities(policy, prompts, completions), old_logp, ref_logp, advantages, mask)
        optimizer.zero_grad()
        loss.backward()
        nn.utils.clip_grad_norm_(policy.parameters(), 1.0)
        optimizer.step()
    return rewards.mean().item()


# %% [markdown]
# 5. The run: examples until the model is right now and then (a policy that is never right has no reward to learn from),
#    then rewards. Training and test problems have no pair of numbers in common.
# %%
def imitate(policy, pairs, steps, rows=256):
    """Supervised training on sums, which is what a pretrained model brings along."""
    optimizer = torch.optim.AdamW(policy.parameters(), lr=2e-3)
    for _ in range(steps):
        batch = [pairs[i] for i in torch.randint(len(pairs), (rows,)).tolist()]
        logp = log_probabilities(policy, prompts_of(batch), answers_of(batch))
        optimizer.zero_grad()
        (-logp.mean()).backward()
        optimizer.step()


def accuracy(policy, pairs, greedy=False):
    completions, _ = sample(policy, prompts_of(pairs), group=1, greedy=greedy)
    return rewards_of(pairs, completions).mean().item()


def main(imitation_steps=190, grpo_steps=200, seed=0):
    """Trains and prints. Returns the accuracy on the test problems, sampled, before and after the rewards."""
    torch.manual_seed(seed)
    pairs = list(itertools.product(range(100), repeat=2))
    pairs = [pairs[i] for i in torch.randperm(len(pairs)).tolist()]
    train, test = pairs[1000:], pairs[:1000]
    policy = Policy()
    imitate(policy, train, imitation_steps)
    reference = copy.deepcopy(policy).requires_grad_(False)                           # line 1: it stays as it is now
    optimizer = torch.optim.AdamW(policy.parameters(), lr=LEARNING_RATE, weight_decay=0.0)
    before = accuracy(policy, test)
    print(f"before: {before:.3f} of sampled sums are right, {accuracy(policy, test, greedy=True):.3f} of greedy ones")
    for step in range(1, grpo_steps + 1):
        batch = [train[i] for i in torch.randint(len(train), (PROBLEMS,)).tolist()]
        reward = grpo_step(policy, reference, optimizer, batch)
        if step % 20 == 0:
            print(f"step {step:4d}   mean reward {reward:.3f}   held-out accuracy {accuracy(policy, test):.3f}")
    return before, accuracy(policy, test)


# %%
if __name__ == "__main__":
    main()
