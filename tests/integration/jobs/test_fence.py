"""A job's program in its fence: hostile ones end as documented, and nothing else on the machine changes."""

from __future__ import annotations

import os
import sys
from pathlib import Path
from typing import Any

import psutil
import pytest
import trio

from p2pavg.tools.jobs.escapes import ESCAPES, try_fence
from p2pavg.tools.jobs.fence import JOB, SCRATCH, FencedPlaces, fenced, limited, own_roots, python_places
from p2pavg.tools.jobs.limits import JobEnd
from p2pavg.tools.jobs.manifest import Needs
from p2pavg.tools.jobs.running import JobProgram
from tests.integration.jobs.fences import needs_fence

pytestmark = [pytest.mark.processes, needs_fence]

NEEDS = Needs(memory_gb=0.25, disk_gb=0.05)
WATCHDOG_SECONDS = 120.0


def test_no_attempt_gets_out() -> None:
    found = try_fence()
    assert [each.what for each in found] == list(ESCAPES)
    assert not [each.line for each in found if each.got_out]


PATHS = os.pathsep.join(own_roots())


async def ends(folder: Path, source: str, *, restarts: bool = False) -> tuple[JobEnd, list[str]]:
    """Run a program in the fence; return how it ended, and its words."""
    said: list[str] = []
    job, scratch, handed = (folder / name for name in ("job", "scratch", "handed"))
    for each in (job, scratch, handed):
        each.mkdir(exist_ok=True)
    (job / "train.py").write_text(source)
    python = Path(sys.executable)
    environment = {"PATH": "/usr/bin:/bin", "PYTHONPATH": PATHS, "HOME": SCRATCH, "PYTHONUNBUFFERED": "1"}
    places = FencedPlaces(job=job, scratch=scratch, handed=handed, python=python_places(python))
    limits: dict[str, Any] = {"network": False, "gpu": False, "shared_bytes": 2**27}
    command = fenced([str(python), f"{JOB}/train.py"], places, environment, **limits)
    command = limited(command, int(NEEDS.disk_gb * 2**30))
    program = JobProgram(command, environment, NEEDS, scratch, None, said.append, restarts=restarts)
    with trio.fail_after(WATCHDOG_SECONDS):
        end = await program.run()
    left = [each for each in psutil.process_iter(["cmdline"]) if str(job) in (each.info["cmdline"] or ())]
    assert not left
    return end, said


async def test_a_program_sees_its_folder_and_writes_to_scratch(tmp_path: Path) -> None:
    end, said = await ends(
        tmp_path,
        "import os, pathlib, sys\n"
        "print(os.getcwd(), sys.argv, sorted(os.listdir('.')), os.environ['HOME'])\n"
        "pathlib.Path(os.environ['HOME'], 'kept').write_text('x')\n",
    )
    assert end == JobEnd("the job's program has ended: its training is over", is_error=False)
    assert said == [f"{JOB} ['{JOB}/train.py'] ['train.py'] {SCRATCH}"]
    assert (tmp_path / "scratch" / "kept").read_text() == "x"


BEYOND = {
    "memory": (
        "x = bytearray(10**9)\nimport time; time.sleep(60)",
        "GB of memory, and its manifest says 0.25 GB",
    ),
    "disk": (
        "import os\nfor n in range(10**6):\n  open(f'/scratch/{n}', 'wb').write(bytes(10**6))",
        "GB of the disk, and its manifest says 0.05 GB",
    ),
    "processes": (
        "import os, time\nfor _ in range(400):\n  os.fork() or time.sleep(60)\ntime.sleep(60)",
        "processes at once",
    ),
    "shared": (
        "import time\nfor n in range(3): open(f'/dev/shm/{n}', 'wb').write(bytes(40 * 10**6))\n"
        "x = bytearray(160 * 10**6); time.sleep(60)",
        "GB of memory",
    ),
    "deleted": (
        "import os, time\nheld = []\n"
        "for _ in range(30):\n  held.append(open('/scratch/x', 'wb'))\n"
        "  held[-1].write(bytes(10**7)); held[-1].flush(); os.unlink('/scratch/x')\ntime.sleep(60)",
        "GB of the disk",
    ),
    "deep": (
        "import os, time\nos.chdir('/scratch')\n"
        "for _ in range(100):\n  os.mkdir('d' * 60); os.chdir('d' * 60)\ntime.sleep(60)",
        "more than 32 folders in each other",
    ),
    "hidden": (
        "import ctypes, os, time\n"
        "if ctypes.CDLL(None).prctl(4, 0, 0, 0, 0) == 0: raise SystemExit('hides')\n"
        "x = bytearray(10**9); time.sleep(60)",
        "GB of memory",
    ),
    "threads": (
        "import threading, time\nthreading.stack_size(2**16)\n"
        "for _ in range(5000):\n  threading.Thread(target=time.sleep, args=(60,), daemon=True).start()\n"
        "time.sleep(60)",
        "threads at once",
    ),
    "files": (
        "while True:\n  open(f'/scratch/{id(object())}{__import__(\"os\").urandom(8).hex()}', 'w')",
        "files",
    ),
}


