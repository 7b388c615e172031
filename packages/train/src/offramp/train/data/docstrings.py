"""The documentation corpus: real English that every machine already has, in the docstrings of its Python packages.

Source files are parsed, never imported or run. A docstring whose first paragraph is a summary and whose rest is the
explanation is also a (details -> one-line summary) pair, so the corpus serves language modelling and summarisation.

The three splits are made by *package*, so that nothing a model saw in training returns in validation because a
neighbouring module says it again; what is repeated word for word anywhere in the corpus is kept once.
"""

from __future__ import annotations

import ast
import hashlib
import json
import os
import sysconfig
import time
import warnings
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Literal

from filelock import FileLock
from tqdm import tqdm

from offramp.common.errors import OfframpError

Split = Literal["train", "validation", "test"]
SPLITS: tuple[Split, ...] = ("train", "validation", "test")

_SKIPPED_PARTS = frozenset({"test", "tests", "testing", "site-packages", "dist-packages", "idlelib", "__pycache__"})
_CACHE_VERSION = 1


@dataclass(frozen=True)
class DocstringOptions:
    """Which docstrings to take.

    Attributes:
        split: the part of the packages to take.
        pairs: only docstrings that have both a summary and details.
        max_files: source files to read at most; the same ones on every run, spread over all packages.
        max_seconds: stop reading after this long. What was read by then is cached and used again, so one machine
            keeps one corpus, but two machines may differ; None reads all `max_files`.
        packages: top-level packages to read; None reads all of them.
        roots: directories to look in; None is the standard library and the installed packages.
        min_details, max_details: length limits of the details, in characters.
        min_summary, max_summary: length limits of the summary, in characters.
        validation_share, test_share: shares of the packages in those splits.
        seed: which packages fall into which split.
    """

    split: Split = "train"
    pairs: bool = False
    max_files: int = 4000
    max_seconds: float | None = None
    packages: Sequence[str] | None = None
    roots: Sequence[str] | None = None
    min_details: int = 100
    max_details: int = 2000
    min_summary: int = 20
    max_summary: int = 200
    validation_share: float = 0.05
    test_share: float = 0.05
    seed: int = 0

    def __post_init__(self) -> None:
        if self.split not in SPLITS:
            raise OfframpError(f"docstring split {self.split!r} is not one of {', '.join(SPLITS)}")
        if not 0 <= self.validation_share + self.test_share < 1:
            raise OfframpError(
                f"validation_share {self.validation_share} and test_share {self.test_share} leave nothing to train on; "
                "their sum must be below 1"
            )


def load_docstrings(options: DocstringOptions, cache_directory: Path) -> list[dict[str, str]]:
    """The rows of one split.

    Args:
        options: what to take.
        cache_directory: where a corpus, once collected, is kept; processes that start together share it.

    Returns:
        Rows with the columns `package`, `name` (dotted), `text` (the whole docstring), `summary` and `details` (both
        empty where the docstring has only one paragraph).
    """
    roots = [Path(root) for root in options.roots] if options.roots is not None else _default_roots()
    # Split, shares, seed and lengths only filter, so all of them share one collection.
    packages = sorted(options.packages) if options.packages is not None else None
    places = [[str(root) for root in roots], _root_state(roots)]
    key = json.dumps([_CACHE_VERSION, *places, packages, options.max_files, options.max_seconds])
    path = cache_directory / f"docstrings-{hashlib.sha256(key.encode()).hexdigest()[:16]}.jsonl"
    if not path.exists():
        cache_directory.mkdir(parents=True, exist_ok=True)
        with FileLock(f"{path}.lock"):
            if not path.exists():
                partial = path.with_suffix(f".{os.getpid()}.partial")
                with partial.open("w", encoding="utf-8") as stream:
                    for row in _collect(roots, options):
                        stream.write(json.dumps(row) + "\n")
                partial.replace(path)
    with path.open(encoding="utf-8") as stream:
        rows = [json.loads(line) for line in stream]
    return [row for row in rows if split_of(row["package"], options) == options.split and _is_wanted(row, options)]


def split_of(package: str, options: DocstringOptions) -> Split:
    """The split of a package: a hash of its name, so that it does not depend on what else is installed."""
    draw = int.from_bytes(hashlib.sha256(f"{options.seed}:{package}".encode()).digest()[:8], "big") / 2**64
    if draw < options.test_share:
        return "test"
    if draw < options.test_share + options.validation_share:
        return "validation"
    return "train"


