"""Fragments of a model: every element once, fragments of one size, strided layers, decided by names and shapes."""

from __future__ import annotations

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from p2pavg.optim.local.local_options import Piece, elements_in, fragments_of, layer_of, layout_digest

GPT = [
    ("wte.weight", (50, 8)),
    *((f"h.{block}.{part}", (8, 8)) for block in range(4) for part in ("attn.weight", "mlp.weight")),
    ("ln_f.weight", (8,)),
]
NAMES, SHAPES = [name for name, _ in GPT], [shape for _, shape in GPT]


@given(
    sizes=st.lists(st.integers(0, 40), min_size=1, max_size=12).filter(lambda sizes: sum(sizes) > 0),
    count=st.integers(1, 9),
    layers=st.integers(1, 5),
)
def test_every_element_is_in_one_fragment_and_sizes_differ_by_one_at_most(
    sizes: list[int], count: int, layers: int
) -> None:
    count = min(count, sum(sizes))
    names = [f"blocks.{index % layers}.{index}" for index in range(len(sizes))]
    found = fragments_of(names, [(size,) for size in sizes], count)
    assert len(found) == count
    seen = [
        (piece.position, element)
        for fragment in found
        for piece in fragment
        for element in range(piece.start, piece.stop)
    ]
    assert sorted(seen) == [(position, e) for position, size in enumerate(sizes) for e in range(size)]
    if count > 1:
        lengths = [elements_in(fragment) for fragment in found]
        assert max(lengths) - min(lengths) <= 1
        assert all(piece.stop > piece.start for fragment in found for piece in fragment)


def test_one_fragment_has_the_whole_parameters_in_their_order() -> None:
    expected = tuple(Piece(position, 0, math.prod(shape)) for position, shape in enumerate(SHAPES))
    assert fragments_of(NAMES, SHAPES, 1) == (expected,)


def test_layers_are_strided() -> None:
    """With blocks of one size and nothing else, fragment k has the blocks k, k + P, .."""
    names = [f"blocks.{block}.{part}" for block in range(6) for part in ("weight", "bias")]
    found = fragments_of(names, [(3,), (1,)] * 6, 3)
    blocks = [{names[piece.position].split(".")[1] for piece in fragment} for fragment in found]
    assert blocks == [{"0", "3"}, {"1", "4"}, {"2", "5"}]


@pytest.mark.parametrize(
    ("name", "layer"),
    [
        ("transformer.h.3.attn.c_proj.weight", "transformer.h.3"),
        ("layers.12.0.bias", "layers.12"),
        ("0.weight", "0"),
        ("wte.weight", "wte"),
        ("weight", "weight"),
        ("parameter 3", "parameter 3"),
    ],
)
def test_layers_are_named_up_to_their_first_number(name: str, layer: str) -> None:
    assert layer_of(name) == layer


def test_digest_depends_on_names_and_pieces() -> None:
    pieces = fragments_of(NAMES, SHAPES, 4)
    digest = layout_digest(NAMES, pieces)
    assert digest == layout_digest(list(NAMES), fragments_of(NAMES, SHAPES, 4))
    assert digest != layout_digest(["other", *NAMES[1:]], pieces)
    assert digest != layout_digest(NAMES, fragments_of(NAMES, SHAPES, 3))