@pytest.mark.parametrize("what", BEYOND)
async def test_a_program_that_takes_more_than_it_declared_is_ended(tmp_path: Path, what: str) -> None:
    source, why = BEYOND[what]
    end, _ = await ends(tmp_path, source, restarts=True)
    assert end.is_error
    assert why in end.why


async def test_a_file_that_is_too_large_cannot_be_written(tmp_path: Path) -> None:
    end, said = await ends(tmp_path, "open('/scratch/x', 'wb').write(bytes(100 * 10**6))")
    assert end == JobEnd("the program ended with exit code 1", is_error=True)
    assert "File too large" in said[-1]


async def test_a_program_that_kills_what_it_sees_ends_itself(tmp_path: Path) -> None:
    end, _ = await ends(
        tmp_path,
        "import os, signal\n"
        "for pid in [int(each) for each in os.listdir('/proc') if each.isdigit()] + [os.getppid(), -1]:\n"
        "  try: os.kill(pid, signal.SIGKILL)\n"
        "  except OSError: pass\n",
    )
    assert end.is_error


def children_of_the_main_thread() -> set[str]:
    return set(Path(f"/proc/self/task/{os.getpid()}/children").read_text().split())


async def test_the_main_thread_starts_the_fence(tmp_path: Path) -> None:
    """bubblewrap ends with the thread that has started it, and trio's threads end when they were idle for a while."""
    before, seen = children_of_the_main_thread(), set[str]()

    async def look() -> None:
        while True:
            seen.update(children_of_the_main_thread())
            await trio.sleep(0.02)

    async with trio.open_nursery() as nursery:
        nursery.start_soon(look)
        await ends(tmp_path, "import time\ntime.sleep(1)")
        nursery.cancel_scope.cancel()
    assert seen - before


async def test_nothing_of_a_program_goes_on_after_its_end(tmp_path: Path) -> None:
    """A daemon of its own, in a session of its own, ends with the first process."""
    end, _ = await ends(
        tmp_path,
        "import os, time\n"
        "if os.fork() == 0:\n"
        "  os.setsid()\n"
        "  if os.fork() == 0:\n"
        "    while True:\n"
        "      open('/scratch/alive', 'w').write(str(time.time())); time.sleep(0.05)\n"
        "  os._exit(0)\n"
        "time.sleep(1)\n",
    )
    assert not end.is_error
    alive = tmp_path / "scratch" / "alive"
    said = alive.read_text()
    await trio.sleep(1.0)
    assert alive.read_text() == said


async def test_a_program_that_prints_without_end_is_cut_short(tmp_path: Path) -> None:
    _, said = await ends(tmp_path, "for number in range(10**5): print(number)\nprint('x' * 10)")
    assert len(said) < 1000
    assert any("left out: it prints too much" in line for line in said)


async def test_words_have_nothing_that_a_terminal_obeys(tmp_path: Path) -> None:
    _, said = await ends(
        tmp_path,
        "import sys\nsys.stdout.buffer.write(b'\\x1b[2J\\xff\\x07ok\\n' + b'x' * 10**6 + b'\\n' + b'last')\n",
    )
    assert said[0] == "?[2J\ufffd?ok"
    assert max(map(len, said)) <= 500


async def test_a_program_that_fails_starts_again_until_it_is_stopped(tmp_path: Path) -> None:
    source = (
        "import pathlib\n"
        "tried = pathlib.Path('/scratch/tried')\n"
        "tried.write_text((tried.read_text() if tried.exists() else '') + 'x')\n"
        "raise SystemExit(0 if len(tried.read_text()) == 3 else 7)\n"
    )
    end, said = await ends(tmp_path, source, restarts=True)
    assert not end.is_error
    assert [line for line in said if "starts again" in line] == [
        "the program ended with exit code 7; it starts again in 1 s",
        "the program ended with exit code 7; it starts again in 2 s",
    ]
