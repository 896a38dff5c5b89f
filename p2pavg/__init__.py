"""Peers average gradients and parameters over the open internet, with no server.

``p2pavg.blocking`` is for ordinary training loops, :func:`open_peer` for trio programs.
"""

from __future__ import annotations

from p2pavg import blocking
from p2pavg.averager import DecentralizedAverager
from p2pavg.config import AveragingConfig
from p2pavg.consensus.certificate import CommitCertificate, verify_certificate
from p2pavg.errors import (
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
    StateError,
)
from p2pavg.group.aggregation import CenteredClip, Median, TrimmedMean
from p2pavg.group.audits import Audits
from p2pavg.group.participation import ByCapability, Participation, RandomFraction
from p2pavg.membership.access import RunAccess
from p2pavg.membership.files import read_run_file
from p2pavg.membership.run_file import RunFile
from p2pavg.net.reach.reachability import Reachability
from p2pavg.peer import Peer, open_peer
from p2pavg.result import Failed, InProgress, NoPeers, RoundResult, Success, Tensors
from p2pavg_compression import Bf16, Blockwise8, Codec, CodecError, Fp16, Fp32, Int8

__version__ = "0.1.0"

__all__ = [
    "AccumulateError",
    "AddressError",
    "Audits",
    "AveragingConfig",
    "Bf16",
    "Blockwise8",
    "BootstrapError",
    "BusyError",
    "ByCapability",
    "CenteredClip",
    "CertificateError",
    "ClosedError",
    "Codec",
    "CodecError",
    "CommitCertificate",
    "ConfigError",
    "DecentralizedAverager",
    "Failed",
    "Fp16",
    "Fp32",
    "IdentityError",
    "InProgress",
    "Int8",
    "ListenError",
    "Median",
    "NoPeers",
    "P2PAvgError",
    "Participation",
    "Peer",
    "RandomFraction",
    "Reachability",
    "RoundResult",
    "RunAccess",
    "RunFile",
    "StateError",
    "Success",
    "Tensors",
    "TrimmedMean",
    "blocking",
    "open_peer",
    "read_run_file",
    "verify_certificate",
]
