"""Which settings of samplers go together."""

SAMPLERS = ("local", "ray", "vllm")
ONLY_FOR = {  # {samplers: {setting that has an effect with these alone: its default}}
    ("ray",): {"ray_address": None, "ray_workers": 1, "ray_rewards": False}, ("vllm",): {"vllm_url": None},
    ("ray", "vllm"): {"sampler_timeout": 600.0}}


def check_sampler(c):
    """Raises ValueError if a setting of samplers has no effect, or contradicts another one. c: a GRPOConfig"""
    for samplers, settings in ONLY_FOR.items():
        for key, default in settings.items():
            if c.sampler not in samplers and getattr(c, key) != default:
                raise ValueError(f"{key}={getattr(c, key)!r} has no effect with sampler={c.sampler!r}; set sampler="
                                 f"{' or '.join(map(repr, samplers))}, or leave {key} out")
    if c.importance == "none" and c.importance_cap != 2.0:
        raise ValueError(f"importance_cap={c.importance_cap} has no effect with importance='none'; set importance="
                         "'token' or leave importance_cap out")
    if c.sampler == "vllm" and c.vllm_url is None:
        raise ValueError("sampler='vllm' needs the address of the server: set vllm_url, such as http://localhost:8000")
    truncation = {"top_p": 1.0, "top_k": 0, "min_p": 0.0}
    for key, whole in truncation.items():
        if c.sampler == "vllm" and getattr(c, key) != whole:
            raise ValueError(f"{key}={getattr(c, key)} with sampler='vllm': the server does not tell which tokens it "
                             "could draw, so training cannot score the distribution that they were drawn from; set "
                             + ", ".join(f"{name}={x}" for name, x in truncation.items()))
    if c.importance != "none" and c.sampler == "local" and not c.max_staleness:
        raise ValueError(f"importance={c.importance!r} has nothing to correct: with sampler='local' and "
                         "max_staleness=0 the policy that is trained wrote every completion; set importance='none'")
    if c.importance != "none" and c.fill_estimator != "trajectory":
        raise ValueError(f"importance={c.importance!r} needs the probability of what was sampled, which fill_estimator="
                         f"{c.fill_estimator!r} only estimates; set fill_estimator='trajectory' or importance='none'")
