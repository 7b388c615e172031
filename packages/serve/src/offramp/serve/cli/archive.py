"""`offramp archive`: a checkpoint directory or a registered model as a model folder for TorchServe."""

from __future__ import annotations

import argparse
from pathlib import Path

from offramp.serve.cli.engine_options import add_engine_options, engine_settings
from offramp.serve.cli.watch_options import add_watch_options, watch_settings
from offramp.serve.model_source import default_cache, resolve_model
from offramp.serve.torchserve.archive import archive


def main(argv: list[str]) -> int:
    """Runs the command with its arguments."""
    parser = argparse.ArgumentParser(
        prog="offramp archive",
        description="Make a model folder that TorchServe loads. The weights are hard-linked where that is possible.",
    )
    parser.add_argument("source", help="a checkpoint directory, or models:/NAME@ALIAS")
    parser.add_argument("out", type=Path, help="the model folder to make; its parent is TorchServe's model store")
    parser.add_argument("--name", help="name in the URL and in requests (default: the folder's)")
    parser.add_argument("--version", default="1.0", help="version in the URL (default: %(default)s)")
    parser.add_argument("--force", action="store_true", help="replace a model folder that is already there")
    parser.add_argument(
        "--cache", type=Path, default=default_cache(), help="where models:/ downloads go (default: %(default)s)"
    )
    add_engine_options(parser)
    add_watch_options(parser)
    options = parser.parse_args(argv)
    folder = archive(
        resolve_model(options.source, options.cache),
        options.out,
        name=options.name or options.out.name,
        version=options.version,
        engine=engine_settings(options),
        watch=watch_settings(options),
        overwrite=options.force,
    )
    print(f"{folder}: model {options.name or options.out.name}, version {options.version}")
    return 0
