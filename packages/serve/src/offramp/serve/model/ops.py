"""The few operations of the engine's forward, each a plain torch function: the reference, and what runs.

They are the seam where faster kernels come in: a replacement has the same signature and is tested against these.

Legend: N rows, D model, F feed-forward, E head dim. Attention is in `attended`.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor


def rms_norm(x: Tensor, weight: Tensor | None, eps: float) -> Tensor:
    """Root-mean-square norm over the last axis, statistics in fp32; no weight is a weight of ones."""
    return F.rms_norm(x, x.shape[-1:], weight, eps)


def rotate(x: Tensor, cos: Tensor, signed_sin: Tensor) -> Tensor:
    """Rotate heads [..., E] by angles whose tables broadcast against them.

    Args:
        x: [..., E]; channels pair up as (i, i + E/2).
        cos: [..., E].
        signed_sin: [..., E], the first half negated: then one roll gives both halves of the rotation.
    """
    return torch.addcmul(x * cos, x.roll(x.shape[-1] // 2, dims=-1), signed_sin)


def gated_silu(gate_up: Tensor) -> Tensor:
    """[N, 2 * F] -> [N, F]."""
    gate, up = gate_up.chunk(2, dim=-1)
    return F.silu(gate) * up


def gated_gelu(gate_up: Tensor) -> Tensor:
    """[N, 2 * F] -> [N, F], through the approximation by tanh."""
    gate, up = gate_up.chunk(2, dim=-1)
    return F.gelu(gate, approximate="tanh") * up
