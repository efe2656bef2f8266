"""The same tensors into TRL's GRPOTrainer give the same loss (pip install trl accelerate)."""

import dataclasses

import pytest
import torch

from core.huggingface.settings import FULL, LoraConfig
from core.huggingface.tokenizer import load_huggingface_tokenizer
from core.models import load_model
from core.optim import build_optimizers
from core.prompts import PromptConsumer
from grpo.grpo_training_step import train_on_rollouts
from grpo.losses import OBJECTIVES, token_weights
from grpo.metrics import DECIDING
from grpo.policies.causal import CausalPolicy
from tests.families import adapter_folder, model_folder, write_sums
from tests.tiny import loss_of, one_process, prompt_config
from tests.objectives.tables import MAX_TOKENS, objective_config, table_rollouts, with_advantage

pytestmark = pytest.mark.slow  # it is the number of them that takes the time

trl = pytest.importorskip("trl")
if trl.__version__ != "1.16.0":  # their loss is called by its private name, with what that version reads
    pytest.skip(f"written for trl==1.16.0, not {trl.__version__}", allow_module_level=True)
from tests.vectors.trl_loss import trl_loss


SEQUENCE = [("gspo", "grpo", "sequence"), ("luspo", "luspo", "sequence")]
TOKEN = [("grpo", "grpo", "token"), ("dr_grpo", "dr_grpo", "token"), ("dapo", "dapo", "token"),
         ("bnpo", "bnpo", "token"), ("cispo", "cispo", "token")]
KINDS = [("none", None), ("k3", None), ("none", 0.1)]  # of KL, clip_high


def ours_and_theirs(name, loss_type, level, estimator, high):
    """(our loss, its gradient to the logits, TRL's loss, its gradient) of the same rollouts."""
    policy, rollouts, reference, reward = table_rollouts()
    c, row = objective_config(name, estimator, clip_high=high), OBJECTIVES[name]
    rollouts = with_advantage(estimator, rollouts, reference, reward, c)
    our_loss, _ = loss_of(policy, rollouts, token_weights(rollouts.train_mask, row.average, MAX_TOKENS), c)
    our_loss.backward()
    twin = policy.logits.detach().clone().requires_grad_()
    logp, ref = (x.gather(-1, rollouts.target[..., None])[..., 0] for x in (twin.log_softmax(-1), reference))
    high = row.clip_high if high is None else high
    high = 1 + high if name == "cispo" else high  # TRL's epsilon_high is cispo's bound itself
    loss = trl_loss(loss_type, logp, rollouts.old_logp, ref, rollouts.advantage.flatten(), rollouts.mask,
                    rollouts.mask.sum(), level, c.kl_beta, row.clip_low, high, MAX_TOKENS)
    loss.backward()
    return our_loss, policy.logits.grad, loss, twin.grad


@pytest.mark.parametrize("name, loss_type, level, estimator, high", [
    (*row, *kind) for row in TOKEN + SEQUENCE for kind in KINDS if (row[2], kind[0]) != ("sequence", "k3")])
def test_loss_and_gradient_equal_trls(name, loss_type, level, estimator, high):
    our_loss, our_gradient, loss, gradient = ours_and_theirs(name, loss_type, level, estimator, high)
    torch.testing.assert_close(our_loss, loss)
    torch.testing.assert_close(our_gradient, gradient)


@pytest.mark.parametrize("row", SEQUENCE)
def test_trl_multiplies_the_sequence_ratio_into_the_kl(row):
    """Its issue #6586, open with 1.16.0; here each token has its own KL."""
    _, ours, _, theirs = ours_and_theirs(*row, "k3", None)
    assert (theirs - ours).norm() > 0.01 * ours.norm()


def their_trainer(folder, adapter, objective, c, out_dir):
    """TRL's GRPOTrainer as its users build it, of the model in this folder, with the adapter of that folder or None."""
    transformers, datasets = pytest.importorskip("transformers"), pytest.importorskip("datasets")
    net = transformers.AutoModelForCausalLM.from_pretrained(folder)
    if adapter:
        net = pytest.importorskip("peft").PeftModel.from_pretrained(net, adapter, is_trainable=True)
    args = trl.GRPOConfig(output_dir=str(out_dir), use_cpu=True, bf16=False, report_to=[], temperature=c.temperature,
                          beta=0.0, loss_type=objective, max_completion_length=c.max_new_tokens, num_generations=2,
                          per_device_train_batch_size=2)
    trainer = trl.GRPOTrainer(model=net, reward_funcs=lambda prompts, **_: [0.0] * len(prompts), args=args,
                              train_dataset=datasets.Dataset.from_list([{"prompt": "1+1="}] * 4),
                              processing_class=transformers.AutoTokenizer.from_pretrained(folder))
    trainer.args.use_bias_correction_kl = True
    trainer.beta, trainer.current_gradient_accumulation_steps = c.kl_beta, 1  # a beta in args would load a reference
    return trainer


def their_inputs(problems, rollouts, G):
    """A batch for TRL's _compute_loss: the tokens, advantages and log-probabilities of our rollouts."""
    prompt = torch.from_numpy(problems["input"]).repeat_interleave(G, 0)             # (N, T)
    padding = torch.from_numpy(problems["padding"]).repeat_interleave(G)             # (N,)
    return {"prompt_ids": prompt, "prompt_mask": (torch.arange(prompt.shape[1]) >= padding[:, None]).long(),
            "completion_ids": rollouts.target, "completion_mask": rollouts.mask.long(),
            "advantages": rollouts.advantage.flatten(), "old_per_token_logps": rollouts.old_logp,
            "ref_per_token_logps": rollouts.ref_logp, "num_items_in_batch": rollouts.mask.sum()}


