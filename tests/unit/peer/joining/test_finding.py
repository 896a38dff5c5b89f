"""The files with which ``p2pavg join`` starts: found, made, or brought by an invitation link."""

from __future__ import annotations

import stat
import time
from dataclasses import dataclass, field, replace
from pathlib import Path

import pytest

from p2pavg.base.errors import ConfigError, InvitationError
from p2pavg.peer.joining import finding
from p2pavg.peer.joining.finding import join
from p2pavg.runs.membership.armour import certificate_text
from p2pavg.runs.membership.certificate import Certificate, Role, issue
from p2pavg.runs.membership.run_file import PeerFiles, RunFile, read_run_file
from p2pavg.runs.membership.tokens import InvitationLink, parse_link
from p2pavg.runs.records.identity import load_seed
from p2pavg.tools.cli.authority import create, open_authority
from p2pavg_dht import Ed25519Signer

DAY = 86400.0
LINK = InvitationLink(f"/ip4/203.0.113.7/tcp/4001/p2p/{Ed25519Signer(b'd' * 32).peer_id}", b"t" * 100).text


@dataclass
class Lab:
    """A run's authority, and a delegate that redeems links."""

    folder: Path
    redeemed: list[str] = field(default_factory=list)
    refuses: str = ""

    @property
    def run_file(self) -> Path:
        return self.folder / "lab.run"

    def certificate(self, peer_id: str, *, days: float = 1.0) -> Certificate:
        authority = open_authority(self.run_file, None)
        return issue(
            authority.key.sign,
            authority=authority.run.authority,
            peer_id=peer_id,
            roles=[Role.AUXILIARY],
            max_weight=1.0,
            not_before=time.time() - 2 * DAY,
            expires=time.time() + days * DAY,
            serial=bytes(16),
        )

    async def redeem(self, link: InvitationLink, seed: bytes) -> tuple[RunFile, Certificate]:
        if self.refuses:
            raise InvitationError(self.refuses)
        peer_id = Ed25519Signer(seed).peer_id
        self.redeemed.append(peer_id)
        return read_run_file(self.run_file), self.certificate(peer_id)


