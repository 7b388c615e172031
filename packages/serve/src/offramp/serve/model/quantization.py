"""Weights rounded to int8, with scales for groups of neighbouring inputs.

A weight is read from memory for every token that is decoded, and of int8 there is half as much to read as of bfloat16.
Rounding is to the nearest, and symmetric: -127 to 127 times the scale. Each output channel has a scale for every
`SCALE_DEPTH` of its inputs, so that one large weight makes only its own group coarse.

What a product with such a weight is to be is said by `Quantized.dequantized`: kernels compute what they would with that
matrix in the type of the states, and where nothing reads int8 that matrix is kept instead.

Legend: O output channels, I inputs, G groups of inputs.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

SCALE_DEPTH = 64
"""Inputs that share a scale; as in `csrc/int8.h`."""

_LARGEST = 127


@dataclass(frozen=True)
class Quantized:
    """A weight [O, I] as int8.

    Attributes:
        values: [O, I] int8, -127 to 127.
        scales: [O, G] fp32, the last group of a channel may be smaller; zero for a group of zeros.
    """

    values: Tensor
    scales: Tensor

    def dequantized(self, dtype: torch.dtype) -> Tensor:
        """The weight [O, I] that this stands for, rounded to `dtype`."""
        scales = self.scales.repeat_interleave(SCALE_DEPTH, dim=1)[:, : self.values.shape[1]]
        return (self.values.float() * scales).to(dtype)


def quantize(weight: Tensor) -> Quantized:
    """Round a weight [O, I]. One that is not finite has groups of NaN."""
    weight = weight.detach().float()
    inputs = weight.shape[1]
    groups = F.pad(weight, (0, -inputs % SCALE_DEPTH)).unflatten(1, (-1, SCALE_DEPTH))
    scales = groups.abs().amax(dim=2) / _LARGEST
    values = (groups / scales.clamp_min(torch.finfo(torch.float32).tiny)[:, :, None]).round()
    values = values.clamp(-_LARGEST, _LARGEST).nan_to_num(0.0)
    return Quantized(values.to(torch.int8).flatten(1)[:, :inputs].contiguous(), scales)
