"""Where rows come from: local files, the Hugging Face hub, the documentation corpus, or a generator function.

Everything becomes a `datasets.Dataset` (or, with `streaming`, an `IterableDataset`) of rows with named columns; which
columns make an example is said by the same `SourceConfig` and applied in `tokenize.py`.
"""

from __future__ import annotations

import glob
import importlib
import os
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, cast

from offramp.common.errors import OfframpError
from offramp.train.data.docstrings import load_docstrings, options_from

if TYPE_CHECKING:
    from datasets import Dataset, IterableDataset

Kind = Literal["files", "hub", "docstrings", "generator"]
# Strings first: a quoted "007" in a recipe has to stay a string.
Option = str | int | float | bool | list[str] | list[int] | list[float] | dict[str, str] | None

_READERS = {".txt": "text", ".md": "text", ".jsonl": "json", ".json": "json", ".csv": "csv", ".parquet": "parquet"}
_COMPRESSIONS = (".gz", ".bz2", ".xz", ".zst")


@dataclass(frozen=True)
class SourceConfig:
    r"""One source of rows, and how a row becomes an example.

    Exactly one of these ways of reading a row is used: `text`; `prompt` with `completion`; `messages`; `input_ids`.
    `text`, `prompt` and `completion` are either the name of a column or a format string over columns, such as
    ``"{cron}\nEnglish:"`` (a literal brace is written twice).

    Attributes:
        kind: `files` reads `path` (files or globs: txt, md, jsonl, json, csv, parquet, also compressed); `hub` loads
            the data set named `path`; `docstrings` is the documentation corpus, no download; `generator` calls the
            Python function `path` ("module:function"), which yields one dict per row and has to yield the same rows
            whenever it is called with the same options.
        path: see `kind`; not used by `docstrings`.
        config_name: configuration of a hub data set ("3.0.0" of cnn_dailymail).
        split: split of a hub data set; slices such as "train[:1%]" work, for files too, unless streaming.
        streaming: read rows as they are needed instead of preparing them all first.
        options: keyword arguments of the generator function, of `datasets.load_dataset`, or `DocstringOptions`.
        limit: at most this many rows, from the front.
        text: whole text, trained on from its second token.
        prompt: the part that is given, not trained on; the source of an encoder-decoder model.
        completion: the part that is trained on; the target of an encoder-decoder model.
        messages: column of chat messages ({"role", "content"} each); every assistant turn is trained on.
        input_ids: column of token ids, used as they are.
        labels: column of labels beside `input_ids`, in Hugging Face's convention (aligned with `input_ids`, -100 is
            not trained on); without it all tokens are trained on.
        append_eos: end texts and completions with the tokenizer's end-of-sequence token.
    """

    kind: Kind = "files"
    path: str | list[str] | None = None
    config_name: str | None = None
    split: str = "train"
    streaming: bool = False
    options: dict[str, Option] = field(default_factory=dict)
    limit: int | None = None
    text: str | None = None
    prompt: str | None = None
    completion: str | None = None
    messages: str | None = None
    input_ids: str | None = None
    labels: str | None = None
    append_eos: bool = True

    def __post_init__(self) -> None:
        ways = [name for name in ("text", "prompt", "messages", "input_ids") if getattr(self, name) is not None]
        if len(ways) > 1:
            raise OfframpError(f"a source reads rows in one way, but {' and '.join(ways)} are set; keep one of them")
        if (self.prompt is None) != (self.completion is None):
            given, lacking = ("prompt", "completion") if self.completion is None else ("completion", "prompt")
            raise OfframpError(f"a source with {given!r} needs {lacking!r}; for text without a prompt use 'text'")
        if self.labels is not None and self.input_ids is None:
            raise OfframpError("a source with 'labels' needs the token ids they belong to; set 'input_ids'")
        if self.kind != "docstrings" and not self.path:
            raise OfframpError(f"a source of kind {self.kind!r} needs a 'path'")
        if self.limit is not None and self.limit < 1:
            raise OfframpError(f"source limit {self.limit} must be at least 1; leave it out to take all rows")

    @property
    def name(self) -> str:
        """A short name for messages."""
        return self.kind if self.path is None else f"{self.kind} {self.path}"

    @property
    def reads_text(self) -> str | None:
        """The column or format string of whole texts; `text` when nothing at all is said."""
        if self.prompt is None and self.messages is None and self.input_ids is None:
            return self.text or "text"
        return None


