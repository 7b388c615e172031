"""The engine's metrics as Prometheus reads them, where the engine is in this process; TorchServe tells its own."""

from __future__ import annotations

from collections.abc import Mapping

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, disable_created_metrics, generate_latest

from offramp.serve.metrics import METRICS

CONTENT_TYPE = "text/plain; version=0.0.4; charset=utf-8"


class PrometheusMetrics:
    """All of `METRICS`, of one model. Threads may emit while another reads.

    Args:
        labels: Of every metric.
    """

    def __init__(self, labels: Mapping[str, str]) -> None:
        disable_created_metrics()  # TorchServe has none of these, and they would double the number of series
        self._registry = CollectorRegistry()
        kinds = {"COUNTER": Counter, "GAUGE": Gauge, "HISTOGRAM": Histogram}
        self._metrics = {
            name: kinds[kind](name, f"Unit: {unit}", list(labels), registry=self._registry).labels(**labels)
            for name, (kind, unit) in METRICS.items()
        }

    def emit(self, name: str, value: float) -> None:
        """Takes in a value of one of `METRICS`; of a counter, what has been added."""
        metric = self._metrics[name]
        if isinstance(metric, Counter):
            metric.inc(value)
        elif isinstance(metric, Gauge):
            metric.set(value)
        else:
            metric.observe(value)

    def text(self) -> bytes:
        """All of them, in `CONTENT_TYPE`."""
        return generate_latest(self._registry)
