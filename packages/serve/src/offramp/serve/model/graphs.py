"""CUDA graphs: what the host would tell the device operation by operation, recorded once and then replayed at once.

A replay reads and writes the very tensors of the recording. So whoever captures gives it inputs that stay where they
are, copies into them before a replay, and copies results out before the next one.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Protocol

import torch
from torch import Tensor

Results = tuple[Tensor, ...]


class Capture(Protocol):
    """Records computations."""

    def __call__(self, compute: Callable[[], Results]) -> tuple[Callable[[], None], Results]:
        """Record what `compute` does with tensors that stay where they are.

        Returns:
            What does it again, and the tensors that then hold the results.
        """
        ...


class CudaGraphs:
    """Captures on one CUDA device; all graphs share their memory."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        with torch.cuda.device(device):
            self._pool = torch.cuda.graph_pool_handle()
            self._stream = torch.cuda.Stream()

    def __call__(self, compute: Callable[[], Results]) -> tuple[Callable[[], None], Results]:
        """See `Capture`."""
        with torch.cuda.device(self._device):
            # First as it is, beside the stream that waits: libraries choose kernels and allocate when they first run.
            self._stream.wait_stream(torch.cuda.current_stream())
            with torch.cuda.stream(self._stream):
                compute()
            torch.cuda.current_stream().wait_stream(self._stream)
            graph = torch.cuda.CUDAGraph()
            # Other threads may talk to a device meanwhile.
            with torch.cuda.graph(graph, pool=self._pool, stream=self._stream, capture_error_mode="thread_local"):
                results = compute()
        return graph.replay, results


def captures(device: torch.device) -> Capture | None:
    """What records on a device; None where nothing can be recorded."""
    return CudaGraphs(device) if device.type == "cuda" else None
