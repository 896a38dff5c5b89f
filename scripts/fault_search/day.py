"""An operator's day, on real processes: a run from its creation to its restart from checkpoints.

A run is created, three peers are invited and start with `p2pavg join` and a training program; they are watched; one is
revoked; the bootstrap peer is restarted on another port, and upgraded; everything is stopped and started again from the
checkpoints. It ends with 1 if anything is lost or not as documented. --write puts each step's output into
docs/how-to/operate-a-run.md.
"""

from __future__ import annotations

import argparse
import re
import signal
import sys
import tempfile
from functools import partial
from pathlib import Path

from scripts.fault_search.day_stage import ROOT, DayError, Program, Stage, free_ports

PAGE = ROOT / "docs" / "how-to" / "operate-a-run.md"
BEGIN, END = "<!-- operator's day: begin -->", "<!-- operator's day: end -->"
NEXT_VERSION = "0.3.0"
TERMS = ("--max-weight", "1000", "--days", "30")
LISTEN = "/ip4/127.0.0.1/tcp/{}"
SUMMARY = "state|run |peers|rounds|certificate|version"
BRIEFLY = "^(state|rounds)"


class Day:
    """One day.

    Args:
        updates: that both members make between two steps.
    """

    def __init__(self, stage: Stage, *, updates: int) -> None:
        self.stage = stage
        self._updates = updates
        self._ports = dict(zip(("hub", "new hub", "ann", "ben"), free_ports(4), strict=True))
        self._ids: dict[str, str] = {}
        self._digests: dict[tuple[str, int], str] = {}  # of the parameters, by member and update

    def pass_by(self) -> None:
        """Take all steps; raise DayError if one is not as promised."""
        self.create()
        self.invite()
        hub, vera, ann, ben = self.start()
        self.watch()
        self.revoke(vera, ann, ben)
        hub = self.move(hub, ann, ben)
        self.upgrade(hub, ann, ben)
        epochs = self.stop(hub, ann, ben)
        self.start_again(epochs)

    def create(self) -> None:
        """Create the run, with the address of the operator's own daemon."""
        stage = self.stage
        stage.begin("Create a run", "The operator's own daemon, `hub`, is where others bootstrap.")
        (stage.folder / "hub").mkdir(mode=0o700)
        self._ids["hub"] = stage.command("identity", "hub/identity.key", shows="^$").strip()
        address = f"{LISTEN.format(self._ports['hub'])}/p2p/{self._ids['hub']}"
        stage.know(self._ids["hub"], "HUB_ID")
        stage.command(
            "run",
            "create",
            "lab",
            "--group-size",
            "2",
            "--relay-mbps",
            "5",
            "--bootstrap",
            address,
            "--output",
            ".",
            shows="^made",
        )

    def invite(self) -> None:
        """Sign certificates for the hub and three peers."""
        stage = self.stage
        stage.begin(
            "Invite three",
            "Ann and Ben train. Vera, a volunteer, gives bandwidth. The hub and Ben get their certificates likewise.",
        )
        for name, role in (
            ("hub", "auxiliary"),
            ("ann", "contributor"),
            ("ben", "contributor"),
            ("vera", "auxiliary"),
        ):
            key = f"{name}/identity.key" if role == "auxiliary" else f"{name}.key"
            (stage.folder / key).parent.mkdir(mode=0o700, exist_ok=True)
            shown = name in ("ann", "vera")
            self._ids[name] = stage.command("identity", key, shows="^$", shown=shown).strip()
            stage.know(self._ids[name], f"{name.upper()}_ID")
            output = f"{name}/lab.cert" if role == "auxiliary" else f"{name}.cert"
            given = (self._ids[name], *TERMS, "--role", role, "-o", output)
            stage.command("run", "invite", "lab.run", *given, shows="^made", shown=shown)

    def start(self) -> tuple[Program, Program, Program, Program]:
        """Start two daemons and two members that train."""
        stage = self.stage
        stage.begin("Start", "Daemons start with `p2pavg join`, and members with their training program.")
        hub = stage.daemon("hub", "--listen", LISTEN.format(self._ports["hub"]))
        stage.wait_for("the hub listens", lambda: stage.status("hub"))
        vera = stage.daemon("vera", "--listen", LISTEN.format(0))
        ann, ben = (stage.member(name, self._ports[name]) for name in ("ann", "ben"))
        self.updates_of(ann, ben, after=0)
        return hub, vera, ann, ben

    def watch(self) -> None:
        """Look at the daemons until both have helped rounds."""
        stage = self.stage
        stage.begin("Watch", "Both daemons help the rounds. Exit code 0 says that they are connected.")
        for name, shows in (("hub", SUMMARY), ("vera", BRIEFLY)):
            stage.wait_for(f"{name} helps", partial(self.has_helped, name))
            stage.command("status", "--home", name, shows=shows)

    def revoke(self, vera: Program, ann: Program, ben: Program) -> None:
        """Revoke the volunteer's certificate, and see its daemon hear of it."""
        stage = self.stage
        stage.begin(
            "Revoke one", "Members have the list within a minute. Vera's daemon says so, with exit code 5."
        )
        stage.command("run", "revoke", "lab.run", self._ids["vera"], shows="^(made|list)")
        stage.wait_for("vera is refused", lambda: (stage.status("vera") or {}).get("refusal"))
        stage.command("status", "--home", "vera", shows="state|certificate", code=5)
        stage.command("stop", "--home", "vera")
        self.ended(vera)
        self.updates_of(ann, ben, after=self.epoch_of(ann))

    def move(self, hub: Program, ann: Program, ben: Program) -> Program:
        """Restart the bootstrap peer on another port. Members that run find it by themselves."""
        stage = self.stage
        stage.begin(
            "Restart the bootstrap peer on another port",
            "The hub joins through the peers that it knew, and helps again. Members train on meanwhile. Those that "
            "start later need the new address, so the operator changes the line `bootstrap` of the run file.",
        )
        stage.command("stop", "--home", "hub")
        self.ended(hub)
        old, new = self._ports["hub"], self._ports["new hub"]
        file = stage.folder / "lab.run"
        file.write_text(file.read_text().replace(f"/tcp/{old}/", f"/tcp/{new}/"))
        stage.note(f"$ sed -i s,/tcp/{old}/,/tcp/{new}/, lab.run")
        hub = stage.daemon("hub", "--listen", LISTEN.format(new))
        stage.wait_for("the hub helps again", partial(self.has_helped, "hub"))
        stage.command("status", "--home", "hub", shows=BRIEFLY)
        self.updates_of(ann, ben, after=self.epoch_of(ann))
        return hub

    def upgrade(self, hub: Program, ann: Program, ben: Program) -> None:
        """Install another version, and let the hub start again in its process."""
        stage = self.stage
        stage.begin(
            "Upgrade one peer",
            "SIGHUP lets the hub finish its round and start again with the version that is installed now, in the same "
            "process, on the same port. The others keep theirs.",
        )
        stage.install(NEXT_VERSION)
        stage.signal(hub, signal.SIGHUP)

        def is_new() -> bool:
            found = stage.status("hub") or {}
            return found.get("version") == NEXT_VERSION and found.get("rounds", 0) > 0

        stage.wait_for("the new version helps", is_new)
        text = stage.command("status", "--home", "hub", shows=f"{BRIEFLY}|^version")
        if f"process {hub.process.pid}" not in text or f"/tcp/{self._ports['new hub']}/" not in text:
            raise DayError(f"another process or port after SIGHUP:\n{text}")
        self.updates_of(ann, ben, after=self.epoch_of(ann))

    def stop(self, hub: Program, ann: Program, ben: Program) -> dict[str, int]:
        """Stop everything; return each member's last update."""
        stage = self.stage
        stage.begin(
            "Stop everything", "Members end after an update that both have; each has written its checkpoint."
        )
        last = max(self.epoch_of(ann), self.epoch_of(ben)) + 2
        for member in (ann, ben):
            (stage.folder / f"{member.name}.last").write_text(str(last))
        for member in (ann, ben):
            self.ended(member)
            self.note_digests(member)
            end = member.event("ended")
            assert end is not None
            stage.note(f"{member.name}: ended after update {end['ended']}, parameters {end['digest'][:16]}")
        stage.command("stop", "--home", "hub")
        self.ended(hub)
        stage.command("status", "--home", "hub", code=3)
        return {member.name: self.epoch_of(member) for member in (ann, ben)}

    def start_again(self, epochs: dict[str, int]) -> None:
        """Start everything from the checkpoints, and compare epochs and parameters with those of before."""
        stage = self.stage
        stage.begin(
            "Start again from the checkpoints",
            "Each member continues at its last update, with the same bits.",
        )
        hub = stage.daemon("hub", "--listen", LISTEN.format(self._ports["new hub"]))
        stage.wait_for("the hub listens", lambda: stage.status("hub"))
        members = []
        for name in epochs:
            (stage.folder / f"{name}.last").write_text(str(max(epochs.values()) + self._updates))
            members.append(stage.member(name, self._ports[name]))
        for member in members:
            stage.wait_for(f"{member.name} begins", partial(member.event, "began"))
            begin = member.event("began")
            assert begin is not None
            stage.note(f"{member.name}: begins at update {begin['began']}, parameters {begin['digest'][:16]}")
            if begin["began"] != epochs[member.name]:
                raise DayError(f"{member.name} lost updates: {begin['began']} and not {epochs[member.name]}")
            if begin["digest"] != self._digests[member.name, begin["began"]]:
                raise DayError(f"{member.name} has other parameters after its restart")
        ends = []
        for member in members:
            self.ended(member)
            end = member.event("ended")
            assert end is not None
            ends.append((end["ended"], end["digest"]))
            stage.note(f"{member.name}: ended after update {end['ended']}, parameters {end['digest'][:16]}")
        if len(set(ends)) != 1:
            raise DayError(f"the members ended apart: {ends}")
        stage.command("stop", "--home", "hub")
        self.ended(hub)

    def updates_of(self, *members: Program, after: int) -> None:
        """Wait until each member has made some updates more, and note them."""
        stage = self.stage
        for each in members:
            stage.wait_for(f"{each.name} updates", partial(self.has_passed, each, after + self._updates))
        for each in members:
            self.note_digests(each)
        stage.note(f"(after update {min(map(self.epoch_of, members))}: the members have the same parameters)")
        for (name, epoch), digest in self._digests.items():
            if digest != self._digests.get(("ann", epoch), digest):
                raise DayError(f"ann and {name} have different parameters after update {epoch}")

    def epoch_of(self, member: Program) -> int:
        """Return the last update that a member has reported."""
        event = member.event("update")
        return 0 if event is None else int(event["update"])

    def has_passed(self, member: Program, update: int) -> bool:
        """Return whether a member has made an update."""
        return self.epoch_of(member) >= update

    def has_helped(self, name: str) -> bool:
        """Return whether a daemon has helped a round since its start."""
        found = self.stage.status(name)
        return found is not None and found["rounds"] > 0

    def note_digests(self, member: Program) -> None:
        """Keep the digests that a member has reported."""
        for event in member.events():
            if "update" in event:
                self._digests[member.name, event["update"]] = event["digest"]

    def ended(self, program: Program) -> None:
        """Wait for the end of a process, which must not have failed."""
        self.stage.wait_for(f"{program.name} ends", lambda: program.process.poll() is not None)
        self.stage.check_alive()


