"""Whether this machine can fence jobs; tests that need it are skipped otherwise, and say why."""

from __future__ import annotations

import pytest

from p2pavg.tools.jobs.fence import missing_fence

WHY = missing_fence()
needs_fence = pytest.mark.skipif(bool(WHY), reason=f"needs a fence: {WHY}")
