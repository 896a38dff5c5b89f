"""The strategy of a run that is made."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from p2pavg.base.errors import ConfigError
from p2pavg.base.files import read_text
from p2pavg.group.topology import BUTTERFLY, resolve_topology
from p2pavg.strategies import DataParallel, Federated, Strategy, read_json, read_toml
from p2pavg.strategies.reading import MAX_TOML_CHARS


def settings_with(settings: dict[str, Any], file: Path) -> dict[str, Any]:
    """Return the settings of a run file with a strategy, and with its rule of combining contributions and its topology.

    Raises:
        ConfigError: the file cannot be read or is no strategy, or the settings have others.
    """
    strategy = _read(file)
    found = {**settings, "strategy": strategy.json}
    if isinstance(strategy, DataParallel | Federated):
        rule = strategy.robust
        if settings["robust"] not in (None, rule):
            raise ConfigError(
                f"robust is {settings['robust']!r}, and the strategy's is {rule!r}: leave --robust out"
            )
        found["robust"] = rule
        if resolve_topology(settings["topology"]).text not in (BUTTERFLY.text, strategy.topology):
            raise ConfigError(
                f"topology is {settings['topology']!r}, and the strategy's is {strategy.topology!r}: leave --topology"
                " out"
            )
        found["topology"] = strategy.topology
    return found


def _read(file: Path) -> Strategy:
    text = read_text(file, "strategy", max_bytes=MAX_TOML_CHARS)
    try:
        return read_json(text) if file.suffix == ".json" else read_toml(text)
    except ConfigError as error:
        raise ConfigError(f"{file}: {error}") from None
