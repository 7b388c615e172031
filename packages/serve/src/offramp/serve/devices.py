"""The device that an engine computes on, and the few ways in which numbers get there.

All decisions are made on the host, so bookkeeping (positions, slots, block tables, who leaves) stays in numpy arrays
and only weights, states and the KV cache live on the device. Transfers to it are pinned and do not wait; the host waits
only where it needs a measured number to decide: once at each exit, and once for the tokens.
"""

from __future__ import annotations

import os
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from offramp.common.errors import OfframpError

if TYPE_CHECKING:
    from offramp.serve.config import EngineConfig

CPU = torch.device("cpu")


def num_cpus() -> int:
    """CPUs that this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def choose_device(config: EngineConfig) -> torch.device:
    """What `EngineConfig.device` names here; `auto` is the first CUDA device, or the CPU where there is none.

    Raises:
        OfframpError: it is not there, or other settings do not go with it.
    """
    device = config.device
    if device == "cpu" or (device == "auto" and not torch.cuda.is_available()):
        return CPU
    if device == "auto":
        replace(config, device="cuda")  # refuses what needs the CPU
    elif not torch.cuda.is_available():
        why = "this build of torch has no CUDA" if torch.version.cuda is None else "torch finds no device that works"
        raise OfframpError(f"device {device!r} is asked for, but {why}; use device cpu or auto.")
    index, count = int(device.partition(":")[2] or 0), torch.cuda.device_count()
    if index >= count:
        raise OfframpError(f"device {device!r} is asked for, but there are {count} CUDA devices; the first is cuda:0.")
    return torch.device("cuda", index)


def on_device(array: npt.NDArray[Any], device: torch.device) -> Tensor:
    """An array as a tensor on `device`; on the CPU both share their memory."""
    if device.type == "cpu":
        return torch.from_numpy(array)
    return _staged(array, device).to(device, non_blocking=True)


def copy_into(tensor: Tensor, array: npt.NDArray[Any]) -> None:
    """Write an array of the host into a tensor of its shape."""
    tensor.copy_(_staged(array, tensor.device), non_blocking=True)


def on_host(*columns: Tensor) -> tuple[Tensor, ...]:
    """Columns [N] of fp32 or whole numbers in the CPU's memory: one transfer, for which the host waits."""
    if columns[0].device.type == "cpu":
        return columns
    # All of them are exact in float64.
    packed = torch.stack([column.double() for column in columns]).cpu()
    return tuple(part.to(column.dtype) for part, column in zip(packed, columns, strict=True))


def rows_at(tensor: Tensor, places: npt.NDArray[np.intp]) -> Tensor:
    """The rows of a tensor at `places` of the host."""
    return tensor.index_select(0, on_device(places, tensor.device))


def _staged(array: npt.NDArray[Any], device: torch.device) -> Tensor:
    """An array as a tensor of the host from which it can be copied to `device` without waiting."""
    tensor = torch.from_numpy(array)
    return tensor.pin_memory() if device.type == "cuda" else tensor
