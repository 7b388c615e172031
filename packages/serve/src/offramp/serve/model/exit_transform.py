"""The exit heads that need nothing but a row: from the state after an exit layer to the one its unembedding reads.

Legend: N rows, D model.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from offramp.common.model.exit_head import Adapter, ExitHead
from offramp.common.model.norm import RMSNorm
from offramp.serve.model import ops
from offramp.serve.model.linear import ChosenKernels, NativeMap, PackedLinear
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

    def __init__(
        self, head: ExitHead, eps: float, kernels: ChosenKernels, *, int8_for: torch.dtype | None = None
    ) -> None:
        """Pack.

        Args:
            head: without a block.
            eps: of norms.
            kernels: what computes it.
            int8_for: see `PackedLinear`.
        """
        assert head.block is None
        self._eps, self._rms_norm = eps, row_norm(kernels)
        self._adapter = None if head.adapter is None else _PackedAdapter(head.adapter, eps, kernels, int8_for)
        self._mlp_norm = _weight(head.mlp_norm)
        if head.mlp is not None:
            self._gated = _GatedLinear(*stacked(head.mlp.gate_proj, head.mlp.up_proj), kernels, int8_for)
            self._down = PackedLinear(*stacked(head.mlp.down_proj), kernels=kernels, int8_for=int8_for)
        self._norm = _weight(head.norm)

    def __call__(self, x: Tensor) -> Tensor:
        """[N, D] -> [N, D], as `ExitHead.transform`."""
        if self._adapter is not None:
            x = self._adapter(x)
        elif self._mlp_norm is not None:
            x = x + self._down(self._gated(self._rms_norm(x, self._mlp_norm, self._eps)))
        return x if self._norm is None else self._rms_norm(x, self._norm, self._eps)


class _PackedAdapter:
    def __init__(self, adapter: Adapter, eps: float, kernels: ChosenKernels, int8_for: torch.dtype | None) -> None:
        self._eps, self._rms_norm = eps, row_norm(kernels)
        self._norm = adapter.norm.weight.detach()
        self._down: _GatedLinear | None = None
        if adapter.down_proj is not None:
            # SiLU by itself is a gate of something that is always one: no weight, and a bias of one.
            weight = adapter.down_proj.weight.detach()
            bias = torch.cat((self._norm.new_zeros(len(weight)), self._norm.new_ones(len(weight))))
            self._down = _GatedLinear(torch.cat((weight, torch.zeros_like(weight))), bias, kernels, int8_for)
        self._proj = PackedLinear(*stacked(adapter.proj), kernels=kernels, int8_for=int8_for)

    def __call__(self, x: Tensor) -> Tensor:
        normed = self._rms_norm(x, self._norm, self._eps)
        if self._down is not None:
            normed = self._down(normed)
        scale = x.float().pow(2).mean(dim=-1, keepdim=True).add(self._eps).sqrt().to(x.dtype)
        return x + self._proj(normed) * scale


class _GatedLinear:
    """silu(gate) * up of one product: [N, I] -> [N, F]. Torch's SiLU rounds by where in a tensor an element lies."""

    def __init__(
        self, weight: Tensor, bias: Tensor | None, kernels: ChosenKernels, int8_for: torch.dtype | None
    ) -> None:
        """Pack a weight [2 * F, I] and a bias [2 * F], those of the gates first."""
        self._features = len(weight) // 2
        library = native_library() if kernels == "native" else None
        self._native = None if library is None else library.ops.gated_linear.default
        self._linear: PackedLinear | None = None
        if library is None:
            self._linear = PackedLinear(weight, bias, kernels=kernels, int8_for=int8_for)
        else:
            self._map = NativeMap.pack(library.ops, weight, bias, gated=True, int8_for=int8_for)

    def __call__(self, x: Tensor) -> Tensor:
        if self._native is not None:
            return self._native(x, self._map.weight, self._map.bias, self._features, self._map.scales)
        assert self._linear is not None
        return ops.gated_silu(self._linear(x))


def _weight(norm: RMSNorm | None) -> Tensor | None:
    return None if norm is None else norm.weight.detach()
