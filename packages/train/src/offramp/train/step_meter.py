"""How long training steps take, how fast that is, and what memory they need, over all processes.

Each process measures its own; the numbers travel with the sums of losses, in one message.
"""

from __future__ import annotations

import resource
import sys
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import torch

from offramp.train.model_flops import ModelFlops


@dataclass
class StepMeter:
    """Of one process.

    Attributes:
        flops: of the model; None, and no metric says how many it needs.
        device: of this process.
        peak_flops: of each device, in operations per second; None if nobody knows.
        rank: of this process.
        ranks: all of them.
    """

    flops: ModelFlops | None
    device: torch.device
    peak_flops: float | None
    rank: int
    ranks: int
    _last_at: float | None = field(default=None, init=False)
    _elapsed: float | None = field(default=None, init=False)

    def pause(self) -> None:
        """Something else than training comes next: how long the step after it takes is not known."""
        self._last_at = None

    def measure(self, positions: int) -> list[float]:
        """What this process knows of the step that ends now, to be added up over all of them.

        Args:
            positions: input tokens that are this process's alone, prompts and padding included.
        """
        now = time.perf_counter()
        self._elapsed = None if self._last_at is None else now - self._last_at
        self._last_at = now
        memory = [0.0] * self.ranks
        memory[self.rank] = float(peak_memory_bytes(self.device))
        return [*memory, positions, self._elapsed or 0.0]

    def metrics(
        self, total: Sequence[float], length: int, depth: int, trained: Mapping[int, float]
    ) -> dict[str, float]:
        """Names and values of the step that was measured last.

        Args:
            total: sums of what all processes measured.
            length: T, positions of a row.
            depth: layers that ran.
            trained: exit layer -> tokens that it was trained on.
        """
        *memory, positions, seconds = total
        metrics = {f"memory_gib_rank_{rank:02d}": size / 2**30 for rank, size in enumerate(memory)}
        if self._elapsed is None:
            return metrics
        seconds /= self.ranks
        metrics |= {"step_seconds": seconds, "tokens_per_second": positions / seconds}
        if self.flops is None:
            return metrics
        speed = self.flops.of_step(positions, length, depth, trained) / seconds
        metrics["model_tflops_per_second"] = speed / 1e12
        if self.peak_flops is not None:
            metrics["mfu"] = speed / (self.peak_flops * self.ranks)
        return metrics


def peak_memory_bytes(device: torch.device) -> int:
    """Most bytes in use since this process began: tensors on CUDA, otherwise the process's resident memory."""
    if device.type == "cuda":
        return torch.cuda.max_memory_allocated(device)
    try:
        # The other number starts with what the launching process had.
        status = Path("/proc/self/status").read_text(encoding="ascii", errors="replace")
        return 1024 * int(status.partition("VmHWM:")[2].split(maxsplit=1)[0])
    except (OSError, ValueError, IndexError):
        return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * (1 if sys.platform == "darwin" else 1024)
