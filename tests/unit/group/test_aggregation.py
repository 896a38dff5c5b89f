"""Rules by text and as objects: one text for each rule, and errors that name the parameter."""

from __future__ import annotations

import math
from collections.abc import Callable

import pytest
from hypothesis import given
from hypothesis import strategies as st

from p2pavg.base.errors import ConfigError
from p2pavg.group.aggregation import (
    PLAIN,
    Aggregation,
    Audits,
    CenteredClip,
    Median,
    RobustRule,
    TrimmedMean,
    read_aggregation,
    resolve_rule,
)

TEXTS: list[tuple[RobustRule, str]] = [
    (TrimmedMean(), "trimmed_mean:0.25"),
    (TrimmedMean(0.1), "trimmed_mean:0.1"),
    (TrimmedMean(1e-9), "trimmed_mean:1e-09"),
    (TrimmedMean(0.499), "trimmed_mean:0.499"),
    (Median(), "median"),
    (CenteredClip(), "centered_clip:1.0:3"),
    (CenteredClip(2), "centered_clip:2.0:3"),
    (CenteredClip(1e6, 16), "centered_clip:1000000.0:16"),
]


@pytest.mark.parametrize(("rule", "text"), TEXTS)
def test_texts_never_change(rule: RobustRule, text: str) -> None:
    assert rule.text == text
    assert resolve_rule(text) == rule
    assert read_aggregation(text) == Aggregation(rule)
    assert Aggregation(rule).text == text


def test_no_rule_is_the_weighted_mean() -> None:
    assert resolve_rule(None) is None
    assert read_aggregation("") == PLAIN == Aggregation()
    assert PLAIN.text == ""


@pytest.mark.parametrize(
    ("aggregation", "text"),
    [
        # Audits as usual are in no text, so the keys of a run are those of its rule.
        (Aggregation(audits=None), "audit:off"),
        (Aggregation(None, 3), "max_norm:3.0"),
        (Aggregation(Median(), 1e6), "median max_norm:1000000.0"),
        (Aggregation(Median(), 2.0, Audits(0.5, before=True)), "median max_norm:2.0 audit:before:0.5"),
    ],
)
def test_a_bound_and_audits_are_in_the_text(aggregation: Aggregation, text: str) -> None:
    assert aggregation.text == text
    assert read_aggregation(text) == aggregation


@given(
    st.builds(
        Aggregation,
        st.none() | st.just(Median()),
        st.none() | st.floats(1.0, 1e6),
        st.none() | st.builds(Audits, st.floats(0.001, 1.0), st.booleans()),
    )
)
def test_a_text_is_read_back(aggregation: Aggregation) -> None:
    assert read_aggregation(aggregation.text) == aggregation


@pytest.mark.parametrize(
    "text",
    [
        *("audit:after:0.125", "audit:off median", "median  audit:off", "audit:", " ", " median"),
        *("max_norm:", "max_norm:0.5", "max_norm:nan", "max_norm:3", "max_norm:3.0 median"),
        *("medianmax_norm:3.0", "max_norm:3.0 max_norm:3.0", "median max_norm:3.0 "),
    ],
)
def test_a_text_that_no_aggregation_has_is_refused(text: str) -> None:
    with pytest.raises(ConfigError):
        read_aggregation(text)


@pytest.mark.parametrize(
    ("text", "rule"),
    [
        ("trimmed_mean", TrimmedMean(0.25)),
        ("trimmed_mean:.1", TrimmedMean(0.1)),
        ("centered_clip", CenteredClip(1.0, 3)),
        ("centered_clip:2", CenteredClip(2.0, 3)),
        ("centered_clip:2:1", CenteredClip(2.0, 1)),
    ],
)
def test_short_texts(text: str, rule: RobustRule) -> None:
    assert resolve_rule(text) == rule
    with pytest.raises(ConfigError, match="an aggregation's text is"):
        read_aggregation(text)  # of other peers, only the text from which keys are derived


@pytest.mark.parametrize(
    "given",
    [
        *("", "mean", "trimmed_mean:", "trimmed_mean:0.1:2", "median:1", "centered_clip:1:2:3", "Median"),
        *("trimmed_mean:half", "trimmed_mean:nan", "trimmed_mean:inf", "trimmed_mean:0.5", "trimmed_mean:0"),
        *(
            "trimmed_mean:-0.1",
            "centered_clip:0",
            "centered_clip:inf",
            "centered_clip:1:0",
            "centered_clip:1:17",
        ),
        *("centered_clip:1:1.5", "centered_clip:1:nan", "centered_clip:1:1e300", "trimmed_mean:" + "1" * 60),
        *(0.25, True, b"median", Median, ["median"]),
    ],
    ids=lambda given: repr(given)[:30],
)
def test_anything_else_is_refused(given: object) -> None:
    with pytest.raises(ConfigError):
        resolve_rule(given)


@pytest.mark.parametrize(
    ("make", "named"),
    [
        *[(lambda v=v: TrimmedMean(v), "fraction") for v in (0, -1.0, 0.5, math.nan, math.inf, "0.1", True)],
        *[(lambda v=v: CenteredClip(v), "radius") for v in (0, -1.0, 1.1e6, math.nan, 10**400, "1", True)],
        *[(lambda v=v: CenteredClip(1.0, v), "iterations") for v in (0, 17, 1.0, "1", True)],
    ],
)
def test_parameters_out_of_range_are_named(make: Callable[[], RobustRule], named: str) -> None:
    with pytest.raises(ConfigError, match=rf"^{named}\b"):
        make()
