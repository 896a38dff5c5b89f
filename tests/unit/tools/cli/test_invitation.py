"""The commands of delegates and of newcomers: links, the daemon's options, and the files that a newcomer gets."""

from __future__ import annotations

import re
import time

import pytest

from p2pavg.runs.membership.certificate import Role
from p2pavg.runs.membership.run_file import read_certificate_file, read_run_file
from p2pavg.runs.membership.tokens import Token, parse_link, read_token, token_key
from p2pavg.runs.records.identity import load_seed
from tests.unit.runs.membership.runs import signer
from tests.unit.tools.cli.commands import Commands

DAY = 86400.0
FILES = ("--certificate", "delegate.cert", "--identity", "delegate.key")
LINK = ("run", "link", "lab.run")
ANYWHERE = ("--listen", "/ip4/127.0.0.1/tcp/0")


@pytest.fixture
def address(p2pavg: Commands) -> str:
    """Return the address of a delegate of the run ``lab``, whose files are in the folder."""
    peer_id = p2pavg.succeeds("identity", "delegate.key").strip()
    p2pavg.succeeds("run", "create", "lab", "--output", ".")
    terms = ("--max-weight", "100", "--days", "30", "--role", "contributor", "--role", "observer")
    p2pavg.succeeds("run", "delegate", "lab.run", peer_id, *terms, "-o", "delegate.cert")
    return f"/ip4/127.0.0.1/tcp/4001/p2p/{peer_id}"


def tokens(out: str) -> list[Token]:
    key = token_key(load_seed("delegate.key"), read_run_file("lab.run").authority)
    return [read_token(key, parse_link(line).token) for line in out.splitlines()]


class TestLink:
    def test_links_grant_all_that_the_delegate_may(self, p2pavg: Commands, address: str) -> None:
        out = p2pavg.succeeds(*LINK, *FILES, "--address", address, "--count", "3")
        assert {parse_link(line).address for line in out.splitlines()} == {address}
        own = read_certificate_file("delegate.cert")
        found = tokens(out)
        assert len({token.serial for token in found}) == len(found) == 3
        for token in found:
            assert token.roles == {Role.CONTRIBUTOR, Role.OBSERVER}
            assert (token.max_weight, token.certificate_expires) == (100.0, own.expires)
            assert abs(token.expires - time.time() - 7 * DAY) < 600.0

    def test_links_can_grant_less(self, p2pavg: Commands, address: str) -> None:
        less = ["--role", "observer", "--max-weight", "5", "--days", "3", "--certificate-days", "2"]
        (token,) = tokens(p2pavg.succeeds(*LINK, *FILES, "--address", address, *less))
        assert (token.roles, token.max_weight) == (frozenset({Role.OBSERVER}), 5.0)
        assert abs(token.certificate_expires - time.time() - 2 * DAY) < 600.0
        assert token.expires == token.certificate_expires, "no link for a certificate that has expired"

    @pytest.mark.parametrize(
        ("options", "pattern"),
        [
            ("--count 0", "--count must be from 1 to 1000, got 0"),
            ("--days -1", "--days must be above 0"),
            ("--certificate-days 0", "--certificate-days must be above 0"),
            ("--role delegate", "--role must be one of"),
            ("--role source", "the link cannot be made: its delegate may not grant the role source"),
            ("--max-weight 101", "the link cannot be made: its delegate may grant a max_weight of 100"),
            ("--address nonsense", "'nonsense' is not an address"),
            (f"--address /ip4/127.0.0.1/tcp/1/p2p/{signer(9).peer_id}", "must be an address of the delegate"),
            ("--identity gone.key", "cannot read the identity gone.key: No such file"),
        ],
    )
    def test_mistakes(self, p2pavg: Commands, address: str, options: str, pattern: str) -> None:
        error = p2pavg.fails(*LINK, *FILES, "--address", address, *options.split())
        assert re.search(pattern, error)

    def test_a_peer_that_is_no_delegate_makes_no_links(self, p2pavg: Commands, address: str) -> None:
        peer_id = address.rpartition("/")[2]
        terms = ("--max-weight", "1", "--days", "1")
        p2pavg.succeeds("run", "invite", "lab.run", peer_id, *terms, "-o", "plain.cert")
        error = p2pavg.fails(*LINK, "--certificate", "plain.cert", *FILES[2:], "--address", address)
        assert "it does not have the role delegate" in error


class TestPeerOptions:
    @pytest.mark.parametrize(
        ("options", "pattern"),
        [
            ("--certificate delegate.cert", "--certificate needs --run FILE.run"),
            ("--delegate", "--delegate needs --run FILE.run"),
            ("--name garage", "--name needs --run FILE.run or --run-id NAME"),
            ("--run lab.run", "--run needs --certificate FILE and --identity FILE"),
            ("--run lab.run CERTIFICATE", "--run needs --certificate FILE and --identity FILE"),
            ("--run lab.run CERTIFICATE KEY --run-id lab", "--run and --run-id exclude each other"),
            ("--run gone.run CERTIFICATE KEY", "cannot read the run file gone.run: No such file"),
            ("--run lab.run CERTIFICATE --identity other.key", "certificate: it is for 12D3KooW"),
            ("--run lab.run --certificate lab.run KEY", "lab.run: it has no line of base64"),
            ("--run lab.run --certificate plain.cert KEY --delegate", "it does not have the role delegate"),
        ],
    )
    def test_mistakes(self, p2pavg: Commands, address: str, options: str, pattern: str) -> None:
        p2pavg.succeeds("identity", "other.key")
        peer_id = address.rpartition("/")[2]
        terms = ("--max-weight", "1", "--days", "1")
        p2pavg.succeeds("run", "invite", "lab.run", peer_id, *terms, "-o", "plain.cert")
        words = options.replace("CERTIFICATE", " ".join(FILES[:2])).replace("KEY", " ".join(FILES[2:]))
        assert re.search(pattern, p2pavg.fails("peer", *ANYWHERE, *words.split()))


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ("lab", "--bootstrap ADDR is needed"),
        ("lab --bootstrap ADDR --listen 8080", "--listen must be HOST:PORT"),
        ("lab --bootstrap ADDR --certificate x", "--certificate needs a run file"),
        ("x.run", "--certificate FILE and --identity FILE"),
        ("lab --bootstrap ADDR --token-file missing", "missing"),
    ],
)
def test_mistakes_in_what_to_monitor(p2pavg: Commands, arguments: str, message: str) -> None:
    assert message in p2pavg.fails("monitor", *arguments.split())
