"""The budget of handshakes that are begun and not finished."""

from collections.abc import Callable
from itertools import cycle
from types import SimpleNamespace

import pytest
import trio
from trio.testing import MockClock

from p2pavg.net.limits import first_messages
from p2pavg.net.limits.call_budget import OVERHEAD, CallBudget, CallRates
from p2pavg.net.limits.first_messages import Handshakes

RATES = CallRates(peer_seconds=0.1, peer_burst_seconds=1.0, prefix_factor=2.0)
HOST, NEIGHBOUR, ELSEWHERE = "203.0.113.9", "203.0.113.77", "198.51.100.1"


Make = Callable[[float], Handshakes]


@pytest.fixture
def handshakes(monkeypatch: pytest.MonkeyPatch) -> Make:
    """Return a maker of budgets by whose clock each step of a handshake takes some seconds."""

    def make(step: float) -> Handshakes:
        readings = cycle([0.0, step])
        monkeypatch.setattr(first_messages, "time", SimpleNamespace(thread_time=lambda: next(readings)))
        return Handshakes(CallBudget(RATES))

    return make


async def finish() -> str:
    await trio.sleep(1.0)
    return "done"


async def fail() -> None:
    await trio.sleep(1.0)
    raise ValueError("not finished")


async def waited(budget: Handshakes, host: str) -> float:
    began = trio.current_time()
    await budget.wait_for_turn(host)
    return trio.current_time() - began


async def test_a_finished_handshake_is_not_charged(handshakes: Make, autojump_clock: MockClock) -> None:
    budget = handshakes(10.0)
    for _ in range(5):
        assert await budget.run(HOST, finish()) == "done"
    assert await waited(budget, HOST) == 0.0


async def test_an_abandoned_handshake_is_charged_to_its_network(
    handshakes: Make, autojump_clock: MockClock
) -> None:
    """Only the steps of the handshake count, not the second in which it waits."""
    budget = handshakes(1.0)
    assert await waited(budget, HOST) == 0.0
    with pytest.raises(ValueError, match="not finished"):
        await budget.run(HOST, fail())
    debt = 2 * 1.0 * OVERHEAD - RATES.peer_burst_seconds * RATES.prefix_factor
    assert await waited(budget, ELSEWHERE) == 0.0
    assert await waited(budget, NEIGHBOUR) == pytest.approx(debt / RATES.peer_seconds / RATES.prefix_factor)
    assert await waited(budget, HOST) == 0.0


async def test_a_cancelled_handshake_is_charged(handshakes: Make, autojump_clock: MockClock) -> None:
    budget = handshakes(1.0)
    with trio.move_on_after(0.5) as scope:
        await budget.run(HOST, finish())
    assert scope.cancelled_caught
    assert await waited(budget, HOST) > 0.0


async def test_a_wait_that_is_longer_than_a_callers_goes_on(
    handshakes: Make, autojump_clock: MockClock
) -> None:
    """An honest peer may be behind the same router, so it is not refused."""
    budget = handshakes(2.0)
    with pytest.raises(ValueError, match="not finished"):
        await budget.run(HOST, fail())
    assert await waited(budget, HOST) >= 20.0 - 1e-6


async def test_a_handshake_may_catch_what_is_thrown_into_it(
    handshakes: Make, autojump_clock: MockClock
) -> None:
    async def patient() -> str:
        with trio.move_on_after(0.1):
            await trio.sleep_forever()
        return "later"

    assert await handshakes(0.0).run(HOST, patient()) == "later"
