"""A second version of a job: all that train change to it after the same update, and one that refuses stays out."""

from __future__ import annotations

import re
import signal
from pathlib import Path

import pytest

from tests.integration.jobs.fences import needs_fence
from tests.integration.jobs.join_work import MANIFEST, TRAIN, call, make_run, started

pytestmark = pytest.mark.processes


@needs_fence
def test_all_change_to_the_next_version_after_the_same_update(tmp_path: Path) -> None:
    first, links = make_run(tmp_path)
    program = tmp_path / "job" / "train.py"
    program.write_text(program.read_text().replace('f"update', 'f"second version: update'))
    packed = call(tmp_path, "job", "pack", "job", "-o", "second.job")
    found = re.search("root ([0-9a-f]{64})", packed)
    assert found is not None
    both = ("--yes", "--job", first, "--job", found.group(1))
    with (
        started(tmp_path, "operator", "join", "lab", *both) as operator,
        started(tmp_path, "one", "join", links[0], "--home", "one", *both) as one,
        # On a machine without a person, and of the first version alone.
        started(tmp_path, "stays", "join", links[1], "--home", "stays", "--yes", "--job", first) as stays,
    ):
        change = (operator, one)
        for each in (*change, stays):
            each.until("update [0-9]+ of 3 peers")
        # Far enough away for all to hear of it. The command's own choice is three minutes away.
        soon = max(operator.updates) + 100
        told = call(tmp_path, "job", "publish", "lab", "second.job", "--since", str(soon))
        since = re.search("version 2 of the job takes over after update ([0-9]+)", told)
        assert since is not None, told
        assert "it is published by" in told
        for each in change:
            each.until("second version: update [0-9]+ of 2 peers")
        assert stays.end() == 1
        assert "this machine will not go on with version 2" in stays.text
        assert f"and --job allows {first} only" in stays.text
        for each in change:
            each.until(f"second version: update {int(since.group(1)) + 3} ")
            each.process.send_signal(signal.SIGINT)
        assert [each.end() for each in change] == [0, 0]
    last = int(since.group(1))
    for each in (*change, stays):
        olds = [int(number) for number in re.findall("lab: update ([0-9]+) of", each.text)]
        # The step of the last one has not returned: the next version goes on from there.
        assert max(olds) == last - 1, each.text
        assert "Traceback" not in each.text
    for each in change:
        assert min(int(n) for n in re.findall("second version: update ([0-9]+) of", each.text)) == last + 1
    for number in (last - 2, last - 1, last + 1, last + 2):
        assert len({each.updates[number] for each in change}) == 1


@needs_fence
def test_a_version_that_fails_makes_room_for_the_one_that_is_mended(tmp_path: Path) -> None:
    job = tmp_path / "broken"
    job.mkdir()
    (job / "job.toml").write_text(MANIFEST)
    (job / "train.py").write_text("raise SystemExit('it is broken')")
    first, links = make_run(tmp_path, count=1, job=job)
    (job / "train.py").write_text(TRAIN.replace("FOLDER", str(tmp_path)))
    found = re.search("root ([0-9a-f]{64})", call(tmp_path, "job", "pack", str(job), "-o", "second.job"))
    assert found is not None
    both = ("--yes", "--job", first, "--job", found.group(1))
    with (
        started(tmp_path, "operator", "join", "lab", *both) as operator,
        started(tmp_path, "one", "join", links[0], "--home", "one", *both) as one,
    ):
        for each in (operator, one):
            each.until("it is broken")
        assert "version 2 of the job" in call(
            tmp_path, "job", "publish", "lab", "second.job", "--since", "1000"
        )
        for each in (operator, one):
            each.until("update [0-9]+ of 2 peers")
            assert "it fails, and makes room for the next version" in each.text or "version 2" in each.text
            each.process.send_signal(signal.SIGINT)
        assert [operator.end(), one.end()] == [0, 0]
