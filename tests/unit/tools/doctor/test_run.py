"""The run, its peers and their bandwidth: the level and the cause for each set of records."""

from __future__ import annotations

from typing import Any

import pytest

from p2pavg.group.candidate import Candidate, sign_candidate
from p2pavg.optim.coordination.word import RecipeRecord
from p2pavg.runs.records.run_entry import RunEntry
from p2pavg.tools.doctor.findings import Finding, Level
from p2pavg.tools.doctor.rules.run import FoundRun, Measured, judge_bandwidth, judge_peers, judge_run
from p2pavg_dht import Ed25519Signer


def entry(**changes: Any) -> RunEntry:
    fields: dict[str, Any] = {
        "schema_hash": bytes(32),
        "tensors": 2,
        "elements": 100,
        "codec": "fp32",
        "group_size": 4,
        "rule": "",
        "aggregation": "",
    }
    return RunEntry(**(fields | changes))


def word(recipe: int = 0, origin: int = 0, **changes: Any) -> RecipeRecord:
    fields: dict[str, Any] = {"tensors": 2, "elements": 100, "fields": (("lr", "0.1"),)}
    return RecipeRecord(recipe=bytes([recipe]) * 32, origin=bytes([origin]) * 32, **(fields | changes))


def run(*entries: RunEntry, **changes: Any) -> FoundRun:
    fields: dict[str, Any] = {"run_id": "lab", "known": 5}
    return FoundRun(entries={f"peer{n}": each for n, each in enumerate(entries)}, **(fields | changes))


def told(findings: list[Finding]) -> list[tuple[Level, str]]:
    return [(each.level, each.cause) for each in findings]


class TestRun:
    def test_found(self) -> None:
        (found,) = judge_run(run(entry()), asked=True)
        assert (found.level, found.what) == (Level.OK, "1 peer of the run 'lab'")

    def test_not_found(self) -> None:
        (found,) = judge_run(run(), asked=True)
        assert found.level is Level.FAULT
        assert found.cause.startswith("none of the 5 peers of this network takes part in it")
        assert "rotate" not in found.remedy
        (found,) = judge_run(run(sealed=True, known=0), asked=True)
        assert "no peer answers" in found.cause
        assert "p2pavg run rotate" in found.remedy

    def test_not_looked_for(self) -> None:
        assert [each.what for each in judge_run(None, asked=True)] == ["not known"]
        assert [each.what for each in judge_run(None, asked=False)] == ["not known"]
        assert judge_peers(None, None) == []
        assert judge_peers(run(), None) == []


def apart(found: FoundRun, own_id: str | None) -> list[Finding]:
    """Return the findings on why peers do not meet, without the number of peers that are ready."""
    *others, ready = judge_peers(found, own_id)
    assert ready.level is Level.NOTE
    return others


def candidate(number: int, state: bytes = b"", *, auxiliary: bool = False) -> Candidate:
    return sign_candidate(
        Ed25519Signer(bytes([number]) * 32),
        key=bytes(32),
        deadline=1e9,
        expiration_time=1e9 + 60.0,
        weight=0.0 if auxiliary else 1.0,
        bandwidth=10.0,
        codec="fp32",
        auxiliary=auxiliary,
        addresses=[f"/ip4/203.0.113.{number}/tcp/4001"],
        state=state,
    )


