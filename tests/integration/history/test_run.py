"""A run of real processes whose members come, go and lie, kept by two archivists, one of which is killed."""

from __future__ import annotations

import json
import os
import re
import signal
import sys
from contextlib import ExitStack
from pathlib import Path

import pytest

from p2pavg.runs.records.identity import load_seed
from p2pavg_dht import Ed25519Signer
from tests.integration.jobs.join_work import COMMAND, Started
from tests.programs import run_python
from tests.unit.verification.evidence.samples import contradiction

pytestmark = [pytest.mark.processes, pytest.mark.long]

WORK = [sys.executable, "-m", "tests.integration.history.work"]
PEERS = 4
UPDATES = 60
ROOT = Path(__file__).parents[3]


class Stage:
    """The folder of a run, and its processes."""

    def __init__(self, folder: Path, stack: ExitStack) -> None:
        self.folder, self._stack = folder, stack
        self.command("run", "create", "lab", "--address", "127.0.0.1")
        said = self.command("run", "link", "lab", "--count", "6")
        self._links = re.findall(r"p2pavg:\S+", said)

    def command(self, *words: str, code: int = 0, **environment: str) -> str:
        """Run a command to its end."""
        homes = {f"XDG_{kind.upper()}_HOME": str(self.folder / kind) for kind in ("data", "cache")}
        own = {**os.environ, **environment, **homes}
        done = run_python(*COMMAND[1:], *words, cwd=self.folder, env=own, timeout=300)
        assert done.returncode == code, done.stdout + done.stderr
        return done.stdout

    def peer(self, number: int, name: str = "", **options: object) -> Started:
        """Start a peer that trains."""
        name = name or f"peer{number}"
        given = {
            "seed": number,
            "peers": PEERS,
            "updates": UPDATES,
            "out": str(self.folder / f"{name}.safetensors"),
            **options,
        }
        run = "lab" if number == 0 else self._links[number]
        home = "" if number == 0 else str(self.folder / f"home{number}")
        return self._started(name, run, home, json.dumps(given), command=WORK)

    def archivist(self, name: str) -> Started:
        """Start an archivist that trains nothing."""
        homes = ("--home", str(self.folder / "homeA"), str(self.folder / "other"))
        return self._started(name, "archive", "--run", self._links[5], *homes, command=COMMAND)

    def _started(self, name: str, *words: str, command: list[str]) -> Started:
        found = Started(self.folder, name, *words, command=command)
        self._stack.callback(found.close)
        return found


def test_a_run_is_verified_from_its_first_update_to_its_last_bit(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PYTHONPATH", str(ROOT))
    with ExitStack() as stack:
        here = Stage(tmp_path, stack)
        evidence = tmp_path / "evidence"
        first = here.peer(0, history=str(tmp_path / "one"), evidence=str(evidence))
        address = first.until(r"peer 12D3\S+ at (\S+)")[1]
        others = [here.peer(number) for number in (1, 2, 3)]
        archivist = here.archivist("archivist")
        first.until("update 4 ")
        archivist.until("recorded update 2")
        # One is killed, and comes back late; the archivist is killed, too.
        others[0].process.kill()
        archivist.process.kill()
        first.until("update 8 ")
        late = here.peer(1, "late")
        archivist = here.archivist("archivist again")
        late.until("update [0-9]+ of [1-9]")
        # One is revoked.
        revoked = others[1].until("peer (12D3[A-Za-z0-9]+)")[1]
        here.command("run", "revoke", "lab/lab.run", "home2/lab.cert", "--bootstrap", address)
        first.until("update (1[5-9]|[2-5][0-9]) ")
        # One has lied.
        key = tmp_path / "home3" / "identity.key"
        liar = Ed25519Signer(load_seed(key))
        draft = tmp_path / "draft"
        draft.write_bytes(contradiction(by=liar))
        draft.rename(evidence)
        first.until("ended")
        late.until("ended")
        archivist.until(f"recorded update {UPDATES}")
        archivist.process.send_signal(signal.SIGTERM)
        assert archivist.end() == 0
        assert (first.end(), late.end()) == (0, 0)
        here.command("history", "merge", "both", "one", "other")
        for threads in ("1", "3"):
            said = here.command(
                *("history", "verify", "both", "--again", "--run", "lab/lab.run"),
                *("--model", "late.safetensors"),
                OMP_NUM_THREADS=threads,
            )
            whole = (
                f"{UPDATES} updates of 4 peers, from the snapshot of update 0 to update {UPDATES}: replayed"
            )
            assert whole in said
            assert "missing" not in said
            assert "the parameters in late.safetensors are these" in said
            assert f"{liar.peer_id} was excluded: it signed that it holds two" in said
        said_by = json.loads(here.command("history", "credits", "both", "--format", "json"))
        by_peer = {each["peers"][0]: each for each in said_by["contributors"]}
        assert by_peer[liar.peer_id]["struck_out"]
        assert 0 < by_peer[revoked]["updates"] < UPDATES
