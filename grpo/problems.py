"""What a run works on: the problems it trains with and those it is evaluated on, of either kind."""

from core.dataset_consumer import DatasetConsumer
from core.model import LANGUAGE_MODEL, MASKED_FILL
from core.prompts import PromptConsumer, has_prompts
from grpo.evaluate import CHUNK, Evaluation
from grpo.evaluate_prompts import PromptEvaluation
from grpo.scoring import EXACT_VOCABULARY, check_exact


def build_data(config, dist):
    """Prompts, or windows of running text with hidden tokens, as the dataset has it."""
    if has_prompts(config.dataset):
        return PromptConsumer(config.dataset, config.batch_size, config.seed, dist.rank, dist.world,
                              config.max_prompt_length, config.template, config.system_prompt, config.response_prefix)
    return DatasetConsumer(config.dataset, MASKED_FILL, config.block_size, config.batch_size, config.seed, dist.rank,
                           dist.world, config.masks, config.mask_low, config.mask_high)


def build_evaluation(config, policy, reference, rewards, gold_judge, data, dist, dtype):
    """The evaluation that suits the generator. Raises ValueError if generator and dataset are of two kinds, or a prompt
    leaves no room for a completion."""
    causal = policy.config.mode == LANGUAGE_MODEL
    if causal != isinstance(data, PromptConsumer):
        kind, example = ("prompts", "arithmetic") if causal else ("running text", "char_diffusion")
        raise ValueError(f"generator_checkpoint={config.generator_checkpoint} has mode {policy.config.mode} and needs "
                         f"a dataset of {kind}, such as data/{example}, which dataset={config.dataset} is not")
    if not causal:
        return fill_in_evaluation(config, reference, rewards.judge, gold_judge, dist, dtype, rewards)
    if gold_judge is not None:
        raise ValueError("gold_judge_checkpoint is for fill-in: a causal run does not log it; use "
                         "gold_judge_checkpoint=None")
    if policy.config.base_vocab_size > EXACT_VOCABULARY and (config.top_p, config.top_k, config.min_p) != (1.0, 0, 0.0):
        raise ValueError(f"top_p={config.top_p}, top_k={config.top_k}, min_p={config.min_p}: to train on what was "
                         f"drawn, the tokens kept out of {policy.config.base_vocab_size} would have to be stored for "
                         "every token; set top_p=1.0, top_k=0, min_p=0.0")
    if reference is not None:
        check_exact(config, policy)
    room = min(m.config.block_size for m in (policy, reference) if m is not None) - data.longest
    if config.max_new_tokens > room:
        raise ValueError(f"max_new_tokens={config.max_new_tokens} and prompts of up to {data.longest} tokens do not "
                         f"fit the model's block_size={policy.config.block_size}; set max_new_tokens to at most "
                         f"{room}, or max_prompt_length")
    rewards.check(data.records["train"] + data.records["val"])
    return PromptEvaluation(data, reference, rewards, config, dist, dtype)


def fill_in_evaluation(config, reference, judge, gold_judge, dist, dtype, rewards=None):
    """Validation problems of a run's masks, the same for every seed and batch size."""
    data = DatasetConsumer(config.dataset, MASKED_FILL, config.block_size, CHUNK, masks=config.masks,
                           mask_low=config.mask_low, mask_high=config.mask_high)
    return Evaluation(data, reference, judge, gold_judge, config.eval_problems, config.eval_completions,
                      (config.top_p, config.top_k, config.min_p), dist, dtype, rewards, config.unmask_steps)
