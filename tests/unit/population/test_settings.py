"""Settings and ranges: what follows from a draw. What is refused stands in the golden file of strategies."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from p2pavg.base.errors import ConfigError
from p2pavg.population import Choice, LogUniform, Uniform
from p2pavg.population.settings import Draws, Value
from tests.unit.population.samples import SETTINGS


def test_the_digest_depends_on_every_setting() -> None:
    changes: list[dict[str, Any]] = [
        {"space": {"lr": LogUniform(1e-4, 1.0)}},
        {"space": {**SETTINGS.space, "lr": Uniform(1e-4, 1.0)}},
        {"interval": 11},
        {"mode": "max"},
        {"exploit": "tournament"},
        {"quantile": 0.3},
        {"explore": "resample"},
        {"resample_probability": 0.3},
        {"factors": (1.3, 0.8)},
        {"max_lag": 6},
        {"seed": 1},
    ]
    digests = {SETTINGS.digest, *(replace(SETTINGS, **change).digest for change in changes)}
    assert len(digests) == len(changes) + 1
    assert replace(SETTINGS, space=dict(reversed(list(SETTINGS.space.items())))).digest == SETTINGS.digest


def test_the_first_hyperparameters_follow_from_the_member_and_are_golden() -> None:
    assert SETTINGS.first("a") == SETTINGS.first("a")
    assert SETTINGS.first("a") != SETTINGS.first("b")
    for number in range(200):
        assert SETTINGS.checked(SETTINGS.first(str(number))) == SETTINGS.first(str(number))


def test_hyperparameters_of_the_caller_are_checked() -> None:
    good: dict[str, Value] = {"lr": 1, "momentum": 0.5, "kind": "b"}
    assert SETTINGS.checked(good) == {"kind": "b", "lr": 1.0, "momentum": 0.5}
    wrong: list[tuple[dict[str, Value], str]] = [
        ({"lr": 2.0}, "lr = 2.0 is not in its range"),
        ({"kind": "d"}, "kind = 'd' is not in its range"),
        ({"other": 1.0}, "'other' is not in the population's space"),
    ]
    for changes, message in wrong:
        with pytest.raises(ConfigError, match=message):
            SETTINGS.checked({**good, **changes})
    with pytest.raises(ConfigError, match="'lr' is missing"):
        SETTINGS.checked({"momentum": 0.5, "kind": "b"})


def test_draws_cover_a_range_and_stay_inside() -> None:
    draws = Draws(b"seed")
    fractions = sorted(draws.fraction() for _ in range(1000))
    assert 0.0 <= fractions[0] < 0.01
    assert 0.99 < fractions[-1] < 1.0
    assert 0.45 < fractions[500] < 0.55
    for range_ in (Uniform(-1.0, 1.0), LogUniform(1e-5, 1e-1), Choice((1, 2, 3))):
        assert all(range_.holds(range_.draw(fraction)) for fraction in (0.0, *fractions, 1.0))


def test_whole_numbers_and_booleans_are_different_choices() -> None:
    choice = Choice((True, 1, "1"))
    assert [choice.holds(value) for value in (True, 1, "1", 1.0, False)] == [True, True, True, False, False]
