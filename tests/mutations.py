"""Plants faults in a copy of the code, one at a time, and runs the tests that must catch each of them.

python tests/mutations.py
python tests/mutations.py kl            # those faults alone whose name contains this

Prints a table: the fault, whether it was caught, the test that failed first, and the seconds. Ends with exit code 1 if
one was missed, or if a test fails without any fault.
"""

import pathlib
import re
import shutil
import subprocess
import sys
import tempfile
import time

ROOT = pathlib.Path(__file__).parent.parent

# (fault, file, text, its replacement, tests)
FAULTS = [
    # the mathematics
    ("a group's advantage is divided by the variance", "grpo/losses.py", "return x / (variance.sqrt() + 1e-4)",
     "return x / (variance + 1e-4)", "tests/objectives/test_advantages.py tests/vectors"),
    ("the variance is divided by G", "grpo/losses.py", "variance = squares / (count - 1).clamp(min=1)",
     "variance = squares / count", "tests/objectives/test_advantages.py tests/vectors"),
    ("leave-one-out forgets G / (G - 1)", "grpo/losses.py", "return x * count / (count - 1).clamp(min=1)",
     "return x", "tests/objectives/test_advantages.py tests/vectors"),
    ("equal rewards keep rounding errors", "grpo/losses.py", ".masked_fill(highest <= lowest, 0.0)", "",
     "tests/objectives/test_advantages.py tests/objectives/test_extremes.py"),
    ("the standard deviation of the step is that of a rank", "grpo/losses.py",
     "return over_std(x, total(x.square().sum()), total(mask.sum()))",
     "return over_std(x, x.square().sum(), mask.sum())",
     "tests/objectives/test_advantages.py tests/runs/test_ranks.py"),
    ("the loss takes the larger surrogate", "grpo/losses.py", "return torch.min(r * advantage, clipped * advantage)",
     "return torch.max(r * advantage, clipped * advantage)", "tests/objectives/test_objectives.py tests/vectors"),
    ("the ratio is never clipped from above", "grpo/losses.py", "clipped = r.clamp(1 - low, 1 + high)",
     "clipped = r.clamp(min=1 - low)", "tests/objectives/test_objectives.py tests/vectors"),
    ("cispo's weight has a gradient", "grpo/losses.py", "return r.clamp(1 - low, 1 + high).detach() * advantage * logp",
     "return r.clamp(1 - low, 1 + high) * advantage * logp", "tests/objectives/test_objectives.py tests/vectors"),
    ("gspo sums the log-ratio", "grpo/losses.py", "(log_ratio.sum(1, keepdim=True) / length).detach()",
     "log_ratio.sum(1, keepdim=True).detach()", "tests/objectives/test_objectives.py tests/vectors"),
    ("dppo's mask looks at one side", "grpo/losses.py", ".masked_fill(too_high | too_low, 0.0)",
     ".masked_fill(too_high, 0.0)", "tests/objectives/test_objectives.py tests/vectors"),
    ("sapo's gate has one temperature", "grpo/losses.py", ".masked_fill(advantage > 0, tau_pos)", "",
     "tests/objectives/test_objectives.py"),
    ("dro's penalty is not halved", "grpo/losses.py", "- beta / 2 * r.log()", "- beta * r.log()",
     "tests/objectives/test_objectives.py"),
    ("a mean of means over completions becomes one over tokens", "grpo/losses.py",
     "return mask / mask.sum(1, keepdim=True).clamp(min=1) / N", "return mask / mask.sum().clamp(min=1)",
     "tests/objectives/test_objectives.py tests/vectors"),
    ("the tokens of the step are counted on one rank", "grpo/losses.py",
     "return mask / total(mask.sum()).clamp(min=1)", "return mask / mask.sum().clamp(min=1)",
     "tests/runs/test_ranks.py tests/objectives/test_objectives.py"),
    ("k3 is mirrored", "grpo/losses.py", "x = (ref_logp - logp).clamp(-20, 20)", "x = (logp - ref_logp).clamp(-20, 20)",
     "tests/exactness/test_kl.py tests/runs/test_iterations.py tests/vectors"),
    ("the exact KL is mirrored", "grpo/losses.py", "return (logp.exp() * (logp - ref_logp)).sum(-1)",
     "return (ref_logp.exp() * (ref_logp - logp)).sum(-1)",
     "tests/objectives/test_objectives.py tests/exactness/test_kl.py tests/runs/test_iterations.py "
     "tests/exactness/test_gradient.py"),
    ("the KL loses the importance weight", "grpo/losses.py",
     "return kl if weighs else ratio * kl", "return kl",
     "tests/vectors tests/objectives/test_objectives.py"),
    ("log-ratios are not clamped", "grpo/losses.py", "torch.where(counted, logp - old_logp, 0.0).clamp(-20, 20)",
     "torch.where(counted, logp - old_logp, 0.0)",
     "tests/objectives/test_objectives.py tests/objectives/test_extremes.py"),
    ("MaxRL divides by the standard deviation's place", "grpo/losses.py",
     "return x / mean.masked_fill(mean == 0, 1.0)", "return x / (mean.masked_fill(mean == 0, 1.0) + 0.1)",
     "tests/objectives/test_advantages.py"),
    ("pass@k counts the completion itself", "grpo/shaping.py", "wrong_others = wrong.sum(1, keepdim=True) - wrong",
     "wrong_others = wrong.sum(1, keepdim=True)", "tests/objectives/test_pass_at_k.py"),
    ("the overlong penalty begins at the limit", "grpo/shaping.py", "rollouts.max_tokens - buffer - length",
     "rollouts.max_tokens - length", "tests/objectives/test_pass_at_k.py tests/objectives/test_groups.py"),
    ("the entropy is a loss", "grpo/grpo_training_step.py", "loss = loss - objective.entropy_bonus",
     "loss = loss + objective.entropy_bonus", "tests/objectives/test_objectives.py"),
    ("skipped completions stay in the loss", "grpo/grpo_training_step.py", "train_mask=rollouts.train_mask * seen,",
     "", "tests/exactness/test_first_ratio.py tests/objectives/test_groups.py"),
    ("the moving reference takes the wrong share", "grpo/reference.py", "1 - config.ema_alpha", "config.ema_alpha",
     "tests/exactness/test_kl.py tests/runs/test_iterations.py"),
    ("kl_beta moves the wrong way", "grpo/reference.py", "mean_kl / config.kl_target - 1",
     "1 - mean_kl / config.kl_target",
     "tests/exactness/test_kl.py tests/runs/test_iterations.py"),
    # sampling and scoring
    ("the nucleus stops one token early", "core/distributions.py", "kept = before < top_p",
     "kept = ordered.cumsum(-1) < top_p",
     "tests/exactness/test_distributions.py"),
    ("min_p compares without a logarithm", "core/distributions.py", "math.log(min_p)", "min_p - 1",
     "tests/exactness/test_distributions.py"),
    ("tokens are scored over the whole vocabulary", "core/distributions.py",
     "return logp.masked_fill(~mask, -torch.inf).log_softmax(-1)", "return logp",
     "tests/exactness/test_distributions.py tests/exactness/test_first_ratio.py"),
    ("the temperature is left out of scoring", "core/distributions.py", "return (logits / temperature).log_softmax(-1)",
     "return logits.log_softmax(-1)", "tests/exactness/test_distributions.py tests/exactness/test_generation.py"),
    ("a token of probability 0 can be drawn", "core/distributions.py", "right=True)", "right=False)",
     "tests/exactness/test_distributions.py"),
    ("a pass does not read what was drawn before it", "core/fill_in_passes.py",
     "text = fill_in(text, column, now, target[:, None])[:, 0]", "pass", "tests/policies/test_fill_in.py"),
    ("texts without a hidden token are read too", "core/fill_in.py",
     "texts, text = index[:, 0].unique(return_inverse=True)", "texts, text = torch.arange(len(hidden)), index[:, 0]",
     "tests/policies/test_fill_in.py"),
    ("a cached token sees the padding", "core/cache.py", "return attention_mask(self.length, T, padding, device)",
     "return attention_mask(self.length, T, None, device)",
     "tests/exactness/test_cache.py tests/exactness/test_generation.py"),
    ("the stop token is not trained", "core/generation.py",
     "drawn = live                                                                 # (n,)",
     "drawn = live & ~torch.isin(token, ids_on(token.device, *self.stop.ids))",
     "tests/exactness/test_generation.py "
     "tests/policies/test_causal.py"),
    ("a row that stays takes another's noise", "core/generation.py",
     "self.noise = self.noise[keep.to(self.noise.device)]", "self.noise = self.noise[: len(keep)]",
     "tests/exactness/test_generation.py"),
    # the order of the data
    ("all ranks read the same problems", "core/data.py", "first = (micro * self.world + self.rank) * self.batch_size",
     "first = micro * self.world * self.batch_size", "tests/data/test_text_windows.py tests/runs/test_ranks.py"),
    ("every step draws the same windows", "core/data.py", "SPLITS.index(split), step, number])",
     "SPLITS.index(split), 0, number])", "tests/data/test_text_windows.py"),
    ("a share leaves out the prompts at the percentile", "core/prompts.py", "if count / len(lengths) >= share:",
     "if count / len(lengths) > share:", "tests/data/test_prompts.py"),
    ("prompts come in the order of the file", "core/prompts.py", "order = rng.permutation(len(records))",
     "order = np.arange(len(records))", "tests/data/test_prompts.py"),
    ("minibatches are not shuffled anew", "grpo/rollout.py", "self.stored, epoch])", "self.stored, 0])",
     "tests/runs/test_iterations.py"),
    # the resume
    ("the optimizers begin anew", "core/checkpoint_manager.py", "optimizer.load_state_dict(saved)", "pass",
     "tests/runs/test_resume.py tests/runs/test_supervised_training.py"),
    ("the reference is the policy that resumes", "grpo/grpo_trainer.py",
     'self.saved_reference.load_weights(state["reference"])', "self.saved_reference.load_weights(state[\"model\"])",
     "tests/runs/test_resume.py"),
    ("the buffer begins anew", "grpo/grpo_trainer.py",
     "self.buffer.load_state_dict(mine, self.dist.device, self.policy.inputs_type)", "pass",
     "tests/runs/test_resume.py"),
    ("a column is taken for that of all texts", "grpo/policies/fill.py", "self.position % T", "self.position",
     "tests/runs/test_runs_of_before.py"),
    ("a state may run code", "core/checkpoint_manager.py", 'map_location="cpu", weights_only=True',
     'map_location="cpu", weights_only=False', "tests/runs/test_states.py"),
    ("gradients are averaged over ranks once more", "core/distributed.py", "g.copy_(summed.view_as(g))",
     "g.copy_(summed.view_as(g) / self.world)", "tests/runs/test_ranks.py tests/runs/test_waiting_ranks.py"),
    # refusals
    ("a loss that is not finite takes the step", "grpo/grpo_training_step.py", "all_finite(metrics, DECIDING)", "True",
     "tests/runs/test_bad_steps.py"),
    ("the state of another run is read", "core/checkpoint_manager.py", "if differing:", "if False:",
     "tests/runs/test_states.py"),
    ("a generator is taken for a judge", "core/models.py", "if mode is not None and config.mode != mode:", "if False:",
     "tests/runs/test_wrong_inputs.py tests/runs/test_model_files.py"),
    ("a validation prompt is left out", "core/prompts.py", "if len(record[\"tokens\"]) > limit:", "if False:",
     "tests/runs/test_wrong_inputs.py"),
    ("an old package is accepted", "core/errors.py", "if release(found) < release(floor):", "if False:",
     "tests/runs/test_wrong_inputs.py"),
    ("bfloat16 is emulated", "core/device.py", "including_emulation=False", "including_emulation=True",
     "tests/runs/test_pretended_gpu.py"),
    ("float64 is asked of an Apple GPU", "core/huggingface/lora.py", "torch.cat(first).cpu()", "torch.cat(first)",
     "tests/runs/test_pretended_gpu.py"),
    ("a wrong number of rewards is accepted", "grpo/reward_functions/registry.py", "if len(values) != N:", "if False:",
     "tests/runs/test_wrong_inputs.py"),
    ("a setting outside its range is accepted", "core/settings/setting.py", "    if not fits:\n", "    if False:\n",
     "tests/runs/test_settings.py tests/runs/test_wrong_inputs.py"),
    ("a bug of ours passes for a mistake of the user's", "core/errors.py",
     "if not lines and (is_bug or isinstance(error, Mistake) or is_out_of_memory(error)):",
     "if not lines and (isinstance(error, Mistake) or is_out_of_memory(error)):",
     "tests/runs/test_errors.py tests/runs/test_wrong_inputs.py"),
    ("a mistake lacks the user's line", "core/errors.py", "place = one_line(lines[-1]) if lines else self.place",
     "place = self.place", "tests/runs/test_errors.py"),
    ("code runs without Landlock", "grpo/sandbox/run.py", 'allowed = {"namespaces"} if',
     'allowed = {"namespaces", "Landlock"} if', "tests/rooms/test_sandbox.py"),
    ("the console is not the first file", "core/run.py", 'logger.write_console(f"{now()}: a run begins")', "pass",
     "tests/runs/test_starts_and_ends.py"),
    ("an own number beside the answer counts", "grpo/reward_functions/verify_math.py",
     "return sorted(used), value", "return sorted(set(used)), value",
     "tests/rooms/test_math_rewards.py"),
]


