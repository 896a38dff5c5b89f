"""The commands of a run's authority: their files, what they print, and the mistakes that they report."""

from __future__ import annotations

import os
import re
import stat
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PublicKey

from p2pavg.base.files import locked
from p2pavg.runs.config import AveragingConfig
from p2pavg.runs.membership.armour import certificate_text
from p2pavg.runs.membership.certificate import Role, refusal
from p2pavg.runs.membership.run_file import read_certificate_file, read_revocations_file, read_run_file
from p2pavg.runs.records.identity import load_seed, make_seed
from p2pavg.strategies import DataParallel, Federated, strategy_of
from p2pavg.tools.cli import authority as commands
from p2pavg.tools.cli import new_run
from p2pavg.tools.daemon.words import ExitCode
from p2pavg_dht import Ed25519Signer
from p2pavg_dht.identity import peer_id_of
from tests.unit.runs.membership.runs import Authority, signer
from tests.unit.tools.cli.commands import Commands

PEER = signer(1).peer_id
OTHER = signer(2).peer_id
ADDRESS = f"/ip4/203.0.113.7/tcp/4001/p2p/{PEER}"
TERMS = ("--max-weight", "100", "--days", "30")
CREATE = ("run", "create", "lab")
REVOKE = ("run", "revoke", "--offline", "lab.run")
INVITE = ("run", "invite", "lab.run")


@pytest.fixture
def lab(p2pavg: Commands) -> Commands:
    """Return the command line in a folder in which the run ``lab`` was made."""
    p2pavg.succeeds(*CREATE, "--output", ".")
    return p2pavg


def mode(name: str) -> int:
    return stat.S_IMODE(Path(name).stat().st_mode)


def travel(monkeypatch: pytest.MonkeyPatch, days: float) -> None:
    monkeypatch.setattr(commands, "time", SimpleNamespace(time=lambda: time.time() + days * 86400.0))


