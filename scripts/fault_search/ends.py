"""Whole runs from start to end: ``scripts/faults starts --ends`` and ``--virtual``, which says what is checked."""

from __future__ import annotations

import json
import multiprocessing
import os
import re
import signal
import sys
import tempfile
import time
import traceback
from collections.abc import Sequence
from contextlib import ExitStack
from pathlib import Path

from scripts.fault_search.starts import ENDED, OPENED, QUICKSTART, _address_of, running
from tests.simulation.ends import TOLD_SECONDS, UPDATES, EndSetting, Incident, draw_setting, play_ends

TOLD = "RunEndedError: the run has ended"
START_SECONDS = 300.0  # for all processes to open their averagers: a busy machine takes minutes
STAYS = "stays for peers that lack it"
AWAKE = "awake again"


def play_virtual(seeds: Sequence[int], processes: int) -> int:
    """Play runs on virtual time; print what is wrong, and return the number of runs in which something is."""
    if not seeds:
        return 0
    wrong = told = 0
    began = time.monotonic()
    with multiprocessing.get_context("spawn").Pool(processes) as pool:
        for done, (seed, count, findings) in enumerate(pool.imap_unordered(_play, seeds), 1):
            told += count
            if findings:
                wrong += 1
                print(f"seed {seed}: {'; '.join(findings)}", flush=True)
            if done % 10 == 0 or done == len(seeds):
                seconds = time.monotonic() - began
                print(f"{done} virtual runs in {seconds:.0f} s: {wrong} wrong, {told} peers told", flush=True)
    return wrong


def _play(seed: int) -> tuple[int, int, list[str]]:
    try:
        ends = play_ends(draw_setting(seed))
    except Exception as error:  # noqa: BLE001 - a peer's program has failed: that is a finding
        return seed, 0, [repr(error)]
    return seed, sum(bool(end.told) for end in ends.peers), ends.findings()


# ---------------------------------------------------------------------- real processes


def program(*, local: bool, epochs: int = UPDATES) -> str:
    """Return the documented program with naps, which prints its lineage and a digest of its parameters at the end."""
    found = re.search(r"```python\n(.*?)```", QUICKSTART.read_text(encoding="utf-8"), flags=re.DOTALL)
    assert found is not None
    text = found.group(1)
    given = "AveragedOptimizer(inner, averager, target_batch_size=256)"
    local_updates = "p2pavg.optim.diloco(inner, averager, sync_every=10)"
    for was, becomes in (
        (given, local_updates if local else given),
        (
            "while optimizer.epoch < 20:",
            f"naps = dict(json.loads(sys.argv[2]))\n    while optimizer.epoch < {epochs}:\n"
            "        for at in [at for at in naps if at <= optimizer.epoch]:\n"
            "            time.sleep(naps.pop(at))\n"
            f'            print("{AWAKE}", flush=True)\n'
            "        time.sleep(float(sys.argv[3]))",
        ),
        ("import sys\n", "import json\nimport sys\nimport time\n"),
        ("bootstrap=sys.argv[1:]", "bootstrap=sys.argv[1:2]"),
        ("loss {report.metrics['loss']:.3f}\"\n", "loss {report.metrics['loss']:.3f}\", flush=True\n"),
    ):
        assert text.count(was) == 1, f"docs/tutorial/quickstart.md has no longer: {was}"
        text = text.replace(was, becomes)
    held = "optimizer.anchor" if local else "list(model.parameters())"
    return text + (
        "    from p2pavg.optim.base.state import digest_of\n"
        f'    print("{ENDED}", optimizer.epoch, optimizer.lineage.state.hex(), digest_of({held}).hex(), flush=True)\n'
    )


FORKS = multiprocessing.get_context("forkserver")
"""Its server imports torch once. Several imports at once would take longer than the delays that a run draws."""


class _Lines:
    """The output of a process, of which each line begins with the time."""

    def __init__(self, path: str) -> None:
        self._file = open(path, "w", encoding="utf-8")  # noqa: SIM115 - open until the process ends
        self._begins = True

    def write(self, text: str) -> int:
        for part in text.splitlines(keepends=True):
            self._file.write(f"{time.monotonic():.3f} {part}" if self._begins else part)
            self._begins = part.endswith("\n")
        self._file.flush()
        return len(text)

    def flush(self) -> None:
        self._file.flush()


def _main(text: str, arguments: list[str], log: str, delay: float) -> None:
    """Run the program in this process."""
    sys.stdout = sys.stderr = lines = _Lines(log)
    sys.argv = ["train.py", *arguments]
    time.sleep(delay)
    try:
        exec(compile(text, "train.py", "exec"), {"__name__": "__main__"})
    except BaseException:  # noqa: BLE001 - as the interpreter does at the end of a program
        traceback.print_exc(file=lines)
        os._exit(1)


