"""How a served model watches itself, as command-line options."""

from __future__ import annotations

import argparse
import dataclasses
from typing import Any

from offramp.serve.config import WatchSettings


def add_watch_options(parser: argparse.ArgumentParser) -> None:
    """Adds one option for each setting; what is not given keeps its default."""
    group = parser.add_argument_group("watching over quality")
    group.add_argument(
        "--audit-share",
        type=float,
        metavar="SHARE",
        help="share of greedy early-exit answers to make again at full depth while nobody waits, and compare "
        "(default: 0)",
    )
    group.add_argument(
        "--adapt-to",
        type=float,
        metavar="SHARE",
        help="raise thresholds where audits show that tokens agree with full depth less often (default: never)",
    )
    group.add_argument(
        "--drift-alarm",
        type=float,
        metavar="INDEX",
        help="alarm when depths or confidences are so far from those at calibration; 0.1 is little, 0.25 much "
        "(default: 0.25)",
    )


def watch_settings(options: argparse.Namespace) -> dict[str, Any]:
    """The `WatchSettings` fields that were given.

    Raises:
        OfframpError: One of them cannot be.
    """
    given = {field.name: getattr(options, field.name) for field in dataclasses.fields(WatchSettings)}
    settings = {name: value for name, value in given.items() if value is not None}
    WatchSettings(**settings)
    return settings
