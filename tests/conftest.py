import os
import signal
import sys

os.environ.setdefault("OMP_NUM_THREADS", "2")
os.environ.setdefault("HF_HUB_OFFLINE", "1")  # a test never waits for the network
# A shell ignores Ctrl-C for what it runs in the background, and processes that tests start would inherit that
signal.signal(signal.SIGINT, signal.default_int_handler)
sys.path.insert(0, os.path.dirname(os.path.dirname(os.path.abspath(__file__))))

import pytest
import torch

from grpo.rewards import REWARDS
from tests.tiny import TEXT, write_prompt_dataset, write_text_dataset


@pytest.fixture(scope="session")
def dataset(tmp_path_factory):
    """A folder with a small prepared dataset."""
    folder = tmp_path_factory.mktemp("data") / "tiny"
    write_text_dataset(folder, TEXT)
    return str(folder)


@pytest.fixture(scope="session")
def prompts(tmp_path_factory):
    """A folder with a small prepared dataset of prompts."""
    return write_prompt_dataset(tmp_path_factory.mktemp("data") / "sums")


@pytest.fixture(autouse=True)
def seeded():
    torch.manual_seed(0)


@pytest.fixture(autouse=True)
def rewards_of_a_test():
    """Rewards that a test defines are removed after it."""
    before = dict(REWARDS)
    yield
    REWARDS.clear()
    REWARDS.update(before)
