"""The subcommands that offramp-train contributes to `offramp`."""

from __future__ import annotations

from offramp.common.command import Command

plan = Command(
    summary="Show what a recipe's pipeline will cost: time and memory of each stage, the timeline of a step",
    main="offramp.train.plan:main",
    step=19,
)
fit = Command(
    summary="Train a model and its exits as a recipe says, on one process, DDP or the DeepSpeed pipeline",
    main="offramp.train.cli:fit_main",
    step=20,
)
validate = Command(
    summary="Measure loss and accuracy of every exit on a recipe's validation data",
    main="offramp.train.cli:validate_main",
    step=21,
)
test = Command(
    summary="Measure loss and accuracy of every exit on a recipe's test data",
    main="offramp.train.cli:test_main",
    step=22,
)
export = Command(
    summary="Turn a training checkpoint into a checkpoint directory",
    main="offramp.train.export:main",
    step=30,
)
sync = Command(
    summary="Tell MLflow what a run could not tell it while the store was away",
    main="offramp.train.tracking.sync:main",
    step=24,
)
register = Command(
    summary="Put a checkpoint directory into the MLflow model registry under an alias",
    main="offramp.train.tracking.register:main",
    step=31,
)
