"""What tests of whole runs share."""

import pytest


@pytest.fixture
def without_pictures(monkeypatch):
    """Drawing the curves takes most of the time of a short run."""
    from grpo.report import page
    monkeypatch.setattr(page, "draw_curves", lambda runs, path: None)
