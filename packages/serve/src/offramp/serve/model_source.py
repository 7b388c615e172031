"""Where a model comes from: a checkpoint directory, or a URI that another distribution knows how to fetch."""

from __future__ import annotations

import os
from importlib.metadata import entry_points
from pathlib import Path

from offramp.common.errors import OfframpError

GROUP = "offramp.model_sources"
"""Entry points named by URI scheme, each a function `resolve(uri: str, cache: Path) -> Path`.

Serving must not import MLflow, so that it can be installed without; offramp-train contributes ``models``.
"""


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
    scheme, colon, _ = source.partition(":/")
    if colon and not Path(source).exists():
        for entry_point in entry_points(group=GROUP, name=scheme):
            return Path(entry_point.load()(source, cache))
        raise OfframpError(
            f"nothing installed can fetch {source!r}; `{scheme}:/` addresses need offramp-train with MLflow, "
            "or give the path of a checkpoint directory."
        )
    path = Path(source)
    if not path.is_dir():
        raise OfframpError(f"there is no directory {source!r}; give a checkpoint directory or models:/NAME@ALIAS.")
    return path
