"""A recipe's digest depends on exactly the relevant settings; its texts are short."""

from __future__ import annotations

import zlib
from functools import partial
from typing import Any

import pytest
import torch
from blake3 import blake3
from hypothesis import given
from hypothesis import strategies as st
from torch.optim import SGD, Adam, AdamW

from p2pavg.base.messages import pack
from p2pavg.optim import FedAdam
from p2pavg.optim.base.recipe import (
    MAX_FIELD_CHARS,
    MAX_FIELDS,
    Rate,
    Recipe,
    canonical,
    first_difference,
    hyperparameters,
    in_force,
    numbers_digest,
    rate_of,
    settings_in,
    text_of,
)

GOLDEN = "eac6edf14c3f0147013c0fc50f26e1dd9b55a134b2d7bf502f7370b0772de338"


def weights(*sizes: int) -> list[torch.nn.Parameter]:
    return [torch.nn.Parameter(torch.zeros(size)) for size in sizes or (2,)]


def digest_of(optimizer: torch.optim.Optimizer) -> bytes:
    return numbers_digest(hyperparameters(optimizer))


class TestDigest:
    def test_digest_is_the_same_in_every_process(self) -> None:
        """Each process of the suite has another seed of Python's hashes, and so another order of the set."""
        names = {"b": 1, "a": set("zyx")}
        rules = (("target_batch_size", 256.0), ("max_grad_norm", None), ("names", names))
        numbers = hyperparameters(SGD(weights(), lr=0.1, momentum=0.9))
        assert Recipe(rules=rules, numbers=numbers).digest.hex() == GOLDEN

    @given(
        st.sampled_from(["lr", "momentum", "dampening", "weight_decay"]),
        st.floats(0.0, 10.0),
        st.floats(0.0, 10.0),
    )
    def test_every_change_of_a_number_changes_the_digest(self, name: str, one: float, other: float) -> None:
        found = {}
        for value in (one, other):
            optimizer = SGD(weights(), lr=0.1)
            optimizer.param_groups[0][name] = value
            found[value] = digest_of(optimizer)
        assert len(set(found.values())) == len(found)

    @pytest.mark.parametrize(
        "change",
        [
            {"lr": 0.1 + 2**-56},
            {"betas": (0.9, 0.998)},
            {"betas": (0.8, 0.999)},
            {"eps": 1e-9},
            {"weight_decay": 0.0},
            {"amsgrad": True},
            {"maximize": True},
        ],
    )
    def test_every_change_of_an_option_changes_the_digest(self, change: dict[str, Any]) -> None:
        assert digest_of(AdamW(weights(), **({"lr": 0.1} | change))) != digest_of(AdamW(weights(), lr=0.1))

    def test_every_group_counts(self) -> None:
        def grouped(*rates: float) -> SGD:
            return SGD([{"params": weights(), "lr": rate} for rate in rates], lr=1.0)

        found = [grouped(0.1), grouped(0.1, 0.1), grouped(0.1, 0.2), grouped(0.2, 0.1)]
        assert len({digest_of(optimizer) for optimizer in found}) == len(found)

    def test_type_of_a_number_does_not_count(self) -> None:
        found = [1, 1.0, torch.tensor(1.0), torch.tensor([1], dtype=torch.int64)]
        assert len({canonical(value) for value in found}) == 1
        assert canonical((0.9, 0.99)) == canonical([0.9, 0.99])
        assert canonical(True) != canonical(1)
        assert canonical(10**400) != canonical(10**400 + 1)

    def test_the_implementation_does_not_count(self) -> None:
        """A peer with a GPU and one without compute the same update with different implementations."""
        assert digest_of(Adam(weights(), foreach=True)) == digest_of(Adam(weights(), foreach=False))
        assert digest_of(Adam(weights(), fused=True)) == digest_of(Adam(weights()))
        scheduled = SGD(weights(), lr=0.1)
        torch.optim.lr_scheduler.StepLR(scheduled, step_size=5)
        assert digest_of(scheduled) == digest_of(SGD(weights(), lr=0.1))

    def test_missing_options_count_as_off(self) -> None:
        older, newer = AdamW(weights()), AdamW(weights())
        newer.param_groups[0]["invented_later"] = False
        older.param_groups[0].pop("decoupled_weight_decay", None)
        assert digest_of(older) == digest_of(newer)

    def test_the_order_of_a_dict_does_not_count(self) -> None:
        assert canonical({"a": 1, "b": 2}) == canonical({"b": 2, "a": 1})
        assert canonical({"a": 1, "b": 2}) != canonical({"a": 2, "b": 1})

    def test_callable_counts_by_name_and_arguments(self) -> None:
        first, second = partial(FedAdam, lr=0.1), partial(FedAdam, lr=0.1)
        assert canonical(first) == canonical(second) != canonical(partial(FedAdam, lr=0.2))
        assert canonical(FedAdam) != canonical(SGD)
        assert "0x" not in repr(canonical(object()))

    def test_tensor_counts_by_its_values(self) -> None:
        assert canonical(torch.arange(3)) == canonical(torch.arange(3).clone())
        assert canonical(torch.arange(3)) != canonical(torch.arange(1, 4))

    def test_recursive_value_has_a_digest(self) -> None:
        held: list[Any] = []
        held.append(held)
        assert canonical(held) == canonical(held)

    def test_rules_and_numbers_have_separate_digests(self) -> None:
        one = Recipe(rules=(("a", 1), ("b", 2)), numbers=())
        other = Recipe(rules=(("a", 1),), numbers=(("b", 2),))
        assert one.digest != other.digest
        assert one.rules_digest != other.rules_digest
        later = Recipe(rules=(("a", 1),), numbers=(("b", 3),))
        assert later.rules_digest == other.rules_digest


