"""GRPO with other terms in the place of its KL; docs/kl.md has the runs.

python docs/kl_on_a_model.py plain config/grpo_arithmetic.py --kl_beta=0.1 --kl_estimator=exact   # or k2, k3
python docs/kl_on_a_model.py k1 config/grpo_arithmetic.py --kl_beta=0.1 --kl_estimator=k2
python docs/kl_on_a_model.py k1,colder config/grpo_arithmetic.py --kl_beta=0.1 --kl_estimator=k2
"""

import os
import sys

sys.path.insert(0, os.path.dirname(os.path.dirname(os.path.abspath(__file__))))

from core.errors import UsageError, run_script
from grpo import losses
from grpo.grpo_trainer import GRPOTrainer
from grpo.sampling_settings import SamplingSettings
from grpo.train_grpo import main as train


def sample_colder(trainer, problems, again):
    """Draws at temperature .8 and top_p .9 what the loss scores at 1, over all tokens."""
    config = trainer.config.varied(temperature=0.8, top_p=0.9)
    rollouts = trainer.policy.sample(problems, trainer.iteration, SamplingSettings.of(config))
    rollouts.inputs.kept = None
    return rollouts, {}


def main(argv):
    """Changes what the first argument names, and trains with the others."""
    changes = set("".join(argv[:1]).split(","))
    if not changes <= {"plain", "k1", "colder"}:
        raise UsageError("the first argument must be plain, k1, colder or k1,colder; then come a config and settings")
    if "k1" in changes:
        losses.KL_ESTIMATORS["k2"] = lambda logp, ref_logp, ratio: ratio.detach() * (logp - ref_logp)
    if "colder" in changes:
        GRPOTrainer.sample = sample_colder
    train(argv[1:])


if __name__ == "__main__":
    run_script(main)
