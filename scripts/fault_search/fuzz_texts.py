"""Texts of a hostile peer for the fuzz test: markup, escapes of terminals, HTML, labels of Prometheus and formats.

Each message is a status, a metric's name or a reason whose texts are drawn from all these languages. It is refused
where it comes in, or each place that shows it shows it as it is: the monitor's JSON, its terminal page, the progress of
a training loop, the exporter, and the sentence for the log.
"""

from __future__ import annotations

import io
import json
import random
from collections import Counter
from typing import Any

import msgspec
from prometheus_client import CollectorRegistry, generate_latest
from prometheus_client.parser import text_string_to_metric_families
from rich.console import Console

from p2pavg.base.errors import RemoteProtocolError
from p2pavg.base.formats import PeerText
from p2pavg.base.numbers import is_name
from p2pavg.metrics.figures import Figures
from p2pavg.optim.base.report import StepReport
from p2pavg.optim.logging.display import RunProgress
from p2pavg.telemetry.events import RoundEnded, RoundKind, UpdateTaken
from p2pavg.telemetry.round_log import round_sentence
from p2pavg.telemetry.status import PeerStatus, read_status
from p2pavg.tools.monitor.overview import Overview
from p2pavg.tools.monitor.terminal import screen

RUN = "texts"
NOW = 1_800_000_000.0
FRAGMENTS = (
    *("[/b]", "[bold red]", "[link=file:///etc/passwd]", "[", "]", ":skull:", "\\["),
    *("\x1b[2J", "\x1b]8;;http://x\x07", "\x9b31m", "\x00", "\r", "\n", "\t", "\u202e", "\u2028"),
    *("<script>alert(1)</script>", "<img src=x onerror=alert(1)>", "&quot;", "'", "</"),
    *('"', "\\", "\\n", '"} 1', '{run="x"}', "# HELP p2pavg_epoch x", "}", ","),
    *("%s", "%(x)d", "{0.__class__}", "{}", "$(id)", "loss", "a", " "),
)


def some_text(dice: random.Random, most: int) -> str:
    """Draw a text of at most ``most`` characters."""
    return "".join(dice.choice(FRAGMENTS) for _ in range(dice.randint(1, 5)))[:most]


def some_status(dice: random.Random) -> bytes:
    """Draw the bytes of a status, as a peer without any check writes them."""
    texts: dict[str, Any] = {"name": 40, "software": 32, "role": 32, "reach_sentence": 200, "drift": 200}
    texts = {name: some_text(dice, most) for name, most in texts.items() if dice.random() < 0.4}
    if dice.random() < 0.5:
        texts["metrics"] = ((some_text(dice, 32), dice.random()),)
        texts["history_of"], texts["history"] = texts["metrics"][0][0], ((1, 1.0), (2, 0.5))
    written: list[Any] = msgspec.to_builtins(PeerStatus(), builtin_types=(bytes,))
    for name, text in texts.items():
        written[1 + PeerStatus.__struct_fields__.index(name)] = text
    return msgspec.msgpack.encode(written)


def shown(told: PeerStatus) -> str:
    """Return the terminal's page of a run with one peer, whose status came over the network. Its JSON is checked."""
    overview = Overview(RUN, begins=NOW)
    overview.receive({"one": (told, NOW)}, NOW)
    run: Any = overview.shown(NOW + 1.0)
    (peer,) = json.loads(json.dumps(run))["peers"]
    assert peer["name"] == told.name, "the page's JSON has another name"
    console = Console(file=io.StringIO(), width=400, height=60, force_terminal=False)
    console.print(screen(run, 60))
    assert isinstance(console.file, io.StringIO)
    return console.file.getvalue()


def drawn(report: StepReport, metric: str) -> None:
    """Let the progress of a training loop show a report."""
    with RunProgress(console=Console(file=io.StringIO(), width=200), metric=metric) as progress:
        progress.show(report)


def exported(name: str) -> list[str]:
    """Return the names of metrics that a scraper reads from the exporter's text after an update with one metric."""
    registry = CollectorRegistry()
    Figures(registry, [RUN]).take(
        UpdateTaken(
            time=NOW, run_id=RUN, epoch=1, lineage=bytes(32), group_id="00", peers=("one", "two"), samples=1.0,
            metrics={name: 1.0}, grad_norm=None, learning_rates=(),
        )
    )  # fmt: skip
    families = text_string_to_metric_families(generate_latest(registry).decode())
    return [
        sample.labels["name"]
        for family in families
        for sample in family.samples
        if sample.name == "p2pavg_training_metric"
    ]


def told(reason: str) -> str:
    """Return the line of the log about a round that failed, and lost a member, for a peer's reason."""
    ended = RoundEnded(
        time=NOW, run_id=RUN, result=RoundKind.FAILED, duration=1.0, exchange_duration=0.5,
        agreement_duration=0.1, group_id="00", members=("one", "two"), contributors=("one", "two"), sent={},
        received={}, samples=1.0, own_samples=1.0, lost={"two": f"two was lost: {reason}"}, code="left_out",
        reason=reason,
    )  # fmt: skip
    return round_sentence(ended)


def search(dice: random.Random, count: int) -> Counter[str]:
    """Draw ``count`` texts; return how many were shown and refused.

    Raises:
        AssertionError: a place that shows a text has changed it, or was made to say something else.
    """
    tally: Counter[str] = Counter()
    for _ in range(count):
        try:
            status = read_status(some_status(dice))
        except RemoteProtocolError:
            tally["refused texts"] += 1
        else:
            page = shown(status)
            assert all(line.isprintable() for line in page.splitlines()), (
                "the terminal gets control characters"
            )
            assert not status.name.strip() or status.name.strip() in page, "the terminal shows another name"
            tally["shown texts"] += 1
        name, reason = some_text(dice, 32), PeerText(some_text(dice, 120))
        line = told(reason)
        assert line.isprintable(), "a line of the log has control characters"
        if not is_name(name):
            continue
        assert exported(name) == [name], "a scraper reads another name"
        drawn(
            StepReport(
                epoch=1, peers=1, others=0, samples=1.0, samples_per_second=1.0, metrics={name: 1.0},
                behind=reason, waiting=reason,
            ),
            name,
        )  # fmt: skip
    return tally
