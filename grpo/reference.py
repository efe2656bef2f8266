"""The model that the policy is kept near."""

import copy

from core.checkpoint_manager import freeze, load_model
from core.model import MASKED_FILL


def build_reference(policy, config, tokenizer, device):
    """A frozen copy of the policy at step 0, or reference_checkpoint; None if kl_beta is 0 and none was named."""
    if config.reference_checkpoint is not None:
        return freeze(load_model(config.reference_checkpoint, device, MASKED_FILL, tokenizer, "reference_checkpoint")[0])
    return freeze(copy.deepcopy(policy)) if config.kl_beta > 0 else None
