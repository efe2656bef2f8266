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
     "return mask / length / N", "return mask / mask.sum().clamp(min=1)",
     "tests/objectives/test_objectives.py tests/vectors"),
    ("the tokens of the step are counted on one rank", "grpo/losses.py",
     "tokens = total(mask.sum()).clamp(min=1)", "tokens = mask.sum().clamp(min=1)",
     "tests/runs/test_ranks.py tests/objectives/test_objectives.py"),
    ("k3 is mirrored", "grpo/losses.py", "x = (ref_logp - logp).clamp(-20, 20)", "x = (logp - ref_logp).clamp(-20, 20)",
     "tests/exactness/test_kl.py tests/runs/test_iterations.py tests/vectors"),
    ("the exact KL is mirrored", "grpo/losses.py", "return (logp.exp() * (logp - ref_logp)).sum(-1)",
     "return (ref_logp.exp() * (ref_logp - logp)).sum(-1)",
     "tests/objectives/test_objectives.py tests/exactness/test_kl.py tests/runs/test_iterations.py "
     "tests/exactness/test_gradient.py"),
    ("the KL loses the importance weight", "grpo/losses.py",
     "return ratio * kl", "return kl",
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
    ("skipped completions stay in the loss", "grpo/grpo_training_step.py", " * is_scored.float().view(-1, 1)", "",
     "tests/exactness/test_first_ratio.py tests/objectives/test_groups.py"),
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
     "logp = logp.masked_fill(~kept, -torch.inf)", "pass",
     "tests/exactness/test_distributions.py tests/exactness/test_first_ratio.py"),
    ("the temperature is left out of scoring", "core/distributions.py", "return (logits / temperature).log_softmax(-1)",
     "return logits.log_softmax(-1)", "tests/exactness/test_distributions.py tests/exactness/test_generation.py"),
    ("of a large vocabulary the KL's gradient is not centred", "core/performance/head.py",
     "factor = factor - d_kl * kl[:, None]", "pass", "tests/exactness/test_large_vocabulary.py"),
    ("of a large vocabulary the whole distribution is scored", "grpo/policies/policy.py",
     " and kept is None and", " and", "tests/exactness/test_large_vocabulary.py"),
    ("every formula passes over a large vocabulary", "grpo/policies/policy.py",
     "self.vocabulary >= LARGE_VOCABULARY", "False", "tests/exactness/test_large_vocabulary.py"),
    ("a token of probability 0 can be drawn", "core/distributions.py", "right=True)", "right=False)",
     "tests/exactness/test_distributions.py"),
    ("all tokens of a large vocabulary are added up in float64", "core/distributions.py",
     "if vocabulary < LARGE_VOCABULARY:", "if True:", "tests/exactness/test_distributions.py"),
    ("a token is drawn in its block by the noise of the block", "core/distributions.py",
     "first_above(inside, share[..., None])", "first_above(inside, uniform[..., None])",
     "tests/exactness/test_distributions.py"),
    ("a nucleus that fills the top part counts as whole", "core/distributions.py", "return lowest_kept <= lowest",
     "return lowest_kept < lowest", "tests/exactness/test_distributions.py"),
    ("greedy tokens are scored among all tokens", "grpo/policies/policy.py", "if settings.top_k == 1:", "if False:",
     "tests/policies/test_all_kinds.py"),
    ("a pass does not read what was drawn before it", "core/fill_in_passes.py",
     "filled = fill_in(text, column, due, target[:, None])", "filled = text[:, None]",
     "tests/policies/test_fill_in.py"),
    ("texts without a hidden token are read too", "core/fill_in.py",
     "read, row = index[:, 0].unique(return_inverse=True)", "read, row = torch.arange(len(hidden)), index[:, 0]",
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
    ("a stop token in an answer ends a decoded completion", "core/performance/decode.py",
     "if is_end and self.given[number, column] < 0:", "if is_end:", "tests/exactness/test_decode.py"),
    ("a row whose nucleus exceeds the top part does not wait", "core/performance/decode.py",
     "waits = is_drawn & logp.isnan()", "waits = torch.zeros_like(is_drawn)", "tests/exactness/test_decode.py"),
    ("decoded tokens behind an answer come in another order", "core/performance/decode.py",
     "tokens = ring[slot:] + ring[:slot]", "tokens = ring", "tests/exactness/test_decode.py"),
    # the order of the data
    ("all ranks read the same problems", "core/data.py", "first = (micro * data.world + rank) * data.batch_size",
     "first = micro * data.world * data.batch_size", "tests/data/test_text_windows.py tests/runs/test_ranks.py"),
    ("every step draws the same windows", "core/data.py", "SPLITS.index(split), step, *number])",
     "SPLITS.index(split), 0, *number])", "tests/data/test_text_windows.py"),
    ("preparing data loads torch", "core/data.py", "if TYPE_CHECKING:", "if True:", "tests/data/test_prepare.py"),
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
    # supervised and judge training
    ("all texts of a judge are the first generator's", "core/supervised/judge_training.py",
     "for_filler * len(fillers)", "for_filler * 0",
     "tests/data/test_judge_training.py"),
    ("all texts of a judge are filled at the lowest temperature", "core/supervised/judge_training.py",
     "width * for_temperature", "0 * for_temperature", "tests/data/test_judge_training.py"),
    ("the clean texts of a judge are those of one generator", "core/supervised/judge_training.py",
     "is_clean = for_clean < config.clean_share", "is_clean = for_filler < config.clean_share",
     "tests/data/test_judge_training.py"),
    ("the noise of a judge's text belongs to its row", "core/supervised/judge_training.py",
     "step, number, (1, T + 3))", "step, range(len(mask)), (1, T + 3))",
     "tests/data/test_judge_training.py"),
    ("a judge learns its teacher's probabilities as log-odds", "core/supervised/build.py",
     "return filled, log_odds(realness), mask", "return filled, realness, mask", "tests/data/test_judge_training.py"),
    ("a judge with a teacher learns which tokens are true", "core/trainer.py", "target.is_floating_point()", "False",
     "tests/runs/test_supervised_training.py"),
    ("equal fills of a word count each", "grpo/evaluation/fill_in.py", "distinct += len(set(texts))",
     "distinct += len(texts)", "tests/rooms/test_fill_in_evaluation.py"),
    ("the AUC of a judge depends on the masks of the data", "core/supervised/judge_training.py",
     "calculate_judge_scores(judge, filled_30, cls)", "calculate_judge_scores(judge, filled, cls)",
     "tests/data/test_judge_training.py"),
    ("the token AUC counts tokens that nobody filled in", "core/supervised/judge_training.py",
     "was_masked = mask.to(dist.device)", "was_masked = torch.ones_like(mask)", "tests/data/test_judge_training.py"),
    ("a tie counts as won", "core/supervised/judge_training.py", "return (below + at_most) / 2", "return at_most",
     "tests/data/test_judge_training.py"),
    ("a judge is correct on the wrong side of one half", "core/trainer.py", "is_correct = (logits > 0) ==",
     "is_correct = (logits < 0) ==", "tests/runs/test_supervised_training.py"),
    ("accuracy ignores the weights of tokens", "core/trainer.py", "(is_correct * weight).sum()", "is_correct.sum()",
     "tests/runs/test_supervised_training.py"),
    ("the validation loss is a mean of means", "core/supervised/build.py",
     "loss, correct, predictions = map(sum, zip(*found, strict=True))",
     "loss, correct, predictions = map(sum, zip(*[(x / n, hits, n) for x, hits, n in found]))",
     "tests/runs/test_supervised_training.py"),
    ("the validation reads training text", "core/supervised/build.py", 'batches("val", step)',
     'batches("train", step)', "tests/runs/test_supervised_training.py"),
    ("the validation has dropout", "core/trainer.py", "self.model.eval()", "pass",
     "tests/runs/test_supervised_training.py"),
    ("embeddings and tied output layers come to Ray's workers rounded", "core/models.py", "return linear - embeddings",
     "return linear | embeddings", "tests/rooms/test_ray_workers.py"),
    ("Ray's workers get float32 in a run in bfloat16", "grpo/samplers/ray.py",
     "own = dtype if x.data_ptr() in multiplied else x.dtype", "own = x.dtype", "tests/rooms/test_ray_workers.py"),
    ("a vLLM server gets float32 in a run in bfloat16", "grpo/samplers/vllm.py",
     "return x.to(policy.dtype) if x.is_floating_point() else x", "return x", "tests/rooms/test_vllm.py"),
    ("tied weights travel twice", "grpo/samplers/sampler.py", "if key not in found:", "if True:",
     "tests/rooms/test_ray_workers.py"),
    ("every rank evaluates all problems", "core/distributed.py", "items[self.rank :: self.world]", "items",
     "tests/runs/test_ranks.py"),
    ("an evaluation leaves ranks idle that have no whole batch", "grpo/evaluation/samples.py",
     "pieces = math.ceil(self.dist.world / len(batches))", "pieces = 1",
     "tests/rooms/test_held_out_samples.py tests/runs/test_ranks.py"),
    ("a rank validates on its own batches", "core/data.py", "rank = data.rank if split == \"train\" else 0",
     "rank = data.rank",
     "tests/runs/test_ranks.py"),
    ("every report of a judge is of one generator", "core/supervised/build.py", "judge_report(model, data, filler,",
     "judge_report(model, data, fillers[0],", "tests/runs/test_supervised_training.py"),
    ("a supervised step that is not finite is taken", "core/trainer.py",
     "is_finite = math.isfinite(loss) and math.isfinite(norm)", "is_finite = True",
     "tests/runs/test_supervised_training.py"),
    ("skipped supervised steps never end a run", "core/trainer.py", "self.bad.add_not_finite(self.step, metrics)",
     "pass", "tests/runs/test_supervised_training.py"),
    ("a resumed run draws other dropout masks", "core/trainer.py",
     "torch.manual_seed(seed)", "pass",
     "tests/runs/test_supervised_training.py"),
    ("the supervised gradient is divided by the micro-batches", "core/trainer.py", "sums[2].clamp(min=1)",
     "len(batches)", "tests/runs/test_supervised_training.py"),
    ("the supervised predictions are counted on one rank", "core/trainer.py", "sums = dist.total(sums)", "pass",
     "tests/runs/test_supervised_training.py"),
    ("a model keeps the output layer of another mode", "core/supervised/build.py",
     'weights.pop("head.weight", None)', "pass", "tests/runs/test_supervised_training.py"),
    ("an export is not in half precision", "core/trainer.py", "self.tokenizer, torch.float16,",
     "self.tokenizer, torch.float32,", "tests/runs/test_supervised_training.py"),
    ("a window of the judge's credit ends too early", "core/judge.py", "high = (position + width + 1)",
     "high = (position + width)", "tests/rooms/test_judge_reward.py"),
    ("equal texts of a judge are read apart", "grpo/reward_functions/judge.py", "sorted(dict.fromkeys(texts), key=len)",
     "sorted(texts, key=len)", "tests/rooms/test_judge_reward.py"),
    # refusals
    ("a loss that is not finite takes the step", "grpo/grpo_training_step.py", "all_finite(metrics, FINITE_IN_STEP)",
     "True", "tests/runs/test_bad_steps.py"),
    ("the state of another run is read", "core/checkpoint_manager.py", "if differing:", "if False:",
     "tests/runs/test_states.py"),
    ("a generator is taken for a judge", "core/models.py", "if mode is not None and config.mode != mode:", "if False:",
     "tests/runs/test_wrong_inputs.py tests/runs/test_model_files.py"),
    ("a validation prompt is left out", "core/prompts.py", "if len(record[\"tokens\"]) > self.limit:", "if False:",
     "tests/runs/test_wrong_inputs.py"),
    ("an old package is accepted", "core/errors.py", "if release(found) < release(floor):", "if False:",
     "tests/runs/test_wrong_inputs.py"),
    ("bfloat16 is emulated", "core/device.py", "including_emulation=False", "including_emulation=True",
     "tests/runs/test_pretended_gpu.py"),
    ("float64 is asked of an Apple GPU", "core/huggingface/lora.py", "torch.cat(first).cpu()", "torch.cat(first)",
     "tests/runs/test_pretended_gpu.py"),
    ("a completion of one token loses the gradient of its prompt", "core/huggingface/model.py",
     "            end = tokens\n", "            pass\n", "tests/exactness/test_huggingface_models.py"),
    ("the parts of a group share recurrent states", "core/huggingface/model.py",
     "tree_map_only(torch.Tensor, torch.clone, vars(self))", "vars(self)",
     "tests/exactness/test_huggingface_models.py"),
    ("a compiled decoder copies the cache of a layer for each token", "core/huggingface/model.py",
     "buffer[self.place] = new[:, :, 0].to(buffer.dtype)",
     "buffer.scatter_(2, self.place[2][:, None, None].expand_as(new), new.to(buffer.dtype))",
     "tests/exactness/test_compiled_layers.py"),
    ("each layer has compiled programs of its own", "core/huggingface/model.py", "settings[name] = own", "pass",
     "tests/exactness/test_compiled_layers.py"),
    ("sizes that are equal by chance become constants", "core/model.py",
     "torch.fx.experimental._config.use_duck_shape = False", "pass", "tests/exactness/test_compiled_layers.py"),
    ("padding is read as a block", "core/huggingface/model.py",
     "number = number.masked_fill(place < 0, length)", "pass", "tests/exactness/test_diffusion_models.py"),
    ("the first token takes the state of another", "core/huggingface/model.py",
     "torch.where(is_first[..., None], h, h.roll(1, 1))", "h.roll(1, 1)", "tests/exactness/test_diffusion_models.py"),
    ("a model object stays in bfloat16", "core/huggingface/load.py", "        net.float()\n", "        pass\n",
     "tests/rooms/test_huggingface_folders.py"),
    ("a model card names the folders of the machine", "core/huggingface/card.py", 're.sub("(?<= )/.*/", "", text)',
     "text", "tests/rooms/test_huggingface_folders.py"),
    ("two sets of functions from Python are mixed up", "grpo/rewards.py", "        self.register()\n        settings",
     "        settings", "tests/rooms/test_reward_sums.py"),
    ("a wrong number of rewards is accepted", "grpo/reward_functions/registry.py", "if len(values) != N:", "if False:",
     "tests/runs/test_wrong_inputs.py"),
    ("a config that adds an objective is missing in the command that resumes", "core/config.py",
     "if imported:", "if False:", "tests/runs/test_what_a_config_builds.py"),
    ("a type hint of a config counts as a value", "core/config.py", "if symbol.is_annotated() and", "if False and",
     "tests/runs/test_what_a_config_builds.py"),
    ("a vLLM server may report raw log-probabilities", "grpo/samplers/vllm.py", "if abs(logp) > CERTAIN:", "if False:",
     "tests/rooms/test_vllm.py"),
    ("iterations are started again by the next one", "grpo/samplers/sampler.py", "self.next = end", "pass",
     "tests/exactness/test_staleness.py"),
    ("a setting outside its range is accepted", "core/settings/setting.py", "    if not fits:\n", "    if False:\n",
     "tests/runs/test_settings.py tests/runs/test_wrong_inputs.py"),
    ("a bug of ours passes for a mistake of the user's", "core/errors.py",
     "if not users and (is_bug or isinstance(error, Mistake) or is_out_of_memory(error)):",
     "if not users and (isinstance(error, Mistake) or is_out_of_memory(error)):",
     "tests/runs/test_errors.py tests/runs/test_wrong_inputs.py"),
    ("a mistake lacks the user's line", "core/errors.py", "place = one_line(f\"{shortest(frame.filename)}",
     "one_line(f\"{shortest(frame.filename)}", "tests/runs/test_errors.py"),
    ("code runs without Landlock", "grpo/sandbox/run.py", 'allowed = {"namespaces"} if',
     'allowed = {"namespaces", "Landlock"} if', "tests/rooms/test_sandbox.py"),
    ("the console is not the first file", "core/run.py", 'logger.write_console(f"{now()}: a run begins")', "pass",
     "tests/runs/test_starts_and_ends.py"),
    ("an own number beside the answer counts", "grpo/reward_functions/verify_math.py",
     "sorted(map(int, found)) == given", "sorted(set(map(int, found))) == sorted(set(given))",
     "tests/rooms/test_math_rewards.py"),
    ("the time that is left forgets evaluations", "core/run.py",
     "left = mean * steps + self.evaluation_seconds * evaluations", "left = mean * steps",
     "tests/runs/test_console.py"),
    ("a column of the console does not fit", "core/logger.py", "len(names) + width <= room", "len(names) <= room",
     "tests/runs/test_console.py"),
    ("an evaluation at two intervals counts twice", "grpo/grpo_config.py",
     " + steps // self.sample_interval - steps // both", " + steps // self.sample_interval",
     "tests/runs/test_console.py"),
    # held-out evaluation, and the page of a run
    ("held-out means are means of batches", "grpo/evaluation/samples.py",
     "measured[name] = scores.sum(), len(scores)", "measured[name] = scores.mean(), 1",
     "tests/rooms/test_held_out_samples.py"),
    ("samples are shown of each batch", "grpo/evaluation/samples.py",
     "shown = join(samples)[:SHOWN]", "shown = join(samples)",
     "tests/rooms/test_held_out_samples.py"),
    ("the best sample is the last", "grpo/evaluation/samples.py", "worth.argsort(descending=True, stable=True)",
     "worth.argsort(stable=True)", "tests/rooms/test_held_out_samples.py"),
    ("the question of messages is the first", "grpo/evaluation/samples.py", "for message in reversed(prompt):",
     "for message in prompt:", "tests/rooms/test_held_out_samples.py"),
    ("samples.jsonl holds infinite numbers", "grpo/evaluation/samples.py",
     "return number if math.isfinite(number) else str(number)", "return number",
     "tests/rooms/test_held_out_samples.py"),
    ("the colour of a sampled span reaches a character too far", "grpo/evaluation/samples.py", "shown[first:end] = [",
     "end = min(end + 1, len(shown)); shown[first:end] = [", "tests/rooms/test_held_out_samples.py"),
    ("a long text loses its end", "grpo/evaluation/samples.py", 'shown[half:-half] = " ... "',
     'shown[2 * half:] = " ... "', "tests/rooms/test_held_out_samples.py"),
    ("a change is computed of one measurement", "grpo/evaluation/samples.py",
     "return number is not None and math.isfinite(number)", "return number is not None",
     "tests/rooms/test_held_out_samples.py"),
    ("pass@k takes what was not scored for wrong", "grpo/evaluation/prompts.py", ".amax(1)", ".nan_to_num().amax(1)",
     "tests/rooms/test_prompt_evaluation.py"),
    ("a word at the edge of a window counts", "grpo/evaluation/fill_in.py", "start > 0 and end < len(text)",
     "end < len(text)", "tests/rooms/test_fill_in_evaluation.py"),
    ("a word begins at a token's beginning", "grpo/evaluation/fill_in.py", "bisect_right(ends, start) - 1",
     "bisect_left(ends, start)", "tests/rooms/test_fill_in_evaluation.py"),
    ("each sample has the credit of the first", "grpo/evaluation/fill_in.py", "self.credit[n][: sum(masked)]",
     "self.credit[0][: sum(masked)]", "tests/rooms/test_fill_in_evaluation.py"),
    ("a long run's page loses evaluations", "grpo/report/page.py", "if is_nth or held_out(record):", "if is_nth:",
     "tests/rooms/test_report.py"),
    ("a long run's page ends before its last step", "grpo/report/page.py", "(count - number) % every == 0",
     "number % every == 0", "tests/rooms/test_report.py"),
    ("the line of a curve is a mean of the numbers before", "grpo/report/page.py",
     "values[max(0, i - reach) : i + reach + 1]", "values[max(0, i - reach) : i + 1]", "tests/rooms/test_report.py"),
    ("a skipped completion has the colour of the best", "grpo/report/page.py", "lowest = min(", "lowest = max(",
     "tests/rooms/test_report.py"),
    ("a page shows the first evaluations only", "grpo/report/page.py", "del by_step[second]", "continue",
     "tests/rooms/test_report.py"),
    ("the band of a curve divides by the number of runs", "grpo/report/page.py", "y.std(0, ddof=len(runs) > 1)",
     "y.std(0)", "tests/rooms/test_report.py"),
    # what a GPU would launch
    ("a model that reads both ways makes a cache of its own", "core/huggingface/model.py",
     'inputs["use_cache"] = past is not None', "pass", "tests/exactness/test_compiled_layers.py"),
    ("the decoder casts its weights for each token", "core/performance/decode.py",
     "                setattr(*place, self.cast[place])\n", "", "tests/rooms/test_counts.py"),
    ("the logits are copied once more", "core/huggingface/model.py", "return at_least_float32(logits)",
     "return at_least_float32(logits).clone()", "tests/rooms/test_counts.py"),
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
