"""The budgets of strangers: their memory and their record calls."""

import pytest
import trio
from trio.testing import MockClock

from p2pavg.base.errors import RemoteProtocolError, StreamBrokenError
from p2pavg.base.limits import REPLY_SECONDS
from p2pavg.net.limits.admission import Acquaintances, TrustClass
from p2pavg.net.limits.call_budget import LONGEST_DELAY, OVERHEAD, CallBudget, CallRates
from p2pavg.net.limits.memory_budget import MemoryBudget
from p2pavg.net.transport import Stream, receive_message, send_message
from p2pavg.testing import MemoryNetwork
from p2pavg_dht import Ed25519Signer

RATES = CallRates()


class Connection:
    """A fake connection that holds bytes of streams."""

    def __init__(self, owner: str, *streams: int) -> None:
        self.owner = owner
        self.streams = list(streams)

    def held(self) -> int:
        return sum(self.streams)

    def shed(self) -> int:
        if not self.streams:
            return 0
        self.streams.remove(largest := max(self.streams))
        return largest


class TestMemory:
    def budget(self, *connections: Connection) -> MemoryBudget:
        acquaintances = Acquaintances()
        for connection in connections:
            if connection.owner.startswith("friend"):
                acquaintances.remember(connection.owner, TrustClass.COMPANION)
        return MemoryBudget(connections, acquaintances, strangers_bytes=1600, total_bytes=16_000)

    def test_the_greediest_peer_loses_its_largest_stream(self) -> None:
        greedy, same = Connection("greedy", 300, 700), Connection("greedy", 500)
        modest = Connection("modest", 600)
        self.budget(greedy, same, modest).arrived(1)
        assert (greedy.streams, same.streams, modest.streams) == ([300], [500], [600])

    def test_peers_of_a_group_are_not_counted_with_strangers(self) -> None:
        friend, stranger = Connection("friend", 5000), Connection("stranger", 900)
        self.budget(friend, stranger).arrived(1)
        assert friend.streams == [5000]
        assert stranger.streams == [900]

    def test_all_peers_together_are_bounded_too(self) -> None:
        friends = [Connection(f"friend {number}", 5000) for number in range(4)]
        self.budget(*friends).arrived(1)
        assert sum(friend.held() for friend in friends) == 15_000

    def test_the_budget_is_kept_for_any_order_of_arrivals(self) -> None:
        connections = [Connection(f"stranger {number}") for number in range(7)]
        budget = self.budget(*connections)
        for number in range(5000):
            connection, count = connections[number * number % 7], number % 97
            budget.arrived(count)
            connection.streams.append(count)
            assert budget.held() <= 1600 + 97
            if number % 13 == 0 and connection.streams:
                connection.streams.pop()

    def test_shedding_without_holders_is_no_error(self) -> None:
        class Stuck(Connection):
            def shed(self) -> int:
                return 0

        self.budget(Stuck("stuck", 5000)).arrived(1)


class TestCalls:
    def test_an_honest_caller_never_waits(self) -> None:
        """The caller joins among 50 peers, and then makes two finds a second for an hour."""
        budget = CallBudget()
        for _ in range(200):
            assert budget.delay(0.0, "peer", "prefix") == 0.0
            budget.charge(0.0, "peer", "prefix", seconds=0.001, count=4000)
        for second in range(3600):
            for _ in range(2):
                assert budget.delay(float(second), "peer", "prefix") == 0.0
                budget.charge(float(second), "peer", "prefix", seconds=0.002, count=64 * 1024)

    @pytest.mark.parametrize(("seconds", "count"), [(0.0, 64 * 1024), (0.008, 100)])
    def test_a_flood_is_answered_at_the_granted_rate(self, seconds: float, count: int) -> None:
        budget, now, spent, sent = CallBudget(), 0.0, 0.0, 0
        while now < 60.0:
            delay = budget.delay(now, "peer", "prefix")
            if delay is None:
                now += 0.1
                continue
            now += delay
            budget.charge(now, "peer", "prefix", seconds=seconds, count=count)
            spent, sent = spent + seconds * OVERHEAD, sent + count
            now += 1e-6
        assert sent <= RATES.peer_burst_bytes + RATES.peer_bytes * 62.0 + count
        assert spent <= RATES.peer_burst_seconds + RATES.peer_seconds * 62.0 + seconds * OVERHEAD

    def test_a_caller_deep_in_debt_is_refused(self) -> None:
        budget = CallBudget()
        budget.charge(
            0.0, "peer", "prefix", seconds=0.0, count=int(RATES.peer_burst_bytes + 3 * RATES.peer_bytes)
        )
        assert budget.delay(0.0, "peer", "prefix") is None
        assert budget.delay(1.5, "peer", "prefix") == pytest.approx(1.5)
        assert LONGEST_DELAY < 5.0, "the caller's timeout is 5 s"

    def test_many_identities_of_one_network_share_its_account(self) -> None:
        budget, answered = CallBudget(), 0
        for number in range(1000):
            if budget.delay(0.0, f"peer {number}", "prefix") == 0.0:
                budget.charge(0.0, f"peer {number}", "prefix", seconds=0.0, count=1024 * 1024)
                answered += 1
        # The last call begins with a small rest of the budget, and leaves a debt.
        assert answered == RATES.prefix_factor * RATES.peer_burst_bytes / 1024 / 1024 + 1
        assert budget.delay(0.0, "neighbour", "another prefix") == 0.0


async def test_an_incomplete_message_breaks_its_stream_after_a_timeout(autojump_clock: MockClock) -> None:
    """A sender of one byte a second is dropped. The caller bounds the wait for the first byte."""
    raised: list[tuple[str, float]] = []
    here, there = (Ed25519Signer(bytes(31) + bytes([number])) for number in (1, 2))
    network = MemoryNetwork(latency=(0.0, 0.0))
    async with network.transport(here) as one, network.transport(there) as other:

        async def receive(stream: Stream) -> None:
            began = trio.current_time()
            assert await receive_message(stream) == b"whole"
            assert trio.current_time() - began == pytest.approx(100.0)
            began = trio.current_time()
            try:
                await receive_message(stream)
            except RemoteProtocolError as error:
                raised.append((str(error), trio.current_time() - began))

        other.serve("/receives/1", receive)
        stream = await one.open_stream(other.peer_id, "/receives/1", addresses=other.addresses, timeout=10.0)
        await trio.sleep(100.0)
        await send_message(stream, b"whole")

        async def drip() -> None:
            for byte in (1000).to_bytes(4, "big") + bytes(1000):
                await stream.send_all(bytes([byte]))
                await trio.sleep(1.0)

        with pytest.raises(StreamBrokenError):
            await drip()
    ((text, seconds),) = raised
    assert "was not complete" in text
    assert seconds == pytest.approx(REPLY_SECONDS)
