"""The few operations of the engine's forward, each a plain torch function: the reference, and what runs.

They are the seam where faster kernels come in: a replacement has the same signature and is tested against these.

Legend: N rows, M decode rows, T keys, D model, F feed-forward, H query heads, K key/value heads, E head dim.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from offramp.serve.model.rows import Rows


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


def attend(query: Tensor, cache: Tensor, rows: Rows, num_kv_heads: int) -> Tensor:
    """Causal attention of rows over their sequences' cached keys and values, their own included.

    Args:
        query: [N, H, E], rotated.
        cache: [slots, 2 * K * E], one layer of `KVStorage.data`.
        rows: what each row attends to.
        num_kv_heads: K.

    Returns:
        [N, H * E].
    """
    parts: list[Tensor] = []
    if rows.decode is not None:
        parts.append(_attend_decode(query[: rows.num_decode], cache, rows, num_kv_heads))
    start = rows.num_decode
    for chunk in rows.chunks:
        stop = start + chunk.num_rows
        parts.append(_attend_chunk(query[start:stop], cache, chunk.slots, chunk.bias, num_kv_heads))
        start = stop
    return parts[0] if len(parts) == 1 else torch.cat(parts)


def _attend_decode(query: Tensor, cache: Tensor, rows: Rows, num_kv_heads: int) -> Tensor:
    """One query per sequence, [M, H, E] -> [M, H * E]: all sequences at once over padded keys.

    The query heads that share a key/value head go in as if they were queries of one head; the CPU kernel is then
    several times faster than with `enable_gqa`.
    """
    assert rows.decode is not None
    num_rows, num_heads, head_dim = query.shape
    slots = rows.decode.slots
    gathered = cache.index_select(0, slots.flatten()).view(num_rows, slots.shape[1], 2, num_kv_heads, head_dim)
    keys, values = gathered[:, :, 0].transpose(1, 2), gathered[:, :, 1].transpose(1, 2)
    query = query.reshape(num_rows, num_kv_heads, num_heads // num_kv_heads, head_dim)
    out = F.scaled_dot_product_attention(query, keys, values, attn_mask=rows.decode.bias)
    return out.reshape(num_rows, num_heads * head_dim)


def _attend_chunk(query: Tensor, cache: Tensor, slots: Tensor, bias: Tensor | None, num_kv_heads: int) -> Tensor:
    """The queries of one sequence, [N, H, E] -> [N, H * E]."""
    num_rows, num_heads, head_dim = query.shape
    group = num_heads // num_kv_heads
    gathered = cache.index_select(0, slots).view(-1, 2, num_kv_heads, 1, head_dim)
    gathered = gathered.permute(1, 2, 3, 0, 4).expand(2, num_kv_heads, group, -1, head_dim)
    query = query.transpose(0, 1).reshape(num_kv_heads, group, num_rows, head_dim)
    out = F.scaled_dot_product_attention(query, gathered[0], gathered[1], attn_mask=bias)
    return out.reshape(num_heads, num_rows, head_dim).transpose(0, 1).reshape(num_rows, num_heads * head_dim)
