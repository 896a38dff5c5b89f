"""Text, batches and model, which make the peers' runs comparable with the reference's."""

import math

import pytest
import torch

from scripts.demo_gpt.batches import Batches, cut_windows, held_out_windows
from scripts.demo_gpt.model import GPT, ModelConfig
from scripts.demo_gpt.recipe import is_evaluated, rate_factor
from scripts.demo_gpt.text import RARE, Text, load_text, vocabulary_of

PEERS, BATCH, CONTEXT = 3, 4, 8


@pytest.fixture(scope="module")
def text() -> Text:
    return load_text()


def batches(*, seed: int = 0) -> Batches:
    """Return batches over distinct numbers, so that a window identifies its position."""
    tokens = torch.arange(100 * (CONTEXT + 1))
    return Batches(tokens, context=CONTEXT, batch_size=BATCH, peers=PEERS, seed=seed)


def seen(source: Batches, peer: int, steps: int) -> list[int]:
    return [int(window[0]) for step in range(steps) for window in source.of_peer(peer, step)]


def test_rare_characters_share_one_number() -> None:
    assert vocabulary_of("a" * 10 + "b" * 9) == (RARE, "a")


def test_no_window_belongs_to_two_peers_and_a_pass_shows_none_twice() -> None:
    source = batches()
    shares = [set(seen(source, peer, 40)) for peer in range(PEERS)]
    assert all(shares)
    assert len(set.union(*shares)) == sum(map(len, shares))
    first_pass = seen(batches(), 0, 34 // BATCH)
    assert len(set(first_pass)) == len(first_pass)


def test_the_reference_sees_the_batches_of_an_update() -> None:
    source = batches()
    parts = [source.of_peer(0, 7), source.of_peer(2, 7), source.of_peer(2, 7, number=1)]
    assert not torch.equal(parts[1], parts[2]), "further batches of an update are others"
    assert torch.equal(source.together(7, {0: 1, 2: 2}), torch.cat(parts))


def test_too_little_text_is_refused() -> None:
    with pytest.raises(ValueError, match="too few"):
        Batches(torch.arange(50), context=CONTEXT, batch_size=BATCH, peers=PEERS, seed=0)


def test_held_out_windows_span_the_text() -> None:
    tokens = torch.arange(100 * (CONTEXT + 1))
    windows = held_out_windows(tokens, context=CONTEXT, count=5)
    assert windows.shape == (5, CONTEXT + 1)
    assert torch.equal(windows[-1], cut_windows(tokens, CONTEXT)[-1])


def test_model_has_the_promised_size_and_starts_near_chance(text: Text) -> None:
    model = GPT(ModelConfig(vocabulary_size=len(text.vocabulary)), seed=0)
    assert 1e6 <= sum(parameter.numel() for parameter in model.parameters()) <= 5e6
    characters = torch.randint(len(text.vocabulary), (8, 65), generator=torch.Generator().manual_seed(0))
    assert model.loss(characters).item() == pytest.approx(math.log(len(text.vocabulary)), rel=0.05)


def test_model_cannot_see_the_future(text: Text) -> None:
    model = GPT(ModelConfig(vocabulary_size=len(text.vocabulary)), seed=0)
    before, after = text.train[:32].clone(), text.train[:32].clone()
    after[20:] = 1
    torch.testing.assert_close(model(before[None])[:, :20], model(after[None])[:, :20])


def test_learning_rate_rises_then_falls() -> None:
    rates = [rate_factor(step, 100) for step in range(100)]
    peak = rates.index(max(rates))
    assert rates[:peak] == sorted(rates[:peak])
    assert rates[peak:] == sorted(rates[peak:], reverse=True)
    assert rates[-1] < rates[peak] / 5


def test_the_last_step_is_always_evaluated() -> None:
    assert all(is_evaluated(steps, steps) for steps in (1, 5, 13, 120))
    assert [step for step in range(1, 121) if is_evaluated(step, 120)] == list(range(5, 121, 5))
