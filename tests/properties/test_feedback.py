"""Error feedback loses nothing: what was given is what was sent and what is left, with dense and with sparse codecs."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from p2pavg.allreduce.reduction import PartContribution, average_part
from p2pavg.optim import ErrorFeedback
from p2pavg_compression import Blockwise8, Codec, Int4, Int8, Ternary, TopK

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
    "codec",
    [Ternary(block_size=64), Ternary(), TopK(chunk=64, k=8), Int8(block_size=64), Blockwise8()],
    ids=lambda codec: codec.name,
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


@settings(max_examples=60, deadline=None)
@given(
    given_=st.lists(vectors().filter(lambda drawn: len(drawn) >= 3), min_size=1, max_size=8),
    weights=st.lists(st.sampled_from([1.0, 2.0, 5.0]), min_size=3, max_size=3),
    turn=st.booleans(),
)
def test_what_the_encoding_of_an_average_loses_comes_with_a_later_one(
    given_: list[list[torch.Tensor]], weights: list[float], turn: bool
) -> None:
    """Three members, each of which reduces a third of the vector; in turn another one, or always the same."""
    codec, total = Ternary(block_size=64), sum(weights)
    feedbacks = [ErrorFeedback(codec) for _ in weights]
    thirds, sent, wanted = [(0, 64), (64, 192), (192, 300)], torch.zeros(ELEMENTS), torch.zeros(ELEMENTS)
    for number, drawn in enumerate(given_):
        values = [
            feedback.compensate([vector])[0] for feedback, vector in zip(feedbacks, drawn, strict=False)
        ]
        wanted += sum(w / total * vector for w, vector in zip(weights, drawn, strict=False))
        for member, feedback in enumerate(feedbacks):
            first, last = thirds[(member + number * turn) % 3]
            parts = [
                PartContribution(
                    str(index),
                    weight,
                    each[first:last] if index == member else codec.encode(each[first:last].clone()),
                )
                for index, (weight, each) in enumerate(zip(weights, values, strict=True))
            ]
            left_out = torch.empty(last - first)
            average_part(codec, parts, total, sent_part := torch.empty(last - first), left_out=left_out)
            sent[first:last] += sent_part
            feedback.delivered(first, last, left_out=left_out * (total / weights[member]))
    residuals = [feedback.state_dict()["residual"] for feedback in feedbacks]
    left = sum(
        (w / total * residual for w, residual in zip(weights, residuals, strict=True) if residual is not None)
    )
    largest = max(float(torch.stack(drawn).abs().max()) for drawn in given_)
    torch.testing.assert_close(sent + left, wanted, rtol=0, atol=largest * 1e-4 + 1e-9)


def test_what_an_average_lacks_has_to_be_as_long_as_the_share() -> None:
    feedback = ErrorFeedback(Ternary())
    feedback.compensate([torch.ones(ELEMENTS)])
    with pytest.raises(ValueError, match=r"left_out has the shape \(3,\), and the share 4 elements"):
        feedback.delivered(0, 4, left_out=torch.zeros(3))
    feedback.delivered(0, 2, (4, 6), left_out=torch.tensor([1.0, 2.0, 3.0, 4.0]))
    residual = feedback.state_dict()["residual"]
    assert residual is not None
    assert residual[:6].tolist() == [1.0, 2.0, 0.0, 0.0, 3.0, 4.0]


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
