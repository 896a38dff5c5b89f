"""The schema hash decides which peers can average with each other."""

from __future__ import annotations

import torch

from p2pavg.allreduce.vector.accumulation import Given, schema_of


def schema_hash(given: Given) -> bytes:
    return schema_of(given)[0].hash


def test_the_hash_never_changes() -> None:
    """Peers of different versions have to agree on it."""
    given = {"layer.weight": torch.zeros(2, 3), "layer.bias": torch.zeros((), dtype=torch.bfloat16)}
    assert schema_hash(given).hex() == "264580df99fdc33db316e7dfa49992d7e6257bf66a36e35eab0281ae6fe28997"
    assert (
        schema_hash(list(given.values())).hex()
        == "574bd3a44f247c5ed9208fb3b3d5051c46616560fbb87c62a7d0115ddd122eb7"
    )


def test_values_do_not_matter() -> None:
    assert schema_hash([torch.zeros(3)]) == schema_hash((torch.ones(3),))


def test_names_shapes_and_dtypes_matter() -> None:
    given: list[Given] = [
        [torch.zeros(6)],
        [torch.zeros(2, 3)],
        [torch.zeros(3, 2)],
        [torch.zeros(6, 1)],
        [torch.zeros(6, dtype=torch.float16)],
        [torch.zeros(6, dtype=torch.bfloat16)],
        [torch.zeros(3), torch.zeros(3)],
        [torch.zeros(6), torch.zeros(0)],
        [torch.zeros(0), torch.zeros(6)],
        [torch.zeros(6), torch.zeros(())],
        {"a": torch.zeros(6)},
        {"b": torch.zeros(6)},
        {"": torch.zeros(6)},
        {"a": torch.zeros(3), "b": torch.zeros(3)},
        {"b": torch.zeros(3), "a": torch.zeros(3)},
        {"a\nb": torch.zeros(3), "": torch.zeros(3)},
        {"a": torch.zeros(3), "\nb": torch.zeros(3)},
        {"\ud800": torch.zeros(6)},
    ]
    assert len({schema_hash(each) for each in given}) == len(given)


def test_a_vector_and_its_tensors() -> None:
    schema, tensors = schema_of(
        {"a": torch.arange(6.0).view(2, 3), "empty": torch.zeros(0), "b": torch.tensor(9.0)}
    )
    assert schema.sizes == [6, 0, 1]
    assert schema.elements == 7
    found = schema.unflatten(torch.cat([tensor.reshape(-1) for tensor in tensors]))
    assert isinstance(found, dict)
    assert list(found) == ["a", "empty", "b"]
    assert all(torch.equal(one, other) for one, other in zip(found.values(), tensors, strict=True))


def test_hash_of_many_tensors() -> None:
    many = [torch.zeros(1)] * 5000
    assert schema_hash(many) != schema_hash(many[:-1])
