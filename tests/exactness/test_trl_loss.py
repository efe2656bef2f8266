"""The same tensors into TRL's GRPOTrainer give the same loss and gradient (pip install trl accelerate)."""

import dataclasses

import pytest
import torch

from core.huggingface.lora import FULL
from core.huggingface.tokenizer import load_huggingface_tokenizer
from core.models import load_model
from core.optim import build_optimizers
from core.prompts import PromptConsumer
from core.supervised.config import PretrainConfig
from grpo.losses import OBJECTIVES, token_weights
from grpo.policies.causal import CausalPolicy
from grpo.sums import Sums
from grpo.sampling_settings import SamplingSettings
from tests.families import adapter_folder, model_folder, write_sums
from tests.tiny import loss_of, prompt_config, train

pytestmark = pytest.mark.slow  # it is the number of them that takes the time

trl = pytest.importorskip("trl")
if trl.__version__ != "1.16.0":  # their loss is called by its private name, with what that version reads
    pytest.skip(f"written for trl==1.16.0, not {trl.__version__}", allow_module_level=True)
K3, NO_KL = {"kl_beta": 0.3, "kl_estimator": "k3"}, {"kl_beta": 0.0}


@pytest.fixture(scope="module")
def llama(tmp_path_factory):
    """(folder of a model, folder of an adapter for it, file of prompts)."""
    pytest.importorskip("peft")
    folder = tmp_path_factory.mktemp("llama")
    base = model_folder(folder / "model", "llama")
    return base, adapter_folder(folder / "adapter", base), write_sums(folder / "sums.jsonl")


def made(llama, adapter, out_dir, **settings):
    """(config, policy, TRL's GRPOTrainer of the same model, rollouts, the same as inputs of TRL's _compute_loss)"""
    transformers, datasets = pytest.importorskip("transformers"), pytest.importorskip("datasets")
    folder, _, sums = llama
    c = prompt_config(max_new_tokens=8, stop_sequences=("e", "o", "1", "x", "L"), **settings)
    model, _ = load_model(folder, adapter=PretrainConfig(lora_init_from=adapter) if adapter else FULL)
    policy = CausalPolicy(model, load_huggingface_tokenizer(folder))
    problems = PromptConsumer(sums, c.batch_size, tokenizer=policy.tokenizer).problems("train", 0)
    rollouts = policy.sample(problems, 0, SamplingSettings.of(c))
    noise = 0.3 * torch.randn(2, *rollouts.mask.shape) * rollouts.mask
    rollouts = dataclasses.replace(rollouts, advantage=torch.randn(len(rollouts.mask), 1),
                                   old_logp=rollouts.old_logp + noise[0], ref_logp=rollouts.old_logp + noise[1])
    net = transformers.AutoModelForCausalLM.from_pretrained(folder)
    if adapter:
        net = pytest.importorskip("peft").PeftModel.from_pretrained(net, adapter, is_trainable=True)
    args = trl.GRPOConfig(
        output_dir=str(out_dir), use_cpu=True, bf16=False, report_to=[], temperature=c.temperature, beta=0.0,
        max_completion_length=8, num_generations=2, per_device_train_batch_size=2)
    trainer = trl.GRPOTrainer(model=net, reward_funcs=lambda prompts, **_: [0.0] * len(prompts), args=args,
                              train_dataset=datasets.Dataset.from_list([{"prompt": "1+1="}] * 4),
                              processing_class=transformers.AutoTokenizer.from_pretrained(folder))
    trainer.args.use_bias_correction_kl = True
    trainer.loss_type = "grpo" if c.objective == "gspo" else c.objective
    trainer.beta, trainer.current_gradient_accumulation_steps = c.kl_beta, 1  # a beta in args would load a reference
    prompt = torch.from_numpy(problems["input"]).repeat_interleave(c.group_size, 0)  # (N, T)
    padding = torch.from_numpy(problems["padding"]).repeat_interleave(c.group_size)  # (N,)
    lengths = rollouts.mask.sum(1)
    assert len(padding.unique()) > 1 and len(lengths.unique()) > 1, "prompts and completions of different lengths"
    inputs = {"prompt_ids": prompt, "prompt_mask": (torch.arange(prompt.shape[1]) >= padding[:, None]).long(),
              "completion_ids": rollouts.target, "completion_mask": rollouts.mask.long(),
              "advantages": rollouts.advantage.flatten(), "old_per_token_logps": rollouts.old_logp,
              "ref_per_token_logps": rollouts.ref_logp, "num_items_in_batch": lengths.sum()}
    return c, policy, trainer, rollouts, inputs


