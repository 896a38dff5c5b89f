"""Error feedback loses nothing: what was given is what was sent and what is left, with dense and with sparse codecs."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from p2pavg.optim import ErrorFeedback
from p2pavg_compression import Codec, Int4, Ternary, TopK

ELEMENTS = 300  # with a short last block
CODECS: list[Codec] = [
    Ternary(block_size=64),
    Ternary(),
    TopK(chunk=64, k=8),
    TopK(chunk=256, k=4, bits=1),
    Int4(),
]


@st.composite
def vectors(draw: st.DrawFn) -> list[torch.Tensor]:
    """Draw a few vectors whose parts have magnitudes of their own; some numbers are zeros."""
    found = []
    for seed in draw(st.lists(st.integers(0, 1000), min_size=1, max_size=6)):
        generator = torch.Generator().manual_seed(seed)
        scales = torch.tensor(draw(st.lists(st.sampled_from([0.0, 1e-6, 1.0, 30.0]), min_size=5, max_size=5)))
        found.append(torch.randn(ELEMENTS, generator=generator) * scales.repeat_interleave(ELEMENTS // 5))
    return found


@pytest.mark.parametrize("codec", CODECS, ids=lambda codec: codec.name)
@settings(max_examples=100, deadline=None)
@given(given_=vectors(), share=st.tuples(st.integers(0, 2), st.integers(2, 4)))
def test_what_was_sent_and_what_is_left_are_what_was_given(
    codec: Codec, given_: list[torch.Tensor], share: tuple[int, int]
) -> None:
    feedback, sent = ErrorFeedback(codec), torch.zeros(ELEMENTS, dtype=torch.float64)
    first, last = share[0] * 64, share[1] * 64
    for vector in given_:
        (contribution,) = feedback.compensate([vector])
        arrived = codec.decode(codec.encode(contribution), ELEMENTS)
        if codec.is_sparse:  # a mean with a member that sent nothing, of which the average keeps some
            average = codec.decode(codec.encode(arrived / 2), ELEMENTS)
            arrived = arrived * (average != 0)
            feedback.delivered(first, last, averaged=[average])
        else:
            arrived[first:last] = contribution[first:last]  # it reduces this part itself
            feedback.delivered(first, last)
        sent += arrived
    residual = feedback.state_dict()["residual"]
    assert residual is not None
    total = torch.stack(given_).double().sum(0)
    largest = torch.stack(given_).abs().sum(0).max()
    torch.testing.assert_close(sent + residual, total, rtol=0, atol=float(largest) * 1e-5)


@pytest.mark.parametrize(
    "codec", [Ternary(block_size=64), Ternary(), TopK(chunk=64, k=8)], ids=lambda codec: codec.name
)
@settings(max_examples=100, deadline=None)
@given(given_=vectors())
def test_the_error_of_a_codec_with_feedback_is_shorter_than_the_vector(
    codec: Codec, given_: list[torch.Tensor]
) -> None:
    """Otherwise residuals could grow without end (Karimireddy et al. 2019, assumption A)."""
    for vector in given_:
        decoded = codec.decode(codec.encode(vector), ELEMENTS)
        error, length = (vector - decoded).norm(), vector.norm()
        assert error <= 0.99 * length or length == 0


def test_the_residual_of_a_steady_contribution_stays_bounded() -> None:
    """Also of a block with a few large values beside many small ones, which a single level fits badly."""
    vector = torch.randn(ELEMENTS, generator=torch.Generator().manual_seed(0))
    vector[::16] *= 100
    feedback, lengths = ErrorFeedback(Ternary()), []
    for _ in range(1200):
        feedback.compensate([vector])
        feedback.delivered(0, 0)
        residual = feedback.state_dict()["residual"]
        assert residual is not None
        lengths.append(float(residual.norm()))
    assert max(lengths[600:]) <= 1.1 * max(lengths[:600])
