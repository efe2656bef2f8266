"""The learning rate of each step."""

import pytest

from core.scheduler import CosineLRScheduler


@pytest.mark.parametrize(("settings", "rates"), [
    ((1.0, 0.1, 4, 14), {0: 0.25, 1: 0.5, 3: 1.0, 4: 1.0, 9: 0.55, 14: 0.1, 99: 0.1}),
    ((1.0, 0.2, 0, 8), {0: 1.0, 4: 0.6, 8: 0.2, 11: 0.2}), ((1e-5, None, 0, 8), {0: 1e-5, 8: 1e-6})])
def test_schedule_warms_up_decays_and_stays(settings, rates):
    """Without a lowest rate it ends at a tenth of the highest."""
    lr = CosineLRScheduler(*settings).lr
    assert {step: lr(step) for step in rates} == pytest.approx(rates)
