"""The settings of samplers, and which of them go together."""

import re
from dataclasses import dataclass

from core.settings.ranges import check_choices, check_ranges

CHOICES = {"sampler": ("local", "ray", "vllm"), "ratio_to": ("policy", "sampler")}
RANGES = {"sampler_timeout": "(0, 1e6]", "max_staleness": "[0, 100]", "ray_workers": "[1, 1e4]"}
ONLY_FOR = {  # {samplers: {setting that has an effect with these alone: its default}}
    ("ray",): {"ray_address": None, "ray_workers": 1}, ("vllm",): {"vllm_url": None},
    ("ray", "vllm"): {"sampler_timeout": 600.0}}
CLUSTER = re.compile(r"auto|[\w.:\[\]-]+:[1-9]\d{0,4}")
# http://host:port/path, without a name or password, which config.json would keep
ADDRESS = re.compile(r"https?://([\w.-]+|\[[\da-f:]+\])(:\d{1,5})?(/[\w./-]*)?")


@dataclass(frozen=True)
class SamplerConfig:
    """The settings that say where completions are sampled, and with which weights."""

    # where completions are sampled: docs/scaling.md
    sampler: str = "local"                    # local: in this process; ray: in Ray's worker processes, here or in a
                                              # cluster; vllm: by a vLLM server
    sampler_timeout: float = 600.0            # seconds that a call of Ray may take, or a vLLM server may be silent
    max_staleness: int = 0                    # iterations that are sampled ahead while the policy is trained; their
                                              # completions are at most this much older than it; 0: none
    ray_address: str | None = None            # the cluster to join: auto, or host:port; None: a Ray of its own, here
    ray_workers: int = 1                      # worker processes of each rank, which share its problems
    vllm_url: str | None = None               # the address of the server, such as http://localhost:8000
    ratio_to: str = "policy"                  # the clipped ratio is to the policy before its first step on the
                                              # rollouts, or to the sampler, as it was when it wrote them

    def __post_init__(self):
        check_ranges(self, RANGES)
        check_choices(self, CHOICES)


def check_sampler(c):
    """Raises ValueError if a setting of samplers has no effect, or contradicts another one. c: a GRPOConfig"""
    for samplers, settings in ONLY_FOR.items():
        for key, default in settings.items():
            if c.sampler not in samplers and getattr(c, key) != default:
                raise ValueError(f"{key}={getattr(c, key)!r} has no effect with sampler={c.sampler!r}; set sampler="
                                 f"{' or '.join(map(repr, samplers))}, or leave {key} out")
    if c.ray_address is not None and not CLUSTER.fullmatch(c.ray_address):
        raise ValueError(f"ray_address={c.ray_address!r} is neither auto nor the host:port of ray start --head")
    if c.sampler == "vllm":
        check_vllm(c)
    if c.ratio_to == "sampler" and c.fill_estimator != "trajectory":
        raise ValueError("ratio_to='sampler' needs the probability of what was sampled, which fill_estimator="
                         f"{c.fill_estimator!r} only estimates; set fill_estimator='trajectory'")


def check_vllm(c):
    """Raises ValueError if a vLLM server cannot do what the settings ask for, or vllm_url is no address."""
    if not ADDRESS.fullmatch(c.vllm_url or ""):
        raise ValueError(f"vllm_url={c.vllm_url!r} must be an address such as http://localhost:8000, without a "
                         "password; a server's key is read from VLLM_API_KEY in the environment")
    if c.environment is not None:
        raise ValueError(f"environment={c.environment!r} needs sampler='local' or 'ray'; 'vllm' samples one turn")
    if not 0.01 <= c.temperature <= 2:
        raise ValueError(f"temperature={c.temperature:g} with sampler='vllm': a server draws at 0.01 to 2")
    if (c.top_p, c.top_k, c.min_p) != (1.0, 0, 0.0):
        raise ValueError(f"top_p={c.top_p}, top_k={c.top_k}, min_p={c.min_p} with sampler='vllm': a server does not "
                         "tell which tokens could have been drawn; set top_p=1.0, top_k=0, min_p=0.0")
