"""The commands of delegates and of newcomers: links, the daemon's options, and the files that a newcomer gets."""

from __future__ import annotations

import os
import re
import stat
import time
from pathlib import Path

import pytest

from p2pavg.cli import invitation
from p2pavg.records.identity import load_seed
from p2pavg.runs.membership.armour import certificate_text
from p2pavg.runs.membership.certificate import Certificate, Role
from p2pavg.runs.membership.files import read_certificate_file, read_run_file
from p2pavg.runs.membership.run_file import RunFile
from p2pavg.runs.membership.tokens import Link, Token, parse_link, read_token, token_key
from tests.unit.runs.membership.runs import SECRET, Authority, signer
from tests.unit.tools.cli.commands import Commands

DAY = 86400.0
FILES = ("--certificate", "delegate.cert", "--identity", "delegate.key")
ANYWHERE = ("--listen", "/ip4/127.0.0.1/tcp/0")


@pytest.fixture
def address(p2pavg: Commands) -> str:
    """Return the address of a delegate of the run ``lab``, whose files are in the folder."""
    peer_id = p2pavg.succeeds("identity", "delegate.key").strip()
    p2pavg.succeeds("run", "create", "lab")
    terms = ("--max-weight", "100", "--days", "30", "--role", "contributor", "--role", "observer")
    p2pavg.succeeds("run", "delegate", "lab.run", peer_id, *terms, "-o", "delegate.cert")
    return f"/ip4/127.0.0.1/tcp/4001/p2p/{peer_id}"


def tokens(out: str) -> list[Token]:
    key = token_key(load_seed("delegate.key"), read_run_file("lab.run").authority)
    return [read_token(key, parse_link(line).token) for line in out.splitlines()]


class TestLink:
    def test_links_grant_all_that_the_delegate_may(self, p2pavg: Commands, address: str) -> None:
        out = p2pavg.succeeds("run", "link", "lab.run", *FILES, "--address", address, "--count", "3")
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
        (token,) = tokens(p2pavg.succeeds("run", "link", "lab.run", *FILES, "--address", address, *less))
        assert (token.roles, token.max_weight) == (frozenset({Role.OBSERVER}), 5.0)
        assert abs(token.certificate_expires - time.time() - 2 * DAY) < 600.0
        assert token.expires == token.certificate_expires, "no link for a certificate that has expired"

    @pytest.mark.parametrize(
        ("options", "pattern"),
        [
            (["--count", "0"], "--count must be from 1 to 1000, got 0"),
            (["--days", "-1"], "--days must be above 0"),
            (["--certificate-days", "0"], "--certificate-days must be above 0"),
            (["--role", "delegate"], "--role must be one of"),
            (["--role", "source"], "the link cannot be made: its delegate may not grant the role source"),
            (["--max-weight", "101"], "the link cannot be made: its delegate may grant a max_weight of 100"),
            (["--address", "nonsense"], "'nonsense' is not an address"),
            (
                ["--address", f"/ip4/127.0.0.1/tcp/1/p2p/{signer(9).peer_id}"],
                "must be an address of the delegate",
            ),
            (["--identity", "gone.key"], "cannot read the identity gone.key: No such file"),
        ],
        ids=lambda value: value[0] if isinstance(value, list) else "",
    )
    def test_mistakes(self, p2pavg: Commands, address: str, options: list[str], pattern: str) -> None:
        error = p2pavg.fails("run", "link", "lab.run", *FILES, "--address", address, *options)
        assert re.search(pattern, error)

    def test_a_peer_that_is_no_delegate_makes_no_links(self, p2pavg: Commands, address: str) -> None:
        peer_id = address.rpartition("/")[2]
        terms = ("--max-weight", "1", "--days", "1")
        p2pavg.succeeds("run", "invite", "lab.run", peer_id, *terms, "-o", "plain.cert")
        error = p2pavg.fails(
            "run", "link", "lab.run", "--certificate", "plain.cert", *FILES[2:], "--address", address
        )
        assert "it does not have the role delegate" in error


