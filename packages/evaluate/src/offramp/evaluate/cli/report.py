"""`offramp report`: results as one HTML page."""

from __future__ import annotations

import argparse
import os
import sys
from pathlib import Path


def main(argv: list[str]) -> int:
    """Runs the command with its arguments."""
    options = _parser().parse_args(argv)

    from offramp.evaluate.page import write
    from offramp.evaluate.report import page_of

    write(page_of(options.results, options.title), options.out)
    print(f"The report is in {options.out}", file=sys.stderr)
    if os.environ.get("MLFLOW_TRACKING_URI"):
        _log(options.out)
    return 0


def _log(path: Path) -> None:
    """Give the page to MLflow; that it cannot be had is no fault of the page."""
    from mlflow.exceptions import MlflowException

    from offramp.evaluate.mlflow_log import log_page

    try:
        run = log_page(path)
    except MlflowException as fault:
        print(f"offramp: the report was not logged to MLflow: {fault}", file=sys.stderr)
    else:
        print(f"MLflow has it in run {run}", file=sys.stderr)


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="offramp report",
        description="Write results of `offramp evaluate` and `offramp study` as one self-contained HTML page: tables, "
        "plots, commands, versions and machine. With MLFLOW_TRACKING_URI set, MLflow gets it as an artifact.",
    )
    parser.add_argument(
        "results", type=Path, nargs="+", metavar="RESULTS", help="folders with a results.json, or such files"
    )
    parser.add_argument(
        "-o", "--out", type=Path, default=Path("report.html"), metavar="FILE", help="the page (default: %(default)s)"
    )
    parser.add_argument("--title", default="Quality against cost", help="its heading (default: %(default)s)")
    return parser
