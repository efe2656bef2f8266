import os
import sys

os.environ.setdefault("OMP_NUM_THREADS", "2")
sys.path.insert(0, os.path.dirname(os.path.dirname(os.path.abspath(__file__))))

import pytest
import torch

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
