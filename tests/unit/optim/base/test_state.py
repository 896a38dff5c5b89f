"""Arguments and saved states: values out of range are named."""

from __future__ import annotations

import json
import math
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from p2pavg.optim.base.state import Lineage, checked_amount, checked_count, lineage_of, pack_lineage
from p2pavg.optim.coordination.progress import MAX_EPOCH

STATE = bytes(range(32))


@pytest.mark.parametrize("value", [1, 0.5, 1e-300, 1e300, 5e-324])
def test_an_amount_is_a_number_above_zero(value: float) -> None:
    amount = checked_amount("sync_timeout", value)
    assert amount == value
    assert type(amount) is float


@pytest.mark.parametrize(
    "value",
    [
        *[0, 0.0, -1, -0.5, math.nan, math.inf, -math.inf, True, False, None, "1", 1j, [1]],
        pytest.param(10**400, id="10**400"),
    ],
)
def test_any_other_amount_is_named(value: object) -> None:
    with pytest.raises(ValueError, match=r"^sync_timeout must be a number above 0, got "):
        checked_amount("sync_timeout", value)


@pytest.mark.parametrize("value", [1, 2, 10**9])
def test_a_count_is_a_whole_number_above_zero(value: int) -> None:
    assert checked_count("sync_every", value) == value


@pytest.mark.parametrize("value", [0, -1, 1.0, 0.5, math.nan, math.inf, True, False, None, "1", [1]])
def test_any_other_count_is_named(value: object) -> None:
    with pytest.raises(ValueError, match=r"^sync_every must be a whole number above 0, got "):
        checked_count("sync_every", value)


@given(st.integers(0, MAX_EPOCH), st.binary(min_size=32, max_size=32))
def test_lineage_survives_saving(epoch: int, state: bytes) -> None:
    saved = json.loads(json.dumps({"lineage": pack_lineage(Lineage(epoch, state)), "inner": {}}))
    assert lineage_of(saved) == Lineage(epoch, state)


@pytest.mark.parametrize(
    "saved",
    [
        {},
        {"lineage": None},
        {"lineage": {}},
        {"lineage": {"epoch": 1}},
        {"lineage": {"state": STATE.hex()}},
        {"lineage": [1, STATE.hex()]},
        {"lineage": {"epoch": 1, "state": STATE}},
        {"lineage": {"epoch": 1, "state": None}},
        {"lineage": {"epoch": 1, "state": "no hexadecimal"}},
        None,
        3,
        "lineage",
    ],
)
def test_state_without_a_lineage_is_named(saved: Any) -> None:
    with pytest.raises(ValueError, match=r"^state: it holds no lineage: "):
        lineage_of(saved)


@pytest.mark.parametrize(
    ("epoch", "state"),
    [
        (-1, STATE),
        (MAX_EPOCH + 1, STATE),
        (1.0, STATE),
        (None, STATE),
        ("1", STATE),
        (True, STATE),
        (1, b""),
        (1, STATE[:31]),
        (1, STATE + b"\0"),
    ],
)
def test_a_lineage_out_of_range_is_refused(epoch: object, state: bytes) -> None:
    with pytest.raises(ValueError, match=r"^state: its lineage is out of range"):
        lineage_of({"lineage": {"epoch": epoch, "state": state.hex()}})