class TestCreate:
    def test_a_key_and_a_run_file_are_made_for_their_owner_alone(self, p2pavg: Commands) -> None:
        out = p2pavg.succeeds(*CREATE)
        assert os.listdir() == ["lab"]
        assert mode("lab") == 0o700
        for name in ("lab.key", "lab.run", "identity.key"):
            assert mode(f"lab/{name}") == 0o600
        run = read_run_file("lab/lab.run")
        public_key = Ed25519PublicKey.from_public_bytes(run.authority)
        assert Ed25519Signer(load_seed("lab/lab.key")).peer_id == peer_id_of(public_key)
        assert run.secret.hex() not in out
        p2pavg.succeeds("run", "create", "other")
        other = read_run_file("other/other.run")
        assert other.secret != run.secret
        assert other.authority != run.authority

    def test_settings_are_written(self, p2pavg: Commands) -> None:
        options = (
            "--group-size 8 --min-group-size 3 --compression fp16 --max-weight 500 --robust trimmed_mean:0.25 "
            "--max-norm 2 --match-timeout 20 --exchange-timeout 90"
        )
        Path("files").mkdir()
        p2pavg.succeeds(*CREATE, *options.split(), "--bootstrap", ADDRESS, "--output", "files")
        run = read_run_file("files/lab.run")
        assert (run.run_id, run.group_size, run.min_group_size) == ("lab", 8, 3)
        assert (run.compression, run.max_weight, run.bootstrap) == ("fp16", 500.0, (ADDRESS,))
        assert (run.match_timeout, run.exchange_timeout) == (20.0, 90.0)
        assert (run.robust, run.max_norm) == ("trimmed_mean:0.25", 2.0)

    def test_gossip_says_the_size_of_groups(self, p2pavg: Commands) -> None:
        p2pavg.succeeds(*CREATE, "--topology", "gossip:3", "--bootstrap", ADDRESS)
        run = read_run_file("lab/lab.run")
        assert (run.topology, run.group_size) == ("gossip:3", 4)
        assert AveragingConfig(**run.settings).topology == "gossip:3"
        p2pavg.succeeds("run", "create", "pairs", "--topology", "gossip", "--min-group-size", "2")
        shown = p2pavg.succeeds("run", "show", "pairs/pairs.run")
        assert "groups       2 members; 2 are enough after 30 s\n" in shown
        assert "topology     gossip\n" in shown

    def test_a_strategy_of_gossip_needs_no_topology_beside_it(self, p2pavg: Commands) -> None:
        strategy = Federated(rule="noloco", sync_every=4, topology="gossip:2")
        Path("strategy.toml").write_text(strategy.toml)
        told = p2pavg.fails(*CREATE, "--strategy", "strategy.toml", "--topology", "gossip:3")
        assert "topology is 'gossip:3', and the strategy's is 'gossip:2:grid': leave --topology out" in told
        for name, options in (("one", ["--topology", "gossip:2"]), ("two", [])):
            p2pavg.succeeds("run", "create", name, "--strategy", "strategy.toml", *options)
            run = read_run_file(f"{name}/{name}.run")
            assert (strategy_of(run), run.topology, run.group_size) == (strategy, "gossip:2:grid", 3)

    def test_a_strategy_is_written_with_its_rule(self, p2pavg: Commands) -> None:
        strategy = DataParallel(target_batch_size=64, aggregation="median")
        Path("strategy.toml").write_text(strategy.toml)
        Path("strategy.json").write_text(strategy.json)
        for name in ("toml", "json"):
            p2pavg.succeeds("run", "create", name, "--strategy", f"strategy.{name}")
            run = read_run_file(f"{name}/{name}.run")
            assert (strategy_of(run), run.robust) == (strategy, "median")
            assert "strategy     data_parallel\n" in p2pavg.succeeds("run", "show", f"{name}/{name}.run")
        Path("strategy.json").write_text('{"version": 1, "kind": "local", "lr": 1}')
        told = p2pavg.fails(*CREATE, "--strategy", "strategy.json")
        assert "strategy.json: strategy.lr is unknown" in told
        told = p2pavg.fails(*CREATE, "--strategy", "strategy.toml", "--robust", "trimmed_mean:0.1")
        assert "robust is 'trimmed_mean:0.1', and the strategy's is 'median'" in told
        assert not Path("lab").exists()

    @pytest.mark.parametrize(
        "name", ["lab.key", "lab.run", "lab.cert", "lab.issued", "identity.key", "port", "addresses"]
    )
    def test_no_file_is_overwritten(self, p2pavg: Commands, name: str) -> None:
        Path("lab").mkdir(mode=0o700)
        there = Path("lab", name)
        there.write_bytes(b"precious")
        assert str(there) in p2pavg.fails(*CREATE)
        assert there.read_bytes() == b"precious"
        assert os.listdir("lab") == [name]

    def test_of_two_at_once_the_first_keeps_its_files(
        self, p2pavg: Commands, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        def after_another(*arguments: Any, **named: Any) -> bytes:
            here.undo()
            p2pavg.succeeds(*CREATE)
            return make_seed(*arguments, **named)

        with monkeypatch.context() as here:
            here.setattr(new_run, "make_seed", after_another)
            assert "lab/identity.key" in p2pavg.fails(*CREATE)
        assert read_certificate_file("lab/lab.cert").authority == read_run_file("lab/lab.run").authority
        assert Ed25519Signer(load_seed("lab/identity.key")).peer_id

    @pytest.mark.parametrize(
        ("arguments", "pattern"),
        [
            ("../lab", r"NAME must be 1 to 64 letters, .* got '\.\./lab'"),
            (".lab", "NAME must be 1 to 64 letters"),
            ("lab --group-size 1", "group_size must be a whole number from 2 to 64, got 1"),
            ("lab --compression zip", "compression: .*zip"),
            ("lab --max-weight nan", "max_weight must be a number above 0 .* got nan"),
            ("lab --robust mean", "robust: a rule is 'trimmed_mean:FRACTION', .* got 'mean'"),
            ("lab --topology gossip:64", "topology: degree must be a whole number from 1 to 63, got 64"),
            ("lab --topology gossip:1:ring", "topology: graph must be 'grid', which is the only one"),
            ("lab --topology gossip --group-size 8", "group_size is 8, and groups of the topology"),
            ("lab --max-norm 0.5", r"max_norm must be a number from 1 to 1e\+06, got 0\.5"),
            ("lab --bootstrap nonsense", "'nonsense' is not an address"),
            (f"lab --bootstrap /ip4/1.2.3.4/udp/1/p2p/{PEER}", "peer address .* is not of the form"),
            ("lab --count 0", "--count must be from 1 to 1000, got 0"),
            ("lab --days 0", "--days must be above 0"),
            ("lab --address a%b", "--address must be HOST, HOST:PORT or an address such as"),
            ("lab --address /ip4/1.2.3.4/udp/1", "--address must be HOST, HOST:PORT"),
            ("lab --address lab.example:port", "--address must be HOST, HOST:PORT"),
        ],
    )
    def test_mistakes_leave_no_file(self, p2pavg: Commands, arguments: str, pattern: str) -> None:
        assert re.search(pattern, p2pavg.fails("run", "create", *arguments.split()))
        assert os.listdir() == []


class TestInvite:
    def test_a_certificate_admits_the_peer(self, lab: Commands) -> None:
        out = lab.succeeds(*INVITE, PEER, *TERMS)
        certificate = read_certificate_file(f"{PEER}.cert")
        assert certificate.roles == {Role.CONTRIBUTOR}
        assert certificate.max_weight == 100.0
        assert abs(certificate.expires - time.time() - 30 * 86400.0) < 600.0
        assert certificate.identifier.hex() in out
        run = read_run_file("lab.run")
        data = certificate.data
        assert refusal(data, authority=run.authority, peer_id=PEER, now=time.time()) is None
        assert mode("lab.issued") == 0o600

    def test_roles_file_and_key_can_be_chosen(self, lab: Commands) -> None:
        Path("lab.key").rename("safe.key")
        roles = ["--role", "observer", "--role", "source"]
        lab.succeeds(*INVITE, PEER, *TERMS, *roles, "--key", "safe.key", "-o", "peer.cert")
        assert read_certificate_file("peer.cert").roles == {Role.OBSERVER, Role.SOURCE}

    def test_a_delegate_gets_its_role_and_what_it_may_grant(self, lab: Commands) -> None:
        lab.succeeds("run", "delegate", "lab.run", PEER, *TERMS, "--role", "auxiliary", "-o", "peer.cert")
        assert read_certificate_file("peer.cert").roles == {Role.AUXILIARY, Role.DELEGATE}

    @pytest.mark.parametrize(
        ("arguments", "pattern"),
        [
            (["nobody", *TERMS], "a certificate for no peer id"),
            ([PEER, *TERMS, "--role", "king"], "--role must be one of contributor, .* got 'king'"),
            ([PEER, *TERMS, "--role", "delegate"], "got 'delegate'; p2pavg run delegate makes delegates"),
            ([PEER, "--max-weight", "0", "--days", "1"], "a max_weight of 0; it must be above 0"),
            ([PEER, "--max-weight", "1", "--days", "0"], "--days must be above 0 and at most 36500, got 0"),
            ([PEER, "--max-weight", "1", "--days", "nan"], "--days must be above 0 .* got nan"),
            ([PEER, *TERMS, "--key", "gone.key"], "cannot read the authority's key gone.key: No such file"),
            ([PEER, *TERMS, "-o", "lab.run"], "lab.run exists and is never overwritten"),
            ([PEER, *TERMS, "-o", "gone/x"], "cannot write gone/x: No such file"),
        ],
        ids=" ".join,
    )
    def test_mistakes(self, lab: Commands, arguments: list[str], pattern: str) -> None:
        assert re.search(pattern, lab.fails(*INVITE, *arguments))
        assert [file.name for file in Path().glob("*.cert")] == ["lab.cert"]

    def test_a_wrong_key_is_refused(self, lab: Commands) -> None:
        lab.succeeds("run", "create", "other")
        error = lab.fails(*INVITE, PEER, *TERMS, "--key", "other/other.key")
        assert "other/other.key is not the key of the authority that lab.run names" in error
        Path("lab.key").chmod(0o640)
        assert "others can read the authority's key" in lab.fails(*INVITE, PEER, *TERMS)


class TestRevoke:
    @pytest.fixture
    def identifiers(self, lab: Commands) -> list[str]:
        for peer_id in (PEER, OTHER):
            lab.succeeds(*INVITE, peer_id, *TERMS)
        return [read_certificate_file(f"{peer_id}.cert").identifier.hex() for peer_id in (PEER, OTHER)]

    @staticmethod
    def revoked() -> tuple[int, set[str]]:
        found = read_revocations_file("lab.revoked", read_run_file("lab.run").authority)
        return found.number, {each.hex() for each in found.identifiers}

    def test_lists_are_numbered_and_complete(self, lab: Commands, identifiers: list[str]) -> None:
        out = lab.succeeds(*REVOKE, f"{PEER}.cert")
        assert self.revoked() == (1, {identifiers[0]})
        assert identifiers[0] in out
        assert "Publish the list later: p2pavg run publish lab.run" in out
        lab.succeeds(*REVOKE, identifiers[1])
        assert self.revoked() == (2, set(identifiers))

    def test_of_two_at_once_one_is_refused(self, lab: Commands, identifiers: list[str]) -> None:
        """Both would read the same list, and the one that is written last would lack what the other has revoked."""
        with locked(Path("lab.issued")):
            done = lab(*REVOKE, PEER)
        assert done.code == ExitCode.TRY_AGAIN
        assert "another process is writing lab.revoked" in done.err
        lab.succeeds(*REVOKE, OTHER)
        assert self.revoked() == (1, {identifiers[1]})

    def test_a_peer_id_names_all_its_certificates(self, lab: Commands, identifiers: list[str]) -> None:
        lab.succeeds(*INVITE, PEER, *TERMS, "-o", "second.cert")
        Path(f"{PEER}.cert").unlink()
        lab.succeeds(*REVOKE, PEER)
        assert self.revoked() == (1, {identifiers[0], read_certificate_file("second.cert").identifier.hex()})

    def test_expired_certificates_leave_the_list(
        self, lab: Commands, identifiers: list[str], monkeypatch: pytest.MonkeyPatch
    ) -> None:
        lab.succeeds(*REVOKE, PEER, "ab" * 16)
        travel(monkeypatch, days=31.0)
        lab.succeeds(*REVOKE, "cd" * 16)
        assert self.revoked() == (2, {"ab" * 16, "cd" * 16}), "of these it is not known when they expire"

    def test_a_certificate_of_a_delegate_is_remembered_until_it_expires(
        self, lab: Commands, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        run = Authority(load_seed("lab.key"))
        now = time.time()
        day = {"not_before": now, "expires": now + 86400.0}
        by = run.certify(OTHER, roles=[Role.CONTRIBUTOR, Role.DELEGATE], **day)
        certificate = run.certify(PEER, sign=signer(2).sign, issuer=by, **day)
        Path("peer.cert").write_text(certificate_text(certificate))
        lab.succeeds(*REVOKE, "peer.cert")
        assert self.revoked() == (1, {certificate.identifier.hex()})
        travel(monkeypatch, days=2.0)
        lab.succeeds(*REVOKE, "cd" * 16)
        assert self.revoked() == (2, {"cd" * 16})

    def test_the_number_can_be_raised_when_the_last_list_was_lost(
        self, lab: Commands, identifiers: list[str]
    ) -> None:
        lab.succeeds(*REVOKE, PEER, "--number", "7")
        assert self.revoked() == (7, {identifiers[0]})
        assert "--number must be above 7" in lab.fails(*REVOKE, OTHER, "--number", "7")

    def test_mistakes_change_nothing(
        self, lab: Commands, identifiers: list[str], monkeypatch: pytest.MonkeyPatch
    ) -> None:
        Path("forged.cert").write_text(certificate_text(Authority(b"b" * 32).certify(PEER)))
        for what, pattern in {
            "forged.cert": "forged.cert: this run's authority has not signed it",
            "lab.run": "lab.run: it has no line of base64",
            "nonsense": "'nonsense' is no file of a certificate, no identifier .* and no peer id",
            signer(9).peer_id: "lab.issued has no valid certificate of 12D3KooW",
        }.items():
            assert re.search(pattern, lab.fails(*REVOKE, PEER, what))
        travel(monkeypatch, days=31.0)
        assert f"{PEER}.cert: it expired on" in lab.fails(*REVOKE, f"{PEER}.cert")
        assert not Path("lab.revoked").exists()

    def test_a_damaged_file_is_named(self, lab: Commands, identifiers: list[str]) -> None:
        Path("lab.revoked").write_text("QUJD")
        assert "lab.revoked: it is no list" in lab.fails(*REVOKE, PEER)
        with Path("lab.issued").open("a") as ledger:
            ledger.write("QUJD\n")
        assert "lab.issued: line 5: it is no certificate" in lab.fails(*REVOKE, PEER)

    def test_a_full_list_says_what_to_do(self, lab: Commands) -> None:
        named = [number.to_bytes(16, "big").hex() for number in range(201)]
        assert "make a new run file with a new authority" in lab.fails(*REVOKE, *named)


def test_a_new_secret_leaves_the_certificates_valid(lab: Commands) -> None:
    lab.succeeds("run", "rotate", "lab.run", "-o", "new.run")
    old, new = read_run_file("lab.run"), read_run_file("new.run")
    assert old.secret != new.secret
    assert (old.settings, old.authority) == (new.settings, new.authority)
    assert mode("new.run") == 0o600
    assert "lab.run exists" in lab.fails("run", "rotate", "lab.run", "-o", "lab.run")
    assert read_run_file("lab.run") == old


class TestShow:
    def test_the_secret_is_shown_only_on_demand(self, lab: Commands) -> None:
        secret = read_run_file("lab.run").secret.hex()
        shown = lab.succeeds("run", "show", "lab.run")
        assert "run file of the run 'lab'" in shown
        assert secret not in shown
        assert secret in lab.succeeds("run", "show", "lab.run", "--secret")

    def test_how_the_run_combines_contributions(self, lab: Commands) -> None:
        shown = lab.succeeds("run", "show", "lab.run")
        assert "robust       no rule: the weighted mean\n" in shown
        assert "max norm     no limit\n" in shown
        lab.succeeds("run", "create", "other", "--robust", "trimmed_mean", "--max-norm", "2.5")
        shown = lab.succeeds("run", "show", "other/other.run")
        assert "robust       trimmed_mean:0.25\n" in shown
        assert "max norm     2.5 times the median norm of the group\n" in shown

    def test_a_certificate(self, lab: Commands, monkeypatch: pytest.MonkeyPatch) -> None:
        lab.succeeds(*INVITE, PEER, *TERMS, "-o", "peer.cert")
        shown = lab.succeeds("run", "show", "peer.cert")
        assert f"certificate of {PEER}" in shown
        assert "signed by    the authority" in shown
        assert re.search(r"valid until  20.* UTC: 29 days left", shown)
        travel(monkeypatch, days=29.5)
        assert re.search(r"UTC: 1[12]\.\d hours left", lab.succeeds("run", "show", "peer.cert"))
        travel(monkeypatch, days=30.0)
        assert "UTC: expired" in lab.succeeds("run", "show", "peer.cert")
        travel(monkeypatch, days=-1.0)
        assert "UTC: it has not begun" in lab.succeeds("run", "show", "peer.cert")

    def test_the_ledger_and_the_list(self, lab: Commands) -> None:
        for peer_id in (PEER, OTHER):
            lab.succeeds(*INVITE, peer_id, *TERMS)
        shown = lab.succeeds("run", "show", "lab.issued")
        assert f"certificate of {PEER}" in shown
        assert f"certificate of {OTHER}" in shown
        lab.succeeds(*REVOKE, PEER)
        shown = lab.succeeds("run", "show", "lab.revoked")
        assert "list of revoked certificates, number 1" in shown
        assert read_certificate_file(f"{PEER}.cert").identifier.hex() in shown

    def test_a_forged_certificate_is_a_mistake(self, p2pavg: Commands) -> None:
        run = Authority()
        Path("peer.cert").write_text(certificate_text(run.certify(PEER, sign=signer(2).sign)))
        assert "peer.cert: the certificate of 12D3KooW" in p2pavg.fails("run", "show", "peer.cert")

    @pytest.mark.parametrize("text", ["", "# nothing", "Good morning", "QUJD", "a = 1"])
    def test_other_files(self, p2pavg: Commands, text: str) -> None:
        Path("letter").write_text(text)
        assert "p2pavg: letter: " in p2pavg.fails("run", "show", "letter")
        assert "cannot read the file of a run gone: No such file" in p2pavg.fails("run", "show", "gone")
