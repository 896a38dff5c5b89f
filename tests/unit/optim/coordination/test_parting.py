"""A peer that has ended its training, and whose program goes on in another thread."""

from __future__ import annotations

import pytest
from torch.optim import SGD

from p2pavg.optim.catching_up.states import States
from p2pavg.optim.coordination.parting import Parting
from p2pavg.optim.coordination.view import LAST_WORDS
from tests.unit.optim.fakes import Alone, large_batch
from tests.unit.optim.loops import batch, plain


@pytest.fixture
def looks(monkeypatch: pytest.MonkeyPatch) -> list[bool]:
    """Return the looks at other peers' wishes, each of which may take a snapshot."""
    found: list[bool] = []
    monkeypatch.setattr(States, "poll", lambda _, at_step=False: found.append(at_step))
    return found


def ended() -> Parting:
    model = plain()
    optimizer = large_batch(Alone(), SGD(model.parameters(), lr=0.1), model=model, state=None)
    assert batch(model, optimizer).updated
    assert optimizer._parting.begin()
    return optimizer._parting


def test_no_snapshot_is_taken_in_the_midst_of_a_step_of_another_thread(looks: list[bool]) -> None:
    parting = ended()
    looks.clear()
    with parting.stepping:
        parting.stays()
    assert not looks
    parting.stays()
    assert len(looks) == 1


def test_a_peer_that_steps_again_does_not_stay(looks: list[bool]) -> None:
    parting = ended()
    parting.resume()
    looks.clear()
    assert not parting.stays()
    assert not looks


def test_a_peer_that_takes_part_again_takes_its_last_word_back() -> None:
    """The word outlives the peer: if it crashed later, others would take the run for ended at that update."""
    averager = Alone()
    model = plain()
    optimizer = large_batch(averager, SGD(model.parameters(), lr=0.1), model=model, state=None)
    assert batch(model, optimizer).updated
    optimizer.leave()
    last = averager.boards[LAST_WORDS]
    assert not last.withdrawn
    assert batch(model, optimizer).updated
    assert last.withdrawn
