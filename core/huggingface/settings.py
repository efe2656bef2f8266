"""The settings of Hugging Face models: adapters, 4 bits, chat templates."""

from types import SimpleNamespace

from core.settings.setting import READ_AGAIN, Settings, setting

ALL_LINEAR = "all-linear"
FULL = SimpleNamespace(has_adapter=False, load_in_4bit=False)  # all weights are trained


class LoraConfig(Settings):
    """LoRA adapters of Hugging Face models (docs/huggingface.md)."""

    excludes = (
        ("generator_checkpoint@out_dir init_from@out_dir", "", READ_AGAIN),
        ("lora_rank", "lora_init_from", "lora_rank is for a new adapter; leave it out"),
        ("lora_alpha lora_targets!=all-linear", "lora_init_from", "it is for a new adapter; leave it out"),
        ("reference_mode=ema", "kl_beta", "the average of two adapters' matrices is not the average of what they add "
         "to the weights, as lora_rank or lora_init_from would need; set reference_mode='periodic'"),
        ("ref_offload", "reference_checkpoint=None teacher_checkpoint=None",
         "the reference of an adapter is the policy's own weights without it; set ref_offload=False"))

    lora_rank: int = setting(0, "size of a LoRA adapter, which alone is trained; 0: no adapter", "[0, 1e5]")
    lora_alpha: float | None = setting(
        None, "the adapter's output counts lora_alpha / lora_rank times; None: twice", "(0, 1e9]")
    lora_targets: str = setting(
        ALL_LINEAR, "layers with an adapter: all but the output layer, or names of layers, as in q_proj,v_proj")
    lora_init_from: str | None = setting(None, "the folder of an adapter to start from")
    load_in_4bit: bool = setting(False, "hold the weights that are not trained in 4 bits (CUDA, CPU)")

    @property
    def has_adapter(self):
        """True if an adapter is trained in place of the weights."""
        return bool(self.lora_rank or self.lora_init_from)

    @property
    def reference_adapter(self):
        """True if the reference needs an adapter of its own: the run starts from one, or the reference moves."""
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


class ChatTemplateConfig(Settings):
    """The chat template of a Hugging Face tokenizer."""

    chat_template_kwargs: dict | None = setting(
        None, "arguments of the tokenizer's chat template, such as {'enable_thinking': False}")
