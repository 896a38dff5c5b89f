"""The work of ``p2pavg doctor``: check the options, examine, and report."""

from __future__ import annotations

import logging
import shutil
import time

import trio

from p2pavg.base.errors import ConfigError
from p2pavg.base.limits import MAX_RUN_ID_CHARS
from p2pavg.net.addresses import parse_listen_address, parse_peer_address
from p2pavg.net.nat.reach.options import checked_options
from p2pavg.tools.doctor.examination import ExaminedPeer, examine
from p2pavg.tools.doctor.findings import as_json, as_table, faults_of

FAULTY = 1
"""The exit code when a fault was found. Arguments that make no sense end with 2, as in all commands."""


def check(options: ExaminedPeer) -> None:
    """Raise AddressError or ConfigError if the options make no sense."""
    for text in options.listen:
        parse_listen_address(text)
    for text in options.bootstrap:
        parse_peer_address(text)
    checked_options(options.announce)
    if options.run is not None and options.run_id is not None:
        raise ConfigError("--run and --run-id exclude each other: the run file has the run's id")
    if options.certificate is not None and options.run is None:
        raise ConfigError("--certificate needs --run FILE.run")
    if options.run_id is not None and not 0 < len(options.run_id) <= MAX_RUN_ID_CHARS:
        raise ConfigError(f"--run-id must be text of 1 to {MAX_RUN_ID_CHARS} characters")


def report(options: ExaminedPeer, *, json: bool, verbose: bool) -> tuple[str, int]:
    """Examine this machine. Return the text to print, and the exit code."""
    began = time.monotonic()
    if not verbose:
        # The examined peer warns of what it meets. The findings say the same in order.
        logging.disable()
    try:
        findings = trio.run(examine, options)
    finally:
        logging.disable(logging.NOTSET)
    seconds = time.monotonic() - began
    if json:
        text = as_json(findings, seconds)
    else:
        text = "\n".join(as_table(findings, shutil.get_terminal_size((100, 24)).columns))
    return text, FAULTY if faults_of(findings) else 0
