"""The work of ``p2pavg status`` and ``p2pavg stop``: find a daemon's folder, ask, and print."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from pathlib import Path

import trio

from p2pavg.base.errors import ConfigError, ControlError
from p2pavg.base.limits import GLANCE_SECONDS
from p2pavg.net.unix import NotRunningError, connect_unix
from p2pavg.peer.joining.home import Home, default_home, known_homes
from p2pavg.tools.control.messages import DaemonStatus, Question
from p2pavg.tools.control.service import ask
from p2pavg.tools.daemon.words import ExitCode, as_json, as_lines, exit_code

logger = logging.getLogger(__name__)


def homes_of(run: str | None, home: Path | None) -> list[Path]:
    """Return the folders of the daemons that a user means.

    Args:
        run: name of a run, or its run file; ``None`` for all daemons of this user.
        home: the folder.
    """
    if home is not None:
        if run is not None:
            raise ConfigError("name either the run or --home")
        return [home]
    if run is None:
        return known_homes()
    file = Path(run)
    if file.suffix != ".run":
        return [default_home(run)]
    from p2pavg.runs.membership.run_file import read_run_file  # it takes torch, which nothing else here needs

    return [default_home(read_run_file(file).run_id)]


def status(homes: Sequence[Path], *, json: bool) -> tuple[str, ExitCode]:
    """Ask the daemons of these folders. Return the text to print, and the exit code: the highest of all."""
    found: list[tuple[str, DaemonStatus]] = []
    silent: list[str] = []
    for folder in homes:
        try:
            answer = trio.run(ask, Home(folder).socket, Question.STATUS)
        except NotRunningError:
            continue
        except ControlError as error:
            if len(homes) == 1:
                raise
            silent.append(f"{folder}: {error}")  # the others are asked all the same
            continue
        if isinstance(answer, DaemonStatus):
            found.append((str(folder), answer))
    code = max((exit_code(each) for _, each in found), default=ExitCode.NOT_RUNNING)
    if silent:
        code = max(code, ExitCode.TRY_AGAIN)
        for line in silent:
            logger.warning("%s", line)
    if json:
        return as_json(found), code
    if not found and not silent:
        where = f" with the folder {homes[0]}" if len(homes) == 1 else ""
        return f"no daemon runs{where}", code
    return "\n\n".join("\n".join(as_lines(home, each)) for home, each in found), code


def stop(homes: Sequence[Path], *, timeout: float) -> tuple[str, ExitCode]:
    """Tell the daemon of a folder to end, and wait for it."""
    running = [folder for folder in homes if trio.run(_listens, Home(folder).socket)]
    if not running:
        return "no daemon runs", ExitCode.NOT_RUNNING
    if len(running) > 1:
        raise ConfigError(
            "several daemons run; name the run or --home: " + ", ".join(str(folder) for folder in running)
        )
    ended = trio.run(_stop, Home(running[0]).socket, timeout)
    if ended:
        return f"the daemon of {running[0]} has ended", ExitCode.DONE
    return f"the daemon of {running[0]} finishes a round, and then ends", ExitCode.TRY_AGAIN


async def _listens(socket: Path) -> bool:
    try:
        async with connect_unix(socket):
            return True
    except NotRunningError:
        return False


async def _stop(socket: Path, timeout: float) -> bool:
    """Return whether the daemon ended in time. The socket goes after everything else of the daemon."""
    with trio.move_on_after(timeout):
        await ask(socket, Question.STOP)
        while await _listens(socket):  # noqa: ASYNC110 - another process' end
            await trio.sleep(GLANCE_SECONDS)
        return True
    return False
