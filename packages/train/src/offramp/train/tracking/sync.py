"""`offramp sync`: tell MLflow what runs could not tell it while the store was away."""

from __future__ import annotations

import argparse
from pathlib import Path

from offramp.common.errors import OfframpError
from offramp.train.tracking.journal import Journal, is_sent, journals
from offramp.train.tracking.secrets import mask
from offramp.train.tracking.sender import Sender
from offramp.train.tracking.store import default_tracking_uri, in_words


def sync(directory: Path, tracking_uri: str | None = None, timeout_s: float = 600.0) -> list[str]:
    """Sends what waits in the journals of a run directory, oldest first.

    Args:
        directory: a run directory.
        tracking_uri: the MLflow store; `MLFLOW_TRACKING_URI` or `sqlite:///mlflow.db` if None.
        timeout_s: longest time for each journal.

    Returns:
        The ids of the MLflow runs that were told something.

    Raises:
        OfframpError: there are no journals, a run is still going on or belongs to another store, or the store does not
            answer.
    """
    store = tracking_uri or default_tracking_uri()
    paths = journals(directory)
    if not paths:
        raise OfframpError(f"{directory} holds no journal of a run; give a run directory, such as runs/NAME.")
    told: list[str] = []
    for path in paths:
        if is_sent(path):
            continue
        journal = Journal(path)
        try:
            if journal.run_id is not None and journal.tracking_uri not in (None, mask(store)):
                raise OfframpError(
                    f"run {journal.run_id} of {path} is in the store {journal.tracking_uri}, not in {mask(store)}; "
                    "give that with --tracking-uri."
                )
            sender = Sender(journal, store)
            sender.start()
            if not sender.close(timeout_s):
                detail = "it is too slow" if sender.fault is None else in_words(sender.fault)
                raise OfframpError(f"the MLflow store at {mask(store)} does not answer: {detail}")
            told.append(str(journal.run_id))
        finally:
            journal.close()
    return told


def main(argv: list[str]) -> int:
    """`offramp sync`."""
    parser = argparse.ArgumentParser(
        prog="offramp sync",
        description="Tell MLflow what runs could not tell it: metrics, parameters, artifacts and how they ended.",
    )
    parser.add_argument("directory", metavar="DIR", type=Path, help="run directory, such as runs/NAME")
    parser.add_argument(
        "--tracking-uri", metavar="URI", help="MLflow store [MLFLOW_TRACKING_URI or sqlite:///mlflow.db]"
    )
    arguments = parser.parse_args(argv)
    told = sync(arguments.directory, arguments.tracking_uri)
    print(f"sent to run {', '.join(told)}" if told else "everything was sent before")
    return 0