@pytest.fixture(scope="module")
def llama(tmp_path_factory):
    """(folder of a model, folder of an adapter for it, file of prompts)."""
    pytest.importorskip("peft")
    folder = tmp_path_factory.mktemp("llama")
    base = model_folder(folder / "model", "llama")
    return base, adapter_folder(folder / "adapter", base), write_sums(folder / "sums.jsonl")


@pytest.mark.parametrize("lora", [False, True], ids=["full", "lora"])
@pytest.mark.parametrize("name", ["grpo", "dr_grpo", "dapo", "bnpo"])
def test_loss_and_gradient_of_a_hugging_face_model_equal_those_of_trls_trainer(name, lora, llama, tmp_path):
    folder, adapter, sums = llama
    c = prompt_config(objective=name, temperature=0.8, kl_beta=0.3, kl_estimator="k3",
                      max_new_tokens=8, stop_sequences=("e", "o", "1", "x", "L"))
    tokenizer = load_huggingface_tokenizer(folder)
    model, _ = load_model(folder, adapter=LoraConfig(lora_init_from=adapter) if lora else FULL)
    policy = CausalPolicy(model, tokenizer)
    problems = PromptConsumer(sums, c.batch_size, tokenizer=tokenizer).problems("train", 0)
    rollouts = policy.sample(problems, 0, c)
    for lengths in (problems["padding"].tolist(), rollouts.mask.sum(1).tolist()):
        assert len(set(lengths)) > 1, "prompts and completions of different lengths"
    noise = 0.3 * torch.randn(2, *rollouts.mask.shape) * rollouts.mask
    rollouts = dataclasses.replace(rollouts, advantage=torch.randn(len(rollouts.mask), 1),
                                   old_logp=rollouts.old_logp + noise[0], ref_logp=rollouts.old_logp + noise[1])
    weight, row = token_weights(rollouts.train_mask, OBJECTIVES[name].average, c.max_new_tokens), OBJECTIVES[name]
    our_loss, metrics = loss_of(policy, rollouts, weight, c)
    our_loss.backward()
    assert float(metrics["clip_fraction"][0]) > 0, "ratios beyond the clipping range"
    trainer = their_trainer(folder, adapter if lora else None, name, c, tmp_path)
    trainer.epsilon_low, trainer.epsilon_high = row.clip_low, row.clip_high
    loss = trainer._compute_loss(trainer.model, their_inputs(problems, rollouts, c.group_size))
    loss.backward()
    torch.testing.assert_close(our_loss, loss, rtol=1e-5, atol=1e-6)
    ours = {key: p.grad for key, p in model.net.named_parameters() if p.grad is not None}
    theirs = {key: p.grad for key, p in trainer.model.named_parameters() if p.grad is not None}
    assert ours.keys() == theirs.keys() and all(("lora_" in key) == lora for key in ours)
    for key, grad in theirs.items():
        assert grad.norm() > 0, key
        torch.testing.assert_close(ours[key], grad, rtol=1e-4, atol=1e-5 * float(grad.abs().max()), msg=key)


def test_three_optimizer_steps_on_given_rollouts_move_the_weights_as_trls_do(llama, tmp_path):
    folder, _, prompts = llama
    c = prompt_config(objective="grpo", temperature=1.0, top_p=1.0, kl_beta=0.0, max_new_tokens=8, learning_rate=3e-4,
                      min_lr=3e-5, grad_clip=1.0, stop_sequences=("e", "o", "1", "x", "L"))
    model, _ = load_model(folder)
    policy = CausalPolicy(model, load_huggingface_tokenizer(folder))
    before = {key: p.detach().clone() for key, p in model.net.named_parameters()}
    problems = PromptConsumer(prompts, c.batch_size, tokenizer=policy.tokenizer).problems("train", 0)
    rollouts = policy.sample(problems, 0, c)
    rollouts = dataclasses.replace(rollouts, advantage=torch.randn(len(rollouts.mask), 1))
    trainer = their_trainer(folder, None, "grpo", c, tmp_path)
    trainer.args.learning_rate, trainer.args.weight_decay = c.learning_rate, c.weight_decay
    trainer.args.adam_beta1, trainer.args.adam_beta2 = c.beta1, c.beta2
    trainer.create_optimizer()
    inputs = their_inputs(problems, rollouts, c.group_size) | {"ref_per_token_logps": None, "old_per_token_logps": None}
    optimizers = build_optimizers(policy, c)
    sums = dict.fromkeys(DECIDING, (0.0, None)) | {"text_tokens": (1.0, None)}
    for _ in range(3):
        train_on_rollouts(policy, rollouts, sums, optimizers, c, one_process())
        trainer._compute_loss(trainer.model, inputs).backward()
        torch.nn.utils.clip_grad_norm_(trainer.model.parameters(), c.grad_clip)
        trainer.optimizer.step()
        trainer.optimizer.zero_grad()
    ours, theirs = dict(model.net.named_parameters()), dict(trainer.model.named_parameters())
    moved, apart = (torch.stack([(p - other[key]).detach().norm() for key, p in ours.items()]).norm()
                    for other in (before, theirs))
    assert moved > 0 and apart < 1e-3 * moved
