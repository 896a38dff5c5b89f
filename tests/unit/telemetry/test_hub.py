"""Events reach their subscribers, and a subscriber that raises costs no other anything."""

from __future__ import annotations

import logging
import threading

import pytest

from p2pavg.telemetry.events import AnyEvent, PeerGone
from p2pavg.telemetry.hub import Events

EVENT = PeerGone(time=1.0, run_id="run", peer_id="peer")


def raises(event: AnyEvent) -> None:
    raise RuntimeError("a mistake of the subscriber")


def test_subscribers_get_events_in_the_order_of_subscription_until_they_cancel() -> None:
    events, found = Events(), list[tuple[str, AnyEvent]]()
    with events.subscribe(lambda event: found.append(("first", event))) as subscription:
        events.subscribe(lambda event: found.append(("second", event)))
        events.emit(EVENT)
    events.emit(EVENT)
    subscription.cancel()
    assert found == [("first", EVENT), ("second", EVENT), ("second", EVENT)]


def test_one_function_may_be_subscribed_twice_and_cancelled_once() -> None:
    events, found = Events(), list[AnyEvent]()
    first = events.subscribe(found.append)
    events.subscribe(found.append)
    first.cancel()
    events.emit(EVENT)
    assert found == [EVENT]


def test_raising_subscriber_is_logged_once_by_name_and_hurts_no_other(
    caplog: pytest.LogCaptureFixture,
) -> None:
    events, found = Events(), list[AnyEvent]()
    events.subscribe(raises)
    events.subscribe(found.append)
    with caplog.at_level(logging.ERROR):
        for _ in range(3):
            events.emit(EVENT)
    assert found == [EVENT] * 3
    assert [("raises" in record.getMessage()) for record in caplog.records] == [True]


def test_subscriber_may_cancel_itself() -> None:
    events, found = Events(), list[AnyEvent]()

    def once(event: AnyEvent) -> None:
        found.append(event)
        subscription.cancel()

    subscription = events.subscribe(once)
    events.emit(EVENT)
    events.emit(EVENT)
    assert found == [EVENT]


def test_parent_gets_the_events_of_all_children() -> None:
    parent, found = Events(), list[AnyEvent]()
    parent.subscribe(found.append)
    for child in (Events(parent), Events(parent)):
        child.emit(EVENT)
    assert found == [EVENT, EVENT]


def test_what_is_no_function_is_refused() -> None:
    with pytest.raises(TypeError, match="callback must be a function of one event, got str"):
        Events().subscribe("print")  # type: ignore[arg-type]


def test_many_threads_may_subscribe_cancel_and_emit() -> None:
    events, found = Events(), list[AnyEvent]()
    events.subscribe(found.append)

    def work() -> None:
        for _ in range(200):
            with events.subscribe(lambda _: None):
                events.emit(EVENT)

    threads = [threading.Thread(target=work) for _ in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(found) == 8 * 200
    assert len(events._subscriptions) == 1
