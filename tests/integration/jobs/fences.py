"""A mark for tests that need a fence: they are skipped where this machine has none, and say why."""

from __future__ import annotations

import pytest

from p2pavg.tools.jobs.fence import missing_fence

WHY = missing_fence()
needs_fence = pytest.mark.skipif(bool(WHY), reason=f"needs a fence: {WHY}")
