"""The settings of samplers outside this process: Ray's workers, a vLLM server."""

import re

from core.settings.setting import READ_AGAIN, Settings, setting

# http://host:port/path, without a name or password, which config.json would keep
ADDRESS = re.compile(r"https?://([\w.-]+|\[[\da-f:]+\])(:\d{1,5})?(/[\w./-]*)?")


class RayConfig(Settings):
    """Ray's worker processes, here or in the cluster at RAY_ADDRESS in the environment."""

    excludes = (("generator_checkpoint@out_dir judge_checkpoint@out_dir", "", READ_AGAIN),)

    ray_workers: int = setting(1, "worker processes of each rank, which share its problems", "[1, 1e4]")


class VllmConfig(Settings):
    """A vLLM server."""

    excludes = (
        ("vllm_url=None", "sampler=vllm", "it must be an address such as http://localhost:8000"),
        ("temperature<0.01 temperature>2", "sampler=vllm", "a server draws at 0.01 to 2"),
        ("top_p<1 top_k min_p", "sampler=vllm",
         "a server does not tell which tokens could have been drawn; set top_p=1.0, top_k=0, min_p=0.0"),)

    vllm_url: str | None = setting(
        None, "the address of the server, such as http://localhost:8000, without a password; a server's key is read "
        "from VLLM_API_KEY in the environment", ADDRESS)
