"""The subcommands of `offramp` that serve a model."""
