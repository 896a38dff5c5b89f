"""The subscribers of a peer's events. No I/O, no clock."""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable
from typing import TypeAlias

from p2pavg.telemetry.events import AnyEvent

logger = logging.getLogger(__name__)

OnEvent: TypeAlias = Callable[[AnyEvent], None]
"""Takes an event. It is called in the thread in which the event happens, so it returns soon and does not block."""


class Subscription:
    """One subscriber. Call :meth:`cancel` to end it, or use it in a ``with`` statement."""

    def __init__(self, events: Events, callback: OnEvent) -> None:
        self._events = events
        self._callback = callback
        self._has_failed = False

    def cancel(self) -> None:
        """Deliver no more events. A call that runs in another thread may still end after this. May be called twice."""
        self._events._remove(self)

    def __enter__(self) -> Subscription:
        return self

    def __exit__(self, *_: object) -> None:
        self.cancel()

    def deliver(self, event: AnyEvent) -> None:
        """Call the subscriber. An exception is logged once for each subscription, and goes no further."""
        try:
            self._callback(event)
        except Exception:
            if not self._has_failed:
                self._has_failed = True
                name = getattr(self._callback, "__qualname__", None) or type(self._callback).__qualname__
                logger.exception(
                    "the subscriber %s raised on %s; it goes on getting events, and later errors are not logged",
                    name,
                    type(event).__name__,
                )


class Events:
    """Delivers events to subscribers, in the order of subscription. All methods may be called from any thread.

    Args:
        parent: gets every event as well, after the subscribers of this object.
    """

    def __init__(self, parent: Events | None = None) -> None:
        self._parent = parent
        self._lock = threading.Lock()
        self._subscriptions: tuple[Subscription, ...] = ()

    def subscribe(self, callback: OnEvent) -> Subscription:
        """Call ``callback`` with every event from now on.

        Raises:
            TypeError: ``callback`` cannot be called.
        """
        if not callable(callback):
            raise TypeError(f"callback must be a function of one event, got {type(callback).__name__}")
        subscription = Subscription(self, callback)
        with self._lock:
            self._subscriptions = (*self._subscriptions, subscription)
        return subscription

    def emit(self, event: AnyEvent) -> None:
        """Deliver an event to all subscribers, in this thread."""
        self.pass_on(event)
        if self._parent is not None:
            self._parent.emit(event)

    def pass_on(self, event: AnyEvent) -> None:
        """Deliver an event to the subscribers of this object, and not to the parent, which has it already."""
        for subscription in self._subscriptions:  # a tuple, which never changes
            subscription.deliver(event)

    def _remove(self, subscription: Subscription) -> None:
        with self._lock:
            self._subscriptions = tuple(each for each in self._subscriptions if each is not subscription)