def load_rows(source: SourceConfig, cache_directory: Path) -> Dataset | IterableDataset:
    """The rows of a source, not yet tokenised.

    Args:
        source: what to read.
        cache_directory: for the documentation corpus; files and hub data sets use the cache of `datasets`.

    Raises:
        OfframpError: nothing matches, a file cannot be read as what it claims to be, or a function is not there.
    """
    if source.kind == "files":
        rows = _load_files(source)
    elif source.kind == "hub":
        rows = _load(source, str(_single_path(source)), name=source.config_name, split=source.split, **source.options)
    elif source.kind == "docstrings":
        rows = _from_rows(source, partial(load_docstrings, options_from(dict(source.options)), cache_directory))
    else:
        rows = _from_rows(source, partial(_function(_single_path(source)), **source.options))
    if source.limit is not None:
        # `take` of a map-style data set fails when it has fewer rows.
        rows = rows.take(source.limit if source.streaming else min(source.limit, len(cast("Dataset", rows))))
    if not source.streaming and len(cast("Dataset", rows)) == 0:
        raise OfframpError(f"the source {source.name} has no rows")
    return rows


def _load_files(source: SourceConfig) -> Dataset | IterableDataset:
    patterns = [source.path] if isinstance(source.path, str) else list(source.path or ())
    files: list[str] = []
    for pattern in patterns:
        pattern = os.path.expanduser(pattern)
        # A file whose name holds brackets is itself before it is a pattern.
        matches = [pattern] if Path(pattern).is_file() else sorted(glob.glob(pattern, recursive=True))
        matches = [match for match in matches if Path(match).is_file()]
        if not matches:
            raise OfframpError(f"no file matches {pattern!r} (looked from {Path.cwd()}); correct the source's path")
        files += matches
    files = [str(Path(file).resolve()) for file in dict.fromkeys(files)]
    if not any(Path(file).stat().st_size for file in files):
        # The readers of `datasets` end in a bare StopIteration here.
        raise OfframpError(f"the source {source.name} has no rows: {len(files)} files, all of them empty")
    readers = {file: _reader(file) for file in files}
    if len(set(readers.values())) > 1:
        kinds = ", ".join(sorted(set(readers.values())))
        raise OfframpError(f"the files of one source must be of one format, but {source.path} matches {kinds}")
    # For local files only slices make sense; datasets calls the one split "train".
    return _load(source, readers[files[0]], data_files={"train": files}, split=source.split, **source.options)


def _reader(file: str) -> str:
    path = Path(file)
    suffix = Path(path.stem).suffix if path.suffix in _COMPRESSIONS else path.suffix
    if suffix not in _READERS:
        raise OfframpError(f"cannot tell the format of {file}; name it {', '.join(_READERS)} (or compressed)")
    return _READERS[suffix]


def _load(source: SourceConfig, path: str, **arguments: Any) -> Dataset | IterableDataset:
    import datasets

    try:
        return datasets.load_dataset(path, streaming=source.streaming, **arguments)
    except Exception as fault:  # the library raises a dozen types, most about the user's files or names
        cause = fault.__cause__ or fault
        detail = " ".join(str(cause).split())[:300]
        raise OfframpError(f"the source {source.name} cannot be read: {type(cause).__name__}: {detail}") from fault


def _from_rows(source: SourceConfig, rows: Callable[[], Iterable[dict[str, Any]]]) -> Dataset | IterableDataset:
    import datasets

    if source.streaming:
        return datasets.IterableDataset.from_generator(lambda: iter(rows()))
    return datasets.Dataset.from_list(list(rows()))


def _single_path(source: SourceConfig) -> str:
    if not isinstance(source.path, str):
        raise OfframpError(f"a source of kind {source.kind!r} takes one path, not {source.path!r}")
    return source.path


def _function(reference: str) -> Callable[..., Iterable[dict[str, Any]]]:
    module_name, _, function_name = reference.partition(":")
    if not module_name or not function_name:
        raise OfframpError(f"a generator's path is 'module:function', not {reference!r}")
    try:
        return getattr(importlib.import_module(module_name), function_name)
    except (ImportError, AttributeError) as fault:
        raise OfframpError(f"the generator {reference!r} cannot be imported: {fault}") from fault
