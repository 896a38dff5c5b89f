"""A daemon's folder: where it is, who may use it, its port, and the peers that it remembers."""

from __future__ import annotations

import socket
import stat
from pathlib import Path

import pytest

from p2pavg.base.errors import AddressError, ConfigError
from p2pavg.peer.joining.home import MAX_REMEMBERED, Home, data_folder, default_home, known_homes
from p2pavg_dht import Ed25519Signer

PEER = Ed25519Signer(b"s" * 32).peer_id
ANY = "/ip4/127.0.0.1/tcp/0"


@pytest.fixture
def home(tmp_path: Path) -> Home:
    made = Home(tmp_path / "one" / "two")
    made.make()
    return made


class TestFolders:
    def test_data_folder(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setenv("HOME", "/home/me")
        monkeypatch.setenv("XDG_DATA_HOME", "/data")
        assert data_folder() == Path("/data/p2pavg")
        for nothing in ("", "relative"):
            monkeypatch.setenv("XDG_DATA_HOME", nothing)
            assert data_folder() == Path("/home/me/.local/share/p2pavg")

    @pytest.mark.parametrize(
        ("run_id", "name"), [("lab", "lab"), ("../../etc", "_.._etc"), ("a/b c", "a_b_c"), ("...", "run")]
    )
    def test_no_name_of_a_run_leaves_the_data_folder(self, run_id: str, name: str) -> None:
        assert default_home(run_id) == data_folder() / name

    def test_a_folder_is_for_its_owner_only(self, home: Home) -> None:
        assert stat.S_IMODE(home.folder.stat().st_mode) == 0o700
        home.make()
        home.folder.chmod(0o777)
        with pytest.raises(ConfigError, match="other users can write"):
            home.make()

    def test_a_file_in_the_way(self, tmp_path: Path) -> None:
        (tmp_path / "file").write_text("")
        with pytest.raises(ConfigError, match="cannot make the folder"):
            Home(tmp_path / "file").make()

    def test_known_homes_are_those_in_which_a_daemon_ran(
        self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setenv("XDG_DATA_HOME", str(tmp_path))
        assert known_homes() == []
        for name in ("b", "a", "empty"):
            default_home(name).mkdir(parents=True)
        for name in ("b", "a"):
            (default_home(name) / "control.sock.lock").touch()
        assert known_homes() == [default_home("a"), default_home("b")]


class TestPort:
    def test_a_free_port_is_kept_for_later_starts(self, home: Home) -> None:
        (first,) = home.listen_again([ANY])
        assert not first.endswith("/tcp/0")
        assert home.listen_again([ANY]) == Home(home.folder).listen_again([ANY]) == [first]
        assert home.listen_again(["/ip6/::/tcp/0"]) == [f"/ip6/::/tcp/{first.rpartition('/')[2]}"]

    def test_a_named_port_stays(self, home: Home) -> None:
        assert home.listen_again(["/ip4/0.0.0.0/tcp/4001"]) == ["/ip4/0.0.0.0/tcp/4001"]
        assert not (home.folder / "port").exists()

    def test_a_port_that_was_taken_meanwhile_is_replaced(self, home: Home) -> None:
        (first,) = home.listen_again([ANY])
        with socket.socket() as other:
            other.bind(("0.0.0.0", int(first.rpartition("/")[2])))
            other.listen()
            (second,) = home.listen_again([ANY])
            assert second != first
        assert home.listen_again([ANY]) == [second]

    @pytest.mark.parametrize("content", ["", "x", "99999999", "-1", "4001 extra"])
    def test_a_damaged_note_is_no_error(self, home: Home, content: str) -> None:
        (home.folder / "port").write_text(content)
        (found,) = home.listen_again([ANY])
        assert 0 < int(found.rpartition("/")[2]) < 65536

    def test_an_address_that_is_none(self, home: Home) -> None:
        with pytest.raises(AddressError):
            home.listen_again(["127.0.0.1:4001"])


class TestRemembered:
    def test_addresses_come_back(self, home: Home) -> None:
        assert home.remembered == []
        address = f"/ip4/127.0.0.1/tcp/4001/p2p/{PEER}"
        home.remember([address])
        assert Home(home.folder).remembered == [address]

    def test_what_is_no_address_is_passed_over(self, home: Home) -> None:
        good = f"/ip4/127.0.0.1/tcp/4001/p2p/{PEER}"
        (home.folder / "peers").write_text(f"nonsense\n{good}\n/ip4/1.2.3.4\n")
        assert home.remembered == [good]

    def test_the_number_is_bounded(self, home: Home) -> None:
        home.remember(f"/ip4/127.0.0.1/tcp/{port}/p2p/{PEER}" for port in range(1, 100))
        assert len(home.remembered) == MAX_REMEMBERED
