"""A real browser without a screen, for tests of pages. Debian has it as chromium and chromium-driver."""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

BROWSERS = ("chromium", "chromium-browser", "google-chrome")
DRIVER = "chromedriver"


def missing() -> str:
    """Return the part that is missing for tests in a browser; empty if none is."""
    try:
        import selenium  # noqa: F401
    except ImportError:
        return "selenium is not installed"
    if not any(map(shutil.which, BROWSERS)):
        return "there is no browser: none of " + ", ".join(BROWSERS)
    return "" if shutil.which(DRIVER) else f"there is no {DRIVER}"


needs_browser = pytest.mark.skipif(bool(missing()), reason=missing() or "there is a browser")


@contextmanager
def opened() -> Iterator[Any]:
    """Open a browser for as long as the block runs; return selenium's driver of it."""
    from selenium import webdriver
    from selenium.webdriver.chrome.options import Options
    from selenium.webdriver.chrome.service import Service

    options = Options()
    options.binary_location = str(next(filter(None, map(shutil.which, BROWSERS))))
    # Containers often run as root and have a small /dev/shm, in either of which Chromium's defaults do not start.
    for argument in (
        "--headless=new",
        "--no-sandbox",
        "--disable-dev-shm-usage",
        "--disable-gpu",
        "--hide-scrollbars",
    ):
        options.add_argument(argument)
    options.set_capability("goog:loggingPrefs", {"browser": "ALL"})
    driver = webdriver.Chrome(options=options, service=Service(shutil.which(DRIVER)))
    try:
        yield driver
    finally:
        driver.quit()


def resize(driver: Any, width: int, height: int, *, dark: bool = False) -> None:
    """Give the page a size in pixels, and light or dark colours."""
    scheme = {"name": "prefers-color-scheme", "value": "dark" if dark else "light"}
    driver.execute_cdp_cmd("Emulation.setEmulatedMedia", {"features": [scheme]})
    driver.execute_cdp_cmd(
        "Emulation.setDeviceMetricsOverride",
        {"width": width, "height": height, "deviceScaleFactor": 1, "mobile": width < 500},
    )


def screenshot(driver: Any, width: int, file: Path, *, dark: bool) -> None:
    """Write a PNG of the whole page."""
    resize(driver, width, 900, dark=dark)
    height = driver.execute_script("return document.documentElement.scrollHeight")
    resize(driver, width, height, dark=dark)
    assert driver.save_screenshot(str(file))


def complaints(driver: Any) -> list[str]:
    """Return the errors that the browser has logged, such as a script that a policy has blocked."""
    return [entry["message"] for entry in driver.get_log("browser") if entry["level"] == "SEVERE"]
