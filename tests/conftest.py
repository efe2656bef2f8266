"""What all tests share. torch is imported in the fixtures: the process that hands out the tests needs none."""

import os
import signal
import sys
import tempfile

os.environ.setdefault("OMP_NUM_THREADS", "1")  # of each of the processes that run tests beside each other
os.environ.setdefault("HF_HUB_OFFLINE", "1")  # a test never waits for the network
if capability := os.environ.get("ATEN_CPU_CAPABILITY"):  # code compiled for one set of instructions fails on another
    os.environ.setdefault("TORCHINDUCTOR_CACHE_DIR", os.path.join(tempfile.gettempdir(), f"inductor_{capability}"))
# A shell ignores Ctrl-C for what it runs in the background: processes that tests start would inherit that
signal.signal(signal.SIGINT, signal.default_int_handler)
sys.path.insert(0, os.path.dirname(os.path.dirname(os.path.abspath(__file__))))

import pytest


def pytest_collection_modifyitems(items):
    """Files with slow tests come first, so that no process is left alone with one at the end."""
    slow = {item.path for item in items if item.get_closest_marker("slow")}
    items.sort(key=lambda item: item.path not in slow)


@pytest.fixture(scope="session")
def dataset(tmp_path_factory):
    """A folder with a small prepared dataset."""
    from tests.tiny import TEXT, write_text_dataset
    folder = tmp_path_factory.mktemp("data") / "tiny"
    write_text_dataset(folder, TEXT)
    return str(folder)


@pytest.fixture(scope="session")
def prompts(tmp_path_factory):
    """A folder with a small prepared dataset of prompts."""
    from tests.tiny import write_prompt_dataset
    return write_prompt_dataset(tmp_path_factory.mktemp("data") / "sums")


@pytest.fixture(autouse=True)
def seeded():
    import torch
    torch.manual_seed(0)


@pytest.fixture(autouse=True)
def rewards_of_a_test():
    """Rewards that a test defines are removed after it."""
    from grpo.reward_functions.registry import run_reward_file
    from grpo.rewards import REWARDS, import_rewards
    import_rewards([None])
    before = dict(REWARDS)
    yield
    run_reward_file.cache_clear()
    REWARDS.clear()
    REWARDS.update(before)


@pytest.fixture
def backend(monkeypatch):
    """Sets the backend of torch.compile. At first it is "eager": PyTorch runs what was traced, without a compiler."""
    import torch
    from torch._dynamo.utils import counters
    from core.model import compiled

    def use(name):
        monkeypatch.setattr("core.model.BACKEND", name)
        compiled.cache_clear()
        torch.compiler.reset()
        counters.clear()
    use("eager")
    yield use
    use("inductor")
