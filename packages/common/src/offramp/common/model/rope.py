"""Rotary position embedding (Su et al., 2021) and its stretched variants.

Legend: B batch, T time, H heads, E head dim.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

from offramp.common.model.config import RopeConfig


def inverse_frequencies(rope: RopeConfig, head_dim: int, length: int) -> Tensor:
    """Angular frequency of each pair of channels, [E/2] fp32.

    Args:
        rope: the variant.
        head_dim: E.
        length: tokens that will be attended over; only `dynamic` looks at it, and only beyond the original length.
    """
    channels = torch.arange(0, head_dim, 2, dtype=torch.int64).float() / head_dim
    theta = rope.theta
    if rope.type == "dynamic" and length > rope.original_length:
        # NTK-aware: stretch the base so that the slowest channel covers the longer context.
        stretch = rope.factor * length / rope.original_length - (rope.factor - 1)
        theta = theta * stretch ** (head_dim / (head_dim - 2))
    frequencies = 1.0 / (theta**channels)
    if rope.type == "linear":
        return frequencies / rope.factor
    if rope.type == "llama3":
        wavelength = 2 * math.pi / frequencies
        low, high = rope.low_freq_factor, rope.high_freq_factor
        smooth = (rope.original_length / wavelength - low) / (high - low)
        smooth = smooth.clamp(0, 1)  # 0: a long wave, stretched in full; 1: a short wave, left alone
        return (1 - smooth) * frequencies / rope.factor + smooth * frequencies
    return frequencies


def rotary_tables(frequencies: Tensor, positions: Tensor) -> tuple[Tensor, Tensor]:
    """Cosines and sines for positions of any shape [...], each [..., E] fp32 (both halves alike)."""
    angles = positions[..., None].float() * frequencies.to(positions.device)
    angles = torch.cat((angles, angles), dim=-1)
    return angles.cos(), angles.sin()


def rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Rotate heads [..., H, E] by tables [..., E]; channels pair up as (i, i + E/2), Hugging Face's order."""
    cos, sin = cos[..., None, :].to(x.dtype), sin[..., None, :].to(x.dtype)
    first, second = x.chunk(2, dim=-1)
    return x * cos + torch.cat((-second, first), dim=-1) * sin
