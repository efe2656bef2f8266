"""Healthy runs, examined once."""

import pytest


@pytest.fixture(scope="session")
def healthy(tmp_path_factory):
    from tests.grpo.evaluation.patients import completing, examined
    return examined(completing(tmp_path_factory.mktemp("healthy")))


@pytest.fixture(scope="session")
def healthy_fill(tmp_path_factory):
    from tests.grpo.evaluation.patients import examined, filling
    return examined(filling(tmp_path_factory.mktemp("fill")))
