"""Processes that share every matrix product of a stage, and what makes their partial results whole.

Each rank of a tensor group has all states and a share of each large matrix. Two operations, each other's transpose, lie
around such a matrix (Megatron-LM: Shoeybi et al., 2019, section 3): `TensorGroup.enter` before it, where a whole tensor
meets shares, and `TensorGroup.leave` after it, where partial sums become whole.

Shares need not be equal, so any vocabulary and any number of ranks go together.

Legend: N tokens, D model, V vocabulary, R ranks.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, cast

import torch
import torch.distributed as dist
from torch import Tensor


def share_of(total: int, rank: int, size: int) -> tuple[int, int]:
    """First and one past the last of the `total` things that are a rank's; shares differ by one at most."""
    return total * rank // size, total * (rank + 1) // size


@dataclass(frozen=True)
class TensorGroup:
    """The tensor-parallel ranks that this process belongs to.

    Attributes:
        group: for collectives.
        rank: of this process in it.
        size: R.
    """

    group: dist.ProcessGroup
    rank: int
    size: int

    def enter(self, x: Tensor) -> Tensor:
        """The same tensor; its gradient is the sum over ranks."""
        return cast("Tensor", _Enter.apply(x, self))

    def leave(self, x: Tensor) -> Tensor:
        """The sum over ranks; each rank's part gets the whole gradient."""
        return cast("Tensor", _Leave.apply(x, self))

    def sum_(self, x: Tensor) -> Tensor:
        """Sum over ranks in place, without a graph."""
        dist.all_reduce(x, group=self.group)
        return x

    def gather(self, x: Tensor) -> Tensor:
        """[...] -> [R, ...] the tensors of all ranks, without a graph."""
        parts = [torch.empty_like(x) for _ in range(self.size)]
        dist.all_gather(parts, x, group=self.group)
        return torch.stack(parts)


class _Enter(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, ranks: TensorGroup) -> Tensor:
        ctx.ranks = ranks
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None]:
        return ctx.ranks.sum_(grads[0].clone(memory_format=torch.contiguous_format)), None


class _Leave(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, ranks: TensorGroup) -> Tensor:
        return ranks.sum_(x.clone(memory_format=torch.contiguous_format))

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None]:
        return grads[0], None