@pytest.fixture
def lab(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Lab:
    folder = tmp_path / "operator"
    folder.mkdir()
    create("lab", folder, [], {})
    made = Lab(folder)
    monkeypatch.setattr(finding, "redeem_link", made.redeem)
    monkeypatch.setenv("XDG_DATA_HOME", str(tmp_path / "data"))
    return made


def start(
    what: object,
    *,
    link: str | None = None,
    home: Path | None = None,
    certificate: Path | None = None,
    identity: Path | None = None,
) -> PeerFiles:
    return join(str(what), link=link, home=home, certificate=certificate, identity=identity)


def peer_of(file: Path) -> str:
    return Ed25519Signer(load_seed(file)).peer_id


class TestRunFile:
    def test_a_peer_without_a_certificate_hears_its_id_and_what_to_do(self, lab: Lab, tmp_path: Path) -> None:
        home = tmp_path / "data" / "p2pavg" / "lab"
        with pytest.raises(ConfigError, match="this peer has no valid certificate of the run 'lab'") as error:
            start(lab.run_file)
        peer_id = peer_of(home / "identity.key")
        assert peer_id in str(error.value)
        assert f"p2pavg run invite lab.run {peer_id}" in error.value.remedy
        assert str(home / "lab.cert") in error.value.remedy
        (home / "lab.cert").write_text(certificate_text(lab.certificate(peer_id)))
        found = start(lab.run_file)
        assert found == PeerFiles(found.folder, lab.run_file, home / "lab.cert", home / "identity.key")

    @pytest.mark.parametrize("name", ["lab.cert", "{peer_id}.cert"])
    def test_a_certificate_beside_the_run_file_is_found(self, lab: Lab, tmp_path: Path, name: str) -> None:
        key = tmp_path / "peer.key"
        with pytest.raises(ConfigError):
            start(lab.run_file, home=tmp_path / "home", identity=key)
        file = lab.folder / name.format(peer_id=peer_of(key))
        file.write_text(certificate_text(lab.certificate(peer_of(key))))
        assert start(lab.run_file, home=tmp_path / "home", identity=key).certificate == file

    def test_certificates_of_others_and_expired_ones_do_not_count(self, lab: Lab, tmp_path: Path) -> None:
        home = tmp_path / "home"
        with pytest.raises(ConfigError):
            start(lab.run_file, home=home)
        own, other = peer_of(home / "identity.key"), Ed25519Signer(b"o" * 32).peer_id
        for certificate in (lab.certificate(own, days=-1.0), lab.certificate(other)):
            (home / "lab.cert").write_text(certificate_text(certificate))
            with pytest.raises(ConfigError, match="no valid certificate"):
                start(lab.run_file, home=home)
        assert start(lab.run_file, home=home, link=LINK).certificate == home / "lab.cert"
        assert lab.redeemed == [own], "an expired certificate is renewed by a link"
        start(lab.run_file, home=home, link=LINK)
        assert lab.redeemed == [own], "a link is used only if it is needed"

    def test_a_folder_with_another_run_of_the_same_name_is_refused(self, lab: Lab, tmp_path: Path) -> None:
        home = start(lab.run_file, home=tmp_path / "home", link=LINK).folder
        other = tmp_path / "other"
        other.mkdir()
        create("lab", other, [], {})
        with pytest.raises(ConfigError, match="of another run with the name 'lab'; name another folder"):
            start(other / "lab.run", home=home)

    def test_a_link_of_another_run_is_refused(self, lab: Lab, tmp_path: Path) -> None:
        other = tmp_path / "other"
        other.mkdir()
        create("lab", other, [], {})
        with pytest.raises(ConfigError, match="the invitation link is of another run"):
            start(other / "lab.run", home=tmp_path / "home", link=LINK)
        assert not (tmp_path / "home" / "lab.cert").exists()


class TestLink:
    def test_a_link_is_enough_and_works_at_every_start(self, lab: Lab, tmp_path: Path) -> None:
        first = start(LINK)
        assert first.folder == tmp_path / "data" / "p2pavg" / "lab"
        address = parse_link(LINK).address
        brought = replace(read_run_file(lab.run_file), bootstrap=(address,))
        assert read_run_file(first.run_file) == brought, "others join by the peer that made the link"
        assert stat.S_IMODE(first.run_file.stat().st_mode) == 0o600
        again = start(LINK)
        assert (again.run_file, again.certificate, again.identity) == (
            first.run_file,
            first.certificate,
            first.identity,
        )
        assert lab.redeemed == [peer_of(first.identity)], "the second start used the link again"
        assert start(first.run_file).certificate == first.certificate

    def test_a_link_with_a_folder(self, lab: Lab, tmp_path: Path) -> None:
        found = start(LINK, home=tmp_path / "here")
        assert found.certificate == tmp_path / "here" / "lab.cert"
        assert start(LINK, home=tmp_path / "here").certificate == found.certificate
        assert len(lab.redeemed) == 1

    def test_a_delegate_that_refuses_costs_no_identity(self, lab: Lab) -> None:
        lab.refuses = "the delegate is offline"
        with pytest.raises(InvitationError):
            start(LINK)
        lab.refuses = ""
        start(LINK)
        assert len(lab.redeemed) == 1

    def test_a_second_run_of_the_same_name_needs_a_folder(self, lab: Lab, tmp_path: Path) -> None:
        (tmp_path / "data" / "p2pavg" / "lab").mkdir(parents=True)
        with pytest.raises(ConfigError, match="start the new one with --home") as error:
            start(LINK)
        (place,) = (tmp_path / "data" / "p2pavg").glob("joining-*")
        assert f"--home {place}," in str(error.value)
        assert start(LINK, home=place).certificate == place / "lab.cert"
        assert len(lab.redeemed) == 1, "a link is good for one peer"

    def test_a_start_that_was_cut_off_behind_the_answer_does_not_lose_the_link(
        self, lab: Lab, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        def cut_off(*_: object) -> None:
            raise KeyboardInterrupt

        with monkeypatch.context() as patch:
            patch.setattr(Path, "rename", cut_off)
            with pytest.raises(KeyboardInterrupt):
                start(LINK)
        found = start(LINK)
        assert len(lab.redeemed) == 1
        assert lab.redeemed == [peer_of(found.identity)]

    def test_two_links_at_once(self, lab: Lab) -> None:
        with pytest.raises(ConfigError, match="give the invitation link once"):
            start(LINK, link=LINK)

    def test_a_link_and_a_certificate(self, lab: Lab, tmp_path: Path) -> None:
        with pytest.raises(ConfigError, match="brings its own certificate"):
            start(LINK, certificate=tmp_path / "c.cert")
