"""Calibrations and reports as runs of MLflow."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

from offramp.train.tracking.store import default_tracking_uri

if TYPE_CHECKING:
    from mlflow import MlflowClient


def log_calibration(found: dict[str, Any], directory: str) -> str:
    """Log a record of `calibration_record`: what was asked as parameters, the points as metrics, all as an artifact.

    Returns:
        The run's id.
    """
    client, run = _begin("calibration", directory)
    for key in ("method", "risk", "bound", "epsilon", "task", "data", "sha256", "num_examples", "max_tokens"):
        client.log_param(run, key, found[key])
    client.log_metric(run, "exact/layers", found["full_depth"]["layers"])
    client.log_metric(run, "exact/tokens_per_second", found["full_depth"]["tokens_per_second"])
    for point, tried in found["chosen"].items():
        delta = found["deltas"][point]
        client.log_metric(run, f"{point}/delta", delta)
        if tried is not None:
            client.log_metric(run, f"{point}/risk", tried["total_loss"] / tried["n"])
            client.log_metric(run, f"{point}/p_value", tried["p_values"][str(delta)])
            client.log_metric(run, f"{point}/layers", tried["layers"])
            client.log_metric(run, f"{point}/tokens_per_second", tried["tokens_per_second"])
    client.log_dict(run, found, "calibration.json")
    client.set_terminated(run)
    return run


def log_page(path: Path) -> str:
    """Log a report, as an artifact.

    Returns:
        The run's id.
    """
    client, run = _begin("report", path.name)
    client.log_artifact(run, str(path))
    client.set_terminated(run)
    return run


def _begin(experiment: str, name: str) -> tuple[MlflowClient, str]:
    """A client of the store, and a new run's id. The fluent API's store would be that of the whole process."""
    from mlflow import MlflowClient

    client = MlflowClient(default_tracking_uri())
    known = client.get_experiment_by_name(experiment)
    of = known.experiment_id if known is not None else client.create_experiment(experiment)
    return client, client.create_run(of, run_name=name).info.run_id
