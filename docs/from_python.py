"""GRPO from Python: one call of grpo_training_step is one optimizer step. First a fill-in model and a reward for
vowels; then a language model object, a list of records and a lambda. It takes seconds. `# %%` begins a notebook cell.

    python docs/from_python.py

Steps that share rollouts (ppo_epochs, minibatches) are handed the same buffer: DataBuffer(config.seed, dist.rank) of
grpo/rollout.py. The phases of a step are functions too: collect_rollouts, with_advantage, train_on_rollouts. A whole
run, with evaluation and checkpoints: `from grpo.train_grpo import main; main(["config/grpo_example.py", "--seed=2"])`.
"""

# %% A fill-in model of this project, and a text with hidden characters
import os
import sys

sys.path.insert(0, os.getcwd())  # the folder of nano-GRPO; in a notebook elsewhere, write its path

import torch

from core.distributed import Distributed
from core.models import load_model, load_tokenizer
from core.optim import build_optimizers
from grpo import GRPOConfig, grpo_training_step
from grpo.policies.fill import FillPolicy
from grpo.rewards import Scored

path = "data/char_diffusion/pretrained/generator.safetensors"
model, tokenizer, dist = load_model(path)[0], load_tokenizer(path), Distributed("cpu")
config = GRPOConfig(temperature=1.0, top_p=1.0, batch_size=4, learning_rate=3e-4)
policy = FillPolicy(model, tokenizer)
reference, optimizers = policy.frozen(), build_optimizers(policy, config)

text = torch.tensor(tokenizer.encode("The quick brown fox jumps over the lazy dog. "))
mask = torch.rand(4, len(text)) < 0.3
problems = {"input": text.where(~mask, tokenizer.mask_token_id).numpy(), "target": text.repeat(4, 1).numpy(),
            "mask": mask.numpy(), "number": range(4)}


# %% A reward that reads token ids, and twenty steps
def vowels(rollouts):
    """The share of vowels among the sampled tokens: (problems, group_size)."""
    share = torch.isin(rollouts.target, torch.tensor(tokenizer.encode("aeiou"))).float() * rollouts.mask
    return Scored(rollouts.by_problem(share.sum(1) / rollouts.mask.sum(1)))


for step in range(20):
    metrics = grpo_training_step(policy, reference, vowels, lambda round: problems, optimizers, step, config, dist)
    print(step, round(metrics["mean_reward"], 3), round(metrics["mean_kl"], 3))

# %% A language model as an object: here a tiny one with random weights, which writes characters
from functools import partial

from core.errors import Mistake
from core.huggingface.export import as_fast_tokenizer
from core.huggingface.load import wrap
from core.prompts import PromptConsumer
from core.settings.optional import require
from core.tokenizer import CharTokenizer
from grpo.policies.causal import CausalPolicy
from grpo.rewards import Rewards

try:
    transformers = require("transformers", "a language model of Hugging Face")
except Mistake as missing:
    raise SystemExit(missing) from None

# Yours: net = transformers.AutoModelForCausalLM.from_pretrained(NAME), or peft's get_peft_model(net, LoraConfig(...));
# backend = transformers.AutoTokenizer.from_pretrained(NAME); on a GPU dist = Distributed(); net.to(dist.device)
backend = as_fast_tokenizer(CharTokenizer(stop=True), 64)
net = transformers.Qwen3ForCausalLM(transformers.Qwen3Config(
    vocab_size=len(backend), hidden_size=32, intermediate_size=64, num_hidden_layers=1, num_attention_heads=2,
    num_key_value_heads=2, head_dim=16, max_position_embeddings=64))

# %% Records as Python dicts, and a reward as a function of texts
records = [{"prompt": f"{a}+{b}=", "answer": str(a + b)} for a in range(10) for b in range(10)]
config = GRPOConfig(batch_size=8, group_size=8, max_new_tokens=16, temperature=1.0, top_p=1.0, kl_beta=0.0,
                    learning_rate=1e-2)  # for tiny models; for large ones 1e-6
model, tokenizer = wrap(net, backend)
policy = CausalPolicy(model, tokenizer, dist.dtype)
optimizers = build_optimizers(policy, config)
data = PromptConsumer(records, config.batch_size, tokenizer=tokenizer)  # a chat model: format=PromptFormat("model")
print(*data.describe_prompts(config.batch_size), sep="\n")
rewards = Rewards.of(config, digits=lambda completions, **columns: [sum(map(str.isdigit, x)) / 16 for x in completions])

# %% Training: the metrics of each step are there when it ends, to print or to draw
history = []
for step in range(20):
    problems = partial(data.problems, "train", step)
    history.append(grpo_training_step(policy, None, rewards, problems, optimizers, step, config, dist))
    print(step, round(history[-1]["mean_reward"], 3), round(history[-1]["entropy"], 3))
    # In a notebook: IPython.display.clear_output(wait=True); pyplot.plot([x["mean_reward"] for x in history])
# policy.save("my-model", step=20) writes a folder that from_pretrained of transformers opens
