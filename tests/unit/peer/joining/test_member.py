"""The peer of a folder: what it listens on, what it announces, and what it refuses."""

from __future__ import annotations

from pathlib import Path

import pytest

import p2pavg
from p2pavg.blocking import open_averager
from p2pavg.peer.joining.member import forwarded, listens_for
from p2pavg.runs.membership.certificate import Role
from p2pavg.runs.membership.run_file import read_run_file
from p2pavg.runs.membership.tokens import parse_link
from p2pavg.tools.cli.new_run import create_run
from p2pavg_dht import Ed25519Signer

PEER = Ed25519Signer(bytes(32)).peer_id


@pytest.fixture
def lab(tmp_path: Path) -> Path:
    create_run("lab", tmp_path / "lab", [], {}, address="127.0.0.1", count=1, days=1.0)
    return tmp_path / "lab"


@pytest.mark.parametrize(
    ("own", "listens"),
    [
        ("/ip4/192.168.1.5/tcp/4001", ["/ip4/0.0.0.0/tcp/4001"]),
        ("/dns/lab.example.org/tcp/4001", ["/ip4/0.0.0.0/tcp/4001"]),
        ("/ip6/2001:db8::1/tcp/4001", ["/ip4/0.0.0.0/tcp/4001", "/ip6/::/tcp/4001"]),
        ("/ip4/127.0.0.1/tcp/4001", ["/ip4/127.0.0.1/tcp/4001"]),
    ],
)
def test_a_peer_listens_where_its_links_lead(own: str, listens: list[str]) -> None:
    assert listens_for([f"{own}/p2p/{PEER}"], 4001) == listens


@pytest.mark.parametrize(
    ("own", "announced"),
    [
        ("/ip4/203.0.113.7/tcp/4001", True),
        ("/ip4/203.0.113.8/tcp/4001", False),
        ("/ip4/192.168.1.5/tcp/4001", False),
        ("/ip4/127.0.0.1/tcp/4001", False),
        ("/dns/lab.example.org/tcp/4001", False),
    ],
    ids=["forwarded", "an interface's", "private", "loopback", "a name"],
)
def test_only_a_forwarded_public_address_is_announced(own: str, announced: bool) -> None:
    hosts = ["127.0.0.1", "192.168.7.7", "203.0.113.8"]
    assert forwarded([f"{own}/p2p/{PEER}"], hosts) == ([own] if announced else [])


def test_the_folder_is_all_that_its_peer_needs(lab: Path) -> None:
    config = p2pavg.join_run(lab, name="first", match_timeout=5.0)
    assert (config.run_id, config.name, config.match_timeout, config.open_run) == ("lab", "first", 5.0, False)
    assert config.access is not None
    assert config.access.roles == {Role.CONTRIBUTOR, Role.AUXILIARY, Role.SOURCE, Role.DELEGATE}
    assert read_run_file(lab / "lab.run").bootstrap == (), "an invited peer may know others than this one"
    with open_averager(config) as averager:
        assert averager.peer_id == config.access.peer_id
        (address,) = averager.addresses
        with (
            pytest.raises(p2pavg.BusyError, match="another process is the peer of the folder"),
            open_averager(config),
        ):
            pass
    with open_averager(config) as averager:
        assert averager.addresses == [address], "links stay good after a restart"


def test_a_link_leads_to_the_folders_peer_and_makes_a_member(lab: Path, tmp_path: Path) -> None:
    (text,) = [
        line.split()[-1]
        for line in create_run("two", tmp_path / "two", [], {}, address="127.0.0.1", count=1, days=1.0)
        if "p2pavg:" in line
    ]
    with open_averager(p2pavg.join_run(tmp_path / "two")) as averager:
        assert parse_link(text).address == averager.addresses[0]
        joined = p2pavg.join_run(text, home=tmp_path / "second")
    assert joined.access is not None
    assert joined.access.roles == {Role.CONTRIBUTOR, Role.AUXILIARY}
    assert p2pavg.join_run(text, home=tmp_path / "second") == joined
    assert p2pavg.join_run(tmp_path / "second") == joined
    assert joined.files is not None
    assert read_run_file(joined.files.run_file).bootstrap == (parse_link(text).address,)


def test_what_is_neither_folder_nor_link_is_named(tmp_path: Path) -> None:
    with pytest.raises(p2pavg.ConfigError, match="no folder or run file 'lab'") as found:
        p2pavg.join_run("lab")
    assert "p2pavg run create" in found.value.remedy
    with pytest.raises(p2pavg.ConfigError, match="must have one run file"):
        p2pavg.join_run(tmp_path)
