"""Fixtures of the simulations."""

from __future__ import annotations

import time
from collections.abc import Callable
from types import SimpleNamespace

import pytest

from p2pavg.optim.coordination import together, view, watch
from tests.simulation.stage import Stage


@pytest.fixture
def stages(monkeypatch: pytest.MonkeyPatch) -> Callable[..., Stage]:
    """Return a factory of stages whose clock the optimizers use."""

    def make(seed: int = 0, **changes: float) -> Stage:
        stage = Stage(seed, **changes)
        for module in (together, view, watch):
            monkeypatch.setattr(module, "time", SimpleNamespace(monotonic=lambda: stage.now, time=time.time))
        return stage

    return make
