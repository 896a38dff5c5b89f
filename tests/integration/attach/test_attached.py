"""The averager of an attached process, beside the optimizers: errors, raw rounds, other averagers."""

from __future__ import annotations

import fcntl
import os
import socket
import stat
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from pathlib import Path

import pytest
import torch

import p2pavg
from p2pavg.attached import AttachedAverager, share_peer
from p2pavg.base.result import Failed, InProgress, NoPeers, Success
from p2pavg.base.threads.workers import NICENESS
from p2pavg.optim import AveragedOptimizer, RunState
from p2pavg.telemetry.events import AnyEvent, RoundEnded
from tests.integration.attach.daemon import daemon
from tests.integration.optim.company import LISTEN, Batches, config, loss_of, small_model

WAIT = 60.0


@contextmanager
def processes(address: str, count: int, **changes: object) -> Iterator[list[AttachedAverager]]:
    """Open averagers over connections of their own, as processes would."""
    with ExitStack() as stack:
        found = []
        for index in range(count):
            peer = stack.enter_context(p2pavg.attach(address, name=f"p{index}"))
            found.append(stack.enter_context(peer.averager(config(2, **changes))))
        yield found


def all_at_once(averagers: list[AttachedAverager], act: Callable[[AttachedAverager], object]) -> list[object]:
    with ThreadPoolExecutor(len(averagers)) as pool:
        return list(pool.map(act, averagers))


def test_the_peer_of_attached_processes_has_a_lower_priority_than_they(tmp_path: Path) -> None:
    with daemon(tmp_path) as peer:
        assert peer.niceness == max(NICENESS, os.getpriority(os.PRIO_PROCESS, 0))


def test_processes_average_without_optimizers(shared: str) -> None:
    with processes(shared, 2) as averagers:
        for index, averager in enumerate(averagers):
            averager.accumulate(
                {"w": torch.full((3,), float(index))}, weight=1.0 + index, metrics={"m": index}
            )
        results = all_at_once(averagers, lambda averager: averager.step(wait=WAIT))
        for averager, result in zip(averagers, results, strict=True):
            assert isinstance(result, Success)
            assert isinstance(result.averaged, dict)
            assert torch.allclose(result.averaged["w"], torch.full((3,), 2 / 3))
            assert result.weights == {averagers[0].peer_id: 1.0, averagers[1].peer_id: 2.0}
            assert result.metrics["m"] == pytest.approx(2 / 3)
            assert averager.weight == 0.0
            assert averager.round_state is None


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_half_precision_comes_back_in_its_dtype(shared: str, dtype: torch.dtype) -> None:
    with processes(shared, 2) as averagers:
        for index, averager in enumerate(averagers):
            averager.accumulate([torch.full((5,), float(index), dtype=dtype)])
        for result in all_at_once(averagers, lambda averager: averager.step(wait=WAIT)):
            assert isinstance(result, Success)
            assert isinstance(result.averaged, list)
            assert torch.equal(result.averaged[0], torch.full((5,), 0.5, dtype=dtype))


def test_an_observer_gets_the_result_and_keeps_what_it_has(shared: str) -> None:
    with processes(shared, 2) as averagers:
        for averager in averagers:
            averager.accumulate([torch.ones(3)], weight=4.0)
        results = all_at_once(
            averagers, lambda averager: averager.step(wait=WAIT, observe=averager is averagers[1])
        )
        assert all(isinstance(result, Success) for result in results)
        assert [averager.weight for averager in averagers] == [0.0, 4.0]
        first = results[0]
        assert isinstance(first, Success)
        assert (first.peers, first.observers) == ((averagers[0].peer_id,), (averagers[1].peer_id,))


def test_processes_that_open_a_board_at_once_see_each_other(shared: str) -> None:
    """The first board of a topic takes the peer a moment."""
    with processes(shared, 2) as averagers:
        run = {averager.peer_id for averager in averagers}
        boards = all_at_once(averagers, lambda averager: averager.board("progress"))
        for board, averager in zip(boards, averagers, strict=True):
            board.publish(averager.peer_id.encode())  # type: ignore[attr-defined]
        for board, averager in zip(boards, averagers, strict=True):
            until = time.monotonic() + WAIT
            while run - {averager.peer_id} - board.entries.keys():  # type: ignore[attr-defined]
                assert time.monotonic() < until
                board.wait(board.version, 0.1)  # type: ignore[attr-defined]