class TestPeers:
    def test_alike(self) -> None:
        (found,) = apart(run(entry(), entry(group_size=8)), None)
        assert (found.level, found.what) == (Level.OK, "2 peers can meet")

    @pytest.mark.parametrize(
        ("odd", "cause"),
        [
            (
                {"tensors": 3, "elements": 50},
                "schema: 3 tensors of 50 elements, most peers 2 tensors of 100 elements",
            ),
            (
                {"schema_hash": b"o" * 32},
                "schema: 2 tensors of 100 elements with other names, shapes or dtypes, "
                "most peers 2 tensors of 100 elements",
            ),
            ({"codec": "fp16"}, "codec: fp16, most peers fp32"),
            ({"rule": "gpu"}, "participation rule: gpu, most peers none"),
            ({"aggregation": "median"}, "aggregation: median, most peers the weighted mean"),
        ],
    )
    def test_one_peer_of_three_differs(self, odd: dict[str, Any], cause: str) -> None:
        (found,) = apart(run(entry(), entry(**odd), entry()), None)
        assert (found.level, found.cause) == (Level.FAULT, cause)
        assert found.what == "1 of 3 peers of the run cannot meet the others"

    def test_several_differences_are_told_apart(self) -> None:
        found = apart(run(entry(), entry(), entry(codec="fp16"), entry(elements=9, codec="bf16")), None)
        assert [each.cause.partition(":")[0] for each in found] == ["schema", "codec"]
        assert found[1].what == "2 of 4 peers of the run cannot meet the others"

    def test_this_peer_decides_if_it_runs(self) -> None:
        (found,) = apart(run(entry(), entry(codec="fp16"), entry()), "peer1")
        assert found.what == "2 of 3 peers of the run cannot meet this one"
        assert found.cause == "codec: fp32, this peer fp16"

    def test_the_run_file_decides_on_codec_and_aggregation(self) -> None:
        found = apart(run(entry(), entry(), codec="blockwise8", aggregation="median"), None)
        assert told(found) == [
            (Level.FAULT, "codec: fp32, the run file blockwise8"),
            (Level.FAULT, "aggregation: the weighted mean, the run file median"),
        ]

    @pytest.mark.parametrize(
        ("odd", "cause"),
        [
            (word(1, fields=(("lr", "0.2"),)), "recipe: lr 0.2, most peers 0.1"),
            (word(1, fields=()), "recipe: lr none, most peers 0.1"),
            (word(1), "recipe: settings that are not published"),
            (word(0, 1), "recipe: other first parameters (another seed?)"),
            (word(1, tensors=3, elements=50), "recipe: 3 tensors of 50 elements, most peers 2 of 100"),
        ],
    )
    def test_recipes(self, odd: RecipeRecord, cause: str) -> None:
        words = {"peer0": word(), "peer1": odd, "peer2": word()}
        (found,) = apart(run(entry(), words=words), None)
        assert (found.level, found.cause) == (Level.FAULT, cause)

    def test_refused_publishers(self) -> None:
        refused = {
            "a": "its certificate was revoked",
            "b": "its certificate was revoked",
            "c": "it is forged",
        }
        (found,) = apart(run(entry(), refused=refused), None)
        assert found.level is Level.WARNING
        assert found.cause == "certificate: 2 peers: its certificate was revoked; 1 peer: it is forged"

    def test_peers_that_cannot_be_reached(self) -> None:
        ready = (candidate(0), candidate(1), candidate(2))
        found = apart(run(entry(), ready=ready, unreached=((ready[1], "Connection refused"),)), None)
        assert [each.level for each in found] == [Level.WARNING]
        assert found[0].what.startswith("1 of 3 peers that are ready for a round cannot be reached")
        assert "at /ip4/203.0.113.1/tcp/4001 (Connection refused)" in found[0].cause

    @pytest.mark.parametrize(
        ("states", "what", "cause"),
        [
            ([], "0 peers of the run look for a group now", ""),
            ([b"a"], "1 peer of the run looks for a group now", ""),
            (
                [b"a", b"a", b"b"],
                "3 peers of the run look for a group now",
                "state: 1 of them average with other",
            ),
        ],
    )
    def test_ready_peers(self, states: list[bytes], what: str, cause: str) -> None:
        ready = tuple(candidate(number, state) for number, state in enumerate(states))
        found = judge_peers(run(entry(), ready=(*ready, candidate(9, b"x", auxiliary=True))), None)[-1]
        assert (found.level, found.what) == (Level.NOTE, what)
        assert found.cause.startswith(cause)


class TestBandwidth:
    def judged(self, up: float, down: float, elements: int = 10**7, codec: str = "fp32") -> Finding:
        measured = [Measured(peer_id="12D3KooWabcdef", up_mbps=up, down_mbps=down, seconds=0.02)]
        (found,) = judge_bandwidth(measured, elements, codec, 60.0)
        return found

    def test_fast_enough(self) -> None:
        found = self.judged(20.0, 40.0)
        assert (found.level, found.what) == (Level.OK, "..abcdef: 20.0 Mbit/s up, 40.0 Mbit/s down, 20 ms")

    def test_too_slow_for_the_runs_exchange(self) -> None:
        found = self.judged(10.0, 40.0)
        assert found.level is Level.WARNING
        assert found.cause == "at this speed, an exchange of 40 MB takes about 64 s, and may take 60 s"
        assert self.judged(10.0, 40.0, codec="blockwise8:64").level is Level.OK
        assert self.judged(0.0, 40.0).level is Level.WARNING

    def test_slow_link_of_an_unknown_run(self) -> None:
        assert self.judged(0.9, 40.0, elements=0).level is Level.WARNING
        assert self.judged(1.0, 40.0, elements=0).level is Level.NOTE

    def test_not_measured(self) -> None:
        assert [each.what for each in judge_bandwidth([], 0, "", 60.0)] == ["not known"]
        (found,) = judge_bandwidth([Measured(peer_id="12D3KooWabcdef", error="busy")], 0, "", 60.0)
        assert found.cause == "..abcdef: busy"
