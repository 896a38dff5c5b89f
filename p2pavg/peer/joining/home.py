"""The folder of one daemon: its identity, the files of its run, its control socket, and what it remembers."""

from __future__ import annotations

import os
import re
import socket
import stat
from collections.abc import Iterable, Sequence
from pathlib import Path

from p2pavg.base.errors import AddressError, ConfigError
from p2pavg.base.files import PRIVATE, naming_errors, read_text, replace_file
from p2pavg.net.addresses import parse_listen_address, parse_peer_address

MAX_REMEMBERED = 32
"""Addresses of other peers that a daemon keeps for its next start."""
_MAX_FILE_BYTES = 16 * 1024
_FOLDER_MODE = 0o700


def data_folder() -> Path:
    """Return the folder in which daemons have theirs: ``$XDG_DATA_HOME/p2pavg``, or ``~/.local/share/p2pavg``."""
    given = os.environ.get("XDG_DATA_HOME", "")
    # By the specification of these folders, a relative path counts as if it were not given.
    base = Path(given) if os.path.isabs(given) else Path.home() / ".local" / "share"
    return base / "p2pavg"


def default_home(run_id: str) -> Path:
    """Return the folder of the daemon of a run if its user names none."""
    return data_folder() / file_name(run_id)


def file_name(run_id: str) -> str:
    """Return a name for files of a run, whose id may have any characters."""
    return re.sub(r"[^A-Za-z0-9._-]", "_", run_id)[:64].lstrip(".-") or "run"


def known_homes() -> list[Path]:
    """Return the folders in :func:`data_folder` in which a daemon has run, by name."""
    try:
        found = sorted(data_folder().iterdir())
    except OSError:
        return []
    return [folder for folder in found if Home(folder).lock.exists()]  # a lock stays when its daemon ends


class Home:
    """The folder of one daemon."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder

    @property
    def identity(self) -> Path:
        """The peer's key file."""
        return self.folder / "identity.key"

    @property
    def socket(self) -> Path:
        """The control socket."""
        return self.folder / "control.sock"

    @property
    def lock(self) -> Path:
        """The lock of the one process that is this peer."""
        return self.socket.with_name(f"{self.socket.name}.lock")

    def run_file(self, run_id: str) -> Path:
        """Return the place of the run file, if an invitation link brought it."""
        return self.folder / f"{file_name(run_id)}.run"

    def certificate(self, run_id: str) -> Path:
        """Return the place of the peer's certificate."""
        return self.folder / f"{file_name(run_id)}.cert"

    def job(self, root: bytes) -> Path:
        """Return the place of the file of a job, by its root."""
        return self.jobs / f"{root.hex()}.job"

    @property
    def jobs(self) -> Path:
        """The folder with the files of jobs."""
        return self.folder / "jobs"

    def make(self) -> None:
        """Make the folder, for its owner only.

        Raises:
            ConfigError: it cannot be made, or other users can write to it.
        """
        with naming_errors(f"cannot make the folder {self.folder}", self.folder):
            self.folder.mkdir(mode=_FOLDER_MODE, parents=True, exist_ok=True)
            found = self.folder.stat()
        if os.name == "posix" and (found.st_uid != os.geteuid() or stat.S_IMODE(found.st_mode) & 0o022):
            raise ConfigError(
                f"other users can write to the folder {self.folder}; chmod 700 it, or name another with --home"
            )

    @property
    def remembered(self) -> list[str]:
        """Addresses of peers that were in the network when the daemon last ran."""
        return [line for line in self._lines("peers") if _is_peer_address(line)][:MAX_REMEMBERED]

    def remember(self, addresses: Iterable[str]) -> None:
        """Keep addresses of peers for the next start, in place of earlier ones.

        Raises:
            OSError: the disk is full, for example. The earlier ones stay then.
        """
        self._write("peers", list(addresses)[:MAX_REMEMBERED])

    @property
    def port(self) -> int:
        """The port that the peer has at each start; 0 if it has none yet."""
        last = self._lines("port")
        port = int(last[0]) if last and last[0].isascii() and last[0].isdigit() else 0
        return port if port < 65536 else 0

    def keep_port(self, port: int) -> None:
        """Note the port for the next start.

        Raises:
            ConfigError: the file cannot be written.
        """
        self._keep("port", str(port))

    @property
    def addresses(self) -> list[str]:
        """Addresses at which others dial this peer, as its user named them when the run was made."""
        return [line for line in self._lines("addresses") if _is_peer_address(line)]

    def keep_address(self, address: str) -> None:
        """Note an address at which others dial this peer.

        Raises:
            ConfigError: the file cannot be written.
        """
        self._keep("addresses", address)

    def listen_again(self, wanted: Sequence[str]) -> list[str]:
        """Return addresses to listen on: one port of this daemon's own, start after start, in place of port 0.

        Other peers then find it again at the addresses that they know, and routers keep their rules for the port. If
        another process has taken the port meanwhile, another one is chosen.

        Raises:
            AddressError: a text is no address to listen on.
        """
        if not any(_port(address) == 0 for address in wanted):
            return list(wanted)
        port = _free_port(self.port)
        self.keep_port(port)
        chosen = f"/tcp/{port}"
        return [each.rpartition("/tcp/")[0] + chosen if _port(each) == 0 else each for each in wanted]

    def _lines(self, name: str) -> list[str]:
        file = self.folder / name
        if not file.exists():
            return []
        return read_text(file, "file of a daemon", max_bytes=_MAX_FILE_BYTES).split()

    def _keep(self, name: str, line: str) -> None:
        with naming_errors(f"cannot write into the folder {self.folder}", self.folder):
            self._write(name, [line])

    def _write(self, name: str, lines: Iterable[str]) -> None:
        replace_file(self.folder / name, "".join(f"{line}\n" for line in lines).encode(), mode=PRIVATE)


def _is_peer_address(text: str) -> bool:
    try:
        parse_peer_address(text)
    except AddressError:
        return False
    return True


def _port(address: str) -> int:
    return int(str(parse_listen_address(address).value_for_protocol("tcp")))


def _free_port(wanted: int) -> int:
    """Return ``wanted`` if no process of this machine listens there, or else a free port."""
    with socket.socket(socket.AF_INET, socket.SOCK_STREAM) as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind(("0.0.0.0", wanted))
            probe.listen(1)
        except OSError:
            return _free_port(0)
        return int(probe.getsockname()[1])
