"""The larger files of a job: in a folder of the volunteer's, kept from an earlier start, or from a mirror over HTTP.

Whoever has a file, its bytes are checked against the digest in the job's manifest, and the run's authority has signed
that.
"""

from __future__ import annotations

import hashlib
import os
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from http.client import HTTPException, HTTPMessage, HTTPResponse
from pathlib import Path
from typing import IO
from urllib.request import HTTPRedirectHandler, Request, build_opener

from p2pavg.base.errors import BusyError, ConfigError
from p2pavg.base.files import locked, what_to_do
from p2pavg.base.formats import PeerText, in_bytes
from p2pavg.base.limits import LOOK_SECONDS, STALL_SECONDS
from p2pavg.net.limits.rate import RateLimit
from p2pavg.tools.jobs.folder import large_files
from p2pavg.tools.jobs.manifest import MANIFEST, LargeFile

READ_BYTES = 256 * 1024
MAX_TRIES = 64
"""Of one mirror, each of which has brought some bytes: a download of a day over a link that breaks each half hour."""
MAX_REASON_CHARS = 200


class _StoppedError(Exception):
    """The user has stopped the command, and nobody waits for the file any more."""


class MirrorFiles:
    """Finds the larger files of jobs on this machine, and fetches those that are not there. All calls block.

    Args:
        own: a folder of the volunteer's that may have them, under the same names; ``None``: there is none.
        kept: the folder for what is fetched, under its digests.
        download: the user's limit.
        say: takes lines for the user.
    """

    def __init__(self, own: Path | None, kept: Path, download: RateLimit, say: Callable[[str], None]) -> None:
        self._own = own
        self._kept = kept
        self._download = download
        self._say = say
        self._opener = build_opener(_Redirects)
        self._stopped = threading.Event()

    def stop(self) -> None:
        """End all calls, in other threads too, once the mirror that they read from answers or falls silent."""
        self._stopped.set()

    def find(self, files: Sequence[LargeFile]) -> dict[str, Path]:
        """Return the place of each file by its name, after its bytes were checked. Fetch what is missing.

        Raises:
            ConfigError: a file is in no folder, and no mirror has it; or it cannot be written.
        """
        return {file.name: self._find(file) for file in files}

    def _find(self, file: LargeFile) -> Path:
        if self._own is not None:
            place = self._own / file.name
            if _is(place, file):
                return place.resolve()
            if place.exists():
                self._say(f"{place} is another file than the job's, and is not used")
        place = self._kept / file.sha256
        try:
            self._kept.mkdir(parents=True, exist_ok=True)
            with self._alone(place.with_suffix(".lock")):
                if not _is(place, file):
                    place.unlink(missing_ok=True)  # something of this machine has changed it
                    self._fetch(file, place)
        except OSError as error:
            raise ConfigError(
                f"the job's file {file.name} cannot be kept in {self._kept}: {error.strerror}",
                remedy=what_to_do(error, self._kept),
            ) from None
        return place

    @contextmanager
    def _alone(self, lock: Path) -> Iterator[None]:
        """Wait while another process of this user fetches the same file."""
        while True:
            try:
                with locked(lock):
                    yield
                    return
            except BusyError:
                if self._stopped.wait(LOOK_SECONDS):
                    raise _StoppedError from None

    def _fetch(self, file: LargeFile, place: Path) -> None:
        part = place.with_suffix(".part")  # it stays when this process ends, and the next start goes on
        reasons = []
        for url, host in zip(file.urls, file.hosts, strict=True):
            self._say(f"fetching {file.name}, {in_bytes(file.bytes)}, from {host}")
            if not (why := self._fetch_from(url, file, part)):
                os.replace(part, place)
                return
            reasons.append(f"{host}: {why}")
            self._say(f"{host} does not give {file.name}: {why}")
        raise ConfigError(
            f"the job needs {file.name} ({in_bytes(file.bytes)}, SHA-256 {file.sha256[:16]}…), and no mirror gave it: "
            + ("; ".join(reasons) or "it has none"),
            remedy="run the command again, which goes on with what is here; or name a folder that has it: --files DIR",
        )

    def _fetch_from(self, url: str, file: LargeFile, part: Path) -> str:
        """Complete a part from one mirror; return why it has not the file, empty if it has."""
        for _ in range(MAX_TRIES):
            before = _size(part)
            if before >= file.bytes:
                if _is(part, file):  # this process was ended before it gave it its name
                    return ""
                part.unlink()
                before = 0
            try:
                self._append(url, file, part)
            except (OSError, HTTPException) as error:
                if isinstance(error, _DiskError):
                    raise OSError(error.errno, error.strerror) from None
                if _size(part) > before:
                    continue  # a link that breaks, and goes on
                return PeerText((str(error) or type(error).__name__)[:MAX_REASON_CHARS])
            if _is(part, file):
                return ""
            part.unlink(missing_ok=True)
            # What another mirror has given may be what is wrong with it: this one gets its turn from the beginning.
            if not before:
                return "its bytes are not those that the job names"
        return f"it broke off {MAX_TRIES} times"

    def _append(self, url: str, file: LargeFile, part: Path) -> None:
        """Add what is missing of a part, up to one byte more than the file has."""
        have = _size(part)
        asked = {"User-Agent": "p2pavg", "Accept-Encoding": "identity"}
        if have:
            asked["Range"] = f"bytes={have}-"
        with self._opener.open(Request(url, headers=asked), timeout=STALL_SECONDS) as answer:
            goes_on = have > 0 and _begins_at(answer, have)
            have = have if goes_on else 0
            told = have * 10 // file.bytes
            with _writing(part, append=goes_on) as write:
                while data := answer.read1(min(READ_BYTES, file.bytes + 1 - have)):
                    if self._stopped.wait(self._download.delay(len(data))):
                        raise _StoppedError
                    write(data)
                    have += len(data)
                    if told < (told := have * 10 // file.bytes) < 10:
                        self._say(f"fetching {file.name}: {told * 10}% of {in_bytes(file.bytes)}")
                    if have > file.bytes:
                        return
        if have < file.bytes:
            raise HTTPException(f"it ended after {have} of {file.bytes} bytes")


class _Redirects(HTTPRedirectHandler):
    """Follows redirects to HTTPS only: one to this machine's own network is not what the user has agreed to."""

    def redirect_request(
        self, req: Request, fp: IO[bytes], code: int, msg: str, headers: HTTPMessage, newurl: str
    ) -> Request | None:
        if not newurl.startswith("https://"):
            raise HTTPException(f"it sends to {newurl[:MAX_REASON_CHARS]}, which is not https")
        return super().redirect_request(req, fp, code, msg, headers, newurl)


class _DiskError(OSError):
    """A file of this machine cannot be written, which is not a mirror's fault."""


@contextmanager
def _writing(part: Path, *, append: bool) -> Iterator[Callable[[bytes], None]]:
    try:
        # Without a buffer: what could not be written would be tried again when the file is closed.
        opened = part.open("ab" if append else "wb", buffering=0)
    except OSError as error:
        raise _DiskError(error.errno, error.strerror) from None

    def write(data: bytes) -> None:
        left = memoryview(data)
        try:
            while left:
                left = left[opened.write(left) :]
        except OSError as error:
            raise _DiskError(error.errno, error.strerror) from None

    with opened:
        yield write


def _begins_at(answer: HTTPResponse, place: int) -> bool:
    """Return whether an answer goes on where a part ends. A mirror may know no ranges, and give all of it again."""
    return answer.status == 206 and (answer.headers.get("Content-Range") or "").startswith(f"bytes {place}-")


def wrong_copies(folder: Path) -> list[str]:
    """Return sentences on the larger files that lie in a job's folder and are not those that its manifest names.

    Raises:
        ConfigError: one cannot be read.
    """
    found = []
    try:
        for file in large_files(folder):
            place = folder / file.name
            if place.is_file() and not _is(place, file):
                own = f"bytes = {place.stat().st_size}, sha256 = {_digest(place)!r}"
                found.append(f"{place} has {own}, and {MANIFEST} names others")
    except OSError as error:
        file_name = error.filename or folder
        raise ConfigError(
            f"{file_name} cannot be read: {error.strerror}", remedy=what_to_do(error, file_name)
        ) from None
    return found


def _size(part: Path) -> int:
    return part.stat().st_size if part.exists() else 0


def _is(place: Path, file: LargeFile) -> bool:
    """Return whether a file has the bytes that the manifest names."""
    if not place.is_file() or place.stat().st_size != file.bytes:
        return False
    return _digest(place) == file.sha256


def _digest(place: Path) -> str:
    with place.open("rb") as opened:
        return hashlib.file_digest(opened, "sha256").hexdigest()
