"""Makes histories of a small run without a network: genuine signatures, averages and updates, in milliseconds.

Also takes them apart and puts them together again, as an archivist would that lies.
"""

from __future__ import annotations

import itertools
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import msgspec
import torch
from blake3 import blake3
from torch.optim import Optimizer

from p2pavg.allreduce.averages import EncodedAverage
from p2pavg.allreduce.reduction import parts_of_share
from p2pavg.allreduce.vector.accumulation import Schema
from p2pavg.consensus.certificate import encode_certificate
from p2pavg.consensus.statements import Statement, result_digest
from p2pavg.consensus.votes import DIGEST_BYTES, ResultCommit
from p2pavg.group.aggregation import Aggregation
from p2pavg.group.candidate import ready_key, sign_candidate
from p2pavg.group.roster import Roster, ShareCutter
from p2pavg.optim.base.joined import joined
from p2pavg.optim.base.recipe import Recipe, hyperparameters, numbers_digest
from p2pavg.optim.base.state import Lineage, Origin, digest_of, lineage_from, pack_lineage, pack_origin
from p2pavg.optim.catching_up.state_check import saved_by
from p2pavg.optim.large_batch.averaged import clip
from p2pavg.optim.ranks.shards import total_norm
from p2pavg.runs.membership.certificate import Certificate, Role, issue
from p2pavg.runs.membership.revocation import revoke
from p2pavg.state.average import LoggedAverage, pack_numbers
from p2pavg.state.history.entries import (
    MAGIC,
    REVOKED,
    Entry,
    Seal,
    SegmentBeginning,
    Update,
    credits_of,
    credits_root,
    framed,
    hash_of,
    merkle_root,
    sealed,
)
from p2pavg.state.history.recording import HistoryRecorder, HistorySettings
from p2pavg.state.history.rules import dtype_names, rules_of
from p2pavg.state.history.segments import Segment
from p2pavg.state.nested import flatten
from p2pavg.state.snapshot import Content, copy_of
from p2pavg.testing.simulation import simulated_signer
from p2pavg_compression import resolve_codec

RUN_ID = "made"
BEGAN = 1_750_000_000.0
ROUND_SECONDS = 600.0  # of the made clock, so that a run of some days has few updates
AUTHORITY = 900  # number of the signer that is the authority
ARCHIVIST = 500
_NO_SERIAL = bytes(16)


def adamw(parameters: Sequence[torch.Tensor]) -> Optimizer:
    """Return the usual optimizer."""
    return torch.optim.AdamW(parameters, lr=0.01)


