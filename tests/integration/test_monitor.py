"""The monitor on real processes: its page in a real browser, its JSON, and the terminal."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, TypeVar

import pytest

from p2pavg.testing.swarm import LocalSwarm, SwarmProcess
from tests.integration import browser
from tests.integration.browser import needs_browser

pytest.importorskip("hypercorn")
pytest.importorskip("starlette")

WORK = "tests.integration.monitor_work:train"
LOOPBACK = ("--peer-listen", "/ip4/127.0.0.1/tcp/0")
SHOWN_SECONDS = 5.0
"""An event has to be on the page within this."""
LONG = 120.0
T = TypeVar("T")


def wait_until(found: Callable[[], T | None], what: str, seconds: float = LONG) -> T:
    """Return the first value that is true."""
    end = time.monotonic() + seconds
    while True:
        is_late = time.monotonic() >= end
        if value := found():
            return value
        assert not is_late, f"not within {seconds:g} s: {what}"
        time.sleep(0.05)


@contextmanager
def monitor(*arguments: str) -> Iterator[str]:
    """Run ``p2pavg monitor``; return the address that it prints."""
    command = [sys.executable, "-m", "p2pavg", "monitor", *arguments, *LOOPBACK]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        try:
            yield process.stdout.readline().strip()
        finally:
            process.terminate()
            assert process.wait(20) == 0


def fetch(address: str, **headers: str) -> dict[str, Any]:
    with urllib.request.urlopen(
        urllib.request.Request(f"{address}api/run.json", headers=headers), timeout=10
    ) as answer:
        found: dict[str, Any] = json.load(answer)
    return found


def tile(driver: Any, label: str) -> float:
    """Return the number in a tile of the page; NaN while there is none."""
    text = driver.execute_script(
        "for (const each of document.querySelectorAll('#summary div'))"
        "  if (each.querySelector('dt').textContent === arguments[0]) return each.querySelector('dd').textContent;"
        "return ''",
        label,
    )
    number = re.fullmatch(r"[-0-9.,e+]+", text)
    return float(text.replace(",", "")) if number else float("nan")


def state_of(driver: Any, peer_id: str) -> str:
    text: str = driver.execute_script(
        "const row = document.querySelector(`tr[data-peer='${arguments[0]}'] .pill`);"
        "return row ? row.textContent : ''",
        peer_id,
    )
    return text


def next_update(process: SwarmProcess) -> dict[str, Any]:
    """Return the next update that a process reports from now on."""
    while True:
        try:
            process.event(0.0)
        except TimeoutError:
            return process.event(LONG)


@needs_browser
def test_page_shows_a_run_of_eight_in_which_one_is_killed_and_one_comes_late(tmp_path: Path) -> None:
    """With ``P2PAVG_SCREENSHOTS=DIR``, the screenshots are kept in a folder."""
    folder = Path(os.environ.get("P2PAVG_SCREENSHOTS", tmp_path))
    folder.mkdir(parents=True, exist_ok=True)
    with LocalSwarm(WORK, peers=7, arguments={"peers": 5}) as swarm, browser.opened() as driver:
        swarm.start()
        with monitor("monitored", "--bootstrap", swarm.processes[0].address) as address:
            browser.resize(driver, 1280, 900)
            driver.get(address)
            wait_until(lambda: tile(driver, "Peers") == 7, "all seven peers are on the page")
            wait_until(lambda: tile(driver, "loss") > 0, "the page has a loss")

            first = tile(driver, "loss")
            late = swarm.add(wait=False)
            lower = next_update(swarm.processes[0])
            while lower["loss"] >= first:
                lower = next_update(swarm.processes[0])
            wait_until(
                lambda: tile(driver, "Update") >= lower["epoch"] and tile(driver, "loss") < first,
                "the loss has fallen on the page",
                SHOWN_SECONDS,
            )

            late.wait_joined(LONG)
            wait_until(lambda: tile(driver, "Peers") == 8, "the late peer is on the page", SHOWN_SECONDS)
            wait_until(
                lambda: state_of(driver, late.peer_id) in ("computing", "waiting"), "the late peer takes part"
            )
            victim = swarm.processes[3]
            assert state_of(driver, victim.peer_id) in ("computing", "waiting")
            victim.kill()
            wait_until(
                lambda: state_of(driver, victim.peer_id) == "gone", "the killed peer is gone", SHOWN_SECONDS
            )
            assert tile(driver, "Peers") == 7

            check_keyboard(driver)
            for width in (1280, 390):
                for dark in (False, True):
                    name = f"{'wide' if width > 500 else 'narrow'}-{'dark' if dark else 'light'}.png"
                    browser.screenshot(driver, width, folder / name, dark=dark)
                    wider = driver.execute_script("return document.documentElement.scrollWidth")
                    assert wider <= width, "the page is not wider than the screen"
            assert browser.complaints(driver) == []


def check_keyboard(driver: Any) -> None:
    """The curve and the choice of a metric are reached by the tab key, and the curve obeys the arrow keys."""
    from selenium.webdriver.common.action_chains import ActionChains
    from selenium.webdriver.common.keys import Keys

    def press(key: str) -> str:
        """Press a key; return the id of the element that has the focus then."""
        ActionChains(driver).send_keys(key).perform()  # not to an element, which an event may replace
        found: str = driver.execute_script("return document.activeElement.id")
        return found

    driver.execute_script("document.activeElement.blur(); window.scrollTo(0, 0)")
    seen: list[str] = []
    while "curve-svg" not in seen and len(seen) < 8:
        seen.append(press(Keys.TAB))
    assert seen[-2:] == ["metric", "curve-svg"], seen
    assert press(Keys.ARROW_LEFT) == "curve-svg"
    assert "update" in driver.execute_script("return document.querySelector('#curve .tip').textContent")


def test_training_program_and_daemon_serve_the_page_and_others_need_its_token() -> None:
    with LocalSwarm(WORK, peers=2, arguments={"peers": 2, "monitor": True}) as swarm:
        swarm.start()
        first = swarm.processes[0]
        address = first.event(LONG)["monitor"]
        run = wait_until(lambda: full_run(address, 2), "both peers are in the run")
        assert run["me"] == first.peer_id
        assert {peer["id"] for peer in run["peers"]} == {process.peer_id for process in swarm.processes}
        wait_until(lambda: fetch(address)["rounds"], "a round is in the run")
        (branch,) = wait_until(lambda: fetch(address)["lineages"], "the run has a lineage")
        assert len(branch["peers"]) == 2

        with monitor(
            "monitored", "--bootstrap", first.address, "--listen", "0.0.0.0:0", "--name", "localhost"
        ) as guarded:
            port, token = re.fullmatch(r"http://[^/]+:(\d+)/\?token=([-_0-9A-Za-z]{32})", guarded).groups()  # type: ignore[union-attr]
            with pytest.raises(urllib.error.HTTPError, match="401"):
                fetch(f"http://127.0.0.1:{port}/")
            found = wait_until(
                lambda: full_run(f"http://127.0.0.1:{port}/", 2, Authorization=f"Bearer {token}"),
                "the monitor sees both peers",
            )
            assert found["me"] == ""
        assert fetch(address)["summary"]["peers"] == 2, "a monitor is no peer of the run"
        check_page_of_a_daemon(first.address)


def full_run(address: str, peers: int, **headers: str) -> dict[str, Any] | None:
    run = fetch(address, **headers)
    return run if run["summary"]["peers"] == peers else None


@pytest.mark.long
def test_terminal_view_is_printed_once_where_there_is_no_terminal() -> None:
    with LocalSwarm(WORK, peers=2, arguments={"peers": 2}) as swarm:
        swarm.start()
        next_update(swarm.processes[0])
        command = [sys.executable, "-m", "p2pavg", "monitor", "monitored", "--terminal", *LOOPBACK]
        command += ["--bootstrap", swarm.processes[0].address]
        environment = {**os.environ, "COLUMNS": "120"}
        ended = subprocess.run(
            command, capture_output=True, text=True, env=environment, timeout=LONG, check=False
        )
        assert ended.returncode == 0
        assert all(word in ended.stdout for word in ("garage", "lab-3090", "done", "loss")), ended.stdout


def check_page_of_a_daemon(bootstrap: str) -> None:
    """Check that a daemon that helps the run shows the run's two peers and itself."""
    command = [sys.executable, "-m", "p2pavg", "peer", "--run-id", "monitored", "--monitor", "0"]
    command += ["--listen", "/ip4/127.0.0.1/tcp/0", "--bootstrap", bootstrap]
    with subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True) as process:
        try:
            assert process.stderr is not None
            served = (
                re.search(r"the monitor of run 'monitored' is at (\S+)", line) for line in process.stderr
            )
            address = next(found[1] for found in served if found)
            run = wait_until(lambda: full_run(address, 3), "the two peers and the daemon are in the run")
        finally:
            process.terminate()
    roles = sorted(peer["role"] for peer in run["peers"])
    assert roles == ["auxiliary", "contributor", "contributor"]
    assert run["me"] in {peer["id"] for peer in run["peers"] if peer["role"] == "auxiliary"}
