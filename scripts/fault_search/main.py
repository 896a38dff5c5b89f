"""Looks for faults: in the rules of the agreement, in the real code on virtual time, and in real processes.

Each command checks what it sees against what is promised, and ends with 1 when something is wrong; what is drawn at
random is drawn from seeds, and the one that found it is printed. scripts/faults COMMAND --help says what is checked.
"""

from __future__ import annotations

import argparse
import sys

from scripts.commands import Command, list_commands, run_command

COMMANDS = {
    "explore": Command(
        "scripts.fault_search.explore", "every state that a small group can get into", "a quarter of an hour"
    ),
    "simulate": Command(
        "scripts.fault_search.simulate",
        "seeded rounds in which peers crash, stop and are cut off, on virtual time",
        "half an hour",
    ),
    "fuzz": Command(
        "scripts.fault_search.fuzz",
        "messages of hostile members in random order, on virtual time",
        "half a minute",
    ),
    "audits": Command(
        "scripts.fault_search.audits",
        "audits of reducers that lie, and of honest ones, on virtual time",
        "five minutes",
    ),
    "chaos": Command(
        "scripts.fault_search.chaos",
        "real processes that are killed, stopped and restarted while they average",
        "11 minutes",
    ),
    "churn": Command(
        "scripts.fault_search.churn",
        "a run of 40 peers that are killed and replaced, on virtual time",
        "an hour",
    ),
    "cells": Command(
        "scripts.fault_search.cells",
        "synchronous cells whose peers are killed and replaced, on virtual time",
        "a quarter of an hour",
    ),
    "stops": Command(
        "scripts.fault_search.stops",
        "processes of a training run that stand still and go on, as laptops that sleep",
        "an hour",
    ),
    "state": Command(
        "scripts.fault_search.state",
        "donors and joiners that fail while a state is fetched, in real processes",
        "a quarter of an hour",
    ),
    "history": Command(
        "scripts.fault_search.history",
        "histories that are tampered with, and archivists that are killed",
        "four minutes",
    ),
    "rechecks": Command(
        "scripts.fault_search.rechecks",
        "spot checks of contributions: honest ones must pass, cheats must be found",
        "three minutes",
    ),
    "day": Command(
        "scripts.fault_search.day",
        "an operator's day: create, invite, start, watch, revoke, move, upgrade, stop, start again",
        "two minutes",
    ),
    "starts": Command(
        "scripts.fault_search.starts",
        "starts of the documented program with a third peer that is late",
        "half an hour",
    ),
}


def main() -> int:
    """See the top of this file."""
    ended = run_command(COMMANDS)
    if ended is not None:
        return ended
    parser = argparse.ArgumentParser(
        prog="scripts/faults", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    list_commands(parser.add_subparsers(dest="command", metavar="COMMAND", required=True), COMMANDS)
    parser.parse_args()
    return 0


if __name__ == "__main__":
    sys.exit(main())
