"""What a member of a population refuses."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any, cast

import pytest

from p2pavg.attached.sharing import AttachedSharing
from p2pavg.population.core import Core


def test_a_process_that_shares_its_peer_is_no_member() -> None:
    """The peer offers the common states of its processes: its snapshots would be those of no member."""
    anything = cast(Any, SimpleNamespace())
    sharing = AttachedSharing.__new__(AttachedSharing)
    with pytest.raises(ValueError, match="averager is one of a process that shares its peer"):
        Core(anything, sharing, anything, anything, anything, peer_id="a", clock=lambda: 0.0)
