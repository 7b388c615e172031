"""A linear map with its weight laid out once for the CPU's matrix kernels.

There are three kinds of kernels (`Kernels` in `offramp.serve.config`):

- native: Offramp's own, see `native` and `csrc`. A row's result does not depend on the other rows, bit for bit.
- packed: oneDNN's, with the weight in the blocked order that they read (1.4 to 4 times faster than `F.linear` at decode
  sizes, most in bfloat16). The operators are private to torch, so they are tried once per dtype.
- plain: `F.linear`, the reference.

Native kernels read a weight of int8 as it is (see `quantization`); the others keep what it stands for.

Legend: N rows, I and O input and output features.
"""

from __future__ import annotations

import functools
from typing import Any, Literal, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from offramp.common.errors import OfframpError
from offramp.serve import memory
from offramp.serve.config import Kernels
from offramp.serve.model.head_output import HeadOutput
from offramp.serve.model.native import native_library
from offramp.serve.model.quantization import quantize

ChosenKernels = Literal["native", "packed", "plain"]
"""`Kernels` without `auto`."""


def choose_kernels(kernels: Kernels, dtype: torch.dtype) -> ChosenKernels:
    """What `kernels` amounts to on this machine for weights of `dtype`.

    Raises:
        OfframpError: if `native` is asked for and there are no native kernels here.
    """
    may_be_native = kernels in ("auto", "native") and dtype in (torch.float32, torch.bfloat16)
    has_native = may_be_native and native_library() is not None
    if kernels == "native" and not has_native:
        raise OfframpError(
            "kernels 'native' need a C++ compiler (g++ or clang++) to be built with, and weights of fp32 or bf16; the "
            "log says what is missing. Kernels 'auto' do without."
        )
    if has_native:
        return "native"
    return "packed" if kernels in ("auto", "packed") and can_pack(dtype) else "plain"


class NativeMap(NamedTuple):
    """A linear map as the native kernels take it.

    Attributes:
        weight: packed; int8 where there are scales.
        bias: packed, or None.
        scales: packed, or None.
    """

    weight: Tensor
    bias: Tensor | None
    scales: Tensor | None

    @classmethod
    def pack(
        cls,
        ops: Any,
        weight: Tensor,
        bias: Tensor | None,
        *,
        gated: bool = False,
        int8_for: torch.dtype | None = None,
    ) -> NativeMap:
        """Pack.

        Args:
            ops: namespace of the C++ operations.
            weight: [O, I]; gated: those of the gates, then as many ups.
            bias: [O].
            gated: whether the ups are to be multiplied by SiLU of the gates.
            int8_for: round the weight to int8, for inputs of this type; None leaves it as it is, of the inputs' type.
        """
        packed_bias = None if bias is None else ops.pack_bias(bias.detach().contiguous(), gated)
        if int8_for is None:
            return cls(ops.pack_linear(weight.detach().contiguous(), gated), packed_bias, None)
        quantized = quantize(weight)
        packed, scales = ops.pack_int8(quantized.values, quantized.scales, int8_for, gated)
        return cls(packed, packed_bias, scales)

    def moved(self) -> NativeMap:
        """The same in huge pages."""
        bias, scales = (None if tensor is None else memory.moved(tensor) for tensor in self[1:])
        return NativeMap(memory.moved(self.weight), bias, scales)


class PackedLinear:
    """y = x W^T + b.

    Attributes:
        kernels: what computes it.
        in_features: I.
        out_features: O.
    """

    def __init__(
        self,
        weight: Tensor,
        bias: Tensor | None = None,
        *,
        kernels: Kernels = "auto",
        int8_for: torch.dtype | None = None,
    ) -> None:
        """Lay out a weight.

        Args:
            weight: [O, I].
            bias: [O], of the inputs' type.
            kernels: what is to compute it.
            int8_for: round the weight to int8, for inputs of this type; None leaves it as it is, of the inputs' type.
        """
        weight = weight.detach()
        self.out_features, self.in_features = weight.shape
        on_cpu, dtype = weight.device.type == "cpu", int8_for or weight.dtype
        self.kernels: ChosenKernels = choose_kernels(kernels, dtype) if on_cpu else "plain"
        self._scales: Tensor | None = None
        if self.kernels == "native":
            library = native_library()
            assert library is not None
            packed = NativeMap.pack(library.ops, weight, bias, int8_for=int8_for).moved()
            self._weight, self._bias, self._scales = packed
            # Named overloads, because looking for the right one at each call takes longer than a small product.
            self._linear, self._head = library.ops.linear.default, library.ops.head.default
            return
        self._bias = None if bias is None else bias.detach().contiguous()
        weight = weight.contiguous() if int8_for is None else quantize(weight).dequantized(int8_for)
        self._weight = _pack(weight) if self.kernels == "packed" else weight

    @property
    def packed(self) -> NativeMap | None:
        """The map as native operations take it; None where they do not, or there is a bias."""
        if self.kernels != "native" or self._bias is not None:
            return None
        return NativeMap(self._weight, None, self._scales)

    def __call__(self, x: Tensor) -> Tensor:
        """[N, I] -> [N, O]."""
        if self.kernels == "native":
            return self._linear(x, self._weight, self._bias, self.out_features, False, self._scales)
        if self.kernels == "packed":
            return _packed_linear(x, self._weight, self._bias)
        return F.linear(x, self._weight, self._bias)

    def logits(self, x: Tensor) -> Tensor:
        """Logits [N, O] in fp32, where this is an unembedding.

        Native kernels do not round them to the weight's type in between, so that the largest is the one `head` finds.
        """
        if self.kernels == "native":
            return self._linear(x, self._weight, self._bias, self.out_features, True, self._scales)
        return self(x).float()

    def head(self, x: Tensor) -> HeadOutput:
        """Best tokens of rows [N, I], where this is an unembedding."""
        if self.kernels == "native" and self._bias is None:
            return HeadOutput(*self._head(x, self._weight, self.out_features, self._scales))
        return HeadOutput.of(self.logits(x))


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
