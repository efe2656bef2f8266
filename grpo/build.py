"""The models, data, rewards and evaluation of a run, checked against each other before the first step."""

import os
from dataclasses import dataclass
from importlib import import_module

import torch

from core.checkpoint_manager import shapes
from core.data import DatasetConsumer, has_prompts, is_file_of_records
from core.errors import Mistake, check_version
from core.files import CONFIG
from core.model import LANGUAGE_MODEL, MASKED_FILL, SEQUENCE_SCORER
from core.models import freeze_and_cast, is_huggingface, load_model, load_tokenizer
from core.performance.prepacked import has_fast_bfloat16
from core.settings.setting import changed, shown
from core.run import build_missing
from core.tokenizer import same_vocabulary
from grpo.reference import needs_reference
from grpo.reward_functions.registry import load_reward_file
from grpo.rewards import Rewards
from grpo.sampling_settings import SamplingSettings

# The kinds of a run, as errors name them
FILL_IN = "a masked-fill model on running text"
LEFT_TO_RIGHT = "a language model on prompts"
ANY_ORDER = "a masked-fill model on prompts"
OWN = (  # (settings, the kinds of run that have them, these kinds in words for the error)
    ("gold_judge_checkpoint credit_window", (FILL_IN,), FILL_IN),
    ("environment", (LEFT_TO_RIGHT,), LEFT_TO_RIGHT),
    ("block_length unmask_order", (ANY_ORDER,), ANY_ORDER),
    ("unmask_steps fill_estimator", (FILL_IN, ANY_ORDER), "a masked-fill model"),
    ("stop_sequences overlong_buffer mask_truncated", (LEFT_TO_RIGHT, ANY_ORDER), "a dataset of prompts"))


@dataclass
class Models:
    """The models of a run. The frozen ones are None if the config does not ask for them."""
    kind: str  # FILL_IN, LEFT_TO_RIGHT or ANY_ORDER
    policy: object
    reference: object
    judge: object
    gold_judge: object


def check_features(config):
    """Raises Mistake if the sampler or sharding lacks a package or a server that it needs."""
    if config.sampler != "local":
        import_module(f"grpo.samplers.{config.sampler}").check(config)
    if config.parallel == "fsdp":
        check_version("torch.distributed.fsdp", torch.__version__, "parallel='fsdp'", "-r requirements.txt")


def make_prefetcher(policy, problems, config, dist):
    """Builds a Prefetcher (grpo/samplers/sampler.py) for the config's sampler; None if the policy samples within the
    step. problems: iteration -> the problems of this rank"""
    if config.sampler == "local" and config.max_staleness == 0:
        return None
    from grpo.samplers.sampler import LocalSampler, Prefetcher
    if config.sampler == "local":
        sampler = LocalSampler(policy, config)
    else:
        sampler = import_module(f"grpo.samplers.{config.sampler}").build(policy, config, dist)
    return Prefetcher(sampler, policy, problems, config.max_staleness)


def build_what_is_missing(config, dist, plan):
    """Runs the prepare.py of a missing dataset or model; a dry run only reports it, with the plan. Returns True if
    something is still missing. plan: the lines that need no model and no data"""
    if config.generator_checkpoint is None:
        saved = os.path.join(config.absolute_out_dir, CONFIG)
        if config.resume is True and not os.path.exists(saved):
            raise Mistake(f"generator_checkpoint is not set, and {config.out_dir} has no {CONFIG} to take it from; "
                          "name the config file of the run, or the folder of another run with --out_dir=FOLDER")
        raise Mistake("generator_checkpoint is not set: start with a config, such as python grpo/train_grpo.py "
                      "config/grpo_example.py, or name a model with --generator_checkpoint=PATH")
    checkpoints = ("generator_checkpoint", "teacher_checkpoint", "judge_checkpoint", "gold_judge_checkpoint")
    return build_missing(config, checkpoints, dist, plan)


def with_template(config, origin):
    """Returns the config with its template set. `origin` gets the source of a template that the config does not set."""
    if has_prompts(config.dataset):
        from grpo.template import with_template_of_prompts
        return with_template_of_prompts(config, origin)
    if config.template is None:
        return config.varied(template="plain")
    return config


def build_data(config, dist):
    """Builds the training data: prompts, or windows of running text with hidden tokens, depending on the dataset."""
    load_reward_file(config.reward_file)  # it may define masks
    path = config.generator_checkpoint
    tokenizer = None  # the dataset's own
    if is_file_of_records(config.dataset) or is_huggingface(path, "generator_checkpoint"):
        tokenizer = load_tokenizer(path, "generator_checkpoint")
    order = {
        "seed": config.seed,
        "rank": dist.rank,
        "world": dist.world}
    if has_prompts(config.dataset):
        from core.prompts import PromptConsumer, PromptFormat
        return PromptConsumer(
            config.dataset,
            config.batch_size,
            tokenizer=tokenizer,
            format=PromptFormat.of(config),
            **order)
    return masked_windows(config, config.batch_size, tokenizer, **order)


