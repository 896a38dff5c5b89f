"""The larger files of a job: only their own bytes are taken, and what was fetched is not fetched again."""

from __future__ import annotations

import hashlib
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from types import SimpleNamespace

import pytest

from p2pavg.base.errors import ConfigError
from p2pavg.base.files import locked
from p2pavg.net.limits.rate import UNLIMITED
from p2pavg.tools.jobs import mirrors as module
from p2pavg.tools.jobs.manifest import LargeFile
from p2pavg.tools.jobs.mirrors import MirrorFiles

CONTENT = bytes(range(256)) * 4096
HALF = len(CONTENT) // 2


class Mirror:
    """A web server of this machine. Each path says what its server does wrong."""

    def __init__(self) -> None:
        self.asked: list[tuple[str, str | None]] = []
        """Paths and ranges."""
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
        if to.path == "/elsewhere":
            to.send_response(302)
            to.send_header("Location", f"{self.url}/good")
            to.end_headers()
            return
        content = bytes(len(CONTENT)) if to.path == "/wrong" else CONTENT
        content += bytes(HALF) if to.path == "/long" else b""
        content = content[:HALF] if to.path == "/short" else content
        ranges = wanted is not None and to.path not in ("/no-ranges", "/wrong")
        to.send_response(206 if ranges else 200)
        if ranges:
            to.send_header("Content-Range", f"bytes {begins}-{len(content) - 1}/{len(content)}")
        content = content[begins:] if ranges else content
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
def around(tmp_path: Path) -> SimpleNamespace:
    said: list[str] = []
    files = MirrorFiles(tmp_path / "own", tmp_path / "kept", UNLIMITED, said.append)
    return SimpleNamespace(files=files, said=said, own=tmp_path / "own", kept=tmp_path / "kept")


def large(mirror: Mirror, *paths: str, content: bytes = CONTENT) -> LargeFile:
    return LargeFile(
        name="base/model",
        bytes=len(content),
        sha256=hashlib.sha256(content).hexdigest(),
        urls=tuple(f"{mirror.url}/{path}" for path in paths),
    )


def test_a_file_is_fetched_once(mirror: Mirror, around: SimpleNamespace) -> None:
    for _ in range(2):
        found = around.files.find([large(mirror, "good")])
        assert found["base/model"].read_bytes() == CONTENT
    assert mirror.asked == [("/good", None)]
    # What has changed on the disk is fetched again.
    found["base/model"].write_bytes(bytes(len(CONTENT)))
    assert around.files.find([large(mirror, "good")])["base/model"].read_bytes() == CONTENT


def test_the_volunteers_own_copy_comes_first_if_it_is_the_one(
    mirror: Mirror, around: SimpleNamespace
) -> None:
    place = around.own / "base" / "model"
    place.parent.mkdir(parents=True)
    place.write_bytes(CONTENT)
    assert around.files.find([large(mirror)]) == {"base/model": place}
    place.write_bytes(CONTENT[::-1])
    assert around.files.find([large(mirror, "good")])["base/model"] != place
    assert "is another file than the job's" in around.said[0]


@pytest.mark.parametrize("bad", ["missing", "wrong", "long", "short", "elsewhere"])
def test_a_mirror_that_gives_something_else_is_passed_over(
    mirror: Mirror, around: SimpleNamespace, bad: str
) -> None:
    found = around.files.find([large(mirror, bad, "good")])
    assert found["base/model"].read_bytes() == CONTENT
    assert any("127.0.0.1 does not give base/model" in line for line in around.said)


def test_what_was_fetched_before_is_not_fetched_again(mirror: Mirror, around: SimpleNamespace) -> None:
    file = large(mirror, "breaks")
    assert around.files.find([file])["base/model"].read_bytes() == CONTENT
    assert len(mirror.asked) == 7  # the last of them for the bytes that the division leaves
    assert mirror.asked[1] == ("/breaks", f"bytes={HALF // 3}-")
    # Also by the next start, at a mirror that knows no ranges too.
    for path, range_ in (("good", f"bytes={HALF}-"), ("no-ranges", f"bytes={HALF}-")):
        (around.kept / file.sha256).rename((around.kept / file.sha256).with_suffix(".part"))
        with (around.kept / file.sha256).with_suffix(".part").open("r+b") as part:
            part.truncate(HALF)
        assert around.files.find([large(mirror, path)])["base/model"].read_bytes() == CONTENT
        assert mirror.asked[-1] == (f"/{path}", range_)


def test_a_file_that_was_complete_when_the_process_ended_is_taken(
    mirror: Mirror, around: SimpleNamespace
) -> None:
    file = large(mirror, "good")
    around.kept.mkdir()
    (around.kept / file.sha256).with_suffix(".part").write_bytes(CONTENT)
    assert around.files.find([file])["base/model"].read_bytes() == CONTENT
    assert mirror.asked == []


def test_a_mirror_is_not_blamed_for_what_another_has_given(mirror: Mirror, around: SimpleNamespace) -> None:
    file = large(mirror, "good")
    around.kept.mkdir()
    (around.kept / file.sha256).with_suffix(".part").write_bytes(bytes(HALF))
    assert around.files.find([file])["base/model"].read_bytes() == CONTENT
    assert mirror.asked == [("/good", f"bytes={HALF}-"), ("/good", None)]


def test_a_file_that_nobody_has_is_named_with_every_reason(mirror: Mirror, around: SimpleNamespace) -> None:
    with pytest.raises(ConfigError) as caught:
        around.files.find([large(mirror, "missing", "wrong")])
    assert "the job needs base/model (1.0 MB" in str(caught.value)
    assert "404" in str(caught.value)
    assert "its bytes are not those" in str(caught.value)
    assert "--files DIR" in str(caught.value.remedy)
    with pytest.raises(ConfigError, match="it has none"):
        around.files.find([large(mirror)])


def test_a_folder_that_cannot_be_written_is_named(mirror: Mirror, around: SimpleNamespace) -> None:
    around.kept.write_text("no folder")
    with pytest.raises(ConfigError, match="cannot be kept in"):
        around.files.find([large(mirror, "good")])


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="needs /dev/full, a disk without space")
def test_a_full_disk_is_no_fault_of_the_mirror(mirror: Mirror, around: SimpleNamespace) -> None:
    file = large(mirror, "good")
    around.kept.mkdir()
    (around.kept / file.sha256).with_suffix(".part").symlink_to("/dev/full")
    with pytest.raises(ConfigError, match="No space left on device"):
        around.files.find([file])
    assert not any("does not give" in line for line in around.said)


def test_nothing_more_is_fetched_once_it_was_stopped(mirror: Mirror, around: SimpleNamespace) -> None:
    around.files.stop()
    with pytest.raises(Exception, match=r"^$"):
        around.files.find([large(mirror, "good")])
    assert not (around.kept / large(mirror).sha256).exists()


def test_two_processes_fetch_it_once(
    mirror: Mirror, around: SimpleNamespace, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "LOOK_SECONDS", 0.01)
    file = large(mirror, "good")
    around.kept.mkdir()
    with locked((around.kept / file.sha256).with_suffix(".lock")):
        waits = threading.Thread(target=around.files.find, args=([file],))
        waits.start()
        waits.join(0.2)
        assert waits.is_alive()
        assert mirror.asked == []
    waits.join()
    assert mirror.asked == [("/good", None)]
