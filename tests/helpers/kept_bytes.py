"""What autograd keeps for the backward pass."""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from offramp.train.pipeline.costs import MicroBatchShape


def kept_bytes(model: nn.Module, shape: MicroBatchShape, run: Callable[[], Any], inputs: set[int]) -> int:
    """Bytes of the distinct tensors that autograd saves, without parameters, their casts and `inputs`."""
    weights = {tuple(p.shape) for p in model.parameters()} | {tuple(p.shape[::-1]) for p in model.parameters()}
    known = inputs | {p.data_ptr() for p in model.parameters()}
    seen: dict[int, tuple[int, Tensor]] = {}

    def pack(tensor: Tensor) -> Tensor:
        storage = tensor.untyped_storage()
        if storage.data_ptr() not in known and tuple(tensor.shape) not in weights:
            seen[storage.data_ptr()] = (storage.nbytes(), tensor)
        return tensor

    autocast = torch.autocast("cpu", torch.bfloat16) if shape.mixed else contextlib.nullcontext()
    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor), autocast:
        keep = run()
    assert keep is not None
    return sum(size for size, _ in seen.values())
