"""The subcommands of offramp-evaluate."""
