"""A recipe: configuration files merged in order, then command-line overrides, then interpolations resolved.

All of it happens here and not in jsonargparse, which resolves the interpolations of every file by itself: a value that
a later file or an override changes would then not reach the places that refer to it. Types are checked afterwards, by
the parser that knows the classes.

Within `model:` and `data:` the arguments may be written without `init_args:`, and `class_path:` may be left out where
the command has a default. `vars:` holds values that exist to be referred to (`${vars.lr}`), and `plan:` what
only `offramp plan` reads.
"""

from __future__ import annotations

import json
import math
import re
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, cast

import yaml
from omegaconf import DictConfig, OmegaConf
from omegaconf.errors import OmegaConfBaseException

from offramp.common.errors import OfframpError

CLASS_SECTIONS = ("model", "data")
VARIABLES = "vars"
PLAN = "plan"
"""The section that says what is known about the machines, for `offramp plan` alone."""
_CLASS_KEYS = frozenset({"class_path", "dict_kwargs"})
# Both spellings are merged in the short one, so references are brought to it as well.
_LONG_REFERENCE = re.compile(r"\$\{(" + "|".join(CLASS_SECTIONS) + r")\.init_args\.")


@dataclass(frozen=True)
class RecipeArguments:
    """The command line of a command that runs a recipe.

    Attributes:
        files: configuration files, in order.
        overrides: (dotted key, text of the value), in order.
        help: whether help was asked for.
    """

    files: list[Path] = field(default_factory=list)
    overrides: list[tuple[str, str]] = field(default_factory=list)
    help: bool = False


def parse_command_line(argv: Sequence[str]) -> RecipeArguments:
    """Reads `-c FILE`, `--config FILE`, `--key=value`, `--key value` and `--help`.

    Raises:
        OfframpError: an argument is none of these, or lacks its value.
    """
    files: list[Path] = []
    overrides: list[tuple[str, str]] = []
    rest = list(argv)
    while rest:
        argument = rest.pop(0)
        if argument in ("-h", "--help"):
            return RecipeArguments(help=True)
        name, equals, value = argument.partition("=")
        if name not in ("-c", "--config") and not (name.startswith("--") and len(name) > 2):
            raise OfframpError(f"unexpected argument {argument!r}; give -c FILE or --section.key=value")
        if not equals:
            # A negative number is a value; another option is not.
            if not rest or (rest[0].startswith("--") or rest[0] == "-c"):
                raise OfframpError(f"{argument} needs a value")
            value = rest.pop(0)
        if name in ("-c", "--config"):
            files.append(Path(value))
        else:
            overrides.append((name.removeprefix("--"), value))
    return RecipeArguments(files, overrides)


def load_recipe(files: Sequence[Path], overrides: Sequence[tuple[str, str]] = ()) -> dict[str, Any]:
    """Merges files and overrides and resolves interpolations.

    Overrides stay text, because only the parser knows whether a parameter is a string ("007") or a number; below
    `options`, whose values have no declared type, they are typed by their look.

    Returns:
        Nested dicts and lists of plain values, without `vars`.

    Raises:
        OfframpError: a file is not there or no YAML mapping, or a key refers to a missing value.
    """
    config = OmegaConf.create({})
    for file in files:
        config = cast(DictConfig, OmegaConf.merge(config, _load_file(file)))
    for key, text in overrides:
        _apply(config, key, text)
    try:
        plain = OmegaConf.to_container(config, resolve=True, throw_on_missing=True)
    except OmegaConfBaseException as fault:
        reason = str(fault).splitlines()[0].removeprefix("MissingMandatoryValue while resolving interpolation: ")
        raise OfframpError(f"configuration key {fault.full_key!r} has no value: {reason}") from fault
    except Exception as fault:  # resolvers raise what they like
        raise OfframpError(f"the configuration cannot be resolved: {fault}") from fault
    recipe = cast("dict[str, Any]", plain)
    recipe.pop(VARIABLES, None)
    for section in CLASS_SECTIONS:
        part = recipe.get(section)
        if isinstance(part, dict):
            arguments = {key: value for key, value in part.items() if key not in _CLASS_KEYS}
            named = {key: value for key, value in part.items() if key in _CLASS_KEYS}
            recipe[section] = {**named, "init_args": arguments}
    return recipe


def _load_file(file: Path) -> DictConfig:
    if not file.is_file():
        raise OfframpError(f"there is no configuration file {file}")
    try:
        config = OmegaConf.load(file)
        plain = _short_references(OmegaConf.to_container(config, resolve=False))
        if not isinstance(plain, dict):
            raise OfframpError(f"{file} must hold a mapping of sections such as trainer:, model: and data:")
        for section in CLASS_SECTIONS:
            part = plain.get(section)
            if isinstance(part, dict) and isinstance(part.get("init_args"), dict):
                plain[section] = {**part.pop("init_args"), **part}
        return OmegaConf.create(plain)
    except (yaml.YAMLError, OmegaConfBaseException, UnicodeDecodeError, OSError) as fault:
        detail = " ".join(str(fault).split())
        raise OfframpError(f"{file} is not a valid configuration: {detail}") from fault


def _short_references(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: _short_references(part) for key, part in value.items()}
    if isinstance(value, list):
        return [_short_references(part) for part in value]
    return _LONG_REFERENCE.sub(r"${\1.", value) if isinstance(value, str) else value


def _apply(config: DictConfig, key: str, text: str) -> None:
    path = key.split(".")
    if not all(path):
        raise OfframpError(f"--{key} is not a dotted key such as --trainer.max_steps")
    if path[0] in CLASS_SECTIONS and path[1:2] == ["init_args"]:
        del path[1]
    value = _typed_by_look(text) if "options" in path[:-1] else _short_references(text)
    try:
        OmegaConf.update(config, ".".join(path), value, merge=False, force_add=True)
    except (OmegaConfBaseException, IndexError, TypeError, ValueError, AttributeError) as fault:
        raise OfframpError(f"--{key} cannot be set: {str(fault).splitlines()[0]}") from fault


def _typed_by_look(text: str) -> Any:
    """JSON values become what they say, the rest are strings.

    So 7, 0.5, 1e-3 and true are typed, and 007, 1_000, on and 6e1234 (no finite number, but maybe a hash) stay text.
    """
    try:
        value = json.loads(text)
    except ValueError:
        return text
    if isinstance(value, float):
        return value if math.isfinite(value) else text
    return value


def plain_yaml(config: dict[str, Any]) -> str:
    """The configuration as YAML of plain containers only."""
    return yaml.safe_dump(config, sort_keys=False, allow_unicode=True, width=120)


def import_object(path: str) -> Any:
    """The class or function that a dotted path names."""
    module, _, name = path.rpartition(".")
    return getattr(__import__(module, fromlist=[name]), name)
