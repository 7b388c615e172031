"""One sentence for a fault in a recipe, found in jsonargparse's account: a tree of everything that it tried."""

from __future__ import annotations

import contextlib
import difflib
import re
from collections.abc import Iterator
from typing import Any

import lightning.pytorch as pl
from jsonargparse import ArgumentError, ArgumentParser
from lightning.pytorch.utilities.exceptions import MisconfigurationException

from offramp.common.errors import OfframpError
from offramp.train.recipe import import_object


@contextlib.contextmanager
def explained(recipe: dict[str, Any]) -> Iterator[None]:
    """Turns what parsing and building a recipe raise into an `OfframpError`."""
    try:
        yield
    except OfframpError:
        raise
    except MisconfigurationException as fault:
        raise OfframpError(f"the configuration is refused: {' '.join(str(fault).split())}") from fault
    except (ArgumentError, ValueError, TypeError, ImportError, AttributeError) as fault:
        cause: BaseException | None = fault
        while cause is not None:
            if isinstance(cause, OfframpError):
                raise cause from None
            cause = cause.__cause__ or cause.__context__
        if not isinstance(fault, ArgumentError) and not str(fault).startswith(("Does not validate", "Parser key")):
            # Raised by Lightning's or the recipe's own classes, in their own words.
            if isinstance(fault, ValueError):
                raise OfframpError(f"the configuration is refused: {fault}") from fault
            raise
        raise OfframpError(explain(str(fault), recipe)) from fault


_KEY = re.compile(r"Parser key \"(?P<key>.+)\":")
_CLASS = re.compile(r"Problem with given class_path '(?P<path>.+)':")
_UNKNOWN = re.compile(r"(?:Group '(?P<group>.+)' does not accept option|Option) '(?P<key>.+?)'(?: is not accepted)?$")
_TYPE = re.compile(r"Expected an? (?P<type>.+?)(?:\. Got value: (?P<value>.*))?$")
_NOISE = re.compile(
    r"Does not validate|Subtypes:|Errors:|Given value|Subclass types|Not a valid subclass|a (?:dict|class)"
)


def explain(message: str, recipe: dict[str, Any]) -> str:
    """One sentence out of jsonargparse's account.

    Args:
        message: of the exception.
        recipe: that was parsed, to name the value where the account does not.
    """
    path: list[str] = []
    class_path = ""
    value = ""
    wanted: list[str] = []
    for line in (raw.strip().removeprefix("- ") for raw in message.splitlines()):
        if match := _KEY.match(line):
            path += match["key"].split(".")
            wanted.clear()  # what was tried in place of the group that this key is in
        elif match := _CLASS.match(line):
            class_path = match["path"]
        elif match := _UNKNOWN.match(line):
            path += match["group"].split(".") if match["group"] else []
            *parents, key = match["key"].split(".")
            return _unknown_key(path + parents, key, class_path)
        elif match := _TYPE.match(line):
            expected = _type_name(match["type"])
            # The alternative "nothing at all" is never what was meant.
            if match["value"] is not None:
                value = match["value"]
            if expected != "null" and expected not in wanted:
                wanted.append(expected)
        elif line.startswith("Given value: ") and not value and wanted:
            value = line.removeprefix("Given value: ")
        elif not _NOISE.match(line) and not wanted:
            return f"configuration key {'.'.join(path)!r}: {line}" if path else f"the configuration is refused: {line}"
        if wanted and value:
            break
    key = ".".join(path)
    return (
        f"configuration key {key!r} must be {' or '.join(wanted) or 'of another type'}, but its value is {value[:100]}"
    )


def _type_name(text: str) -> str:
    text = text.strip()
    if match := re.fullmatch(r"<class '(.+)'>", text):
        return {"NoneType": "null"}.get(match[1], match[1])
    return text.replace("typing.", "")


def _unknown_key(parents: list[str], key: str, class_path: str) -> str:
    known = _known_keys(parents, class_path)
    close = difflib.get_close_matches(key, known, n=1)
    hint = f"did you mean {close[0]!r}?" if close else f"the keys there are {', '.join(known)}" if known else ""
    where = ".".join([*parents, key])
    owner = f" ({class_path.rpartition('.')[2]})" if class_path else ""
    return f"unknown configuration key {where!r}{owner}" + (f"; {hint}" if hint else "")


def _known_keys(parents: list[str], class_path: str) -> list[str]:
    """The keys that could have been meant: parameters of the class, or of the group within it."""
    parser = ArgumentParser(exit_on_error=False)
    try:
        if class_path:
            parser.add_class_arguments(import_object(class_path), fail_untyped=False)
        elif parents[:1] == ["trainer"]:
            parser.add_class_arguments(pl.Trainer, "trainer", fail_untyped=False)
        else:
            return ["seed_everything", "trainer", "model", "data", "ckpt_path", "vars"]
        names = list(parser.get_defaults(skip_validation=True).keys())
    except Exception:  # only a hint is lost
        return []
    # The last parents may be a group of the class: keys are compared within it.
    for size in range(len(parents), 0, -1):
        prefix = ".".join(parents[-size:]) + "."
        inside = [name.removeprefix(prefix).split(".")[0] for name in names if name.startswith(prefix)]
        if inside:
            return sorted(set(inside))
    return sorted({name.split(".")[0] for name in names})