def masked_windows(config, batch_size, tokenizer, **order):
    """Windows of running text with hidden tokens. order: seed, rank and world of a DatasetConsumer"""
    return DatasetConsumer(
        config.dataset,
        MASKED_FILL,
        config.block_size,
        batch_size,
        masks=config.masks,
        mask_low=config.mask_low,
        mask_high=config.mask_high,
        tokenizer=tokenizer,
        **order)


def build_models(config, data, dist):
    """Builds the Models of a config. Raises Mistake for a setting that does not fit the others, or for a dataset that
    does not fit the generator."""
    generator = load_policy_model("generator_checkpoint", config, data.tokenizer, dist, adapter=config)
    kind = kind_of(generator.mode, data)
    check_kind(config, kind, data)
    policy = make_policy(kind, generator, data.tokenizer, config, dist)
    judge = load_judge("judge_checkpoint", config, kind, policy, dist)
    gold_judge = load_judge("gold_judge_checkpoint", config, kind, policy, dist)
    has_credits = config.credit_window is not None
    if has_credits and judge is not None and judge.model.judge_head == "cls":
        raise Mistake(f"credit_window needs a judge of positions, not judge_checkpoint={config.judge_checkpoint}; "
                      "use credit_window=None")
    reference = build_reference(config, policy, dist)
    if config.compile:
        policy.compile()
        if reference is not None:
            reference.compile()
        policy.try_compiled()
    parts = (policy, reference, judge, gold_judge)
    used = [part.model for part in parts if part is not None]
    shard_models(used, config, dist)
    return Models(kind, *parts)


def uses_fsdp(config, dist):
    """True if each rank holds a part of every model."""
    return config.parallel == "fsdp" and dist.world > 1


def loading_device(config, dist):
    """The device to load a model on: the CPU if the model will be sharded, because all of it may not fit on one GPU."""
    if uses_fsdp(config, dist):
        return torch.device("cpu")
    return dist.device


def shard_models(models, config, dist):
    """Shards the models if the config asks for it."""
    if uses_fsdp(config, dist):
        from core.performance.sharding import shard
        for model in models:
            shard(model, dist)


def kind_of(mode, data):
    """The kind of run for a generator's mode and the data: FILL_IN, LEFT_TO_RIGHT or ANY_ORDER."""
    if mode == LANGUAGE_MODEL:
        return LEFT_TO_RIGHT
    if data.has_prompts:
        return ANY_ORDER
    return FILL_IN


def check_kind(config, kind, data):
    """Raises Mistake if the dataset or a setting is for another kind of run."""
    if kind == LEFT_TO_RIGHT and not data.has_prompts:
        raise Mistake(f"generator_checkpoint={config.generator_checkpoint} has mode {LANGUAGE_MODEL} and needs a "
                      f"dataset of prompts, such as data/arithmetic, which {config.dataset} is not; set dataset")
    for keys, kinds, needed in OWN:
        if kind in kinds:
            continue
        for key in changed(config, *keys.split()):
            raise Mistake(f"{key}={shown(vars(config)[key])} needs {needed}, but this run has {kind} "
                          "(generator_checkpoint, dataset); leave it out")


def make_policy(kind, model, tokenizer, config, dist):
    """The policy for a kind of run."""
    if kind == FILL_IN:
        from grpo.policies.fill import FillPolicy as KindOfPolicy
    elif kind == LEFT_TO_RIGHT:
        from grpo.policies.causal import CausalPolicy as KindOfPolicy
    else:
        from grpo.policies.prompt_fill import PromptFillPolicy as KindOfPolicy
    return KindOfPolicy(model, tokenizer, dist.dtype, config.grad_checkpoint)


def load_policy_model(key, config, tokenizer, dist, mode=None, adapter=None):
    """Loads a model that can sample, from the checkpoint of the setting `key`.
    mode: the required mode; adapter: a RunConfig with the settings of the adapter to train, if there is one"""
    path = vars(config)[key]
    device = loading_device(config, dist)
    model, _ = load_model(path, device, mode, tokenizer, key, adapter, dist.dtype)
    if model.mode == SEQUENCE_SCORER:
        raise Mistake(f"{key}={path} has mode {model.mode}, but {MASKED_FILL} or {LANGUAGE_MODEL} is needed here")
    return model


def build_reference(config, policy, dist):
    """Builds the reference: the policy at step 0, or the model of reference_checkpoint or teacher_checkpoint. None if
    the run needs no reference."""
    if not needs_reference(config):
        return None
    key = "reference_checkpoint"
    if config.teacher_checkpoint is not None:
        key = "teacher_checkpoint"
    path = vars(config)[key]
    if path is None:
        reference = policy.frozen()
    else:
        reference = load_reference(key, config, policy, dist)
    # The reference of a new adapter is the policy's own model without the adapter, so the two share weights
    shares_weights = path is None and config.has_adapter
    if not shares_weights:
        dtype = dist.dtype
        if config.reference_mode == "ema":
            dtype = torch.float32  # in bfloat16 the small moves of an average would be rounded away
        freeze_and_cast(dtype, reference.model)
    if config.ref_offload:
        reference.to("cpu")
    return reference


