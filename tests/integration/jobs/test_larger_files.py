"""A job with a file that members do not carry: a volunteer's program reads it where it lies in the job's folder."""

from __future__ import annotations

import hashlib
import os
from functools import partial
from http.server import SimpleHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from threading import Thread

import pytest

from tests.integration.jobs.fences import needs_fence
from tests.integration.jobs.join_work import MANIFEST, make_run, started

pytestmark = pytest.mark.processes

BASE = bytes(range(256)) * 1000
TRAIN = """
import hashlib, os, p2pavg
with p2pavg.job() as job:
    base = (job.folder / "base" / "model").read_bytes()
    print("its digest is", hashlib.sha256(base).hexdigest(), flush=True)
    try:
        (job.folder / "base" / "model").write_bytes(b"other")
    except OSError as error:
        print("it cannot be changed:", error.strerror, flush=True)
"""


class _Quiet(SimpleHTTPRequestHandler):
    def log_message(self, *_: object) -> None:
        pass


@pytest.mark.parametrize(
    "source", [pytest.param("mirror", marks=needs_fence), pytest.param("own", marks=needs_fence), "unfenced"]
)
def test_the_program_reads_its_base(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, source: str) -> None:
    (tmp_path / "web" / "base").mkdir(parents=True)
    (tmp_path / "web" / "base" / "model").write_bytes(BASE)
    server = ThreadingHTTPServer(("127.0.0.1", 0), partial(_Quiet, directory=tmp_path / "web"))
    thread = Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01})
    thread.start()
    try:
        job = tmp_path / "job"
        job.mkdir()
        digest = hashlib.sha256(BASE).hexdigest()
        (job / "job.toml").write_text(
            f"{MANIFEST}[[files]]\nname = 'base/model'\nbytes = {len(BASE)}\nsha256 = '{digest}'\n"
            f"urls = ['http://127.0.0.1:{server.server_port}/base/model']\n"
        )
        (job / "train.py").write_text(TRAIN)
        root, _ = make_run(tmp_path, count=1, job=job)
        # Of this test alone: nothing is there from another one.
        monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
        if source == "unfenced":
            monkeypatch.setenv("PATH", str(tmp_path))  # no bwrap in it
        words = ["--files", str(tmp_path / "web")] if source == "own" else []
        words += ["--no-fence"] if source == "unfenced" else []
        with started(tmp_path, "one", "join", "lab", "--yes", "--job", root, *words) as one:
            assert one.end() == 0, one.text
        assert (
            f"fetches   1 larger file, 256.0 kB, from http://127.0.0.1:{server.server_port}; kept in"
            in one.text
        )
        assert f"its digest is {digest}" in one.text
        kept = tmp_path / "cache" / "p2pavg" / "files" / f"{digest}-{len(BASE)}"
        assert kept.exists() == (source != "own")
        if source != "unfenced":
            assert f"it cannot be changed: {os.strerror(30)}" in one.text  # a read-only file system
            assert (kept if source == "mirror" else tmp_path / "web" / "base" / "model").read_bytes() == BASE
    finally:
        server.shutdown()
        thread.join()
        server.server_close()
