"""Where a model comes from: a checkpoint directory, or a URI that another distribution knows how to fetch."""

from __future__ import annotations

import os
import re
from collections.abc import Callable
from importlib.metadata import entry_points
from pathlib import Path
from typing import Any

from offramp.common.errors import OfframpError

GROUP = "offramp.model_sources"
"""Entry points named by URI scheme, each a function `resolve(uri: str, cache: Path) -> Path`.

Serving must not import MLflow, so that it can be installed without; offramp-train contributes ``models``.
"""

VERSIONS_GROUP = "offramp.model_versions"
"""The same, each a function `look_up(uri: str) -> tuple[str, str]`: the version it points to, and its SHA-256."""


def default_cache() -> Path:
    """Where downloaded models are kept, by the convention of the desktop (XDG_CACHE_HOME)."""
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "offramp" / "models"


def resolve_model(source: str, cache: Path) -> Path:
    """Turns a directory or ``models:/NAME@ALIAS`` into a local directory.

    Args:
        source: A path, or a URI whose scheme has an entry point.
        cache: Where downloads may be kept.

    Raises:
        OfframpError: There is no such directory, or nothing installed knows the scheme.
    """
    if is_uri(source):
        return Path(_of_scheme(GROUP, source)(source, cache))
    path = Path(source)
    if not path.is_dir():
        raise OfframpError(f"there is no directory {source!r}; give a checkpoint directory or models:/NAME@ALIAS.")
    return path


def look_up(uri: str) -> tuple[str, str]:
    """Number of the version that a URI points to now, and SHA-256 of its checkpoint directory; fetches nothing.

    Raises:
        OfframpError: It points to nothing, its registry does not answer, or nothing installed knows the scheme.
    """
    version, sha256 = _of_scheme(VERSIONS_GROUP, uri)(uri)
    return version, sha256


def is_uri(source: str) -> bool:
    """Whether a source is a URI such as ``models:/NAME@ALIAS``, and not a path."""
    return ":/" in source and not Path(source).exists()


def model_name(source: str) -> str:
    """A name that can stand in a URL: of ``models:/NAME@ALIAS`` NAME, of a path its last part."""
    uri = re.fullmatch(r"\w+:/(?P<name>[^/@]+)(@.*|/\d+)?", source)
    last = Path(source).resolve().name if uri is None else uri["name"]
    return "".join(char if char.isalnum() or char in "._-" else "-" for char in last).strip("-.")


def _of_scheme(group: str, uri: str) -> Callable[..., Any]:
    scheme = uri.partition(":/")[0]
    for entry_point in entry_points(group=group, name=scheme):
        return entry_point.load()
    raise OfframpError(
        f"nothing installed can fetch {uri!r}; `{scheme}:/` addresses need offramp-train with MLflow, "
        "or give the path of a checkpoint directory."
    )