def load_reference(key, config, policy, dist):
    """Loads a policy of the same kind, with the model of the setting `key`."""
    path = vars(config)[key]
    model = load_policy_model(key, config, policy.tokenizer, dist, policy.model.mode)
    reference = type(policy)(model, policy.tokenizer, dist.dtype, config.grad_checkpoint)
    if is_huggingface(path, key):
        # Its files may declare other end tokens. Both models must ban the same tokens, or the KL would compare
        # distributions over different tokens
        model.banned_ids = policy.model.banned_ids
    moves = config.reference_mode != "static"
    same_shape = shapes(reference.weights()) == shapes(policy.weights())
    if moves and not same_shape:
        raise Mistake(f"{key}={path} has another shape than the generator, so it cannot move")
    return reference


def load_judge(key, config, kind, policy, dist):
    """Loads the frozen judge of the setting `key`; None if it is not set. In fill-in the judge reads the generator's
    token ids, so it needs the generator's vocabulary; on prompts it may have its own vocabulary."""
    path = vars(config)[key]
    if path is None:
        return None
    from grpo.reward_functions.judge import Judge
    device = loading_device(config, dist)
    needed_tokenizer = None
    if kind == FILL_IN:
        needed_tokenizer = policy.tokenizer
    model, _ = load_model(path, device, SEQUENCE_SCORER, needed_tokenizer, key)
    freeze_and_cast(dist.dtype, model)
    tokenizer = load_tokenizer(path, key)
    reads_ids = same_vocabulary(tokenizer.description(), policy.tokenizer)
    judge = Judge(model, tokenizer, reads_ids, dist.dtype)
    if kind == FILL_IN:
        needed = config.block_size
        if model.judge_head == "cls":
            needed += 1  # CLS precedes the text
        if model.longest_input < needed:
            raise Mistake(f"{key}={path} has block_size={model.longest_input}, but needs {needed}: lower block_size")
        is_whole = not uses_fsdp(config, dist)  # shards cannot be packed
        if config.dtype == "auto" and is_whole and has_fast_bfloat16(model):
            judge.pack()
    return judge


def build_rewards(config, models, data, dist):
    """Builds the Rewards of the run. Raises Mistake for a record that a reward cannot score."""
    scorer = None
    path = config.reward_model_checkpoint
    if path is not None:
        from grpo.reward_functions.reward_model import load_reward_model
        scorer = load_reward_model(path, loading_device(config, dist), dist.dtype)
        shard_models([scorer.model], config, dist)
    rewards = make_rewards(config, models.judge, scorer)
    records = [{"where": config.dataset}]  # running text has no fields
    if data.has_prompts:
        records = data.records["train"] + data.records["val"]
    rewards.check(records)
    if config.environment is not None:
        from grpo.environments import check_begins
        check_begins(config, data)
    return rewards


def make_rewards(config, judge=None, reward_scorer=None):
    """Builds the Rewards of a run. With a credit_window they give each token a credit."""
    if config.credit_window is None:
        return Rewards(config, judge, reward_scorer)
    from grpo.reward_functions.judge import TokenRewards
    return TokenRewards(config, judge, reward_scorer)


def build_evaluation(config, models, rewards, data, dist):
    """Builds the evaluation for the kind of run. Raises Mistake if a text is too long for the models, or if
    unmask_steps is larger than a block."""
    settings = SamplingSettings.of(config)
    sampling_batch = models.policy.sampling_batch(settings)
    config = config.varied(sample_rows=sampling_batch)
    room = models.policy.model.longest_input
    if models.reference is not None:
        room = min(room, models.reference.model.longest_input)
    if models.kind == FILL_IN:
        if config.block_size > room:
            raise Mistake(f"texts of {config.block_size} tokens (block_size) are more than the {room} that the model "
                          "reads; lower block_size")
        return fill_in_evaluation(config, models, dist, rewards)
    if data.longest + config.max_new_tokens > room:
        raise Mistake(f"prompts of up to {data.longest} tokens, as the template {config.template!r} writes them, and "
                      f"{config.max_new_tokens} new ones (max_new_tokens) do not fit the {room} tokens that the model "
                      "reads; lower max_new_tokens or, in tokens, max_prompt_length, or set another template")
    places = config.block_length or config.max_new_tokens
    if config.unmask_steps > places:
        raise Mistake(f"unmask_steps={config.unmask_steps} is more than the {places} places of a block (block_length, "
                      "or max_new_tokens); lower it")
    from grpo.evaluation.prompts import PromptEvaluation
    return PromptEvaluation(data, models.reference, rewards, config, dist)


def fill_in_evaluation(config, models, dist, rewards=None):
    """Builds the evaluation on validation problems with the masks of the run. The problems are the same for every seed
    and batch size."""
    from grpo.evaluation.fill_in import PROBLEMS_PER_STEP, FillInEvaluation
    data = masked_windows(config, PROBLEMS_PER_STEP, models.policy.tokenizer)
    judges = {"judge": models.judge, "gold_judge": models.gold_judge}
    return FillInEvaluation(data, models.reference, judges, rewards, config, dist)
