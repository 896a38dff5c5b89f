"""The larger files of a job: in a folder of the volunteer's, kept from an earlier start, or from a mirror over HTTP.

The bytes of each file are checked against the digest in the job's manifest, which the run's authority has signed. A
mirror is a stranger, and so is what answers in its place: a router's page, or a proxy's.
"""

from __future__ import annotations

import hashlib
import shutil
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from contextlib import asynccontextmanager
from pathlib import Path
from typing import BinaryIO

import httpx
import trio

from p2pavg.base.errors import BusyError, ConfigError, StateError
from p2pavg.base.files import locked, naming_errors
from p2pavg.base.formats import PeerText, in_bytes
from p2pavg.base.limits import ASK_AGAIN_SECONDS, LOOK_SECONDS, STALL_SECONDS
from p2pavg.net.limits.rate import RateLimit
from p2pavg.tools.jobs.folder import has_bytes
from p2pavg.tools.jobs.manifest import LargeFile, origin_of
from p2pavg.tools.jobs.running import in_left_thread

PIECE_BYTES = 64 * 1024
"""A mirror that brings less within STALL_SECONDS, which is 17 kbit/s, has stopped; so has a try that brings less."""
MAX_BREAKS = 7
"""In a row, of all mirrors, with pauses of 1 to 32 s between them: a router dials anew in less than a minute."""
MAX_REDIRECTS = 10
MAX_REASON_CHARS = 200
TRY_LATER = frozenset({408, 425, 429, 500, 502, 503, 504})
"""Codes of HTTP with which a server says that it has no time now."""


class _RefusedError(Exception):
    """A mirror has not this file, and is not asked again."""


class _BrokenError(Exception):
    """A try broke off. The mirror may be asked again."""


class _FileMirror:
    """One mirror of a file, with the part that it has given.

    Each has its own, so that none has to go on with the bytes of another. It stays when this process ends.
    """

    def __init__(self, url: str, place: Path) -> None:
        self.url = url
        self.part = place.with_name(f"{place.name}.{hashlib.sha256(url.encode()).hexdigest()[:8]}.part")
        self.is_old = bool(self.size)
        """True while the part is of an earlier start."""
        self.why = ""
        """The reason for which it has not given the file."""

    @property
    def size(self) -> int:
        """Bytes that are here."""
        return _size(self.part)


