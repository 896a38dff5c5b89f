"""A member's share is no longer than the norm that it signed, with room for what codecs round."""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp
from numpy.typing import NDArray

from p2pavg.allreduce.events import FalseNormError, UndecodableError
from p2pavg.allreduce.reduction import SLACK, NormCheck, PartContribution, average_part, vector_norm
from p2pavg.group.aggregation import Median, RobustRule
from p2pavg_compression import KNOWN_CODECS, Codec, Fp32, resolve_codec
from tests.unit.group.samples import SIGNERS, candidate, roster

IDS = [signer.peer_id for signer in SIGNERS]
CODECS = [resolve_codec(name) for name in KNOWN_CODECS]


def check_of(*norms: float) -> NormCheck:
    return NormCheck(roster([candidate(index, norm=norm, weight=1.0) for index, norm in enumerate(norms)]))


def test_norm_of_a_vector() -> None:
    assert vector_norm(torch.tensor([3.0, -4.0])) == 5.0
    assert vector_norm(torch.empty(0)) == 0.0
    assert vector_norm(torch.full((2**20 + 3,), 2.0**100)) == pytest.approx(2.0**100 * math.sqrt(2**20 + 3))
    assert vector_norm(torch.full((2**21,), 1e-30)) == pytest.approx(1e-30 * math.sqrt(2**21))


def test_parts_of_a_share_count_together_and_members_apart() -> None:
    check = check_of(1.0, 1.0)
    check.take(IDS[0], torch.tensor([1.2, 0.0]))
    check.take(IDS[1], torch.tensor([1.9]))
    check.take(IDS[0], torch.tensor([1.6]))  # exactly twice the norm
    with pytest.raises(
        FalseNormError, match=f"{IDS[0]} sent values of a norm of 2.23.* signed a norm of 1"
    ) as caught:
        check.take(IDS[0], torch.tensor([1.0]))
    assert caught.value.peer_id == IDS[0]


def test_zeros_have_no_norm() -> None:
    check = check_of(0.0, 1.0)
    check.take(IDS[0], torch.zeros(5))
    with pytest.raises(FalseNormError):
        check.take(IDS[0], torch.tensor([1e-30]))


@pytest.mark.parametrize("codec", CODECS, ids=lambda codec: codec.name)
@settings(deadline=None, max_examples=200)
@given(
    values=hnp.arrays(
        np.float32,
        st.integers(1, 130),
        elements=st.floats(-1.0, 1.0, width=32) | st.floats(-(2.0**-20), 2.0**-20, width=32),
    )
)
def test_no_codec_makes_an_honest_member_a_liar(codec: Codec, values: NDArray[np.float32]) -> None:
    vector = torch.from_numpy(values)
    decoded = codec.decode(codec.encode(vector), len(vector))
    assert vector_norm(decoded) <= SLACK * (1 + 1e-5) * vector_norm(vector)
    check_of(vector_norm(vector), 1.0).take(IDS[0], decoded)


def contributions(*rows: Sequence[float], factors: Sequence[float]) -> list[PartContribution]:
    """Return contributions of which the first is the reducer's own."""
    return [
        PartContribution(IDS[index], 1.0, row if index == 0 else row.numpy().tobytes(), factor)
        for index, (row, factor) in enumerate(zip(map(torch.tensor, rows), factors, strict=True))
    ]


@pytest.mark.parametrize("robust", [None, Median()], ids=["mean", "median"])
@pytest.mark.parametrize("checked", [False, True])
def test_factors_apply_to_own_and_other_values(robust: RobustRule | None, checked: bool) -> None:
    given_rows = contributions([8.0, 8.0], [2.0, 4.0], [30.0, 3.0], factors=[0.5, 1.0, 0.1])
    own = given_rows[0].values
    assert isinstance(own, torch.Tensor)
    out = torch.empty(2)
    check = check_of(99.0, 99.0, 99.0) if checked else None
    average_part(Fp32(), given_rows, 3.0, out, robust=robust, check=check)
    wanted = [3.0, 8.3 / 3] if robust is None else [3.0, 4.0]
    torch.testing.assert_close(out, torch.tensor(wanted))
    assert own.tolist() == [8.0, 8.0], "the reducer's own vector is not changed"


@pytest.mark.parametrize("robust", [None, Median()], ids=["mean", "median"])
def test_values_are_checked_before_they_are_shortened(robust: RobustRule | None) -> None:
    given_rows = contributions([1.0], [1.0], [5.0], factors=[1.0, 1.0, 0.01])
    with pytest.raises(FalseNormError) as caught:
        average_part(Fp32(), given_rows, 3.0, torch.empty(1), robust=robust, check=check_of(9.0, 1.0, 2.0))
    assert caught.value.peer_id == IDS[2]


def test_an_undecodable_part_is_named_when_norms_are_checked() -> None:
    given_rows = contributions([1.0], [math.nan], factors=[1.0, 1.0])
    with pytest.raises(UndecodableError):
        average_part(Fp32(), given_rows, 2.0, torch.empty(1), check=check_of(1.0, 1.0))
