"""A linear map with its weight laid out once for the CPU's matrix kernels.

oneDNN can keep a weight in the blocked order its kernels read (1.4 to 4 times faster than `F.linear` at decode sizes,
most in bfloat16). The operators are private to torch, so they are tried once per dtype and dropped if they are missing
or wrong; the answer is then `F.linear`'s.

Legend: N rows, I and O input and output features.
"""

from __future__ import annotations

import functools

import torch
import torch.nn.functional as F
from torch import Tensor

from offramp.serve.model.head_output import HeadOutput


class PackedLinear:
    """y = x W^T + b."""

    def __init__(self, weight: Tensor, bias: Tensor | None = None, *, pack: bool = True) -> None:
        """Lay out a weight.

        Args:
            weight: [O, I].
            bias: [O].
            pack: False keeps the plain layout (the reference).
        """
        self.bias = None if bias is None else bias.detach().contiguous()
        self.is_packed = pack and weight.device.type == "cpu" and can_pack(weight.dtype)
        self._weight = _pack(weight.detach()) if self.is_packed else weight.detach().contiguous()

    def __call__(self, x: Tensor) -> Tensor:
        """[N, I] -> [N, O]."""
        if self.is_packed:
            return _packed_linear(x, self._weight, self.bias)
        return F.linear(x, self._weight, self.bias)

    def head(self, x: Tensor) -> HeadOutput:
        """Best tokens of rows [N, I], where this is an unembedding."""
        return HeadOutput.of(self(x))


@functools.cache
def can_pack(dtype: torch.dtype) -> bool:
    """Whether this build of torch packs weights of `dtype` and then computes what `F.linear` computes."""
    generator = torch.Generator().manual_seed(0)
    weight = torch.randn(24, 40, generator=generator).to(dtype)
    bias = torch.randn(24, generator=generator).to(dtype)
    x = torch.randn(3, 40, generator=generator).to(dtype)
    try:
        y = _packed_linear(x, _pack(weight), bias)
    except (AttributeError, RuntimeError, TypeError):
        return False
    exact = F.linear(x.double(), weight.double(), bias.double())
    # 40 products of size about 1: fp32 sums are off by 1e-5 at most, and bf16 rounds the result at 2^-9 of its size.
    return torch.allclose(y.double(), exact, rtol=1e-2 if dtype == torch.bfloat16 else 0.0, atol=1e-4)


def _pack(weight: Tensor) -> Tensor:
    # The hint is the number of rows to be fast for. The blocked order turned out to be the same for 1 to 64 rows.
    return torch.ops.mkldnn._reorder_linear_weight(weight.contiguous(), 8)


def _packed_linear(x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    return torch.ops.mkldnn._linear_pointwise(x, weight, bias, "none", [], "")