class MirrorFiles:
    """Finds the larger files of jobs on this machine, and fetches those that are not there.

    Args:
        own: a folder of the volunteer's that may have them, under the same names; ``None``: there is none.
        kept: the folder for what is fetched.
        download: the user's limit.
        say: tells the user a line.
    """

    def __init__(
        self, own: Path | None, kept: Path, download: RateLimit, say: Callable[[str], Awaitable[None]]
    ) -> None:
        self._own = own
        self._kept = kept
        self._download = download
        self._say = say

    async def find(self, files: Sequence[LargeFile]) -> dict[str, Path]:
        """Return the place of each file by its name, after its bytes were checked. Fetch what is missing.

        Raises:
            ConfigError: a file cannot be read or written on this machine, or there is no room for it.
            StateError: a file is in no folder, and no mirror gave it.
        """
        return {file.name: await self._find(file) for file in files}

    async def _find(self, file: LargeFile) -> Path:
        if self._own is not None:
            place = self._own / file.name
            with naming_errors(f"{self._own} cannot be read, for the job's file {file.name}", self._own):
                if await _is(place, file):
                    return place.resolve()
                is_there = place.exists()
            if is_there:
                await self._say(f"{place} is another file than the job's, and is not used")
        # With its size: a manifest that names another one must not make this machine drop what a run has.
        place = self._kept / f"{file.sha256}-{file.bytes}"
        with naming_errors(f"{self._kept} cannot be written, for the job's file {file.name}", self._kept):
            self._kept.mkdir(parents=True, exist_ok=True)
            async with self._alone(place):
                if not await _is(place, file):
                    place.unlink(missing_ok=True)  # something of this machine has changed it
                    await self._fetch(file, place)
        return place

    @asynccontextmanager
    async def _alone(self, place: Path) -> AsyncIterator[None]:
        """Wait while another process of this user fetches the same file."""
        waits = False
        while True:
            try:
                with locked(place.with_suffix(".lock")):
                    yield
                    return
            except BusyError:
                if not waits:
                    await self._say("another p2pavg of this user fetches it; this one waits")
                waits = True
            await trio.sleep(LOOK_SECONDS)

    async def _fetch(self, file: LargeFile, place: Path) -> None:
        """Ask the mirrors in turn, until one has given the file or none is left."""
        mirrors = [_FileMirror(url, place) for url in dict.fromkeys(file.urls)]
        room = shutil.disk_usage(self._kept).free + max((mirror.size for mirror in mirrors), default=0)
        if file.bytes > room:
            raise ConfigError(
                f"{self._kept} has {in_bytes(room)} free, and the job's file {file.name} has {in_bytes(file.bytes)}",
                remedy="free some space, or name a folder that has the file: --files DIR",
            )
        left, breaks = list(mirrors), 0
        headers = {"User-Agent": "p2pavg", "Accept-Encoding": "identity"}
        async with httpx.AsyncClient(timeout=STALL_SECONDS, headers=headers) as client:
            while left and breaks < MAX_BREAKS:
                mirror, before = left[0], left[0].size
                await self._say(f"fetching {file.name}, {in_bytes(file.bytes)}, from {origin_of(mirror.url)}")
                try:
                    if await self._complete(client, mirror, file):
                        mirror.part.replace(place)
                        for each in mirrors:
                            each.part.unlink(missing_ok=True)
                        return
                except (_RefusedError, _BrokenError) as error:
                    mirror.why = f"{origin_of(mirror.url)}: {PeerText(str(error)[:MAX_REASON_CHARS])}"
                    await self._say(f"no {file.name} from {mirror.why}")
                    if isinstance(error, _RefusedError):
                        left.remove(mirror)
                        continue
                if mirror.size >= before + PIECE_BYTES:
                    breaks = 0  # and the same one again
                    continue
                breaks += 1
                left.append(left.pop(0))
                if breaks < MAX_BREAKS:
                    await trio.sleep(ASK_AGAIN_SECONDS * 2 ** (breaks - 1))
        reasons = "; ".join(mirror.why for mirror in mirrors if mirror.why) or "it has none"
        raise StateError(
            f"the job needs {file.name} ({in_bytes(file.bytes)}, SHA-256 {file.sha256[:16]}…), and no mirror gave it:"
            f" {reasons}",
            remedy="run the command again, which goes on with what is here; or name a folder that has it: --files DIR",
        )

    async def _complete(self, client: httpx.AsyncClient, mirror: _FileMirror, file: LargeFile) -> bool:
        """Fetch what is missing of a mirror's part; return false if it has to begin anew."""
        await self._append(client, mirror.url, file, mirror.part)
        if await _is(mirror.part, file):
            return True
        mirror.part.unlink(missing_ok=True)
        if not mirror.is_old:
            raise _RefusedError("its bytes are not those that the job names")
        mirror.is_old = False  # its file may have changed since the earlier start
        return False

    async def _append(self, client: httpx.AsyncClient, url: str, file: LargeFile, part: Path) -> None:
        """Add what is missing of a part, up to one byte more than the file has."""
        have = _size(part)
        if have >= file.bytes:
            return  # this process was ended before it gave it its name
        try:
            async with _answer(client, url, have) as answer:
                if not (goes_on := have > 0 and answer.status_code == 206):
                    have = 0
                if _total(answer, have) not in (None, file.bytes):
                    raise _RefusedError("it has a file of another size")
                with part.open("ab" if goes_on else "wb") as opened:
                    await self._write_all(answer, file, have, opened)
        except (trio.TooSlowError, httpx.TimeoutException):
            raise _BrokenError(f"it brought next to nothing for {STALL_SECONDS:.0f} s") from None
        except (httpx.HTTPError, httpx.InvalidURL, ValueError, OverflowError) as error:
            raise _BrokenError(str(error) or type(error).__name__) from None

    async def _write_all(self, answer: httpx.Response, file: LargeFile, have: int, opened: BinaryIO) -> None:
        told = have * 10 // file.bytes
        async with _ending(answer.aiter_raw(PIECE_BYTES)) as pieces:
            while have <= file.bytes:
                with trio.fail_after(STALL_SECONDS):
                    piece = await anext(pieces, b"")
                if not piece:
                    break
                await trio.sleep(self._download.delay(len(piece)))
                await trio.to_thread.run_sync(opened.write, piece[: file.bytes + 1 - have])
                have += len(piece)
                if told < (told := have * 10 // file.bytes) < 10:
                    await self._say(f"fetching {file.name}: {told * 10}% of {in_bytes(file.bytes)}")
        if have < file.bytes:
            raise _BrokenError(f"it ended after {have} of {file.bytes} bytes")


@asynccontextmanager
async def _ending(pieces: AsyncIterator[bytes]) -> AsyncIterator[AsyncIterator[bytes]]:
    """End httpx's generators with the block: it nests several, and to close the outermost leaves the others open."""
    try:
        yield pieces
    finally:
        # A cancelled read ends all of them, from the innermost outwards. What is in memory already may come before.
        with trio.CancelScope() as scope:
            scope.cancel()
            async for _ in pieces:
                pass


@asynccontextmanager
async def _answer(client: httpx.AsyncClient, url: str, begins: int) -> AsyncIterator[httpx.Response]:
    """Ask for a file from a place on, and follow redirects; each to HTTPS, or to the same server."""
    request = client.build_request("GET", url, headers={"Range": f"bytes={begins}-"} if begins else None)
    for _ in range(MAX_REDIRECTS):
        # To connect, and until the head is here: it may come byte by byte, which httpx's own timeout does not see.
        with trio.fail_after(2 * STALL_SECONDS):
            answer = await client.send(request, stream=True)
        try:
            after = answer.next_request
            if after is None:
                if answer.status_code not in (200, 206):
                    kind = _BrokenError if answer.status_code in TRY_LATER else _RefusedError
                    raise kind(f"it answers with HTTP {answer.status_code}")
                yield answer
                return
            here, there = ((each.url.scheme, each.url.host, each.url.port) for each in (request, after))
            if after.url.scheme != "https" and here != there:
                raise _RefusedError(f"it sends to {after.url}, which is not https")
            request = after
        finally:
            await answer.aclose()
    raise _RefusedError(f"it sends elsewhere {MAX_REDIRECTS} times")


def _total(answer: httpx.Response, begins: int) -> int | None:
    """Return the size of the whole file, as far as the answer says it; 0 if it goes on in another place."""
    if answer.status_code == 206:
        unit, _, rest = answer.headers.get("Content-Range", "").partition(" ")
        place, _, total = rest.partition("/")
        if unit != "bytes" or not place.startswith(f"{begins}-"):
            return 0
    else:
        total = answer.headers.get("Content-Length", "")
    return int(total) if total.isascii() and total.isdigit() and len(total) < 20 else None


def _size(part: Path) -> int:
    return part.stat().st_size if part.exists() else 0


async def _is(place: Path, file: LargeFile) -> bool:
    """Return whether a file has the bytes that the manifest names."""
    return await in_left_thread(has_bytes, place, file)  # gigabytes: Ctrl-C ends the wait