def losses_and_gradients(llama, out_dir, name, level="token", adapter=None, kl=K3):
    """[(loss, {parameter: gradient}) of ours, of TRL's]"""
    row = OBJECTIVES[name]
    bounds = {} if row.clip_low is None else {"clip_high": 0.2}
    c, policy, trainer, rollouts, inputs = made(llama, adapter, out_dir, objective=name, temperature=0.8, **bounds,
                                                **kl)
    ours, metrics = loss_of(policy, rollouts, token_weights(rollouts.train_mask, row.average, c.max_new_tokens), c)
    trainer.importance_sampling_level = level
    if bounds:
        assert float(metrics["clip_fraction"][0]) > 0, "ratios beyond the clipping range"
        # TRL's epsilon_high is cispo's bound itself
        trainer.epsilon_low, trainer.epsilon_high = row.clip_low, c.clip_high + (name == "cispo")
    theirs = trainer._compute_loss(trainer.model, inputs)
    found = []
    for loss, net in ((ours, policy.model.net), (theirs, trainer.model)):
        loss.backward()
        found.append((loss, {key: p.grad for key, p in net.named_parameters() if p.grad is not None}))
    return found


@pytest.mark.parametrize("name, level, lora, kl", [
    ("grpo", "token", False, K3), ("grpo", "token", True, K3), ("dr_grpo", "token", False, K3),
    ("dapo", "token", True, K3), ("bnpo", "token", False, K3), ("cispo", "token", False, K3),
    ("sapo", "token", False, K3),
    ("gspo", "sequence", False, NO_KL), ("luspo", "sequence", False, NO_KL)])
def test_loss_and_gradient_of_a_hugging_face_model_equal_those_of_trls_trainer(
        name, level, lora, kl, llama, tmp_path):
    adapter = llama[1] if lora else None
    (ours, our), (theirs, their) = losses_and_gradients(llama, tmp_path, name, level, adapter, kl)
    torch.testing.assert_close(ours, theirs, rtol=1e-5, atol=1e-6)
    assert our.keys() == their.keys() and all(("lora_" in key) == lora for key in our)
    for key, grad in their.items():
        assert grad.norm() > 0, key
        torch.testing.assert_close(our[key], grad, rtol=1e-4, atol=1e-5 * float(grad.abs().max()), msg=key)


@pytest.mark.parametrize("name", ["gspo", "luspo"])
def test_trl_multiplies_the_sequence_ratio_into_the_kl(name, llama, tmp_path):
    """Its issue #6586, open with 1.16.0; here each token has its own KL."""
    (_, our), (_, their) = losses_and_gradients(llama, tmp_path, name, "sequence")
    key = "lm_head.weight"
    assert (their[key] - our[key]).norm() > 0.01 * our[key].norm()


def test_three_optimizer_steps_on_given_rollouts_move_the_weights_as_trls_do(llama, tmp_path):
    c, policy, trainer, rollouts, inputs = made(llama, None, tmp_path, learning_rate=3e-4, min_lr=3e-5, grad_clip=1.0,
                                                **NO_KL)
    before = {key: p.detach().clone() for key, p in policy.model.net.named_parameters()}
    for key, value in {"learning_rate": c.learning_rate, "adam_beta1": c.beta1, "adam_beta2": c.beta2,
                       "weight_decay": c.weight_decay}.items():
        setattr(trainer.args, key, value)
    trainer.create_optimizer()
    inputs |= {"ref_per_token_logps": None, "old_per_token_logps": None}  # each step is one of ratio 1
    optimizers = build_optimizers(policy, c)
    for _ in range(3):
        train(policy, rollouts, Sums(), c, optimizers)
        trainer._compute_loss(trainer.model, inputs).backward()
        torch.nn.utils.clip_grad_norm_(trainer.model.parameters(), c.grad_clip)
        trainer.optimizer.step()
        trainer.optimizer.zero_grad()
    theirs = dict(trainer.model.named_parameters())
    moved, apart = (sum(float((p - other[key]).detach().square().sum()) for key, p in
                        policy.model.net.named_parameters()) ** 0.5 for other in (before, theirs))
    assert moved > 0 and apart < 1e-3 * moved
