"""The public names of the package ``p2pavg``, which loads this module when the first of them is used."""

from __future__ import annotations

from p2pavg import blocking, optim  # noqa: F401 - p2pavg.optim can be used without an import of its own
from p2pavg.base.errors import (
    AccumulateError,
    AddressError,
    BootstrapError,
    BusyError,
    CertificateError,
    ClosedError,
    ConfigError,
    IdentityError,
    ListenError,
    P2PAvgError,
    RunEndedError,
    StateError,
)
from p2pavg.base.result import (
    DrawnContribution,
    Failed,
    FailedCode,
    InProgress,
    NoPeers,
    NoPeersCode,
    RoundResult,
    Success,
    Tensors,
)
from p2pavg.consensus.certificate import CommitCertificate, verify_certificate
from p2pavg.group.aggregation import Audits, CenteredClip, Median, TrimmedMean
from p2pavg.group.participation import ByCapability, Participation, RandomFraction
from p2pavg.group.topology import Butterfly, Gossip, Hierarchical, Star
from p2pavg.net.nat.reach.reachability import Reachability
from p2pavg.peer.averager import DecentralizedAverager
from p2pavg.peer.joining.member import join_run
from p2pavg.peer.peer import Peer, open_peer
from p2pavg.runs.config import AveragingConfig
from p2pavg.runs.membership.membership import RunAccess
from p2pavg.runs.membership.run_file import RunFile, read_run_file
from p2pavg.strategies.job import Job, job
from p2pavg.telemetry.status import RunPeer
from p2pavg_compression import NF4, Bf16, Blockwise8, Codec, CodecError, Fp16, Fp32, Int4, Int8, Ternary, TopK

__all__ = [
    "NF4",
    "AccumulateError",
    "AddressError",
    "Audits",
    "AveragingConfig",
    "Bf16",
    "Blockwise8",
    "BootstrapError",
    "BusyError",
    "Butterfly",
    "ByCapability",
    "CenteredClip",
    "CertificateError",
    "ClosedError",
    "Codec",
    "CodecError",
    "CommitCertificate",
    "ConfigError",
    "DecentralizedAverager",
    "DrawnContribution",
    "Failed",
    "FailedCode",
    "Fp16",
    "Fp32",
    "Gossip",
    "Hierarchical",
    "IdentityError",
    "InProgress",
    "Int4",
    "Int8",
    "Job",
    "ListenError",
    "Median",
    "NoPeers",
    "NoPeersCode",
    "P2PAvgError",
    "Participation",
    "Peer",
    "RandomFraction",
    "Reachability",
    "RoundResult",
    "RunAccess",
    "RunEndedError",
    "RunFile",
    "RunPeer",
    "Star",
    "StateError",
    "Success",
    "Tensors",
    "Ternary",
    "TopK",
    "TrimmedMean",
    "blocking",
    "job",
    "join_run",
    "open_peer",
    "read_run_file",
    "verify_certificate",
]