class _Process:
    """One forked process and its lines."""

    def __init__(self, text: str, arguments: list[str], log: Path, delay: float) -> None:
        self._log = log
        self._process = FORKS.Process(target=_main, args=(text, arguments, str(log), delay), daemon=True)
        self._process.start()

    @property
    def lines(self) -> list[tuple[float, str]]:
        """The lines so far, each with its time."""
        text = self._log.read_text(encoding="utf-8") if self._log.exists() else ""
        found = []
        for line in text.splitlines():
            at, _, rest = line.partition(" ")
            found.append((float(at), rest))
        return found

    def first(self, part: str) -> tuple[float, str] | None:
        """Return the first line that contains this, with its time."""
        return next(((at, line) for at, line in self.lines if part in line), None)

    @property
    def has_ended(self) -> bool:
        return not self._process.is_alive()

    def send(self, number: signal.Signals) -> None:
        if self._process.pid is not None and self._process.is_alive():
            os.kill(self._process.pid, number)

    def close(self) -> None:
        self._process.kill()
        self._process.join()


class _Peer:
    """One process of a run, and what is to happen to it."""

    def __init__(self, process: _Process, incidents: Sequence[Incident]) -> None:
        self.program = process
        self.killed = False
        self.woke_at = 0.0
        self._pending = [incident for incident in incidents if incident.kind != "nap"]
        self._stopped_until: float | None = None
        self._at: dict[int, float] = {}

    def act(self, now: float) -> None:
        """Stop, continue or kill the process if it is time."""
        if self._stopped_until is not None:
            if now >= self._stopped_until:
                self._stopped_until, self.woke_at = None, now
                self.program.send(signal.SIGCONT)
            return
        if self.program.has_ended:
            return
        reached = max(
            (int(line.split()[1]) for _, line in self.program.lines if line.startswith("update ")), default=0
        )
        for incident in [each for each in self._pending if each.epoch <= reached]:
            due = self._at.setdefault(id(incident), now + incident.after)
            if now < due:
                continue
            self._pending.remove(incident)
            if incident.kind == "kill":
                self.killed = True
                self.program.send(signal.SIGKILL)
            else:
                self._stopped_until = now + incident.seconds
                self.program.send(signal.SIGSTOP)
            return

    @property
    def told_after(self) -> float | None:
        """Seconds from its awakening until it was told of the end; ``None`` if it was not told."""
        told = self.program.first(TOLD)
        if told is None:
            return None
        naps = [seconds for seconds, line in self.program.lines if AWAKE in line]
        return told[0] - max([*naps, self.woke_at])


def play_real(seeds: Sequence[int]) -> int:
    """Play runs with real processes; print what is wrong, and return the number of runs in which something is."""
    wrong = 0
    FORKS.set_forkserver_preload(["p2pavg.optim"])
    for done, seed in enumerate(seeds, 1):
        setting, began = draw_setting(seed), time.monotonic()
        findings, told, stayed, logs = _run(setting)
        wrong += bool(findings)
        print(
            f"seed {seed}: {len(setting.peers)} peers, {'diloco' if setting.local else 'large batch'},"
            f" {told} told, {stayed} stayed, {time.monotonic() - began:.0f} s;"
            f" {'; '.join(findings) or 'well'}. {wrong} of {done} runs wrong",
            flush=True,
        )
        if findings:
            print(*setting.peers, *logs, sep="\n---\n", file=sys.stderr, flush=True)
    return wrong


def _run(setting: EndSetting) -> tuple[list[str], int, int, list[str]]:
    with ExitStack() as stack:
        folder = stack.enter_context(tempfile.TemporaryDirectory())
        text = program(local=setting.local)
        daemon = stack.enter_context(
            running(["-u", "-m", "p2pavg", "peer", "--listen", "/ip4/127.0.0.1/tcp/0"])
        )
        address = _address_of(daemon)
        peers = []
        for index, plan in enumerate(setting.peers):
            naps = [(each.epoch, each.seconds) for each in plan.incidents if each.kind == "nap"]
            arguments = [address, json.dumps(naps), str(plan.batch_seconds)]
            process = _Process(text, arguments, Path(folder) / f"{index}.log", plan.delay)
            stack.callback(process.close)
            peers.append(_Peer(process, plan.incidents))
        began: float | None = None
        until = time.monotonic() + START_SECONDS
        while time.monotonic() < until:
            if began is None and all(peer.program.first(OPENED) for peer in peers):
                began = time.monotonic()
                until = began + 2 * START_SECONDS
            for peer in peers:
                peer.act(time.monotonic())
            if all(peer.program.has_ended for peer in peers):
                break
            time.sleep(0.02)
        stuck = [index for index, peer in enumerate(peers) if not peer.program.has_ended]
        logs = ["\n".join(f"{at:9.2f} {line}" for at, line in peer.program.lines) for peer in peers]
        return _checked(peers, stuck, logs)


def _checked(
    peers: Sequence[_Peer], stuck: Sequence[int], logs: list[str]
) -> tuple[list[str], int, int, list[str]]:
    findings = [f"peer {index} is still there" for index in stuck]
    ended = set()
    for index, peer in enumerate(peers):
        if peer.killed or index in stuck:
            continue
        if (after := peer.told_after) is not None:
            findings += [f"peer {index} was told {after:.1f} s after it woke"] if after > TOLD_SECONDS else []
        elif (line := peer.program.first(ENDED)) is None:
            findings.append(f"peer {index} ended without its last update, and was not told")
        else:
            ended.add(line[1])
    if len(ended) > 1:
        findings.append("peers ended with different parameters")
    told = sum(peer.told_after is not None for peer in peers)
    return findings, told, sum(peer.program.first(STAYS) is not None for peer in peers), logs
