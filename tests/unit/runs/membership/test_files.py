"""The files of a run, and the configuration that follows from them: errors name the file."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from p2pavg import AveragingConfig, ConfigError, RunFile, TrimmedMean, read_run_file
from p2pavg.group.aggregation import Aggregation
from p2pavg.runs.membership.armour import MAX_TEXT_CHARS, certificate_text, revocations_text
from p2pavg.runs.membership.revocation import revoke
from p2pavg.runs.membership.run_file import MAX_EDITED_BYTES, read_certificate_file, read_revocations_file
from tests.unit.runs.membership.runs import SECRET, Authority, signer

RUN = Authority()
OTHER = Authority(b"b" * 32)
PEER = signer(1).peer_id


@pytest.fixture
def run_file(tmp_path: Path) -> Path:
    made = RunFile(
        run_id="lab",
        authority=RUN.public,
        secret=SECRET,
        group_size=8,
        min_group_size=3,
        match_timeout=20.0,
        exchange_timeout=90.0,
        compression="fp16",
        max_weight=500.0,
        robust="trimmed_mean:0.25",
        max_norm=2.0,
        bootstrap=(f"/ip4/203.0.113.7/tcp/4001/p2p/{PEER}",),
    )
    return written(tmp_path / "lab.run", made.text)


@pytest.fixture
def certificate(tmp_path: Path) -> Path:
    return written(tmp_path / "peer.cert", certificate_text(RUN.certify(PEER)))


def written(file: Path, text: str) -> Path:
    file.write_text(text, encoding="utf-8")
    return file


def test_a_configuration_follows_from_both_files(run_file: Path, certificate: Path) -> None:
    config = AveragingConfig.from_run(str(run_file), certificate=certificate)
    assert config.access is not None
    assert (config.access.authority, config.access.secret) == (RUN.public, SECRET)
    assert config.access.peer_id == PEER
    shared = ("run_id", "group_size", "min_group_size", "match_timeout", "exchange_timeout", "max_weight")
    run = read_run_file(run_file)
    assert {name: getattr(config, name) for name in shared} == {name: getattr(run, name) for name in shared}
    assert config.compression == "fp16"
    assert config.aggregation == Aggregation(TrimmedMean(0.25), 2.0)


def test_settings_of_one_peer_replace_those_of_the_run(run_file: Path, certificate: Path) -> None:
    config = AveragingConfig.from_run(
        run_file, certificate=certificate, group_size=4, bandwidth=50.0, tags=("gpu",)
    )
    assert (config.group_size, config.bandwidth, config.tags) == (4, 50.0, ("gpu",))


@pytest.mark.parametrize("name", ["run_id", "access"])
def test_the_run_itself_cannot_be_overridden(run_file: Path, certificate: Path, name: str) -> None:
    changed: dict[str, Any] = {name: None}
    with pytest.raises(ConfigError, match=rf"{name} cannot be overridden: it follows from .*lab\.run"):
        AveragingConfig.from_run(run_file, certificate=certificate, **changed)


def test_an_override_is_checked(run_file: Path, certificate: Path) -> None:
    with pytest.raises(ConfigError, match="group_size must be a whole number"):
        AveragingConfig.from_run(run_file, certificate=certificate, group_size=65)
    with pytest.raises(TypeError, match="group_sise"):
        AveragingConfig.from_run(run_file, certificate=certificate, group_sise=4)


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        ("", r"lab\.run: version is missing"),
        ("group_size = ", r"lab\.run: it is not TOML"),
        ("#" * (MAX_EDITED_BYTES + 1), r"lab\.run is no run file: it has more than 16384 bytes"),
    ],
)
def test_an_error_of_a_run_file_names_it(run_file: Path, certificate: Path, text: str, reason: str) -> None:
    written(run_file, text)
    with pytest.raises(ConfigError, match=reason):
        AveragingConfig.from_run(run_file, certificate=certificate)


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        ("Good morning", r"peer\.cert: it has no line of base64"),
        ("A" * (MAX_TEXT_CHARS + 1), r"peer\.cert is no certificate: it has more than 8192 bytes"),
        (certificate_text(OTHER.certify(PEER)), r"peer\.cert: certificate: it is of another run"),
        (certificate_text(RUN.certify(PEER, sign=OTHER.sign)), r"peer\.cert: certificate: its signature"),
    ],
)
def test_an_error_of_a_certificate_names_it(
    run_file: Path, certificate: Path, text: str, reason: str
) -> None:
    written(certificate, text)
    with pytest.raises(ConfigError, match=reason):
        AveragingConfig.from_run(run_file, certificate=certificate)


def test_files_that_cannot_be_read(tmp_path: Path, run_file: Path) -> None:
    with pytest.raises(ConfigError, match=r"cannot read the run file .*gone\.run: No such file"):
        read_run_file(tmp_path / "gone.run")
    with pytest.raises(ConfigError, match=r"cannot read the certificate .*: Is a directory"):
        read_certificate_file(tmp_path)
    (tmp_path / "peer.key").write_bytes(b"\xff" * 32)
    with pytest.raises(ConfigError, match=r"peer\.key is no run file: it is not text"):
        read_run_file(tmp_path / "peer.key")


def test_a_list_of_revoked_certificates_is_read(tmp_path: Path) -> None:
    revocations = revoke(RUN.sign, authority=RUN.public, number=1, identifiers=[bytes(16)])
    file = written(tmp_path / "lab.revoked", revocations_text(revocations))
    assert read_revocations_file(file, RUN.public) == revocations
    with pytest.raises(ConfigError, match=r"lab\.revoked: it is no list of this run's revoked certificates"):
        read_revocations_file(file, OTHER.public)