def copy_of_the_code(folder):
    """Copies what git tracks, and the data sets that were prepared here, to a folder."""
    done = subprocess.run(["git", "ls-files"], cwd=ROOT, capture_output=True, text=True, check=True)
    listed = done.stdout.split("\n")
    prepared = [str(path.relative_to(ROOT)) for pattern in ("*.bin", "meta.json")
                for path in ROOT.glob(f"data/*/{pattern}")]
    for name in filter(None, {*listed, *prepared}):
        if (ROOT / name).is_file():
            (folder / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy(ROOT / name, folder / name)


def run_tests(folder, tests):
    """The test that fails first, or None. A run that ends in another way counts as a failure of it."""
    command = [sys.executable, "-m", "pytest", "-x", "-q", "-n", "0", "-p", "no:cacheprovider", *tests.split()]
    done = subprocess.run(command, cwd=folder, capture_output=True, text=True)
    failed = re.search(r"^(?:FAILED|ERROR) (\S+)", done.stdout, re.M)
    return failed[1] if failed else done.stdout[-200:] if done.returncode else None


def main(words):
    chosen = [fault for fault in FAULTS if all(word in fault[0] for word in words)]
    if not chosen:
        sys.exit(f"{__doc__}\nno fault has all of these words in its name: {' '.join(words)}")
    missed = 0
    with tempfile.TemporaryDirectory() as name:
        folder = pathlib.Path(name)
        copy_of_the_code(folder)
        if failed := run_tests(folder, " ".join(sorted({test for fault in chosen for test in fault[4].split()}))):
            raise SystemExit(f"{failed} fails without a fault")
        for what, file, text, replacement, tests in chosen:
            path = folder / file
            right = path.read_text()
            if right.count(text) != 1:
                raise SystemExit(f"{file} has {text!r} {right.count(text)} times")
            start = time.time()
            path.write_text(right.replace(text, replacement))
            failed = run_tests(folder, tests)
            path.write_text(right)
            missed += failed is None
            print(f"{'caught' if failed else 'MISSED'} {time.time() - start:4.0f} s  {what}: {failed}", flush=True)
    print(f"{len(chosen) - missed} of {len(chosen)} faults were caught")
    raise SystemExit(missed > 0)


if __name__ == "__main__":
    main(sys.argv[1:])
