"""Memory in huge pages, where the operating system gives them.

Decoding reads all weights and much of the cache for every token, so it is bound by memory; and with pages of 4 KiB much
of that time goes into finding the pages, most of all in a virtual machine, whose tables are two deep. With pages of
2 MiB the engine decoded a third faster on the machine it was measured on. Smaller matrices gain too, as everything
comes from a cold cache between two runs of layers: an exit test took two thirds of the time.
"""

from __future__ import annotations

import contextlib
import math
import mmap
import sys
from collections.abc import Sequence

import torch
from torch import Tensor

from offramp.serve.devices import CPU

_HUGE_PAGE = 2 << 20
_WORTH_ONE = 256 << 10
"""Bytes from which on a tensor gets huge pages of its own, though it may not fill the last one."""


def empty(shape: Sequence[int], dtype: torch.dtype, device: torch.device = CPU) -> Tensor:
    """A tensor of this shape whose content is undefined; memory of the CPU that is not touched is not used."""
    size = math.prod(shape) * dtype.itemsize
    if size < _WORTH_ONE or sys.platform != "linux" or device.type != "cpu":
        return torch.empty(shape, dtype=dtype, device=device)
    # Room to begin at a whole page: the kernel need not place a mapping so.
    whole = -(-size // _HUGE_PAGE) * _HUGE_PAGE
    region = mmap.mmap(-1, whole + _HUGE_PAGE, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    with contextlib.suppress(OSError):  # a kernel without them; ordinary pages do
        region.madvise(mmap.MADV_HUGEPAGE)
    octets = torch.frombuffer(region, dtype=torch.uint8)
    start = -octets.data_ptr() % _HUGE_PAGE
    return octets[start : start + size].view(dtype).view(shape)


def moved(tensor: Tensor) -> Tensor:
    """A contiguous tensor with the same content."""
    return empty(tensor.shape, tensor.dtype).copy_(tensor)
