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
    summary="Answer the OpenAI API on this machine until Ctrl-C, with TorchServe or without",
    main="offramp.serve.cli.serve:main",
    step=51,
)
gateway = Command(
    summary="Answer the OpenAI API for models on TorchServe: keys, limits, and nothing else gets through",
    main="offramp.serve.cli.gateway:main",
    step=52,
)
keys = Command(
    summary="Make API keys for a gateway or a server, and take them back",
    main="offramp.serve.cli.keys:main",
    step=52,
)
deploy = Command(
    summary="Put a checkpoint directory or a registered model in place at a TorchServe, and follow an alias",
    main="offramp.serve.cli.deploy:main",
    step=52,
)
bench = Command(
    summary="Measure speed at full depth and with early exits, and where the time goes",
    main="offramp.serve.cli.bench:main",
    step=60,
)
