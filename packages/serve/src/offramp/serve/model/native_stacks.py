"""Weights of several layers in one tensor each, as the C++ operations take them."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from offramp.serve import memory
from offramp.serve.model.linear import NativeMap


class Stack:
    """Tensors of layers in one.

    Attributes:
        tensor: made when the first of them comes; None if none ever does.
    """

    def __init__(self, count: int) -> None:
        self.tensor: Tensor | None = None
        self._count = count

    def put(self, index: int, tensor: Tensor | None) -> None:
        """Take in that of layer `index` + 1."""
        if tensor is None:
            return
        if self.tensor is None:
            self.tensor = memory.empty((self._count, *tensor.shape), tensor.dtype)
        self.tensor[index] = tensor.detach()


class MapStack:
    """Packed linear maps of layers in one weight and, where there are any, one bias and one tensor of scales."""

    def __init__(self, ops: Any, count: int, int8_for: torch.dtype | None) -> None:
        self._ops, self._int8_for = ops, int8_for
        self._stacks = tuple(Stack(count) for _ in NativeMap._fields)

    def put(self, index: int, weight: Tensor, bias: Tensor | None, *, gated: bool = False) -> None:
        """Take in that of layer `index` + 1; see `NativeMap.pack`."""
        packed = NativeMap.pack(self._ops, weight, bias, gated=gated, int8_for=self._int8_for)
        for stack, tensor in zip(self._stacks, packed, strict=True):
            stack.put(index, tensor)

    @property
    def tensors(self) -> tuple[Tensor | None, ...]:
        """Weight, bias and scales."""
        return tuple(stack.tensor for stack in self._stacks)
