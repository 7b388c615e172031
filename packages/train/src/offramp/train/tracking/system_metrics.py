"""MLflow's system metrics (processors, memory, disk, network, GPUs) without MLflow's own way to send them.

MLflow's monitor asks the store before every sample, and ends at the first question that is not answered.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any

from mlflow.environment_variables import MLFLOW_SYSTEM_METRICS_SAMPLING_INTERVAL
from mlflow.system_metrics.metrics.cpu_monitor import CPUMonitor
from mlflow.system_metrics.metrics.disk_monitor import DiskMonitor
from mlflow.system_metrics.metrics.gpu_monitor import GPUMonitor
from mlflow.system_metrics.metrics.network_monitor import NetworkMonitor

PREFIX = "system/"
INTERVAL_S = 10.0


class SystemMetrics(threading.Thread):
    """Hands out a sample of this machine every ten seconds (`MLFLOW_SYSTEM_METRICS_SAMPLING_INTERVAL`).

    Args:
        log: is given metrics and the number of the sample.
        first: number of the first sample.
    """

    def __init__(self, log: Callable[[dict[str, float], int], None], first: int) -> None:
        super().__init__(name="system metrics", daemon=True)
        self._log, self._number = log, first
        self._interval = float(MLFLOW_SYSTEM_METRICS_SAMPLING_INTERVAL.get() or INTERVAL_S)
        self._ended = threading.Event()

    def run(self) -> None:
        """Until stopped."""
        monitors: list[Any] = [CPUMonitor(), DiskMonitor(), NetworkMonitor()]
        try:
            monitors.append(GPUMonitor())
        except Exception:  # whatever is missing: a GPU, its driver, or the package that reads it
            monitors = monitors[:3]
        while True:
            metrics: dict[str, float] = {}
            for monitor in monitors:
                monitor.collect_metrics()
                metrics.update(monitor.aggregate_metrics())
                monitor.clear_metrics()
            if self._ended.is_set():
                return
            self._log({PREFIX + name: float(value) for name, value in metrics.items()}, self._number)
            self._number += 1
            if self._ended.wait(self._interval):
                return

    def stop(self) -> None:
        """No more samples."""
        self._ended.set()
        self.join(1.0)
