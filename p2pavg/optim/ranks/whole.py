"""Peers whose ranks hold shards of the parameters, and whose first rank also holds them whole.

Peers average their parameters whole, or shard by shard if all peers have equally many ranks. A peer with shards takes
part in a run of whole parameters as follows: its first rank has a copy of the model, with which it trains like a peer
of one process. Before each step the gradients of the shards are gathered into the copy, one parameter at a time, and
after each change the copy's parameters are scattered over the shards.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any, cast

import torch
from torch import nn

from p2pavg.base.errors import AccumulateError
from p2pavg.optim.base.joined import plain_buffers, plain_parameters
from p2pavg.optim.ranks.shards import Ranks, local_of

if TYPE_CHECKING:
    import torch.distributed as dist

Layout = Mapping[str, tuple[tuple[int, ...], str, bool]]
"""Shape, dtype and whether it is trained, of each parameter and buffer, by name."""


class WholeCopy:
    """The copy of a sharded model on the first rank. All methods are called on all ranks together.

    Args:
        network: the module whose parameters are sharded over the ranks, by ``fully_shard``.
        whole: on rank 0, a module with the same parameters and buffers, not sharded; ``None`` on the other ranks.
        ranks: the ranks.
        group: their group of ``torch.distributed``.
        buffers: names of the buffers that are copied.
    """

    def __init__(
        self,
        network: nn.Module,
        whole: nn.Module | None,
        ranks: Ranks,
        group: dist.ProcessGroup | None,
        buffers: frozenset[str],
    ) -> None:
        self._network = network
        self._ranks = ranks
        self._group = group
        self._parameters = list(network.parameters())
        self._whole = [] if whole is None else list(whole.parameters())
        self._module = whole
        self._buffers = buffers

    @torch.no_grad()
    def collect(self) -> None:
        """Put the gradients of the whole parameters into the copy, and rank 0's buffers.

        Raises:
            AccumulateError: a parameter has a gradient on some ranks only; on all ranks.
        """
        found = self._ranks.gather([parameter.grad is not None for parameter in self._parameters])
        if any(each != found[0] for each in found):
            raise AccumulateError(
                "a parameter has a gradient on one rank of this peer, and none on another one; nothing was"
                " accumulated",
                remedy="let the backward pass of every rank reach the same parameters",
            )
        for place, parameter in enumerate(self._parameters):
            gradient = None if parameter.grad is None else full_of(parameter.grad)
            if self._whole:
                mine = self._whole[place]
                mine.grad = None if gradient is None else gradient.to(mine.device, mine.dtype)
        if self._module is not None:
            _copy_buffers(self._network, self._module, self._buffers)

    @torch.no_grad()
    def spread(self) -> None:
        """Replace the shards of all ranks by those of the copy's parameters, and all buffers by the copy's."""
        import torch.distributed as dist

        reshard(self._network)
        for place, parameter in enumerate(self._parameters):
            self._scatter(parameter, self._whole[place] if self._whole else None)
        if self._module is not None:
            _copy_buffers(self._module, self._network, self._buffers)
        for buffer in chosen_buffers(self._network, self._buffers).values():
            dist.broadcast(buffer, group=self._group, group_src=0)

    def _scatter(self, parameter: torch.Tensor, source: torch.Tensor | None) -> None:
        """Set one parameter of all ranks to rank 0's ``source``."""
        import torch.distributed as dist
        from torch.distributed.tensor import distribute_tensor

        local = local_of(parameter)
        if source is None:  # the shape counts alone
            given = torch.empty(parameter.shape, dtype=local.dtype, device=local.device)
        else:
            given = source.detach().to(local.device)
        if local is parameter:
            dist.broadcast(given, group=self._group, group_src=0)
            local.copy_(given)
        else:
            like = cast(Any, parameter)
            local.copy_(local_of(distribute_tensor(given, like.device_mesh, like.placements)))

    def zero_grad(self, set_to_none: bool) -> None:
        """Zero the copy's gradients."""
        if self._module is not None:
            self._module.zero_grad(set_to_none)


def full_of(tensor: torch.Tensor) -> torch.Tensor:
    """Return the whole tensor of which this rank has a shard; call it on all ranks."""
    full = getattr(tensor, "full_tensor", None)
    return tensor if full is None else cast(torch.Tensor, full())


def is_sharded(network: nn.Module) -> bool:
    """Return whether this rank holds a part of a parameter of a module."""
    return any(hasattr(p, "to_local") and local_of(p).numel() != p.numel() for p in network.parameters())


def reshard(network: nn.Module) -> None:
    """Let FSDP put its shards in place again: after a forward pass without a backward pass it may hold more."""
    for module in network.modules():
        if hasattr(module, "reshard"):
            cast(Any, module).reshard()


def layout_of(module: nn.Module) -> Layout:
    """Return the layout of a module's whole parameters and persistent buffers, in their order."""
    tensors = [*plain_parameters(module).items(), *plain_buffers(module).items()]
    return {
        name: (tuple(t.shape), str(t.dtype).removeprefix("torch."), t.requires_grad) for name, t in tensors
    }


def wrong_network(network: nn.Module, ranks: Sequence[int]) -> str:
    """Return the reason why a sharded network cannot be copied to and from; empty if it can.

    Args:
        ranks: global numbers of the ranks of the process group, in their order.
    """
    for name, parameter in network.named_parameters():
        mesh = getattr(parameter, "device_mesh", None)
        if mesh is None and parameter.requires_grad:
            return f"the parameter {name!r} of network is not sharded: no rank reduces its gradients"
        if mesh is not None and mesh.mesh.flatten().tolist() != list(ranks):
            return (
                f"network is sharded over the ranks {mesh.mesh.flatten().tolist()}, and process_group has"
                f" {list(ranks)}: give the group of the same ranks, in the same order"
            )
    return ""


def difference(whole: Layout, network: Layout) -> str:
    """Return the first difference between the layouts of ``whole`` and ``network``; empty without one."""
    for name in (*whole, *network):
        if name not in network or name not in whole:
            lacks = "network" if name in whole else "whole"
            return f"whole must be the module of network before it was sharded: {lacks} has no {name!r}"
        if whole[name] != network[name]:
            here, there = _told(network[name]), _told(whole[name])
            return f"whole must be like network: {name!r} {there} there, and {here} in network"
    if list(whole) != list(network):
        return "whole must have its parameters in the order of network's"
    return ""


def _told(layout: tuple[tuple[int, ...], str, bool]) -> str:
    shape, dtype, trained = layout
    return f"is {dtype} of shape {shape}{'' if trained else ', not trained,'}"


def chosen_buffers(module: nn.Module, names: frozenset[str]) -> dict[str, torch.Tensor]:
    """Return a module's buffers of these names, in the module's order."""
    return {name: buffer for name, buffer in plain_buffers(module, also=names).items() if name in names}


def _copy_buffers(source: nn.Module, target: nn.Module, names: frozenset[str]) -> None:
    """Copy the buffers that differ: a buffer that is written to is checked for changes."""
    found = chosen_buffers(source, names)
    for name, buffer in chosen_buffers(target, names).items():
        value = found[name].to(buffer.device)
        if not torch.equal(value, buffer):
            buffer.copy_(value)
