"""Exit heads on rows: from the state after an exit layer to the one its unembedding reads, and to how sure it is.

With native kernels each is one operation (`csrc/exit.cpp`), and a row's result does not depend on the rows beside it;
without them torch does it step by step, which is the reference.

Legend: N rows, D model, F features between the maps of a head, V vocabulary (or a shortlist of it).
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Literal

import torch
import torch.nn.functional as F
from torch import Tensor

from offramp.common.exits import confidence
from offramp.common.model.exit_head import ExitClassifier, ExitHead
from offramp.common.model.norm import RMSNorm
from offramp.serve.model import ops
from offramp.serve.model.head_output import HeadOutput
from offramp.serve.model.linear import ChosenKernels, NativeMap, PackedLinear
from offramp.serve.model.native import native_library
from offramp.serve.model.stacking import stacked
from offramp.serve.model.unembedding import Unembedding

_Map = tuple[Tensor, Tensor | None]  # weight and bias
_NO_MAP = (None, None, None)

HeadMeasure = Literal["max_probability", "margin"]
"""Confidence measures that a `HeadOutput` gives."""


def cosine(kernels: ChosenKernels) -> Callable[[Tensor, Tensor], Tensor]:
    """The cosine between states and those before the layer, [N, D] x2 -> [N] fp32, that goes with `kernels`."""
    library = native_library() if kernels == "native" else None
    return confidence.cosine if library is None else library.ops.cosine.default


def exit_classifier(trained: ExitClassifier) -> Callable[[Tensor], Tensor]:
    """The confidence measure `classifier` of one exit, of states [N, D] -> [N] fp32; torch computes it everywhere."""
    weight, bias = trained.weight[0].detach().float(), trained.bias.detach().float()
    return functools.partial(confidence.classifier, weight=weight, bias=bias)


class ExitTransform:
    """norm(x + map(inner(inner_norm(x))) * scale): an exit head without a block, or what follows the block."""

    def __init__(
        self,
        head: ExitHead | None,
        norm: RMSNorm | None,
        eps: float,
        kernels: ChosenKernels,
        *,
        int8_for: torch.dtype | None = None,
    ) -> None:
        """Pack.

        Args:
            head: its adapter or feed-forward is taken; None: there is neither.
            norm: the last norm; None: there is none.
            eps: of norms.
            kernels: what computes it.
            int8_for: see `PackedLinear`.
        """
        self._eps = eps
        self._norm = _weight(norm)
        self._inner_norm: Tensor | None = None
        self._is_scaled = False
        inner: _Map | None = None
        linear: _Map | None = None
        is_gated = False
        if head is not None and head.adapter is not None:
            self._inner_norm, self._is_scaled = _weight(head.adapter.norm), True
            inner = None if head.adapter.down_proj is None else stacked(head.adapter.down_proj)
            linear = stacked(head.adapter.proj)
        elif head is not None and head.mlp is not None:
            self._inner_norm, is_gated = _weight(head.mlp_norm), True
            inner, linear = stacked(head.mlp.gate_proj, head.mlp.up_proj), stacked(head.mlp.down_proj)
        library = native_library() if kernels == "native" else None
        if library is not None:
            native = library.ops
            self._exit_state, self._exit_test = native.exit_state.default, native.exit_test.default
            features = 0 if inner is None else len(inner[0]) // (2 if is_gated else 1)
            packed = (
                *(
                    _NO_MAP
                    if inner is None
                    else NativeMap.pack(native, *inner, gated=is_gated, int8_for=int8_for).moved()
                ),
                features,
                is_gated,
                *(_NO_MAP if linear is None else NativeMap.pack(native, *linear, int8_for=int8_for).moved()),
            )
            self._arguments = (self._inner_norm, *packed, self._is_scaled, self._norm, eps)
        else:
            self._exit_state = self._exit_test = None
            self._inner = None if inner is None else PackedLinear(*inner, kernels=kernels, int8_for=int8_for)
            self._activation = ops.gated_silu if is_gated else F.silu
            self._map = None if linear is None else PackedLinear(*linear, kernels=kernels, int8_for=int8_for)

    def __call__(self, x: Tensor) -> Tensor:
        """[N, D] -> [N, D], as `ExitHead.transform`."""
        if self._exit_state is not None:
            return self._exit_state(x.contiguous(), *self._arguments)
        if self._map is not None:
            inner = ops.rms_norm(x, self._inner_norm, self._eps)
            correction = self._map(inner if self._inner is None else self._activation(self._inner(inner)))
            if self._is_scaled:
                correction = correction * x.float().pow(2).mean(dim=-1, keepdim=True).add(self._eps).sqrt().to(x.dtype)
            x = x + correction
        return x if self._norm is None else ops.rms_norm(x, self._norm, self._eps)

    def test(self, x: Tensor, unembed: Unembedding, measure: HeadMeasure) -> tuple[Tensor, HeadOutput, Tensor]:
        """Transform, unembed and measure.

        Args:
            x: [N, D] states after the exit layer.
            unembed: D -> V, maybe of a shortlist, over which confidence is then measured.
            measure: confidence measure.

        Returns:
            The states [N, D] that the unembedding has read, its best tokens, and the confidences [N] fp32.
        """
        packed = unembed.linear.packed
        if self._exit_test is not None and packed is not None:
            state, token_ids, best, second, logsumexp, values = self._exit_test(
                x.contiguous(),
                *self._arguments,
                *(packed.weight, packed.scales, unembed.linear.out_features, unembed.tokens),
                measure == "margin",
            )
            return state, HeadOutput(token_ids, best, second, logsumexp), values
        state = self(x)
        head = unembed.head(state)
        return state, head, head.margin if measure == "margin" else head.max_probability


def _weight(norm: RMSNorm | None) -> Tensor | None:
    return None if norm is None else norm.weight.detach()
