"""A calibration as a run of MLflow."""

from __future__ import annotations

from typing import Any

from offramp.train.tracking.store import default_tracking_uri


def log_calibration(found: dict[str, Any], directory: str) -> str:
    """Log a record of `calibration_record`: what was asked as parameters, the points as metrics, all as an artifact.

    Returns:
        The run's id.
    """
    from mlflow import MlflowClient
    from mlflow.entities import RunStatus

    client = MlflowClient(default_tracking_uri())
    name = "calibration"
    known = client.get_experiment_by_name(name)
    experiment = known.experiment_id if known is not None else client.create_experiment(name)
    run = client.create_run(experiment, run_name=directory).info.run_id
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
    client.set_terminated(run, RunStatus.to_string(RunStatus.FINISHED))
    return run
