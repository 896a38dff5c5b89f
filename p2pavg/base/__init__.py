"""The ground on which every other room stands: errors, results, encodings, threads, limits."""

from __future__ import annotations

import gc
from collections.abc import Iterator
from contextlib import contextmanager


@contextmanager
def no_garbage_collection() -> Iterator[None]:
    """Pause the garbage collector of this process, for imports: they make objects that stay.

    Beside torch's objects, the collections during our imports take as long as the imports themselves. Another thread
    that switches the collector meanwhile, or forks, finds it as it is here.
    """
    was_enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_enabled:
            gc.enable()
