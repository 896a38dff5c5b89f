"""Random orders of events in groups that are too large for an exhaustive search."""

from __future__ import annotations

from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from tests.unit.consensus.world import Faults, Group

GROUPS = {size: Group(size, Faults(crashes=2, suspicions=1), strict=False) for size in (5, 6)}


@settings(max_examples=150, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(size=st.sampled_from(sorted(GROUPS)), data=st.data())
def test_larger_groups_agree_and_come_to_an_end(size: int, data: st.DataObject) -> None:
    group = GROUPS[size]
    world = group.first
    for _ in range(data.draw(st.integers(0, 60))):
        steps = list(group.steps(world))
        if not steps:
            break
        _, world, _ = steps[data.draw(st.integers(0, len(steps) - 1))]
        assert group.what_is_wrong(world) is None
    for _ in range(2000):
        # A question whose answer changes nothing is asked again for ever.
        due = [after for _, after, must in group.steps(world) if must and after != world]
        if not due:
            break
        world = due[0]
        assert group.what_is_wrong(world) is None
    assert group.what_is_left(world) is None
