"""Progress bars of long generations."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TaskID, TextColumn, TimeElapsedColumn

Report = Callable[[str, int, int], None]
"""Told what is done, how much of it, and out of how much."""


@contextmanager
def reporting(console: Console) -> Iterator[Report]:
    """A progress bar for every name that is reported."""
    columns = (TextColumn("   {task.description}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
    with Progress(*columns, console=console) as bar:
        tasks: dict[str, TaskID] = {}

        def report(name: str, done: int, total: int) -> None:
            if name not in tasks:
                tasks[name] = bar.add_task(name, total=total)
            bar.update(tasks[name], completed=done)

        yield report
