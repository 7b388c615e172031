"""A language that an answer must be in."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from offramp.common.errors import OfframpError

MAX_GRAMMAR = 1 << 16
"""Characters of a grammar. Compiling takes seconds and hundreds of megabytes for one ten times as long."""


@dataclass(frozen=True)
class Constraint:
    """A language that the generated text must be in.

    Attributes:
        kind: what `grammar` is written in; `json` is any JSON object and has none.
        grammar: a JSON schema as text, or a regular expression.
    """

    kind: Literal["json", "json_schema", "regex"]
    grammar: str = ""

    def __post_init__(self) -> None:
        if self.kind not in ("json", "json_schema", "regex"):
            raise OfframpError(f"constraint {self.kind!r} is unknown; choose one of json, json_schema, regex.")
        if not isinstance(self.grammar, str):
            raise OfframpError(f"the grammar of constraint {self.kind!r} is no text: {self.grammar!r}.")
        if len(self.grammar) > MAX_GRAMMAR:
            raise OfframpError(
                f"the grammar of constraint {self.kind!r} has {len(self.grammar)} characters, more than {MAX_GRAMMAR}; "
                "shorten it."
            )
        if (self.kind == "json") != (not self.grammar):
            raise OfframpError(
                "constraint 'json' takes no grammar; leave it out, or choose 'json_schema'."
                if self.grammar
                else f"constraint {self.kind!r} has an empty grammar; give one."
            )
