"""The settings of the sandbox."""

from dataclasses import dataclass

from core.settings.ranges import check_choices, check_ranges

RANGES = {"sandbox_seconds": "(0, 1e5]", "sandbox_megabytes": "[1, 1e6]"}


@dataclass(frozen=True)
class SandboxConfig:
    """The settings of the reward code_execution, which runs what a model wrote."""

    # rewards: python grpo/rewards.py lists them
    sandbox_seconds: float = 5.0              # time limit of code_execution, for tests in Python or for each
                                              # input; reward_timeout limits them together
    sandbox_megabytes: int = 256              # memory limit of code_execution
    sandbox: str = "auto"                     # of code_execution: auto takes what this machine's kernel offers; strict
                                              # refuses to run where a part is missing (docs/security.md)

    def __post_init__(self):
        check_ranges(self, RANGES)
        check_choices(self, {"sandbox": ("auto", "strict")})