def test_a_round_can_be_cancelled_until_it_begins(shared: str) -> None:
    with processes(shared, 2) as averagers:
        for averager in averagers:
            averager.declare([torch.ones(3)])
        averagers[0].accumulate([torch.ones(3)])
        assert isinstance(averagers[0].step(wait=0.1), InProgress)
        assert averagers[0].cancel_matchmaking("no more")
        assert averagers[0].step(wait=WAIT) == NoPeers(reason="no more", code=p2pavg.NoPeersCode.CANCELLED)
        assert averagers[0].weight == 1.0


def test_a_process_alone_hears_that_no_peer_came(shared: str) -> None:
    with processes(shared, 1, match_timeout=1.0) as [averager]:
        averager.accumulate([torch.ones(3)])
        result = averager.step(wait=WAIT)
        assert isinstance(result, NoPeers)
        assert averager.weight == 1.0


def test_another_configuration_is_refused_by_the_name_of_the_setting(shared: str) -> None:
    with (
        processes(shared, 1),
        p2pavg.attach(shared, name="other") as peer,
        pytest.raises(p2pavg.ConfigError, match="with compression='fp32', this one with compression='fp16'"),
        peer.averager(config(2, compression="fp16")),
    ):
        pass


def test_other_tensors_are_refused(shared: str) -> None:
    with processes(shared, 2) as averagers:
        averagers[0].declare([torch.ones(3)])
        with pytest.raises(p2pavg.AccumulateError, match="1 of 3 elements, this one 1 of 4"):
            averagers[1].declare([torch.ones(4)])


def test_a_name_belongs_to_one_process_at_a_time(shared: str) -> None:
    with (
        p2pavg.attach(shared, name="gpu0"),
        pytest.raises(p2pavg.BusyError, match="attached as 'gpu0'"),
        p2pavg.attach(shared, name="gpu0", timeout=1.0),
    ):
        pass
    with p2pavg.attach(shared, name="gpu0") as peer:
        assert peer.name == "gpu0"


def test_a_second_averager_of_one_run_is_refused(shared: str) -> None:
    with (
        p2pavg.attach(shared) as peer,
        peer.averager(config(2)),
        pytest.raises(p2pavg.BusyError, match="has an averager of the run"),
        peer.averager(config(2)),
    ):
        pass


def test_a_run_may_be_closed_and_opened_again(shared: str) -> None:
    with p2pavg.attach(shared) as peer:
        for _ in range(3):
            with peer.averager(config(2)) as averager:
                averager.declare([torch.ones(2)])
            with pytest.raises(p2pavg.ClosedError):
                averager.step(wait=0.0)


def test_siblings_average_apart(shared: str) -> None:
    """As the buckets of DDP do."""
    with processes(shared, 2) as averagers, ExitStack() as stack:
        how = replace(averagers[0].config, run_id="company/bucket")
        beside = [stack.enter_context(averager.sibling(how)) for averager in averagers]
        for index, averager in enumerate([*averagers, *beside]):
            averager.accumulate([torch.full((2,), float(index))])
        results = all_at_once([*averagers, *beside], lambda averager: averager.step(wait=WAIT))  # type: ignore[list-item]
        means = [result.averaged[0][0].item() for result in results if isinstance(result, Success)]  # type: ignore[index]
        assert means == [0.5, 0.5, 2.5, 2.5]


def test_a_process_continues_from_its_checkpoint(shared: str, tmp_path: Path) -> None:
    for begins in (0, 2):
        model, batches = small_model(), Batches(0, 4)
        inner, state = (
            torch.optim.SGD(model.parameters(), lr=0.1),
            RunState(model, directory=tmp_path, every=2),
        )
        with processes(shared, 1) as [averager]:
            optimizer = AveragedOptimizer(inner, averager, target_batch_size=4, min_peers=1, state=state)
            assert optimizer.epoch == begins
            while optimizer.epoch < begins + 2:
                optimizer.zero_grad()
                torch.autograd.backward(loss_of(model, batches.next()))
                optimizer.step(samples=4)
    assert sorted(path.name for path in tmp_path.glob("update-*"))[-1] == "update-000000000004.safetensors"


