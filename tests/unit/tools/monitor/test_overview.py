"""A run's overview follows from its peers' statuses, whatever hostile peers say."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any, cast

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from msgspec.structs import replace

from p2pavg.base.limits import RECORD_LIFE_SECONDS
from p2pavg.telemetry.events import RoundKind
from p2pavg.telemetry.status import Activity, PeerStatus, RoundClaim, TransferClaim, key_of
from p2pavg.tools.monitor import overview as overview_module
from p2pavg.tools.monitor.lineages import Compared, branches
from p2pavg.tools.monitor.overview import FEW_PEERS, MAX_GONE, MAX_NEWS, MAX_PEERS, MAX_SHOWN_EDGES, Overview
from p2pavg.tools.monitor.rounds import MAX_CLAIMS, MAX_ROUNDS, MergedRounds
from p2pavg.tools.monitor.series import MAX_PER_PEER, MAX_POINTS, MAX_SERIES, Series
from tests.unit.telemetry.statuses import FULL, statuses

NOW = 1_800_000_010.0


def claim(group: bytes, **changes: Any) -> RoundClaim:
    begins = RoundClaim(
        group=group,
        result=RoundKind.SUCCESS,
        ended=NOW - 5,
        duration=2.0,
        sent=100,
        members=3,
        contributors=3,
    )
    return replace(begins, **changes)


def run_of(*heard: dict[str, PeerStatus], me: str = "") -> dict[str, Any]:
    """Return the overview after statuses that came a second after each other."""
    overview = Overview("run", me=me, begins=NOW)
    for index, peers in enumerate(heard):
        overview.receive({peer_id: (status, NOW + index) for peer_id, status in peers.items()}, NOW + index)
    shown: dict[str, Any] = json.loads(json.dumps(overview.shown(NOW + len(heard))))
    return shown


def row(run: dict[str, Any], peer_id: str) -> dict[str, Any]:
    (found,) = [peer for peer in run["peers"] if peer["id"] == peer_id]
    return dict(found)


def test_each_peer_has_a_row_of_its_own_words() -> None:
    run = run_of({"one": FULL, "two": PeerStatus(name="second")}, me="two")
    assert (row(run, "one")["name"], row(run, "one")["epoch"]) == ("garage, 3090", 7)
    assert row(run, "one")["activity"] == "waiting"
    assert [peer["me"] for peer in run["peers"]] == [False, True]
    assert run["summary"]["peers"] == 2


def test_peer_that_is_gone_stays_for_a_while_and_may_come_back() -> None:
    gone = run_of({"one": FULL, "two": FULL}, {"one": FULL})
    assert row(gone, "two")["gone"] == NOW + 1
    assert gone["summary"]["peers"] == 1
    assert gone["news"][0]["text"] == "is gone"
    back = run_of({"one": FULL, "two": FULL}, {"one": FULL}, {"one": FULL, "two": replace(FULL, epoch=9)})
    assert row(back, "two")["gone"] is None
    # It has drifted before it came, which is news too.
    assert [news["text"] for news in back["news"][:2]] == [f"says: {FULL.drift}", "came back"]
    overview = Overview("run", begins=NOW)
    overview.receive({"one": (FULL, NOW)}, NOW)
    overview.receive({}, NOW + 1)
    overview.receive({}, NOW + 1 + RECORD_LIFE_SECONDS)
    assert overview.shown(NOW + RECORD_LIFE_SECONDS)["peers"] == []


def test_peers_words_on_others_never_change_their_rows() -> None:
    """A hostile peer names all others as lost, excluded and as its partners."""
    honest = PeerStatus(name="honest")
    liar = PeerStatus(
        name="liar",
        rounds=(claim(b"1" * 8, lost=(key_of("honest"),), result=RoundKind.FAILED),),
        excluded=(key_of("honest"),),
        drift="honest has drifted",
        lanes=(key_of("honest"),),
    )
    with_liar = row(run_of({"honest": honest, "liar": liar}), "honest")
    assert with_liar == row(run_of({"honest": honest}), "honest")


def test_rounds_are_merged_from_the_words_of_their_members() -> None:
    lost = claim(b"1" * 8, lost=(key_of("three"),), sent=50)
    run = run_of(
        {
            "one": PeerStatus(rounds=(lost,)),
            "two": PeerStatus(rounds=(lost, claim(b"2" * 8))),
            "three": PeerStatus(rounds=(claim(b"1" * 8, result=RoundKind.FAILED, reason="cut off", sent=1),)),
        }
    )
    (first,) = [each for each in run["rounds"] if each["group"] == (b"1" * 8).hex()]
    assert first["results"] == {"success": 2, "failed": 1}
    assert first["by"] == ["one", "three", "two"]
    assert first["bytes"] == 101
    assert first["lost"] == [{"peer": "three", "key": key_of("three").hex(), "by": 2}]
    assert first["reason"] == "cut off"
    assert first["at"] == NOW - 5


def test_rounds_without_a_group_are_one_for_each_peer() -> None:
    alone = claim(b"", result=RoundKind.NO_PEERS, members=0)
    run = run_of({"one": PeerStatus(rounds=(alone,)), "two": PeerStatus(rounds=(alone,))})
    assert [each["by"] for each in run["rounds"]] == [["one"], ["two"]]


def test_one_peers_false_figures_move_neither_the_median_nor_the_order() -> None:
    peers = {name: PeerStatus(rounds=(claim(b"1" * 8),)) for name in ("one", "two")}
    liar = PeerStatus(rounds=(claim(b"1" * 8, duration=1e9, members=128),))
    (merged,) = run_of({**peers, "liar": liar})["rounds"]
    assert (merged["duration"], merged["members"]) == (2.0, 3)
    (merged,) = run_of({"one": PeerStatus(rounds=(claim(b"1" * 8, ended=NOW + 1e6),))})["rounds"]
    assert merged["at"] == NOW


def test_peer_that_invents_rounds_pushes_out_its_own() -> None:
    rounds = MergedRounds()
    honest = PeerStatus(rounds=(claim(b"honest!!"),))
    for name in ("one", "two"):
        rounds.receive(name, honest, NOW)
    for index in range(3 * MAX_ROUNDS):
        rounds.receive("liar", PeerStatus(rounds=(claim(index.to_bytes(8, "big")),)), NOW + index)
    for index in range(2 * MAX_CLAIMS):
        rounds.receive(f"another {index}", honest, NOW)
    shown = rounds.shown(10 * MAX_ROUNDS, {})
    assert len(shown) == MAX_ROUNDS
    assert max(len(cast(Any, each["by"])) for each in shown) == MAX_CLAIMS
    assert b"honest!!".hex() in [each["group"] for each in shown]


def test_metrics_have_the_median_of_the_peers_and_a_series_for_each() -> None:
    def at(epoch: int, loss: float) -> PeerStatus:
        return PeerStatus(epoch=epoch, lineage=bytes(8), metrics=(("loss", loss),))

    run = run_of({"one": at(1, 4.0), "two": at(1, 2.0), "three": at(1, 1e9)}, {"one": at(2, 1.0)})
    (loss,) = run["series"]
    assert loss["median"] == [[1, 4.0], [2, 1.0]]
    assert loss["peers"]["one"] == [[1, 4.0], [2, 1.0]]
    (loss, *_) = run_of({"one": FULL})["series"]
    assert loss["median"] == [[1, 4.0], [7, 2.5]], "also of the status' history"


def test_series_forget_what_a_peer_has_gone_back_on_and_stay_bounded() -> None:
    series = Series()
    for epoch in (*range(1, 1000), 500):
        status = PeerStatus(epoch=epoch, lineage=bytes(8), metrics=(("loss", float(epoch)),))
        series.receive("one", status)
    (shown,) = series.shown()
    median, peers = cast(Any, shown["median"]), cast(Any, shown["peers"])
    assert median[-1] == [500, 500.0]
    assert len(median) <= MAX_POINTS
    assert len(peers["one"]) <= MAX_POINTS
    for index in range(2 * MAX_SERIES):
        series.receive(f"peer {index}", PeerStatus(metrics=(("loss", 1.0),)))
    assert series.count == MAX_SERIES


def names_of(series: Series) -> list[object]:
    return [each["name"] for each in series.shown()]


def test_peer_that_invents_metrics_pushes_out_its_own() -> None:
    series = Series()
    for index in range(20):
        series.receive(f"peer {index}", PeerStatus(metrics=(("accuracy", 1.0),)))
    for look in range(2 * MAX_SERIES):
        invented = tuple((f"loss {look} {index}", 1.0) for index in range(8))
        series.receive("liar", PeerStatus(total_rounds=look, metrics=invented))
    assert series.count == 20 + MAX_PER_PEER
    assert names_of(series)[0] == "accuracy"
    (accuracy, *_) = series.shown()
    assert len(accuracy["median"]) == 1  # type: ignore[arg-type]


def test_peers_with_most_series_lose_them_first() -> None:
    series = Series()
    for index in range(20):
        series.receive(f"peer {index}", PeerStatus(metrics=(("loss", 1.0),)))
    for liar in range(100):
        invented = tuple((f"name {liar} {index}", 1.0) for index in range(MAX_PER_PEER))
        series.receive(f"liar {liar}", PeerStatus(metrics=invented))
    assert series.count == MAX_SERIES
    assert names_of(series)[0] == "loss"
    assert len([peer_id for peer_id, own in series._peers.items() if "loss" in own]) == 20


def test_lineages_of_many_peers_are_compared_at_most_every_few_seconds(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    compared: list[int] = []

    def counted(reported: Mapping[str, Mapping[int, bytes]]) -> Compared:
        compared.append(len(reported))
        return branches(reported)

    monkeypatch.setattr(overview_module, "branches", counted)
    for peers, expected in ((FEW_PEERS, 20), (FEW_PEERS + 1, 2)):
        compared.clear()
        overview = Overview("run", begins=NOW)
        for look in range(20):
            now = NOW + 0.5 * look
            found = {f"peer {index}": PeerStatus(epoch=look, lineage=bytes(8)) for index in range(peers)}
            overview.receive({peer_id: (status, now) for peer_id, status in found.items()}, now)
            for _ in range(2):
                overview.shown(now)
        assert compared == [peers] * expected


def test_exchanges_are_pairs_of_known_peers_with_what_each_says() -> None:
    run = run_of(
        {
            "one": PeerStatus(lanes=(key_of("two"), key_of("a stranger")), relayed=(key_of("three"),)),
            "two": PeerStatus(lanes=(key_of("one"),)),
            "three": PeerStatus(lanes=(key_of("three"),)),
        }
    )
    assert run["exchanges"] == [
        {"one": "one", "other": "three", "said": {"one": "relayed"}},
        {"one": "one", "other": "two", "said": {"one": "lane", "two": "lane"}},
    ]
    many = [f"peer {index}" for index in range(40)]
    liars = dict.fromkeys(many, PeerStatus(lanes=tuple(map(key_of, many))))
    assert len(run_of(liars)["exchanges"]) == MAX_SHOWN_EDGES


def test_transfers_drift_and_verified_exclusions_are_shown() -> None:
    transfer = TransferClaim(is_upload=True, done=1, total=2, bytes_per_second=3.0, peers=1)
    overview = Overview("run", begins=NOW)
    overview.receive({"one": (PeerStatus(transfers=(transfer,), drift="they differ"), NOW)}, NOW)
    overview.exclude({"liar": "it lied"}, NOW)
    run: Any = overview.shown(NOW)
    assert run["transfers"] == [
        {"peer": "one", "upload": True, "done": 1, "total": 2, "bytes_per_second": 3.0, "peers": 1}
    ]
    assert run["summary"]["drifted"] == 1
    assert run["excluded"] == [{"peer": "liar", "reason": "it lied"}]


def test_any_number_of_invented_peers_is_bounded() -> None:
    overview = Overview("run", begins=NOW)
    for wave in range(3):
        overview.receive({f"peer {wave} {index}": (FULL, NOW) for index in range(2 * MAX_PEERS)}, NOW + wave)
        run: Any = overview.shown(NOW + wave)
        assert len(run["peers"]) <= MAX_PEERS + MAX_GONE
        assert sum(peer["gone"] is not None for peer in run["peers"]) <= MAX_GONE
        assert len(run["news"]) == MAX_NEWS


@settings(max_examples=20, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(st.lists(st.dictionaries(st.sampled_from("abc"), statuses, max_size=3), max_size=3))
def test_any_statuses_give_json_of_a_bounded_size(heard: list[dict[str, PeerStatus]]) -> None:
    run = run_of(*heard)
    assert len(run["peers"]) <= 3
    assert {peer["activity"] for peer in run["peers"]} <= set(Activity)
    assert len(json.dumps(run)) < 200_000
