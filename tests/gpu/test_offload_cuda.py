"""Local updates of a model on a GPU whose anchor and momentum are in the CPU's memory."""

from __future__ import annotations

from typing import Any, cast

import pytest
import torch
from torch.optim import SGD

from p2pavg.blocking import Averager
from p2pavg.optim import diloco
from tests.unit.optim.fakes import Alone

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]


@pytest.mark.parametrize("options", [{}, {"sync_every": 4, "fragments": 2, "delay": 1}])
def test_offloaded_anchor_is_pinned_and_changes_no_result(options: dict[str, Any]) -> None:
    found = []
    for offload in (False, True):
        averager = Alone(compression=None)
        averager.runs_for = 1
        weights = torch.nn.Parameter(torch.arange(8.0, device="cuda"))
        given: dict[str, Any] = {"sync_every": 2, "peers_to_start": 2} | options
        optimizer = diloco(SGD([weights], lr=0.1), cast(Averager, averager), offload=offload, **given)
        for _ in range(12):
            weights.grad = torch.ones_like(weights)
            optimizer.step(samples=1)
        momentum = [state["momentum_buffer"] for state in optimizer.outer.state_dict()["state"].values()]
        kind = "cpu" if offload else "cuda"
        assert {tensor.device.type for tensor in (*optimizer._anchor.tensors, *momentum)} == {kind}
        assert optimizer._anchor.tensors[0].is_pinned() == offload
        found.append([tensor.cpu() for tensor in (weights.detach(), *optimizer.anchor, *momentum)])
    for on_device, on_cpu in zip(*found, strict=True):
        assert torch.allclose(on_device, on_cpu, atol=1e-6)