class MadeRun:
    """A run of a few members, which takes updates by averages of random numbers.

    Args:
        members: contributors of each round.
        elements: of its one matrix, in rows of 8; it has a bias of 8, too.
        codec: name of the codec.
        has_authority: true for a run whose members have certificates.
        authority: number of the signer that signs these.
        make: makes the optimizer.
        aggregation: rule by which contributions are combined.
        max_grad_norm: limit of the gradient.
    """

    def __init__(
        self,
        *,
        members: int = 4,
        elements: int = 512,
        codec: str = "blockwise8",
        has_authority: bool = True,
        authority: int = AUTHORITY,
        make: Callable[[Sequence[torch.Tensor]], Optimizer | list[Optimizer]] = adamw,
        aggregation: Aggregation = Aggregation(),  # noqa: B008 - frozen
        max_grad_norm: float | None = 0.5,
        seed: int = 0,
    ) -> None:
        self.members = list(range(members))
        """Numbers of the signers that are in each round."""
        self.weights: dict[int, float] = {}
        """Of a member, if it is not 8."""
        self.norms: dict[int, float] = {}
        """That a member signs of its contribution, if it is not 0."""
        self.signs: list[int] | None = None
        """Places of the members that sign that they hold the result; ``None``: all."""
        self.clocks: dict[int, float] = {}
        """Seconds by which the clock of a member is wrong."""
        self.shown: dict[int, bytes] = {}
        """Certificates that a member shows in place of its own."""
        self.now = BEGAN
        self._generator = torch.Generator().manual_seed(seed)
        shapes = ((elements // 8, 8), (8,))
        self.parameters = [torch.nn.Parameter(self._random(shape)) for shape in shapes]
        self.optimizer = joined(make(self.parameters))
        self._max_grad_norm = max_grad_norm
        self._codec = resolve_codec(codec)
        self._authority = simulated_signer(authority) if has_authority else None
        self.schema = Schema(
            names=None, shapes=shapes, dtypes=(torch.float32,) * 2, devices=(torch.device("cpu"),) * 2
        )
        self._key = ready_key(RUN_ID, self.schema.hash, "", aggregation.text)
        self._cutter = ShareCutter(self.schema.elements, self._codec.granularity, aggregation.topology)
        inner = " and ".join(
            type(one).__qualname__ for one in getattr(self.optimizer, "optimizers", [self.optimizer])
        )
        self._recipe = Recipe(
            rules=(("optimizer", "AveragedOptimizer"), ("inner", inner), ("max_grad_norm", max_grad_norm)),
            numbers=hyperparameters(self.optimizer),
        )
        first = digest_of(self.parameters)
        self.origin = _origin(first, self._recipe)
        """The origin in its snapshots."""
        self.lineage = lineage_from(first, self._recipe.digest)
        self.recorded = SegmentBeginning(
            number=0,
            time=0.0,
            archivist=simulated_signer(ARCHIVIST).peer_id,
            run_id=RUN_ID,
            authority=self.authority,
            certificate=self.certificate(ARCHIVIST),
            codec=self._codec.name,
            rule="",
            aggregation=aggregation.text,
            shapes=shapes,
            dtypes=dtype_names(self.schema),
            names=("weight", "bias"),
        )

    @property
    def authority(self) -> bytes:
        """Public key of the authority; empty without one."""
        return b"" if self._authority is None else _public(AUTHORITY)

    def certificate(self, number: int) -> bytes:
        """Return a member's certificate; empty in an open run."""
        if self._authority is None:
            return b""
        return self._issued(number).data

    def _issued(self, number: int) -> Certificate:
        assert self._authority is not None
        return issue(
            self._authority.sign,
            authority=self.authority,
            peer_id=simulated_signer(number).peer_id,
            roles=[Role.CONTRIBUTOR],
            max_weight=1e6,
            not_before=BEGAN - 1000,
            expires=BEGAN + 1e9,
            serial=number.to_bytes(16, "big"),
        )

    def revocation(self, numbers: Sequence[int]) -> tuple[str, bytes]:
        """Return the notice that some members' certificates are revoked."""
        assert self._authority is not None
        identifiers = [self._issued(number).identifier for number in numbers]
        said = revoke(self._authority.sign, authority=self.authority, number=1, identifiers=identifiers)
        return REVOKED, said.encode()

    def _random(self, shape: Sequence[int]) -> torch.Tensor:
        return torch.randn(tuple(shape), generator=self._generator)

    def change_rules(self) -> None:
        """Go on as the peers of a run do that begin again with other settings."""
        self._recipe = replace(self._recipe, rules=(*self._recipe.rules, ("version", 2)))
        self.lineage = self.lineage.with_rules(self._recipe.rules_digest)
        self.origin = _origin(self.origin.parameters, self._recipe)

    def snapshot(self) -> memoryview:
        """Return the present state as the bytes of a snapshot."""
        tensors, told = flatten(saved_by(self.optimizer), "optimizer")
        values = {
            "kind": "parameter/",
            "optimizer": told,
            "lineage": pack_lineage(self.lineage),
            "origin": pack_origin(self.origin),
        }
        named = {
            f"parameter/parameter {number}": tensor.detach() for number, tensor in enumerate(self.parameters)
        }
        return copy_of(Content(tensors={**named, **tensors}, values=values))

    def round(self) -> tuple[LoggedAverage, Lineage]:
        """Average, and take one update; return the average and the lineage after it."""
        self.now += ROUND_SECONDS
        vector = self._random((self.schema.elements,)).mul_(0.1)
        members = tuple(self._candidate(number) for number in self.members)
        roster = Roster(members=members, shares=self._cutter.cut(members), proposal=1)
        encoded, digest, decoded = self._encoded(roster, vector)
        everyone = frozenset(range(len(members)))
        statement = Statement(roster.group_id, 0, everyone, digest)
        signatures = tuple(
            (position, simulated_signer(number).sign(statement.signed_bytes()))
            for position, number in enumerate(self.members)
            if self.signs is None or position in self.signs
        )
        certificate = encode_certificate(roster, ResultCommit(0, everyone, digest, signatures))
        averaged = self.schema.unflatten(decoded)
        assert isinstance(averaged, list)
        settings = hyperparameters(self.optimizer)
        average = LoggedAverage(
            self.lineage.state, roster.group_id, certificate, encoded, pack_numbers(settings)
        )
        self.lineage = self.lineage.after(
            roster.group_id.hex(), digest_of(averaged), numbers_digest(settings)
        )
        self._step(averaged)
        return average, self.lineage

    def _candidate(self, number: int) -> Any:
        return sign_candidate(
            simulated_signer(number),
            key=self._key,
            deadline=self.now + number * 0.001 + self.clocks.get(number, 0.0),
            expiration_time=self.now + 1000.0,
            weight=self.weights.get(number, 8.0),
            bandwidth=100.0,
            codec=self._codec.name,
            auxiliary=False,
            addresses=("/ip4/203.0.113.7/tcp/40001",),
            state=self.lineage.state,
            metrics={"loss": 2.0},
            norm=self.norms.get(number, 0.0),
            certificate=self.shown.get(number, self.certificate(number)),
        )

    def _encoded(self, roster: Roster, vector: torch.Tensor) -> tuple[EncodedAverage, bytes, torch.Tensor]:
        parts, digests, of_shares = [], [], []
        decoded = torch.empty_like(vector)
        for position in range(len(roster.members)):
            found = []
            for part in parts_of_share(roster, position, self._codec.granularity):
                payload = bytes(self._codec.encode(vector[part.start : part.stop]))
                self._codec.decode(payload, part.elements, decoded[part.start : part.stop])
                found.append(blake3(payload).digest())
                parts.append(payload)
            of_shares.append(blake3(b"".join(found)).digest(DIGEST_BYTES))
            digests += found
        return EncodedAverage(tuple(parts), tuple(digests)), result_digest(of_shares), decoded

    def _step(self, averaged: list[torch.Tensor]) -> None:
        if self._max_grad_norm is not None:
            clip(averaged, self._max_grad_norm, total_norm(averaged))
        for parameter, gradient in zip(self.parameters, averaged, strict=True):
            parameter.grad = gradient
        self.optimizer.step()
        self.optimizer.zero_grad()


def _origin(parameters: bytes, recipe: Recipe) -> Origin:
    return Origin(
        parameters=parameters,
        recipe=recipe.digest,
        rules=recipe.rules_digest,
        fields=recipe.fields,
        settings=recipe.packed,
    )


class MadeArchivist:
    """Records a run into a folder.

    Args:
        directory: of the history.
        run: the run.
        number: of the archivist's signer.
        keep: updates that stay.
        starts: false to write nothing before the block begins.
    """

    def __init__(
        self,
        directory: Path,
        run: MadeRun,
        number: int = ARCHIVIST,
        *,
        keep: int | None = None,
        starts: bool = True,
    ) -> None:
        self._run = run
        signer = simulated_signer(number)
        recorded = msgspec.structs.replace(
            run.recorded, archivist=signer.peer_id, certificate=run.certificate(number)
        )
        self.recorder = HistoryRecorder(HistorySettings(directory, keep), recorded, signer, lambda: run.now)
        self.recorder.open()
        self._used: Callable[[], float] = lambda: 0.0
        self._thread = threading.Thread(target=self._write)
        if starts:
            self._thread.start()

    def __enter__(self) -> MadeArchivist:
        if not self._thread.ident:
            self._thread.start()
        return self

    def _write(self) -> None:
        before = time.thread_time()
        self._used = lambda: time.clock_gettime(clock) - before
        clock = time.pthread_getcpuclockid(threading.get_ident())
        self.recorder.run()

    def thread_seconds(self) -> float:
        """Return the processor time of the writing thread, while it runs."""
        return self._used()

    def wait(self) -> None:
        """Wait until all that was given is written."""
        while self.recorder.waits:
            time.sleep(0.001)

    def __exit__(self, *_: object) -> None:
        self.recorder.stop()
        self._thread.join()

    def before(self) -> None:
        """Give the recorder a snapshot, if it needs one."""
        if self.recorder.needs_snapshot(self._run.lineage.state):
            self.recorder.begin(self._run.snapshot(), self._run.lineage.epoch, self._run.lineage.state)

    def take(self, average: LoggedAverage, after: Lineage) -> None:
        """Record an update."""
        self.recorder.took(average, after.epoch, after.state)


def record(run: MadeRun, directory: Path, updates: int, *, number: int = ARCHIVIST) -> None:
    """Let a run take some updates, recorded in one segment."""
    with MadeArchivist(directory, run, number) as archivist:
        for _ in range(updates):
            archivist.before()
            archivist.take(*run.round())


def _public(number: int) -> bytes:
    from p2pavg_dht.identity import public_key_of

    return public_key_of(simulated_signer(number).peer_id).public_bytes_raw()


# Segments in pieces.


@dataclass(frozen=True, slots=True)
class Piece:
    """One entry of a segment with its payload, apart from the chain."""

    entry: Entry
    payload: bytes


def taken_apart(path: Path) -> list[Piece]:
    """Return the entries of a segment."""
    with Segment(path) as segment:
        return [Piece(placed.entry, bytes(segment.payload(placed))) for placed in segment.entries()]


def raw_entries(path: Path) -> list[bytes]:
    """Return the bytes of each entry, with its place in the chain and its payload."""
    data = path.read_bytes()
    with Segment(path) as segment:
        ends = [len(MAGIC), *(placed.end for placed in segment.entries())]
    return [data[begin:end] for begin, end in itertools.pairwise(ends)]


def first_link(path: Path) -> bytes:
    """Return the hash of the entry before a segment."""
    with Segment(path) as segment:
        return next(segment.entries()).previous


def put_together(
    path: Path, pieces: Sequence[Piece], previous: bytes, number: int | None, *, lie: bytes = b""
) -> bytes:
    """Write a segment with a chain of its own; return the hash of its last entry.

    Args:
        number: of the signer that seals it anew; ``None`` to leave the seal as it is.
        lie: root of the credits in the new seal; empty for the right one.
    """
    data, leaves = bytearray(MAGIC), list[bytes]()
    for piece in pieces:
        entry = piece.entry
        if isinstance(entry, Seal) and number is not None:
            entry = _sealed_anew(entry, pieces, leaves, number, lie)
        body = entry.encode()
        data += framed(previous, body) + piece.payload
        previous = hash_of(previous, body)
        leaves.append(previous)
    path.write_bytes(data)
    return previous


def _sealed_anew(
    seal: Seal, pieces: Sequence[Piece], leaves: Sequence[bytes], number: int, lie: bytes
) -> Seal:
    beginning = pieces[0].entry
    assert isinstance(beginning, SegmentBeginning)
    signer = simulated_signer(number)
    fields = {name: getattr(seal, name) for name in seal.__struct_fields__}
    try:
        rules = rules_of(beginning)
        said = [
            rules.contributions(piece.entry.certificate)
            for piece in pieces
            if isinstance(piece.entry, Update)
        ]
        root = credits_root(credits_of((each.time, each.samples) for each in said))
    except Exception:  # noqa: BLE001 - of a certificate that was made up: any root will do
        root = bytes(32)
    fields |= {
        "archivist": signer.peer_id,
        "entries": len(leaves),
        "root": merkle_root(leaves),
        "credits": lie or root,
    }
    return sealed(signer, Seal(**fields))


def updates_in(pieces: Sequence[Piece]) -> Iterator[int]:
    """Yield the places of the updates."""
    return (place for place, piece in enumerate(pieces) if isinstance(piece.entry, Update))
