"""The few operations of the engine's forward, each a plain torch function: the reference, and what runs.

They are the seam where faster kernels come in: a replacement has the same signature and is tested against these.

Legend: N rows, M single rows, P rows of a run, T keys, D model, F feed-forward, H query heads, K key/value heads, E
head dim.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from offramp.serve.model.attended import Run, SingleRows
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
    attended = rows.attended
    single = attended.single
    if single is not None and single.index is None:
        return _attend_single(query, cache, single, num_kv_heads)
    out = query.new_empty(len(rows), query.shape[1] * query.shape[2])
    if single is not None and single.index is not None:
        out[single.index] = _attend_single(query[single.index], cache, single, num_kv_heads)
    for run in attended.runs:
        out[run.start : run.stop] = _attend_run(query[run.start : run.stop], cache, run, num_kv_heads)
    return out


def _attend_single(query: Tensor, cache: Tensor, rows: SingleRows, num_kv_heads: int) -> Tensor:
    """Rows one by one, [M, H, E] -> [M, H * E]: all at once over padded keys.

    The query heads that share a key/value head go in as if they were queries of one head; the CPU kernel is then
    several times faster than with `enable_gqa`.
    """
    num_rows, num_heads, head_dim = query.shape
    slots = rows.slots
    gathered = cache.index_select(0, slots.flatten()).view(num_rows, slots.shape[1], 2, num_kv_heads, head_dim)
    keys, values = gathered[:, :, 0].transpose(1, 2), gathered[:, :, 1].transpose(1, 2)
    query = query.reshape(num_rows, num_kv_heads, num_heads // num_kv_heads, head_dim)
    out = F.scaled_dot_product_attention(query, keys, values, attn_mask=rows.bias)
    return out.reshape(num_rows, num_heads * head_dim)


def _attend_run(query: Tensor, cache: Tensor, run: Run, num_kv_heads: int) -> Tensor:
    """The queries of one sequence, [P, H, E] -> [P, H * E]."""
    num_rows, num_heads, head_dim = query.shape
    group = num_heads // num_kv_heads
    gathered = cache.index_select(0, run.slots).view(-1, 2, num_kv_heads, 1, head_dim)
    gathered = gathered.permute(1, 2, 3, 0, 4).expand(2, num_kv_heads, group, -1, head_dim)
    query = query.transpose(0, 1).reshape(num_kv_heads, group, num_rows, head_dim)
    out = F.scaled_dot_product_attention(query, gathered[0], gathered[1], attn_mask=run.bias)
    return out.reshape(num_heads, num_rows, head_dim).transpose(0, 1).reshape(num_rows, num_heads * head_dim)
