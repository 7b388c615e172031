"""Averages of gradients over data-parallel ranks, in any type; DeepSpeed's own take no fp64."""

from __future__ import annotations

from collections.abc import Iterable, Iterator

import torch
import torch.distributed as dist
from torch import Tensor, nn

BUCKET_ELEMENTS = 5_000_000
"""In one message, unless one gradient alone is larger."""


@torch.no_grad()
def average_gradients(parameters: Iterable[nn.Parameter], group: dist.ProcessGroup) -> None:
    """Average gradients over the ranks of a group, in place; one that is missing counts, and becomes, zero."""
    gradients = []
    for parameter in parameters:
        if parameter.requires_grad:
            if parameter.grad is None:
                parameter.grad = torch.zeros_like(parameter)
            gradients.append(parameter.grad)
    for bucket in _buckets(gradients):
        flat = torch.cat([gradient.flatten() for gradient in bucket])
        dist.all_reduce(flat, group=group)
        flat /= dist.get_world_size(group)
        for gradient, part in zip(bucket, flat.split([gradient.numel() for gradient in bucket]), strict=True):
            gradient.copy_(part.view_as(gradient))


def _buckets(gradients: Iterable[Tensor]) -> Iterator[list[Tensor]]:
    bucket: list[Tensor] = []
    for gradient in gradients:
        if bucket and sum(map(Tensor.numel, bucket)) + gradient.numel() > BUCKET_ELEMENTS:
            yield bucket
            bucket = []
        bucket.append(gradient)
    if bucket:
        yield bucket
