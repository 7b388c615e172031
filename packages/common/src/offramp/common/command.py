"""What a distribution's `offramp.commands` entry points name: a subcommand that is loaded only when it runs."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from importlib import import_module
from typing import TYPE_CHECKING, cast

if TYPE_CHECKING:
    import typer

Main = Callable[[list[str]], int]
"""A subcommand's function: its own arguments (without the program's and the command's name) to an exit code."""


@dataclass(frozen=True)
class Command:
    """One subcommand of `offramp`.

    Attributes:
        summary: One line for `offramp --help`, beginning with a verb.
        main: Where the function is, as ``module:function``. It stays a string so that listing the commands imports
            neither torch nor a framework.
        step: Place along the way from a model to an answer, for the order in `offramp --help`; equal steps are listed
            by name.
    """

    summary: str
    main: str
    step: int

    def load(self) -> Main:
        """Imports and returns the function."""
        module, _, function = self.main.partition(":")
        return cast(Main, getattr(import_module(module), function))


def run_typer(app: typer.Typer, name: str, argv: list[str]) -> int:
    """Runs a Typer application as the subcommand `name` and returns its exit code.

    Calling the application itself would leave the process and put its own traceback printer in place of Python's;
    an `OfframpError` passes through to the umbrella.
    """
    from typer.main import get_command

    try:
        get_command(app).main(args=argv, prog_name=f"offramp {name}")
    except SystemExit as done:
        return done.code if isinstance(done.code, int) else int(done.code is not None)
    return 0
