"""The parts of a model beside its trained parameters: names, frozen parameters, buffers."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Sequence

import torch
from torch import nn
from torch.nn.modules.batchnorm import _NormBase

from p2pavg.allreduce.vector.accumulation import AVERAGED_DTYPES
from p2pavg.optim.base.joined import plain_buffers, plain_modules, plain_name, plain_parameters
from p2pavg.optim.base.recipe import Settings
from p2pavg.optim.base.state import digest_of, joint_digest, tensor_digest
from p2pavg.optim.ranks.shards import local_of
from p2pavg_compression import Codec

# A small variance among larger ones in a codec block. Below it, normalisation's epsilon is about as large.
_SMALL_AMONG_LARGE = (1.0, 1e-3)
_WORST_ERROR = 0.2


class ModelParts:
    """The model's buffers, frozen parameters and names, as an optimizer needs them.

    Args:
        model: the model, or ``None`` if it was not given. Without it, buffers and frozen parameters outside the
            optimizer are unknown.
        trained: the parameters that are trained.
        buffers: names of the buffers to average; ``None`` for the running statistics of normalisation layers in
            training mode. Of buffers that are not persistent, those that are named here are part of the state.
        codec: codec of the run.

    Raises:
        TypeError: ``model`` is not a module, or ``buffers`` is a string.
        ValueError: a name in ``buffers`` is not that of a buffer that can be averaged, or the codec is too coarse.
    """

    def __init__(
        self,
        model: nn.Module | None,
        trained: Sequence[torch.Tensor],
        *,
        buffers: Collection[str] | None,
        codec: Codec,
    ) -> None:
        if model is not None and not isinstance(model, nn.Module):
            raise TypeError(f"model must be a torch.nn.Module, got {type(model).__name__}")
        if model is None and buffers is not None:
            raise ValueError("buffers needs the model: give model= too")
        if model is not None and not {id(p) for p in plain_parameters(model).values()} & {
            id(p) for p in trained
        }:
            raise ValueError(
                f"model is a {type(model).__name__} of which `inner` trains no parameter, such as a copy: give the"
                " module whose parameters `inner` was made of (state=module counts as model=module)"
            )
        self._model = model
        self._trained = list(trained)
        self._averaged_names = _averaged_names(model, buffers)
        if self._averaged_names and not _keeps_small_values(codec):
            raise ValueError(
                f"the codec {codec.name} is too coarse for the model's buffers ({self._averaged_names[0]}, ..):"
                " beside large values it rounds small ones to 0."
                ' Use compression="blockwise8", "bf16" or None, or buffers=[] if they do not change'
            )
        self.begin()

    @property
    def averaged(self) -> list[torch.Tensor]:
        """The averaged buffers, looked up each time because a module may replace them."""
        found = self._buffers() if self._averaged_names else {}
        return [found[name] for name in self._averaged_names]

    @property
    def common(self) -> dict[str, torch.Tensor]:
        """The averaged buffers after the last update, by name: the same on all peers."""
        return dict(zip(self._averaged_names, self._common, strict=True))

    @property
    def numbers(self) -> list[str]:
        """Names of the trained parameters that do not depend on the model: peers may know it or not."""
        return [f"parameter {index}" for index in range(len(self._trained))]

    @property
    def labels(self) -> list[str]:
        """Names of the trained parameters, then of the averaged buffers."""
        known = {} if self._model is None else plain_parameters(self._model)
        named = {id(p): name for name, p in known.items()}
        of_trained = [named.get(id(p), number) for p, number in zip(self._trained, self.numbers, strict=True)]
        return [*of_trained, *(f"buffer {name}" for name in self._averaged_names)]

    def rules(self, frozen: Iterable[torch.Tensor]) -> Settings:
        """Return the settings of frozen parameters and buffers for the recipe.

        Args:
            frozen: the optimizer's parameters that require no gradient.
        """
        still = {id(p): p for p in frozen}
        if self._model is not None:
            still |= {id(p): p for p in self._model.parameters() if not p.requires_grad}
        values = digest_of(local_of(p) for p in still.values()).hex()[:16] if still else ""
        buffers = self._buffers()
        layout = [(name, tuple(b.shape), str(b.dtype)) for name, b in sorted(buffers.items())]
        constants = [tensor_digest(buffers[name]) for name in self._constant_names()]
        return (
            ("frozen parameters", f"{len(still)} of digest {values}" if still else 0),
            ("buffers", len(buffers)),
            ("averaged buffers", ", ".join(self._averaged_names)),
            ("buffers' shapes", layout),
            ("buffers' values", joint_digest(constants).hex()[:16] if constants else ""),
        )

    def begin(self) -> None:
        """Remember the present buffers as the common state of all peers."""
        self._common = [tensor.detach().clone() for tensor in self.averaged]
        """Copies of the averaged buffers after the last update, the same on all peers."""
        buffers = self._buffers()
        self._constants: dict[str, tuple[torch.Tensor, int, bytes]] = {
            name: (buffers[name], buffers[name]._version, tensor_digest(buffers[name]))
            for name in self._constant_names()
        }

    def check_constants(self) -> None:
        """Raise ValueError if a buffer that is not averaged has changed."""
        buffers = self._buffers() if self._constants else {}
        for name, (kept, version, digest) in self._constants.items():
            now = buffers.get(name)
            if now is kept and now._version == version:
                continue
            if now is None or tensor_digest(now) != digest:
                raise ValueError(
                    f"the model's buffer {name!r} changes in training, and would differ between peers."
                    f" Give buffers=[{name!r}, ..] to average it with those named there, or keep it out of the model"
                )
            self._constants[name] = (now, now._version, digest)

    @torch.no_grad()
    def take(self, averaged: Sequence[torch.Tensor]) -> None:
        """Set the averaged buffers to an average."""
        for buffer, kept, average in zip(self.averaged, self._common, averaged, strict=True):
            kept.copy_(average)
            buffer.copy_(average)

    @torch.no_grad()
    def restore(self) -> None:
        """Reset the averaged buffers to their values after the last update."""
        for buffer, kept in zip(self.averaged, self._common, strict=True):
            buffer.copy_(kept)

    def mend(self) -> None:
        """Reset the averaged buffers if one is not finite, after a batch with NaN or infinity."""
        if not all(bool(tensor.isfinite().all()) for tensor in self.averaged):
            self.restore()

    def _buffers(self) -> dict[str, torch.Tensor]:
        if self._model is None:
            return {}
        return plain_buffers(self._model, also=frozenset(self._averaged_names))

    def _constant_names(self) -> list[str]:
        return sorted(
            name
            for name, buffer in self._buffers().items()
            if buffer.is_floating_point() and name not in self._averaged_names
        )


def _averaged_names(model: nn.Module | None, buffers: Collection[str] | None) -> tuple[str, ...]:
    if model is None:
        return ()
    if buffers is None:
        return tuple(sorted(_running_statistics(model) & plain_buffers(model).keys()))
    if isinstance(buffers, str):
        raise TypeError(f"buffers must be a collection of names, got the text {buffers!r}")
    # A buffer that is not persistent is part of the state if it is asked for.
    chosen = frozenset(plain_name(model, name) for name in buffers)
    known = plain_buffers(model, also=chosen)
    for name in chosen:
        if name not in known or known[name].dtype not in AVERAGED_DTYPES:
            raise ValueError(
                f"buffers: {name!r} is not a buffer of the model in float32, float16 or bfloat16"
            )
    return tuple(sorted(chosen))


def _running_statistics(model: nn.Module) -> set[str]:
    return {
        f"{prefix}.{name}".removeprefix(".")
        for prefix, module in plain_modules(model)
        if isinstance(module, _NormBase) and module.training
        for name in ("running_mean", "running_var")
    }


def _keeps_small_values(codec: Codec) -> bool:
    """Return whether a codec roughly keeps a small value beside large ones."""
    large, small = _SMALL_AMONG_LARGE
    probe = torch.full((max(codec.granularity, 2),), large, dtype=torch.float32, device="cpu")
    probe[0] = small
    decoded = codec.decode(codec.encode(probe), probe.numel())
    return abs(float(decoded[0]) - small) <= _WORST_ERROR * small
