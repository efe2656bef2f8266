"""The settings of Hugging Face models: adapters, 4 bits."""

import os
from dataclasses import dataclass

from core.settings.ranges import check_ranges

ALL_LINEAR = "all-linear"
RANGES = {"lora_rank": "[0, 1e5]", "lora_alpha": "(0, 1e9]"}


@dataclass(frozen=True)
class LoraConfig:
    """The settings of Hugging Face models that all training scripts share."""

    # Hugging Face models (docs/huggingface.md)
    lora_rank: int = 0                        # size of a LoRA adapter, which alone is trained; 0: no adapter
    lora_alpha: float | None = None           # the adapter's output counts lora_alpha / lora_rank times; None: twice
    lora_targets: str = ALL_LINEAR            # layers with an adapter: all but the output layer, or names of layers,
                                              # as in q_proj,v_proj
    lora_init_from: str | None = None         # the folder of an adapter to start from
    load_in_4bit: bool = False                # hold the weights that are not trained in 4 bits (CUDA only)

    def __post_init__(self):
        check_ranges(self, RANGES)
        if self.load_in_4bit and not self.has_adapter:
            raise ValueError("load_in_4bit=True: weights in 4 bits cannot be trained; set lora_rank=16")
        if self.lora_rank and self.lora_init_from:
            raise ValueError(f"lora_rank={self.lora_rank} is for a new adapter, but lora_init_from="
                             f"{self.lora_init_from} has its own rank; leave lora_rank out")
        for key in ("lora_alpha", "lora_targets"):
            if not self.lora_rank and getattr(self, key) != getattr(LoraConfig, key):
                raise ValueError(f"{key}={getattr(self, key)!r} is for a new adapter; leave {key} out, or set "
                                 "lora_rank=16")

    def check_base(self, key):
        """Raises ValueError if the model that the setting `key` names lies in out_dir, where this run sets it aside."""
        path = getattr(self, key)
        if self.has_adapter and path and os.path.dirname(os.path.abspath(path)) == os.path.abspath(self.out_dir):
            raise ValueError(f"{key}={path} lies in out_dir={self.out_dir}, from where this run moves it away, but the "
                             "adapter is used with it; choose another out_dir")

    @property
    def has_adapter(self):
        """Tells whether an adapter is trained in place of the weights."""
        return self.lora_rank > 0 or self.lora_init_from is not None

    @property
    def reference_adapter(self):
        """Tells whether the reference needs an adapter of its own: the run starts from one, or the reference moves."""
        mode = getattr(self, "reference_mode", "none")
        if mode == "none" or self.kl_beta == 0 or self.reference_checkpoint is not None:
            return False
        return self.lora_init_from is not None or mode != "static"

    @property
    def targets(self):
        """The names of the layers that get an adapter, none for all linear ones."""
        return [] if self.lora_targets == ALL_LINEAR else [name.strip() for name in self.lora_targets.split(",")]

    @property
    def asked_for(self):
        """The setting that asks for an adapter, for errors."""
        key = "lora_rank" if self.lora_init_from is None else "lora_init_from"
        return f"{key}={getattr(self, key)}"


FULL = LoraConfig()  # all weights are trained
