"""The larger files of a job: only their own bytes are taken, and what was fetched is not fetched again."""

from __future__ import annotations

import hashlib
import shutil
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from types import SimpleNamespace

import pytest
import trio

from p2pavg.base.errors import ConfigError, StateError
from p2pavg.base.files import locked
from p2pavg.net.limits.rate import UNLIMITED
from p2pavg.tools.jobs import mirrors as module
from p2pavg.tools.jobs.manifest import LargeFile
from p2pavg.tools.jobs.mirrors import MirrorFiles

CONTENT = bytes(range(256)) * 4096
HALF = len(CONTENT) // 2
REDIRECTS = {
    "/elsewhere": "http://localhost:1/",
    "/strange": "https://a..b/",
    "/nowhere": "https://[x]/",
    "/port": "https://127.0.0.1:99999999999999999999/",
    "/circle": "{}/circle",
    "/moved": "{}/good",
}


class Mirror:
    """A web server of this machine. Each path says what its server does wrong."""

    def __init__(self) -> None:
        self.asked: list[tuple[str, str | None]] = []
        """Paths and ranges."""
        self.ended = threading.Event()
        mirror = self

        class Handler(BaseHTTPRequestHandler):
            def do_GET(self) -> None:
                mirror.answer(self)

            def log_message(self, _: str, *args: object) -> None:
                pass

        self._server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self.url = f"http://127.0.0.1:{self._server.server_port}"

    @contextmanager
    def serving(self) -> Iterator[None]:
        thread = threading.Thread(target=self._server.serve_forever, kwargs={"poll_interval": 0.01})
        thread.start()
        try:
            yield
        finally:
            self.ended.set()
            self._server.shutdown()
            thread.join()
            self._server.server_close()

    def answer(self, to: BaseHTTPRequestHandler) -> None:
        wanted = to.headers.get("Range")
        self.asked.append((to.path, wanted))
        begins = int(wanted.removeprefix("bytes=").removesuffix("-")) if wanted else 0
        if to.path == "/missing":
            to.send_error(404)
            return
        if to.path in REDIRECTS:
            to.send_response(302)
            to.send_header("Location", REDIRECTS[to.path].format(self.url))
            to.end_headers()
            # A body that has no end, as far as a client is concerned that reads it.
            to.wfile.write(bytes(2**20))
            return
        if to.path == "/busy" and len(self.asked) < 3:
            to.send_error(503)
            return
        if to.path == "/dead" or (to.path == "/dead-once" and len(self.asked) == 1):
            to.connection.close()
            return
        if to.path == "/silent":
            self.ended.wait(20.0)
            return
        if to.path == "/drips":
            to.wfile.write(b"HTTP/1.1 200 OK\r\nContent-Length: %d\r\n\r\n" % len(CONTENT))
            while not self.ended.wait(0.02):
                to.wfile.write(b"x")
            return
        content = bytes(len(CONTENT)) if to.path == "/wrong" else CONTENT
        content += bytes(HALF) if to.path == "/long" else b""
        content = content[:HALF] if to.path == "/short" else content
        ranges = wanted is not None and to.path != "/no-ranges"
        to.send_response(206 if ranges else 200)
        if ranges:
            shifted = begins + (to.path == "/shifted")
            to.send_header("Content-Range", f"bytes {shifted}-{len(content) - 1}/{len(content)}")
        content = content[begins:] if ranges else content
        if to.path != "/unsaid":
            to.send_header("Content-Length", str(len(content)))
        to.end_headers()
        # It breaks off, and each answer brings some more.
        to.wfile.write(content[: HALF // 3] if to.path == "/breaks" else content)


@pytest.fixture
def mirror() -> Iterator[Mirror]:
    found = Mirror()
    with found.serving():
        yield found


@pytest.fixture
def around(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> SimpleNamespace:
    monkeypatch.setattr(module, "ASK_AGAIN_SECONDS", 0.001)
    said: list[str] = []

    async def say(line: str) -> None:
        await trio.lowlevel.checkpoint()
        said.append(line)

    files = MirrorFiles(tmp_path / "own", tmp_path / "kept", UNLIMITED, say)
    return SimpleNamespace(files=files, said=said, own=tmp_path / "own", kept=tmp_path / "kept")


def large(mirror: Mirror, *paths: str, content: bytes = CONTENT) -> LargeFile:
    return LargeFile(
        name="base/model",
        bytes=len(content),
        sha256=hashlib.sha256(content).hexdigest(),
        urls=tuple(f"{mirror.url}/{path}" for path in paths),
    )


def keep_part(around: SimpleNamespace, file: LargeFile, content: bytes) -> Path:
    """Write what an earlier start has fetched from the first mirror."""
    around.kept.mkdir(exist_ok=True)
    name = hashlib.sha256(file.urls[0].encode()).hexdigest()[:8]
    part: Path = around.kept / f"{file.sha256}-{file.bytes}.{name}.part"
    part.write_bytes(content)
    return part


async def test_a_file_is_fetched_once(mirror: Mirror, around: SimpleNamespace) -> None:
    for _ in range(2):
        found = await around.files.find([large(mirror, "good")])
        assert found["base/model"].read_bytes() == CONTENT
    assert mirror.asked == [("/good", None)]
    # What has changed on the disk is fetched again.
    found["base/model"].write_bytes(bytes(len(CONTENT)))
    found = await around.files.find([large(mirror, "good")])
    assert found["base/model"].read_bytes() == CONTENT
    # A manifest that names another size does not make this machine drop it.
    wrong = LargeFile(name="x", bytes=5, sha256=large(mirror).sha256)
    with pytest.raises(StateError, match="it has none"):
        await around.files.find([wrong])
    assert found["base/model"].read_bytes() == CONTENT


async def test_the_volunteers_own_copy_comes_first_if_it_is_the_one(
    mirror: Mirror, around: SimpleNamespace
) -> None:
    place = around.own / "base" / "model"
    place.parent.mkdir(parents=True)
    place.write_bytes(CONTENT)
    assert await around.files.find([large(mirror)]) == {"base/model": place}
    place.write_bytes(CONTENT[::-1])
    assert (await around.files.find([large(mirror, "good")]))["base/model"] != place
    assert "is another file than the job's" in around.said[0]


@pytest.mark.parametrize(
    ("bad", "why"),
    [
        ("missing", "HTTP 404"),
        ("wrong", "its bytes are not those that the job names"),
        ("long", "a file of another size"),
        ("short", "a file of another size"),
        ("elsewhere", "which is not https"),
        ("strange", ""),
        ("nowhere", ""),
        ("port", ""),
        ("circle", "sends elsewhere 10 times"),
        ("dead", ""),
        ("silent", "brought next to nothing"),
        ("drips", "brought next to nothing"),
    ],
)
async def test_a_mirror_that_gives_something_else_is_passed_over(
    mirror: Mirror, around: SimpleNamespace, monkeypatch: pytest.MonkeyPatch, bad: str, why: str
) -> None:
    monkeypatch.setattr(module, "STALL_SECONDS", 0.3)
    found = await around.files.find([large(mirror, bad, "good")])
    assert found["base/model"].read_bytes() == CONTENT
    assert any(f"no base/model from {mirror.url}: " in line and why in line for line in around.said), (
        around.said
    )
    assert not list(around.kept.glob("*.part"))


@pytest.mark.parametrize("path", ["busy", "dead-once", "moved", "unsaid"])
async def test_a_mirror_that_has_no_time_or_moves_gives_it_in_the_end(
    mirror: Mirror, around: SimpleNamespace, path: str
) -> None:
    found = await around.files.find([large(mirror, path)])
    assert found["base/model"].read_bytes() == CONTENT


async def test_what_was_fetched_before_is_not_fetched_again(mirror: Mirror, around: SimpleNamespace) -> None:
    found = await around.files.find([large(mirror, "breaks")])
    assert found["base/model"].read_bytes() == CONTENT
    # Each try brings two whole pieces, and a third that is cut off.
    assert mirror.asked == [
        ("/breaks", f"bytes={begins}-" if begins else None)
        for begins in range(0, len(CONTENT), 2 * module.PIECE_BYTES)
    ]


FROM_HALF = f"bytes={HALF}-"


@pytest.mark.parametrize(
    ("paths", "part", "asked"),
    [
        (["good"], CONTENT[:HALF], [("/good", FROM_HALF)]),
        (["no-ranges"], CONTENT[:HALF], [("/no-ranges", FROM_HALF)]),
        (["good"], CONTENT, []),  # the process was ended before it gave it its name
        (["good"], bytes(HALF), [("/good", FROM_HALF), ("/good", None)]),  # the mirror's file has changed
        (["shifted", "good"], bytes(HALF), [("/shifted", FROM_HALF), ("/good", None)]),
        # No mirror goes on with the bytes of another.
        (["missing", "good"], bytes(HALF), [("/missing", FROM_HALF), ("/good", None)]),
    ],
    ids=["half", "no ranges", "whole", "changed", "shifted", "another mirror"],
)
async def test_the_next_start_goes_on_with_the_bytes_of_a_mirror(
    mirror: Mirror,
    around: SimpleNamespace,
    paths: list[str],
    part: bytes,
    asked: list[tuple[str, str | None]],
) -> None:
    file = large(mirror, *paths)
    keep_part(around, file, part)
    assert (await around.files.find([file]))["base/model"].read_bytes() == CONTENT
    assert mirror.asked == asked


async def test_a_file_that_no_mirror_has_is_named_with_every_reason(
    mirror: Mirror, around: SimpleNamespace
) -> None:
    with pytest.raises(StateError) as caught:
        await around.files.find([large(mirror, "missing", "wrong", "dead")])
    assert "the job needs base/model (1.0 MB" in str(caught.value)
    assert "HTTP 404" in str(caught.value)
    assert "its bytes are not those" in str(caught.value)
    assert "--files DIR" in str(caught.value.remedy)
    assert [path for path, _ in mirror.asked].count("/dead") == module.MAX_BREAKS


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="needs /dev/full, a disk without space")
async def test_a_full_disk_is_no_fault_of_the_mirror(
    mirror: Mirror, around: SimpleNamespace, monkeypatch: pytest.MonkeyPatch
) -> None:
    file = large(mirror, "good")
    part = keep_part(around, file, b"")
    part.unlink()
    part.symlink_to("/dev/full")
    with pytest.raises(ConfigError, match="No space left on device"):
        await around.files.find([file])
    monkeypatch.setattr(shutil, "disk_usage", lambda _: SimpleNamespace(free=HALF))
    with pytest.raises(ConfigError, match=r"has 524.3 kB free, and the job's file base/model has 1.0 MB"):
        await around.files.find([file])
    assert not any(line.startswith("no base/model") for line in around.said)


async def test_a_folder_that_cannot_be_read_or_written_is_named(
    mirror: Mirror, around: SimpleNamespace
) -> None:
    around.own.write_text("no folder")
    around.kept.write_text("no folder")
    with pytest.raises(
        ConfigError, match="kept cannot be written, for the job's file base/model: File exists"
    ):
        await around.files.find([large(mirror, "good")])


async def test_two_processes_fetch_it_once(
    mirror: Mirror, around: SimpleNamespace, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "LOOK_SECONDS", 0.01)
    file = large(mirror, "good")
    around.kept.mkdir()
    async with trio.open_nursery() as nursery:
        with locked(around.kept / f"{file.sha256}-{file.bytes}.lock"):
            nursery.start_soon(around.files.find, [file])
            with trio.fail_after(60.0):
                while not around.said:
                    await trio.sleep(0.01)
            assert mirror.asked == []
    assert mirror.asked == [("/good", None)]
    assert around.said[0] == "another p2pavg of this user fetches it; this one waits"


async def test_ctrl_c_ends_it_at_once(mirror: Mirror, around: SimpleNamespace) -> None:
    with trio.move_on_after(0.3) as scope:
        await around.files.find([large(mirror, "silent")])
    assert scope.cancelled_caught
    with locked(around.kept / f"{large(mirror).sha256}-{len(CONTENT)}.lock"):
        pass
