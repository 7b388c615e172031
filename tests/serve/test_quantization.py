"""Weights of int8: what they stand for, and kernels that read them beside the same kernels with what they stand for."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from helpers.native import loaded
from offramp.serve.model.linear import PackedLinear
from offramp.serve.model.native import NativeLibrary, supported_isa_levels
from offramp.serve.model.quantization import SCALE_DEPTH, quantize

DTYPES = [torch.float32, torch.bfloat16]
# (inputs, outputs): one of each, part of a group, one group and a little, whole groups, more rows of x than a block.
SIZES = [(1, 1), (33, 70), (65, 40), (192, 96), (2048, 40)]
ROWS = [1, 2, 7, 12, 13, 16, 17, 32, 33, 100]


@pytest.fixture(params=supported_isa_levels())
def native(request: pytest.FixtureRequest) -> NativeLibrary:
    return loaded(request.param)


def random_weight(outputs: int, inputs: int) -> Tensor:
    generator = torch.Generator().manual_seed(inputs * 1000 + outputs)
    return torch.randn(outputs, inputs, generator=generator) / inputs**0.5


@pytest.mark.parametrize("inputs", [1, 63, 64, 65, 200])
def test_every_weight_is_the_nearest_multiple_of_its_groups_scale(inputs: int) -> None:
    weight = random_weight(30, inputs)
    weight[3] = 0
    weight[4, 0] = 50.0  # makes its own group coarse, and no other
    quantized = quantize(weight)
    assert quantized.values.dtype == torch.int8
    assert quantized.values.shape == weight.shape
    assert quantized.scales.shape == (30, -(-inputs // SCALE_DEPTH))
    for start in range(0, inputs, SCALE_DEPTH):
        group = weight[:, start : start + SCALE_DEPTH]
        scale = quantized.scales[:, start // SCALE_DEPTH, None]
        torch.testing.assert_close(scale[:, 0] * 127, group.abs().amax(dim=1))
        made = quantized.dequantized(torch.float32)[:, start : start + SCALE_DEPTH]
        assert ((made - group).abs() <= 0.501 * scale).all()
    assert quantized.values.abs().max() == 127
    assert not quantized.dequantized(torch.bfloat16)[3].any()


def test_what_is_not_finite_stays_so() -> None:
    weight = torch.ones(3, 100)
    weight[0, 70], weight[1, 3] = torch.nan, torch.inf
    made = quantize(weight).dequantized(torch.float32)
    assert made.isnan().sum(dim=1).tolist() == [36, 64, 0]
    torch.testing.assert_close(made[2], weight[2])


class Both:
    """One map with a weight of int8, and with what that stands for."""

    def __init__(self, ops: Any, dtype: torch.dtype, inputs: int, outputs: int) -> None:
        self._ops, self._outputs = ops, outputs
        plain, gated = (quantize(random_weight(size, inputs)) for size in (outputs, 2 * outputs))
        self.bias, self.gated_bias = (torch.linspace(-1, 1, size).to(dtype) for size in (outputs, 2 * outputs))
        self.weight, self.gated_weight = plain.dequantized(dtype), gated.dequantized(dtype)
        self.x = torch.randn(max(ROWS), inputs, generator=torch.Generator().manual_seed(0)).to(dtype)
        self._ours = ops.pack_int8(plain.values, plain.scales, dtype)
        self._ours_gated = ops.pack_int8(gated.values, gated.scales, dtype, gated=True)
        self._theirs, self._theirs_gated = ops.pack_linear(self.weight), ops.pack_linear(self.gated_weight, gated=True)

    def run(self, name: str, rows: Tensor, *, int8: bool) -> Tensor:
        packed, scales = self._ours if int8 else (self._theirs, None)
        x = self.x[rows]
        if name == "gated_linear":
            packed, scales = self._ours_gated if int8 else (self._theirs_gated, None)
            bias = self._ops.pack_bias(self.gated_bias, gated=True)
            return self._ops.gated_linear(x, packed, bias, self._outputs, scales)
        if name == "head":
            parts = self._ops.head(x, packed, self._outputs, scales)
            return torch.stack([part.double() for part in parts], dim=1)
        bias = self._ops.pack_bias(self.bias)
        return self._ops.linear(x, packed, bias, self._outputs, name == "linear_fp32", scales)

    def exact(self, name: str) -> Tensor:
        x = self.x.double()
        if name == "gated_linear":
            gate, up = F.linear(x, self.gated_weight.double(), self.gated_bias.double()).chunk(2, dim=1)
            return F.silu(gate) * up
        y = F.linear(x, self.weight.double(), None if name == "head" else self.bias.double())
        if name != "head":
            return y
        best, ids = y.max(dim=1)
        second = y.topk(2, dim=1).values[:, 1] if y.shape[1] > 1 else torch.full_like(best, -torch.inf)
        return torch.stack((ids.double(), best, second, y.logsumexp(dim=1)), dim=1)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("name", ["linear", "linear_fp32", "gated_linear", "head"])
def test_kernels_compute_what_the_dequantized_weight_gives(
    native: NativeLibrary, name: str, dtype: torch.dtype
) -> None:
    same = dtype == torch.float32 or native.isa in ("amx", "avx512_bf16")  # elsewhere bf16 are summed in another order
    for inputs, outputs in SIZES:
        both = Both(native.ops, dtype, inputs, outputs)
        everything = both.run(name, torch.arange(max(ROWS)), int8=True)
        if same:
            assert torch.equal(everything, both.run(name, torch.arange(max(ROWS)), int8=False))
        tolerance = 1e-4 if dtype == torch.float32 else 2**-5
        exact = both.exact(name)
        if name == "head" and dtype == torch.bfloat16:  # best tokens may be nearly equal
            everything, exact = everything[:, 1:], exact[:, 1:]
        torch.testing.assert_close(everything.double(), exact, rtol=tolerance, atol=tolerance)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("name", ["linear", "gated_linear", "head"])
def test_a_rows_bits_do_not_depend_on_the_other_rows(native: NativeLibrary, name: str, dtype: torch.dtype) -> None:
    generator = torch.Generator().manual_seed(0)
    for inputs, outputs in [(131, 197), (320, 1030)]:
        both = Both(native.ops, dtype, inputs, outputs)
        alone = torch.cat([both.run(name, torch.tensor([row]), int8=True) for row in range(max(ROWS))])
        for size in ROWS:
            rows = torch.randperm(max(ROWS), generator=generator)[:size]
            assert torch.equal(both.run(name, rows, int8=True), alone[rows]), size


@pytest.mark.parametrize("kernels", ["native", "packed", "plain"])
@pytest.mark.parametrize("dtype", DTYPES)
def test_a_map_of_int8_is_rounded_from_the_weight_as_it_came(kernels: Any, dtype: torch.dtype) -> None:
    loaded(supported_isa_levels()[0])
    weight, bias = random_weight(50, 130), torch.randn(50).to(dtype)
    x = torch.randn(9, 130).to(dtype)
    made = quantize(weight).dequantized(dtype)
    ours = PackedLinear(weight, bias, kernels=kernels, int8_for=dtype)
    theirs = PackedLinear(made, bias, kernels=kernels)
    assert ours.kernels == theirs.kernels
    tolerance = 1e-4 if dtype == torch.float32 else 2**-6
    for y, other in (
        (ours(x), theirs(x)),
        (ours.logits(x), theirs.logits(x)),
        (ours.head(x).best, theirs.head(x).best),
    ):
        assert y.dtype == other.dtype
        torch.testing.assert_close(y, other, rtol=tolerance, atol=tolerance)


def test_kernels_refuse_what_they_cannot_take(native: NativeLibrary) -> None:
    ops, one = native.ops, quantize(torch.randn(20, 70))
    packed, scales = ops.pack_int8(one.values, one.scales, torch.float32)
    x = torch.randn(2, 70)
    for call, words in (
        (lambda: ops.pack_int8(torch.randn(20, 70), one.scales, torch.float32), "must be int8"),
        (lambda: ops.pack_int8(one.values, one.scales[:, :1].contiguous(), torch.float32), "20 by 2"),
        (lambda: ops.pack_int8(one.values, one.scales, torch.float64), "float32 and bfloat16"),
        (lambda: ops.linear(x, packed, None, 20), "must be of Float"),
        (lambda: ops.linear(x, ops.pack_linear(torch.randn(20, 70)), None, 20, False, scales), "must be of Char"),
        (lambda: ops.linear(x, packed, None, 20, False, scales[:, :1].contiguous()), "scales"),
    ):
        with pytest.raises(RuntimeError, match=words):
            call()
