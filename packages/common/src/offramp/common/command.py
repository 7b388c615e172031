"""What a distribution's `offramp.commands` entry points name: a subcommand that is loaded only when it runs."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from importlib import import_module
from typing import cast

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
