"""The public surface, word for word: a change of it needs a deliberate change of this file."""

from __future__ import annotations

import dataclasses
import inspect
import subprocess
import sys
from collections.abc import Callable
from typing import Any

import pytest

import p2pavg
from p2pavg import blocking, population, strategies

NAMES = [
    "NF4",
    "AccumulateError",
    "AddressError",
    "Audits",
    "AveragingConfig",
    "BehindError",
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

POPULATION_NAMES = [
    "Ancestor",
    "Choice",
    "Decision",
    "Generation",
    "GenerationReport",
    "History",
    "LogUniform",
    "Population",
    "PopulationSettings",
    "Standing",
    "Uniform",
    "Word",
    "check_decision",
    "decide",
]

STRATEGY_NAMES = [
    "Custom",
    "DataParallel",
    "Federated",
    "Local",
    "ModelParallel",
    "PopulationBased",
    "Strategy",
    "read_json",
    "read_toml",
    "strategy_of",
]

ACCUMULATE = (
    "(self, tensors: 'Given', *, weight: 'float' = 1.0, "
    "metrics: 'Mapping[str, float]' = mappingproxy({})) -> 'None'"
)
DECLARE = "(self, tensors: 'Given') -> 'None'"
STEP = (
    "(self, *, wait: 'float | None', state: 'bytes' = b'', observe: 'bool' = False, "
    "group_size: 'int | None' = None, contributors: 'int' = 0, "
    "meeting: 'SearchPlace | Sequence[SearchStage] | None' = None) -> 'RoundResult'"
)

SIGNATURES: list[tuple[Callable[..., Any], str]] = [
    (
        p2pavg.open_peer,
        "(*, listen: 'Sequence[str]' = ('/ip4/127.0.0.1/tcp/0',), bootstrap: 'Sequence[str]' = (), "
        "identity: 'str | os.PathLike[str] | None' = None, announce: 'Sequence[str]' = (), "
        "port_mapping: 'bool' = True, relay_mbps: 'float' = 10.0) -> 'AsyncIterator[Peer]'",
    ),
    (
        blocking.open_averager,
        "(config: 'AveragingConfig', *, bootstrap: 'Sequence[str]' = (), "
        "listen: 'Sequence[str] | None' = None, "
        "identity: 'str | os.PathLike[str] | None' = None, announce: 'Sequence[str]' = (), "
        "port_mapping: 'bool' = True, relay_mbps: 'float' = 10.0) -> 'Iterator[Averager]'",
    ),
    (p2pavg.Peer.averager, "(self, config: 'AveragingConfig') -> 'AsyncIterator[DecentralizedAverager]'"),
    (p2pavg.DecentralizedAverager.declare, DECLARE),
    (p2pavg.DecentralizedAverager.accumulate, ACCUMULATE),
    (p2pavg.DecentralizedAverager.step, STEP),
    (p2pavg.DecentralizedAverager.clear, "(self) -> 'None'"),
    (p2pavg.DecentralizedAverager.aclose, "(self) -> 'None'"),
    (blocking.Averager.declare, DECLARE),
    (blocking.Averager.accumulate, ACCUMULATE),
    (blocking.Averager.step, STEP),
    (blocking.Averager.clear, "(self) -> 'None'"),
]

REQUIRED = dataclasses.MISSING

FIELDS: list[tuple[type, list[tuple[str, str, object]]]] = [
    (
        p2pavg.AveragingConfig,
        [
            ("run_id", "str", REQUIRED),
            ("group_size", "int", 4),
            ("min_group_size", "int", 2),
            ("match_timeout", "float", 30.0),
            ("exchange_timeout", "float", 60.0),
            ("compression", "str | Codec | None", "blockwise8"),
            ("bandwidth", "float | None", None),
            ("max_upload_mbps", "float | None", None),
            ("max_download_mbps", "float | None", None),
            ("participation", "Participation | None", None),
            ("tags", "tuple[str, ...]", ()),
            ("max_weight", "float | None", None),
            ("access", "RunAccess | None", None),
            ("open_run", "bool", False),
            ("robust", "str | RobustRule | None", None),
            ("max_norm", "float | None", None),
            ("audit", "str | Audits", "after"),
            ("recheck", "float", 0.0),
            ("topology", "str | Topology", "butterfly"),
            ("name", "str", ""),
            ("strategy", "str", ""),
            ("version", "int", 0),
            ("files", "PeerFiles | None", None),
        ],
    ),
    (
        p2pavg.RunPeer,
        [
            ("peer_id", "str", REQUIRED),
            ("name", "str", REQUIRED),
            ("version", "str", REQUIRED),
            ("role", "str", REQUIRED),
            ("epoch", "int", REQUIRED),
            ("samples_per_second", "float", REQUIRED),
            ("waiting", "bool", REQUIRED),
            ("behind", "bool", REQUIRED),
            ("reachability", "str", REQUIRED),
            ("last_seen", "float", REQUIRED),
            ("is_self", "bool", False),
        ],
    ),
    (
        p2pavg.Success,
        [
            ("averaged", "Tensors", REQUIRED),
            ("peers", "tuple[str, ...]", REQUIRED),
            ("weights", "Mapping[str, float]", REQUIRED),
            ("total_weight", "float", REQUIRED),
            ("compression_ratio", "float", REQUIRED),
            ("bytes_sent", "int", REQUIRED),
            ("bytes_received", "int", REQUIRED),
            ("duration", "float", REQUIRED),
            ("exchange_duration", "float", REQUIRED),
            ("group_id", "str", REQUIRED),
            ("share", "tuple[int, int]", REQUIRED),
            ("taken_over", "tuple[tuple[int, int], ...]", ()),
            ("metrics", "Mapping[str, float]", {}),
            ("observers", "tuple[str, ...]", ()),
            ("auxiliaries", "tuple[str, ...]", ()),
            ("paths", "Mapping[str, Path]", {}),
            ("clipped", "tuple[str, ...]", ()),
            ("lost", "Mapping[str, str]", {}),
            ("drawn", "tuple[DrawnContribution, ...]", ()),
            ("left_out", "torch.Tensor | None", None),
            ("certificate", "bytes", b""),
        ],
    ),
    (
        p2pavg.InProgress,
        [
            ("ready_peers", "int", REQUIRED),
            ("target_size", "int", REQUIRED),
            ("reason", "str", ""),
            ("waits_for", "str", ""),
        ],
    ),
    (
        p2pavg.NoPeers,
        [
            ("reason", "str", "no other peer is ready"),
            ("code", "NoPeersCode", p2pavg.NoPeersCode.NO_PEER_READY),
        ],
    ),
    (
        p2pavg.Failed,
        [
            ("reason", "str", REQUIRED),
            ("code", "FailedCode", p2pavg.FailedCode.OTHER),
            ("peer", "str | None", None),
            ("contribution_used", "bool | None", False),
        ],
    ),
]

ERRORS: list[tuple[type[Exception], type[Exception]]] = [
    (p2pavg.AccumulateError, ValueError),
    (p2pavg.AddressError, ValueError),
    (p2pavg.CertificateError, ValueError),
    (p2pavg.BootstrapError, OSError),
    (p2pavg.BusyError, RuntimeError),
    (p2pavg.ClosedError, RuntimeError),
    (p2pavg.ConfigError, ValueError),
    (p2pavg.IdentityError, ValueError),
    (p2pavg.ListenError, OSError),
]


def default(field: dataclasses.Field[Any]) -> object:
    return field.default if field.default_factory is REQUIRED else field.default_factory()


def public_names(of: type) -> dict[str, str]:
    return {
        name: "property" if isinstance(value, property) else "method"
        for name, value in vars(of).items()
        if not name.startswith("_")
    }


def test_the_names_of_the_package() -> None:
    assert p2pavg.__all__ == NAMES
    assert all(hasattr(p2pavg, name) for name in NAMES)
    assert all(getattr(p2pavg, name).__doc__ for name in NAMES if name not in ("RoundResult", "Tensors"))


LAZY = """
import sys
import p2pavg

assert "torch" not in sys.modules
assert p2pavg.__version__
try:
    p2pavg.nothing
except AttributeError as error:
    assert str(error) == "module 'p2pavg' has no attribute 'nothing'"
else:
    raise AssertionError
assert p2pavg.optim.diloco  # modules are there as well
assert {"Success", "blocking", "optim"} <= set(dir(p2pavg))
from p2pavg import *
assert Success is p2pavg.Success
"""


def test_importing_the_package_loads_its_names_and_torch_later() -> None:
    subprocess.run([sys.executable, "-c", LAZY], check=True, timeout=60)


def test_the_names_of_population() -> None:
    assert population.__all__ == POPULATION_NAMES
    assert all(getattr(population, name).__doc__ for name in POPULATION_NAMES)


def test_the_names_of_strategies() -> None:
    assert strategies.__all__ == STRATEGY_NAMES
    assert all(getattr(strategies, name).__doc__ for name in STRATEGY_NAMES)


@pytest.mark.parametrize(
    ("function", "signature"), SIGNATURES, ids=lambda value: getattr(value, "__qualname__", "")
)
def test_signatures(function: Callable[..., Any], signature: str) -> None:
    assert str(inspect.signature(function)) == signature


def test_both_averagers_have_the_same_methods() -> None:
    common = {
        "peer_id": "property",
        "addresses": "property",
        "declare": "method",
        "accumulate": "method",
        "accumulated": "property",
        "weight": "property",
        "unresolved_weight": "property",
        "round_state": "property",
        "excluded": "property",
        "reachability": "property",
        "clear": "method",
        "apply_locally": "method",
        "step": "method",
        "expect": "method",
        "cancel_matchmaking": "method",
        "board": "method",
        "share_states": "method",
        "rechecked": "method",
        "sibling": "method",
        "events": "property",
        "statuses": "property",
        "subscribe": "method",
        "members": "method",
        "is_connected": "method",
    }
    own = {"aclose": "method"}
    assert public_names(p2pavg.DecentralizedAverager) == common | own
    assert public_names(blocking.Averager) == common | {
        "config": "property",
        "catch_up": "method",
        "close": "method",
        "beside": "method",
        "open_sibling": "method",
        "end": "method",
        "last_words": "method",
        "on_end": "method",
    }


def test_peer_has_an_id_and_addresses() -> None:
    assert public_names(p2pavg.Peer) == {
        "id": "property",
        "addresses": "property",
        "averager": "method",
        "subscribe": "method",
        "start": "method",
        "join": "method",
        "aclose": "method",
    }


@pytest.mark.parametrize(("of", "fields"), FIELDS, ids=lambda value: getattr(value, "__name__", ""))
def test_fields(of: Any, fields: list[tuple[str, str, object]]) -> None:
    assert [(field.name, field.type, default(field)) for field in dataclasses.fields(of)] == fields
    parameters = inspect.signature(of).parameters.values()
    assert {parameter.kind for parameter in parameters} == {inspect.Parameter.KEYWORD_ONLY}
    assert of.__dataclass_params__.frozen


@pytest.mark.parametrize(("error", "also"), ERRORS, ids=lambda value: value.__name__)
def test_errors_derive_from_their_family_and_a_builtin(error: type[Exception], also: type[Exception]) -> None:
    assert issubclass(error, p2pavg.P2PAvgError)
    assert issubclass(error, also)