def split_docstring(text: str) -> tuple[str, str]:
    """(summary, details) at the first blank line; both empty unless the docstring has both."""
    summary, _, details = text.partition("\n\n")
    summary, details = " ".join(summary.split()), " ".join(details.split())
    # Doctest prompts and field lists in the first paragraph are code, not a summary.
    if not summary or not details or ">>>" in summary or summary.startswith(":"):
        return "", ""
    return summary, details


def _is_wanted(row: dict[str, str], options: DocstringOptions) -> bool:
    if not options.pairs:
        return True
    return (
        options.min_summary <= len(row["summary"]) <= options.max_summary
        and options.min_details <= len(row["details"]) <= options.max_details
    )


def _default_roots() -> list[Path]:
    paths = sysconfig.get_paths()
    return list(dict.fromkeys(Path(paths[name]).resolve() for name in ("stdlib", "purelib", "platlib")))


def _root_state(roots: list[Path]) -> list[list[str]]:
    """The names of what is installed: installing or upgrading a package (its dist-info changes) makes a new corpus."""
    return [sorted(entry.name for entry in root.iterdir()) if root.is_dir() else [] for root in roots]


def _source_files(roots: list[Path], packages: Sequence[str] | None) -> Iterator[tuple[str, Path, str]]:
    """(package, file, dotted module name) in a fixed order that mixes the packages."""
    found: list[tuple[str, str, Path, str]] = []
    for root in roots:
        for folder, folders, files in os.walk(root):
            relative = Path(folder).relative_to(root)
            folders[:] = [name for name in folders if name not in _SKIPPED_PARTS and not name.endswith("-info")]
            for file in files:
                if not file.endswith(".py") or file.startswith(("test_", "conftest")):
                    continue
                parts = [*relative.parts, file.removesuffix(".py")]
                if packages is None or parts[0] in packages:
                    name = ".".join(part for part in parts if part != "__init__")
                    rank = hashlib.sha256(name.encode()).hexdigest()
                    found.append((rank, parts[0], Path(folder, file), name))
    for _, package, path, name in sorted(found):
        yield package, path, name


def _collect(roots: list[Path], options: DocstringOptions) -> Iterator[dict[str, str]]:
    started = time.monotonic()
    seen: set[str] = set()
    files = list(_source_files(roots, options.packages))[: options.max_files]
    for done, (package, path, module) in enumerate(tqdm(files, desc="Reading docstrings", unit="file", delay=2)):
        if options.max_seconds is not None and time.monotonic() - started > options.max_seconds:
            warnings.warn(
                f"reading docstrings stopped at max_seconds={options.max_seconds:g} after {done} of {len(files)} files",
                stacklevel=2,
            )
            return
        for name, text in _docstrings(path, module):
            key = " ".join(text.split())
            summary, details = split_docstring(text)
            # A details text is kept once too: it is the prompt, and the same prompt in two splits would be a leak.
            keys = {key, details} if details else {key}
            if not key or seen & keys:
                continue
            seen |= keys
            yield {"package": package, "name": name, "text": text, "summary": summary, "details": details}


def _docstrings(path: Path, module: str) -> Iterator[tuple[str, str]]:
    try:
        source = path.read_text(encoding="utf-8")
        if '"""' not in source and "'''" not in source:
            return
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # other people's invalid escapes
            tree = ast.parse(source)
    except (OSError, ValueError, SyntaxError, RecursionError, MemoryError):
        return  # not UTF-8, another Python version, a template: not text for us
    for node in ast.walk(tree):
        if isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef):
            text = ast.get_docstring(node)
            if text and text.strip():
                yield (module if isinstance(node, ast.Module) else f"{module}.{node.name}"), text.strip()


def options_from(values: dict[str, object]) -> DocstringOptions:
    """Options from a source's `options`, with an error that names an unknown one."""
    known = asdict(DocstringOptions())
    for name in values:
        if name not in known:
            raise OfframpError(f"docstring source: unknown option {name!r}; the options are {', '.join(known)}")
    return DocstringOptions(**values)  # pyright: ignore[reportArgumentType]