class TestTexts:
    @pytest.mark.parametrize(
        ("value", "text"),
        [
            (None, "none"),
            (4096.0, "4096"),
            (0.1, "0.1"),
            (1e-8, "1e-08"),
            (True, "True"),
            ((0.9, 0.999), "(0.9, 0.999)"),
            (torch.tensor(0.5), "0.5"),
            (torch.zeros(3), ""),
            ("x" * 65, ""),
            ("two\nlines", ""),
            (object(), ""),
        ],
    )
    def test_a_value_as_text(self, value: object, text: str) -> None:
        assert text_of(value) == text

    def test_floats_that_differ_read_differently(self) -> None:
        assert text_of(0.1) != text_of(0.1 + 2**-56)

    def test_first_of_many_groups_are_shown(self) -> None:
        many = SGD([{"params": weights(), "lr": float(index)} for index in range(30)], lr=1.0)
        recipe = Recipe(rules=(("inner", "SGD"),), numbers=hyperparameters(many))
        assert len(recipe.fields) <= MAX_FIELDS
        assert all(len(text) <= MAX_FIELD_CHARS for _, text in recipe.fields)
        shown = [name for name, _ in recipe.fields if name.startswith("lr")]
        assert shown == ["lr of group 0", "lr of group 1", "lr of group 2"]


class TestRates:
    def test_the_newest_before_an_update_is_in_force(self) -> None:
        rates = [Rate(3, b"a" * 8, ""), Rate(7, b"b" * 8, "")]
        assert in_force(rates, 2) is None
        assert [in_force(rates, update) for update in (3, 6, 7, 99)] == [
            rates[0],
            rates[0],
            rates[1],
            rates[1],
        ]

    def test_the_first_update_that_differs_is_found(self) -> None:
        mine = [Rate(1, b"a" * 8, "lr 1")]
        other = [Rate(1, b"a" * 8, "lr 1"), Rate(5, b"b" * 8, "lr 2")]
        assert first_difference(mine, other, 4) is None
        assert first_difference(mine, other, 5) == (Rate(5, b"a" * 8, "lr 1"), Rate(5, b"b" * 8, "lr 2"))
        assert first_difference(mine, mine, 99) is None

    def test_unknown_rates_are_not_compared(self) -> None:
        """A peer may have come later, or its oldest rates may be dropped."""
        assert first_difference([Rate(1, b"a" * 8, "")], [Rate(9, b"b" * 8, "")], 8) is None

    def test_a_rate_names_the_learning_rates(self) -> None:
        grouped = SGD([{"params": weights(), "lr": 0.1}, {"params": weights(), "lr": 0.2}], lr=1.0)
        assert rate_of(4, hyperparameters(grouped)).text == "lr 0.1, 0.2"
        assert rate_of(4, hyperparameters(SGD(weights(), lr=0.5))) == Rate(
            4, numbers_digest(hyperparameters(SGD(weights(), lr=0.5)))[:8], "lr 0.5"
        )


ANY = st.recursive(
    st.none() | st.integers(-5, 5) | st.text(max_size=4) | st.binary(max_size=4),
    lambda values: st.lists(values, max_size=3).map(tuple),
)
VALUES = ANY | st.tuples(st.sampled_from(["text", "number", "none", "list"]), ANY)


@given(st.lists(st.tuples(st.text(max_size=4), VALUES), max_size=4))
def test_the_values_of_a_strangers_recipe_may_be_anything(settings: list[tuple[str, Any]]) -> None:
    # One who makes up the digests, too, as an archivist of a run of its own does.
    digest = blake3(pack("p2pavg/recipe/1", *settings)).digest()
    try:
        found = settings_in(zlib.compress(pack(*settings)), digest, digest)
    except ValueError:
        return
    assert all(value is None or isinstance(value, str | float) for value in found.values())
