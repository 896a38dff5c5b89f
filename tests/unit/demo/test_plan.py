"""The launcher's decisions: which peer starts when, through whom, and which one is killed."""

import signal

from scripts.demo_gpt.events import Done, Ready, TrainLoss, Update
from scripts.demo_gpt.plan import MOST_STARTS, Start, fail_if_killed_too_often, is_over, next_actions
from scripts.demo_gpt.progress import Run, State
from scripts.demo_gpt.settings import Settings

STEPS = 12


def run_of(peers: int, *, calm: bool = False) -> Run:
    return Run.planned(Settings(peers=peers, steps=STEPS, calm=calm))


def ready(run: Run, *indices: int) -> None:
    for index in indices:
        run.peers[index].starts()
        run.peers[index].apply(Ready(parameters=1, peer_id=f"id {index}", address=f"address {index}"))


def kill(run: Run, index: int) -> None:
    run.peers[index].exited(-signal.SIGKILL, "")


def test_a_calm_run_kills_no_peer() -> None:
    run = run_of(2, calm=True)
    ready(run, 0, 1)
    run.peers[1].apply(TrainLoss(step=STEPS - 1, loss=1.0))
    assert next_actions(run) == []


def test_the_first_peer_joins_the_others_again_and_two_never_begin_a_network_each() -> None:
    run = run_of(2, calm=True)
    ready(run, 0, 1)
    kill(run, 0)
    assert next_actions(run) == [Start(0, ("address 1",))]
    kill(run, 1)
    assert next_actions(run) == [Start(0)]


def test_a_peer_that_is_killed_again_and_again_has_failed() -> None:
    run = run_of(2, calm=True)
    ready(run, 0, 1)
    for _ in range(MOST_STARTS):
        run.peers[1].starts()
        kill(run, 1)
    assert next_actions(run) == []
    fail_if_killed_too_often(run)
    assert run.peers[1].state is State.FAILED
    assert run.peers[1].reason == "killed by SIGKILL, for the 4th time"


def test_a_run_whose_peers_have_all_failed_does_not_wait_for_the_late_one() -> None:
    run = run_of(3)
    run.peers[0].fail("an unknown codec")
    assert not is_over(run)
    run.peers[1].fail("an unknown codec")
    assert is_over(run)
    assert run.peers[2].state is State.PLANNED


def test_a_run_is_not_over_while_the_late_peer_trains() -> None:
    run = run_of(3)
    ready(run, 0, 1, 2)
    for peer in run.peers[:2]:
        peer.apply(Done(digest=""))
    assert not is_over(run)
    run.peers[2].apply(Done(digest=""))
    assert is_over(run)


def test_the_batches_of_each_update_are_those_that_its_members_name() -> None:
    run = Run.planned(Settings(peers=2, steps=2, batch_size=4))
    ready(run, 0, 1)
    updates = [
        Update(
            step=step,
            samples=samples,
            seconds=0.1,
            exchange_seconds=0.1,
            bytes_sent=1,
            bytes_received=1,
            compression_ratio=1.0,
        )
        for step, samples in ((1, {"id 0": 4.0, "id 1": 4.0}), (2, {"id 1": 8.0}))
    ]
    run.peers[0].apply(updates[0])
    assert run.batches() is None
    run.peers[1].apply(updates[1])
    for peer in run.peers:
        peer.apply(Done(digest="same"))
    assert run.batches() == [{0: 1, 1: 1}, {1: 2}]
