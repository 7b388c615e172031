"""The subcommands that offramp-serve contributes to `offramp`."""

from __future__ import annotations

from offramp.common.command import Command

generate = Command(
    summary="Generate text offline and show how deep each token went",
    main="offramp.serve.cli.generate:main",
    step=40,
)
archive = Command(
    summary="Pack a checkpoint directory or a registered model for TorchServe",
    main="offramp.serve.cli.archive:main",
    step=50,
)
serve = Command(
    summary="Start TorchServe on this machine and answer the OpenAI API until Ctrl-C",
    main="offramp.serve.cli.serve:main",
    step=51,
)
bench = Command(
    summary="Measure speed at full depth and with early exits, and where the time goes",
    main="offramp.serve.cli.bench:main",
    step=60,
)
