"""Names of a model's parameters and buffers, the same on all peers, however each of them wraps its model.

``torch.compile`` puts ``_orig_mod.`` before every name, and ``DistributedDataParallel`` puts ``module.``. Peers compare
names, deal out fragments by them and keep them in checkpoints, so a peer that wraps its model must have those of one
that does not.

No I/O, no clock.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator

import torch
from torch import nn
from torch.nn.parallel import DataParallel, DistributedDataParallel

# Torch's own names for the one module inside a wrapper: of torch.compile, checkpoint_wrapper and the first FSDP.
_INSIDE = frozenset({"_orig_mod", "_checkpoint_wrapped_module", "_fsdp_wrapped_module"})


def plain_modules(model: nn.Module) -> Iterator[tuple[str, nn.Module]]:
    """Yield each module once, with its name without wrappers; the wrapper comes before what it wraps."""
    seen: set[int] = set()

    def walk(name: str, module: nn.Module) -> Iterator[tuple[str, nn.Module]]:
        if id(module) in seen:
            return
        seen.add(id(module))
        yield name, module
        for part, child in module._modules.items():
            if child is not None:
                yield from walk(name if _is_wrapped(module, part) else _joined(name, part), child)

    return walk("", model)


def plain_parameters(model: nn.Module) -> dict[str, nn.Parameter]:
    """Return a model's parameters by their names without wrappers; of names for one parameter, the first."""
    found: dict[str, nn.Parameter] = {}
    seen: set[int] = set()
    for prefix, module in plain_modules(model):
        for name, parameter in module._parameters.items():
            if parameter is not None and id(parameter) not in seen:
                seen.add(id(parameter))
                found[_free(_joined(prefix, name), found)] = parameter
    return found


def plain_buffers(model: nn.Module, *, also: frozenset[str] = frozenset()) -> dict[str, torch.Tensor]:
    """Return the buffers that are part of a model's state, by their names without wrappers.

    A buffer that is not persistent is none: it is a cache, such as a mask that grows with the longest sequence.

    Args:
        also: names of buffers that are returned even if they are not persistent.
    """
    found: dict[str, torch.Tensor] = {}
    seen: set[int] = set()
    for prefix, module in plain_modules(model):
        for name, buffer in module._buffers.items():
            if buffer is None or id(buffer) in seen:
                continue
            whole = _free(_joined(prefix, name), found)
            if name not in module._non_persistent_buffers_set or whole in also:
                seen.add(id(buffer))
                found[whole] = buffer
    return found


def plain_name(model: nn.Module, name: str) -> str:
    """Return the name without wrappers of a parameter or buffer that has this name with them, or without."""
    kept: list[str] = []
    module: nn.Module | None = model
    for part in name.split("."):
        if module is None or not _is_wrapped(module, part):
            kept.append(part)
        # No child of this name: a buffer, or the name leaves a wrapper out, as plain names do.
        module = None if module is None else module._modules.get(part)
    return ".".join(kept)


def _is_wrapped(module: nn.Module, name: str) -> bool:
    """Return whether a module is a wrapper of its child of this name."""
    return name in _INSIDE or (
        name == "module" and isinstance(module, DataParallel | DistributedDataParallel)
    )


def _joined(prefix: str, name: str) -> str:
    return f"{prefix}.{name}" if prefix else name


def _free(name: str, taken: Collection[str]) -> str:
    """Return a name that no other tensor has: a wrapper may have a tensor of its own beside the wrapped ones."""
    while name in taken:
        name += "'"
    return name