def as_markdown(stage: Stage) -> str:
    """Return the transcript as the section of the page."""
    parts = []
    for number, step in enumerate(stage.steps, start=1):
        parts.append(
            f"**{number}. {step.heading}.** {step.text}\n\n```console\n" + "\n".join(step.lines) + "\n```\n"
        )
    return "\n".join(parts)


def write(text: str) -> None:
    """Put the section between its two marks on the page."""
    page = PAGE.read_text()
    PAGE.write_text(
        re.sub(f"(?s){re.escape(BEGIN)}.*{re.escape(END)}", lambda _: f"{BEGIN}\n\n{text}\n{END}", page)
    )


def main() -> int:
    """See the top of this file."""
    parser = argparse.ArgumentParser(prog="scripts/faults day", description=__doc__)
    parser.add_argument("--updates", type=int, default=5, help="updates between two steps (5)")
    parser.add_argument(
        "--write", action="store_true", help="put the output into docs/how-to/operate-a-run.md"
    )
    parser.add_argument("--folder", type=Path, help="empty folder to keep; otherwise one that is removed")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        stage = Stage(options.folder or Path(folder), print)
        try:
            Day(stage, updates=options.updates).pass_by()
        except DayError as error:
            print(f"NOT AS PROMISED: {error}")
            return 1
        finally:
            stage.close()
    if options.write:
        write(as_markdown(stage))
    print("\nnothing was lost")
    return 0


if __name__ == "__main__":
    sys.exit(main())