class TestPeerOptions:
    @pytest.mark.parametrize(
        ("options", "pattern"),
        [
            (["--certificate", "delegate.cert"], "--certificate needs --run FILE.run"),
            (["--delegate"], "--delegate needs --run FILE.run"),
            (["--run", "lab.run"], "--run needs --certificate FILE and --identity FILE"),
            (["--run", "lab.run", *FILES[:2]], "--run needs --certificate FILE and --identity FILE"),
            (["--run", "lab.run", *FILES, "--run-id", "lab"], "--run and --run-id exclude each other"),
            (["--run", "gone.run", *FILES], "cannot read the run file gone.run: No such file"),
            (["--run", "lab.run", *FILES[:2], "--identity", "other.key"], "certificate: it is for 12D3KooW"),
            (
                ["--run", "lab.run", "--certificate", "lab.run", *FILES[2:]],
                "lab.run: it has no line of base64",
            ),
            (
                ["--run", "lab.run", "--certificate", "plain.cert", *FILES[2:], "--delegate"],
                "it does not have the role delegate",
            ),
        ],
        ids=lambda value: " ".join(value) if isinstance(value, list) else "",
    )
    def test_mistakes(self, p2pavg: Commands, address: str, options: list[str], pattern: str) -> None:
        p2pavg.succeeds("identity", "other.key")
        peer_id = address.rpartition("/")[2]
        terms = ("--max-weight", "1", "--days", "1")
        p2pavg.succeeds("run", "invite", "lab.run", peer_id, *terms, "-o", "plain.cert")
        assert re.search(pattern, p2pavg.fails("peer", *ANYWHERE, *options))


class TestJoin:
    RUN = Authority()
    LINK = Link(f"/ip4/127.0.0.1/tcp/1/p2p/{signer(3).peer_id}", b"token").text

    def answer(
        self, monkeypatch: pytest.MonkeyPatch, run_id: str = "lab", max_weight: float = 100.0
    ) -> Certificate:
        """Let every link be redeemed with this run and this certificate."""
        certificate = self.RUN.certify(signer(4).peer_id, max_weight=max_weight)
        run = RunFile(run_id=run_id, authority=self.RUN.public, secret=SECRET)

        async def redeemed(link: Link, seed: bytes) -> tuple[RunFile, Certificate]:
            return run, certificate

        monkeypatch.setattr(invitation, "redeem_link", redeemed)
        return certificate

    def test_the_files_are_written_and_may_be_there(
        self, p2pavg: Commands, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        certificate = self.answer(monkeypatch)
        Path("files").mkdir()
        for _ in range(2):
            out = p2pavg.succeeds("run", "join", self.LINK, "--identity", "peer.key", "-o", "files")
        assert sorted(os.listdir("files")) == ["lab.cert", "lab.run"]
        assert stat.S_IMODE(Path("files/lab.run").stat().st_mode) == 0o600
        assert read_certificate_file("files/lab.cert") == certificate
        assert read_run_file("files/lab.run").secret == SECRET
        assert "AveragingConfig.from_run('files/lab.run', certificate='files/lab.cert')" in out
        assert SECRET.hex() not in out

    def test_other_files_are_not_overwritten(self, p2pavg: Commands, monkeypatch: pytest.MonkeyPatch) -> None:
        first = self.answer(monkeypatch)
        p2pavg.succeeds("run", "join", self.LINK, "--identity", "peer.key")
        self.answer(monkeypatch, max_weight=5.0)
        assert "lab.cert exists and is never overwritten" in p2pavg.fails(
            "run", "join", self.LINK, "--identity", "peer.key"
        )
        assert Path("lab.cert").read_text() == certificate_text(first)

    @pytest.mark.parametrize(
        ("run_id", "name"),
        [
            ("../../etc/x", "_.._etc_x"),
            (".ssh", "ssh"),
            ("a $(b)", "a___b_"),
            ("...", "run"),
            ("é" * 128, "_" * 64),
        ],
    )
    def test_a_delegate_does_not_choose_the_folder(
        self, p2pavg: Commands, monkeypatch: pytest.MonkeyPatch, run_id: str, name: str
    ) -> None:
        self.answer(monkeypatch, run_id)
        p2pavg.succeeds("run", "join", self.LINK, "--identity", "peer.key")
        assert sorted(os.listdir()) == sorted([f"{name}.cert", f"{name}.run", "peer.key"])

    @pytest.mark.parametrize(
        ("arguments", "pattern"),
        [
            (["nonsense"], "an invitation link begins with p2pavg:"),
            (["p2pavg:AAAA"], "the link is damaged; copy all of it"),
            ([LINK, "-o", "gone"], "gone is no folder; make it first"),
        ],
    )
    def test_mistakes(self, p2pavg: Commands, arguments: list[str], pattern: str) -> None:
        assert re.search(pattern, p2pavg.fails("run", "join", *arguments, "--identity", "peer.key"))
        assert os.listdir() == []