def test_rounds_of_processes_are_events_of_each_and_once_of_their_peer(
    shared: str, peer_events: list[AnyEvent]
) -> None:
    with processes(shared, 2) as averagers:
        found: list[list[AnyEvent]] = [[], []]
        for averager, events in zip(averagers, found, strict=True):
            averager.subscribe(events.append)
            averager.accumulate([torch.ones(2)], metrics={"loss": 3.0})
        results = all_at_once(averagers, lambda averager: averager.step(wait=WAIT))
        ids = {averager.peer_id for averager in averagers}
    for events, result in zip(found, results, strict=True):
        [ended] = [event for event in events if isinstance(event, RoundEnded)]
        assert isinstance(result, Success)
        assert (ended.group_id, set(ended.contributors), ended.samples) == (result.group_id, ids, 2.0)
        assert ended.own_samples == 1.0
    [of_peer] = [event for event in peer_events if isinstance(event, RoundEnded)]
    assert (of_peer.samples, of_peer.own_samples, of_peer.metrics) == (2.0, 2.0, {"loss": 3.0})
    assert len(of_peer.contributors) == 1


def test_nothing_answers_where_no_peer_is(tmp_path: Path) -> None:
    address = f"unix:{tmp_path / 'none.sock'}"
    with (
        pytest.raises(p2pavg.AttachError, match="no peer answers") as error,
        p2pavg.attach(address, timeout=0.5),
    ):
        pass
    assert f"p2pavg peer --attach {tmp_path / 'none.sock'}" in error.value.remedy


def test_only_the_owner_can_connect(shared: str) -> None:
    mode = os.stat(shared.removeprefix("unix:")).st_mode
    assert stat.S_IMODE(mode) == 0o600


@pytest.mark.parametrize("address", ["", "unix:", "unix:" + "x" * 108])
def test_a_path_that_no_socket_can_have_is_refused(address: str) -> None:
    with pytest.raises(p2pavg.ConfigError, match="1 to 107 bytes"), p2pavg.attach(address):
        pass


async def test_two_peers_that_start_at_once_do_not_replace_each_others_socket(tmp_path: Path) -> None:
    """The socket of the one that is just starting may not be there yet: its lock is."""
    path = tmp_path / "peer.sock"
    with (tmp_path / "peer.sock.lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        async with p2pavg.open_peer(listen=LISTEN, port_mapping=False) as peer:
            with pytest.raises(p2pavg.ListenError, match="another peer serves it"):
                async with share_peer(peer, path):
                    pass
    assert not path.exists()


async def test_a_socket_of_a_dead_peer_is_replaced_and_no_other_file_is(tmp_path: Path) -> None:
    path = tmp_path / "peer.sock"
    with socket.socket(socket.AF_UNIX) as dead:
        dead.bind(str(path))
    async with p2pavg.open_peer(listen=LISTEN, port_mapping=False) as peer:
        async with share_peer(peer, path):
            with pytest.raises(p2pavg.ListenError, match="another peer serves it"):
                async with share_peer(peer, path):
                    pass
        assert not path.exists()
        path.write_text("mine")
        with pytest.raises(p2pavg.ListenError, match="no socket is there"):
            async with share_peer(peer, path):
                pass
        assert path.read_text() == "mine"


def test_a_process_whose_values_are_wrong_costs_itself(shared: str) -> None:
    """It writes them into the shared memory, past the checks of its own averager."""
    with processes(shared, 3) as averagers:
        for averager in averagers:
            averager.accumulate([torch.ones(3)])
        assert isinstance(averagers[2].step(wait=0.0), InProgress)
        segment = averagers[2].channel._segment
        assert segment is not None
        segment.values.fill_(float("nan"))
        results = all_at_once(averagers[:2], lambda averager: averager.step(wait=WAIT))
        for result in results:
            assert isinstance(result, Success)
            assert sorted(result.peers) == sorted(averager.peer_id for averager in averagers[:2])
            assert not isinstance(result, Failed)
