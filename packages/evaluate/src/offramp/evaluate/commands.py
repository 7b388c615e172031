"""The subcommands that offramp-evaluate contributes to `offramp`."""

from __future__ import annotations

from offramp.common.command import Command

calibrate = Command(
    summary="Find thresholds that keep a promise about quality, as operating points of a checkpoint directory",
    main="offramp.evaluate.cli.calibrate:main",
    step=35,
)
evaluate = Command(
    summary="Measure quality against cost on a task, at full depth and with early exits",
    main="offramp.evaluate.cli.evaluate:main",
    step=45,
)
report = Command(
    summary="Write results of evaluations and studies as one HTML page",
    main="offramp.evaluate.cli.report:main",
    step=47,
)
study = Command(
    summary="Answer an open question about early exits by a measurement on a model",
    main="offramp.evaluate.cli.study:main",
    step=46,
)
reproduce = Command(
    summary="Repeat a paper's experiment from nothing, and put its numbers beside ours",
    main="offramp.evaluate.reproduce.calm:main",
    step=49,
)
