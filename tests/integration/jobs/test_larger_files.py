"""A job with a file that members do not carry: a volunteer's program reads it where it lies in the job's folder."""

from __future__ import annotations

import hashlib
import os
from collections.abc import Iterator
from functools import partial
from http.server import SimpleHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from threading import Thread

import pytest

from tests.integration.jobs.fences import needs_fence
from tests.integration.jobs.join_work import MANIFEST, make_run, started

pytestmark = pytest.mark.processes

BASE, TOKENS = bytes(range(256)) * 1000, bytes(range(128)) * 1000
MANIFEST_LINES = "[[files]]\nname = 'base/{}'\nbytes = {}\nsha256 = '{}'\n"
TRAIN = """
import hashlib, os, p2pavg
with p2pavg.job() as job:
    for name in ("model", "tokens"):
        file = job.folder / "base" / name
        print(f"the digest of {name} is", hashlib.sha256(file.read_bytes()).hexdigest(), flush=True)
        try:
            file.write_bytes(b"other")
        except OSError as error:
            print(f"{name} cannot be changed:", error.strerror, flush=True)
"""


class _Quiet(SimpleHTTPRequestHandler):
    def log_message(self, *_: object) -> None:
        pass


@pytest.fixture
def mirror(tmp_path: Path) -> Iterator[str]:
    """A mirror that has the model; return its URL."""
    (tmp_path / "web" / "base").mkdir(parents=True)
    (tmp_path / "web" / "base" / "model").write_bytes(BASE)
    with ThreadingHTTPServer(("127.0.0.1", 0), partial(_Quiet, directory=tmp_path / "web")) as server:
        thread = Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01})
        thread.start()
        yield f"http://127.0.0.1:{server.server_port}"
        server.shutdown()
        thread.join()


@pytest.mark.parametrize("has_fence", [pytest.param(True, marks=needs_fence), False], ids=["fenced", "bare"])
def test_the_program_reads_a_mirrors_file_and_the_volunteers_own(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, mirror: str, has_fence: bool
) -> None:
    own = tmp_path / "own" / "base" / "tokens"
    own.parent.mkdir(parents=True)
    own.write_bytes(TOKENS)
    job = tmp_path / "job"
    job.mkdir()
    digests = {name: hashlib.sha256(data).hexdigest() for name, data in (("model", BASE), ("tokens", TOKENS))}
    files = [
        MANIFEST_LINES.format("model", len(BASE), digests["model"]) + f"urls = ['{mirror}/base/model']\n",
        MANIFEST_LINES.format("tokens", len(TOKENS), digests["tokens"]),
    ]
    (job / "job.toml").write_text(MANIFEST + "".join(files))
    (job / "train.py").write_text(TRAIN)
    root, _ = make_run(tmp_path, count=1, job=job)
    # Of this test alone: nothing is there from another one.
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    words = ["join", "lab", "--yes", "--job", root, "--files", str(tmp_path / "own")]
    if not has_fence:
        monkeypatch.setenv("PATH", str(tmp_path))  # no bwrap in it
        with started(tmp_path, "refused", *words) as refused:
            assert refused.end() == 1
            missing = "THERE IS NO FENCE AROUND THIS PROGRAM: the program bwrap is not installed"
            assert missing in refused.text
            assert "--yes runs a job behind a fence only" in refused.text
        assert not (tmp_path / "lab" / "scratch").exists()
        words.append("--no-fence")
    with started(tmp_path, "one", *words) as one:
        assert one.end() == 0, one.text
    assert f"fetches   2 larger files, 384.0 kB, from {mirror}, your --files; kept in" in one.text
    for name, digest in digests.items():
        assert f"the digest of {name} is {digest}" in one.text
    kept = tmp_path / "cache" / "p2pavg" / "files"
    assert [file.name for file in kept.glob("*-*0")] == [f"{digests['model']}-{len(BASE)}"]
    if has_fence:
        for name in digests:
            assert f"{name} cannot be changed: {os.strerror(30)}" in one.text  # a read-only file system
        assert (kept / f"{digests['model']}-{len(BASE)}").read_bytes() == BASE
        assert own.read_bytes() == TOKENS
