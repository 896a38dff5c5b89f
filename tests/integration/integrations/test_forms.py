"""One training loop in five forms: a few lines make each train with three peers, and all end with the same bits."""

from __future__ import annotations

import difflib
import importlib.util
import os
import subprocess
import sys
from contextlib import ExitStack
from pathlib import Path

import pytest
import torch

import p2pavg
from p2pavg.blocking import open_averager

LOOPS = Path(__file__).resolve().parents[3] / "docs" / "examples" / "loops"
PACKAGES = {
    "plain": None,
    "ddp": None,
    "accelerate": "accelerate",
    "lightning": "lightning",
    "trainer": "transformers",
}
RANKS = 2
MOST_LINES = 5
SECONDS = 240.0
forms = pytest.mark.parametrize("form", PACKAGES)
plain_and_others = pytest.mark.parametrize(
    "form", [pytest.param(form, marks=[] if form == "plain" else pytest.mark.long) for form in PACKAGES]
)


def lines_of(name: str) -> list[str]:
    return [line for line in (LOOPS / f"{name}.py").read_text(encoding="utf-8").splitlines() if line.strip()]


@forms
def test_a_form_is_changed_by_five_lines_at_most(form: str) -> None:
    """A line that is replaced counts once, and blank lines do not count."""
    alone, with_peers = lines_of(f"loop_{form}"), lines_of(f"peers_{form}")
    matcher = difflib.SequenceMatcher(None, alone, with_peers, autojunk=False)
    changed = sum(
        max(old_end - old, new_end - new)
        for kind, old, old_end, new, new_end in matcher.get_opcodes()
        if kind != "equal"
    )
    assert 0 < changed <= MOST_LINES
    assert 30 <= len(alone) <= 45, "a loop of about 40 lines"


def test_every_form_is_tested() -> None:
    assert {path.stem for path in LOOPS.glob("*.py")} == {
        f"{kind}_{form}" for form in PACKAGES for kind in ("loop", "peers")
    }


def needs(form: str) -> None:
    package = PACKAGES[form]
    if package is not None and importlib.util.find_spec(package) is None:
        pytest.skip(f"{package} is not installed: pip install '.[{package}]'")


def command(form: str, kind: str) -> list[str]:
    program = str(LOOPS / f"{kind}_{form}.py")
    if form == "ddp":
        run = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(RANKS)]
        return [sys.executable, *run, program, "model.pt"]
    return [sys.executable, program, "model.pt"]


def started(folder: Path, *words: str) -> subprocess.Popen[str]:
    folder.mkdir()
    return subprocess.Popen(
        words,
        cwd=folder,
        env={**os.environ, "OMP_NUM_THREADS": "1"},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )


def parameters_in(folder: Path) -> list[torch.Tensor]:
    """Return one vector for each file of parameters in a folder."""
    files = sorted(folder.glob("model.pt*"))
    states = [torch.load(file, weights_only=True) for file in files]
    return [torch.cat([tensor.reshape(-1) for tensor in state.values()]) for state in states]


@plain_and_others
def test_the_original_trains(form: str, tmp_path: Path) -> None:
    needs(form)
    with started(tmp_path / "alone", *command(form, "loop")) as process:
        said, _ = process.communicate(timeout=SECONDS)
    assert process.returncode == 0, said
    assert parameters_in(tmp_path / "alone")


@plain_and_others
def test_three_peers_end_with_the_same_parameters(form: str, tmp_path: Path) -> None:
    """The bootstrap peer is no peer of the run: each program is started in the same way."""
    needs(form)
    config = p2pavg.AveragingConfig(run_id="bootstrap")
    with ExitStack() as stack:
        bootstrap = stack.enter_context(open_averager(config, listen=["/ip4/127.0.0.1/tcp/0"]))
        processes = []
        for peer in range(3):
            words = [*command(form, "peers"), bootstrap.addresses[0]]
            process = stack.enter_context(started(tmp_path / f"peer-{peer}", *words))
            stack.callback(process.kill)
            processes.append(process)
        said = [process.communicate(timeout=SECONDS)[0] for process in processes]
    assert [process.returncode for process in processes] == [0, 0, 0], "\n".join(said)
    assert not any("Traceback" in text for text in said), "\n".join(said)
    found = [vector for peer in range(3) for vector in parameters_in(tmp_path / f"peer-{peer}")]
    assert len(found) == 3 * (RANKS if form == "ddp" else 1)
    assert all(torch.equal(vector, found[0]) for vector in found)
    assert bool(found[0].isfinite().all())
