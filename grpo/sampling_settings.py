"""The settings of sampling, which policies and environments get in place of the whole config."""

from dataclasses import dataclass, fields
from typing import Self

from core.settings.setting import Settings


@dataclass(frozen=True)
class SamplingSettings:
    """The settings with which completions are sampled. GRPOConfig has the same names, with their meanings."""
    # Problems and completions
    seed: int
    batch_size: int
    problems: int            # distinct problems per iteration and rank
    group_size: int
    sample_rows: int | None
    block_size: int          # tokens per text, for running text
    max_new_tokens: int
    stop_sequences: tuple[str, ...]
    response_prefix: str
    # The distribution of a token
    temperature: float
    top_p: float
    top_k: int
    min_p: float
    # The passes of a masked-fill model
    unmask_steps: int
    block_length: int | None
    unmask_order: str
    fill_estimator: str
    # The environment that answers, and the template around its answers
    environment: str | None
    max_turns: int
    reward_file: str | None
    reward_timeout: float
    template: str | None
    chat_template_kwargs: dict | None
    system_prompt: str | None

    @classmethod
    def of(cls, config: Settings) -> Self:
        """Takes the settings of these names from a config."""
        values = {f.name: getattr(config, f.name) for f in fields(cls)}
        return cls(**values)

    def for_tokens(self) -> dict:
        """The settings of core.distributions.sample_tokens."""
        return {
            "temperature": self.temperature,
            "top_p": self.top_p,
            "top_k": self.top_k,
            "min_p": self.min_p}
