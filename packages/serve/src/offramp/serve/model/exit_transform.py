"""The exit heads that need nothing but a row: from the state after an exit layer to the one its unembedding reads.

Legend: N rows, D model.
"""

from __future__ import annotations

from collections.abc import Callable

import torch.nn.functional as F
from torch import Tensor

from offramp.common.model.exit_head import Adapter, ExitHead
from offramp.common.model.norm import RMSNorm
from offramp.serve.model import ops
from offramp.serve.model.linear import ChosenKernels, PackedLinear
from offramp.serve.model.native import native_library
from offramp.serve.model.stacking import stacked

RowNorm = Callable[[Tensor, Tensor | None, float], Tensor]
"""`ops.rms_norm`, or what stands for it: (x [N, D], weight [D], eps) -> [N, D]."""


def row_norm(kernels: ChosenKernels) -> RowNorm:
    """The norm that goes with `kernels`."""
    library = native_library() if kernels == "native" else None
    return ops.rms_norm if library is None else library.ops.rms_norm.default


class ExitTransform:
    """An `ExitHead` without a block, with its weights packed as those of the layers are.

    With native kernels a row's result does not depend on the rows beside it.
    """

    def __init__(self, head: ExitHead, eps: float, kernels: ChosenKernels) -> None:
        """Pack.

        Args:
            head: without a block.
            eps: of norms.
            kernels: what computes it.
        """
        assert head.block is None
        self._eps, self._rms_norm = eps, row_norm(kernels)
        self._adapter = None if head.adapter is None else _PackedAdapter(head.adapter, eps, kernels)
        self._mlp_norm = _weight(head.mlp_norm)
        if head.mlp is not None:
            self._gate_up = PackedLinear(*stacked(head.mlp.gate_proj, head.mlp.up_proj), kernels=kernels)
            self._down = PackedLinear(*stacked(head.mlp.down_proj), kernels=kernels)
        self._norm = _weight(head.norm)

    def __call__(self, x: Tensor) -> Tensor:
        """[N, D] -> [N, D], as `ExitHead.transform`."""
        if self._adapter is not None:
            x = self._adapter(x)
        elif self._mlp_norm is not None:
            x = x + self._down(ops.gated_silu(self._gate_up(self._rms_norm(x, self._mlp_norm, self._eps))))
        return x if self._norm is None else self._rms_norm(x, self._norm, self._eps)


class _PackedAdapter:
    def __init__(self, adapter: Adapter, eps: float, kernels: ChosenKernels) -> None:
        self._eps, self._rms_norm = eps, row_norm(kernels)
        self._norm = adapter.norm.weight.detach()
        down = adapter.down_proj
        self._down = None if down is None else PackedLinear(*stacked(down), kernels=kernels)
        self._proj = PackedLinear(*stacked(adapter.proj), kernels=kernels)

    def __call__(self, x: Tensor) -> Tensor:
        normed = self._rms_norm(x, self._norm, self._eps)
        if self._down is not None:
            normed = F.silu(self._down(normed))
        scale = x.float().pow(2).mean(dim=-1, keepdim=True).add(self._eps).sqrt().to(x.dtype)
        return x + self._proj(normed) * scale


def _weight(norm: RMSNorm | None) -> Tensor | None:
    return None if norm is None else norm.weight.detach()
