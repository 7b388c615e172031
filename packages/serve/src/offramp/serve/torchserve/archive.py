"""A checkpoint directory as a model folder that TorchServe loads: no archive file, and no second copy of the weights.

The same checkpoint, name, version and settings give the same bytes, whenever and wherever.

- ``MAR-INF/MANIFEST.json``: what TorchServe reads first
- ``MAR-INF/SHA256SUMS``: hashes of all other files, which the handler checks before it loads anything
- ``handler.py``: names the handler class
- ``model-config.yaml``: settings of the worker, the handler and the engine
- ``checkpoint/``: the checkpoint directory, hard-linked where the file system can
"""

from __future__ import annotations

import json
import os
import re
import shutil
import tempfile
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml

from offramp.common.errors import OfframpError
from offramp.serve.torchserve.checksums import SUMS, folder_sha256, format_sums
from offramp.serve.torchserve.settings import HandlerSettings, WorkerSettings, model_config

CHECKPOINT = "checkpoint"
MANIFEST = Path("MAR-INF") / "MANIFEST.json"
MODEL_CONFIG = "model-config.yaml"
HANDLER = "handler.py"
BUILDING = ".building-"
"""What the name of a folder begins with as long as it is not whole."""

_HANDLER_SOURCE = '''"""TorchServe loads the one class that this module defines."""

try:
    from offramp.serve.torchserve.handler import OfframpHandler
except ImportError as error:
    # TorchServe takes an ImportError for a wish to have one of its own handlers, and would only say that it has none.
    raise RuntimeError(f"the handler cannot be imported: {error}") from error


class Handler(OfframpHandler):
    """The handler of this model."""
'''
_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]*")
# An allow-list: the folder goes to a server, so no pickle, no optimizer state and no hidden file comes along.
_SUFFIXES = frozenset({".json", ".safetensors", ".model", ".txt", ".jinja", ".md"})


@dataclass(frozen=True)
class Contents:
    """A model folder before it is made.

    Attributes:
        files: What each file holds, or the file of the checkpoint that it is, by path within the folder.
        sums: Their hashes, the text of `SHA256SUMS`.
    """

    files: Mapping[str, Path | bytes]
    sums: str

    @classmethod
    def of(cls, files: Mapping[str, Path | bytes]) -> Contents:
        """Hashes every file.

        Raises:
            OfframpError: One cannot be read.
        """
        try:
            return cls(files, format_sums(files))
        except OSError as fault:
            raise OfframpError(f"the checkpoint cannot be read: {fault}; check its permissions.") from fault

    @property
    def sha256(self) -> str:
        """One hash for all of it."""
        return folder_sha256(self.sums)

    @property
    def unnamed_sha256(self) -> str:
        """The same, whatever name and version the model gets."""
        lines = self.sums.splitlines(keepends=True)
        return folder_sha256("".join(line for line in lines if not line.endswith(f"  {MANIFEST}\n")))


def contents(
    checkpoint: Path,
    *,
    name: str,
    version: str = "1.0",
    engine: dict[str, Any] | None = None,
    watch: dict[str, Any] | None = None,
    handler: HandlerSettings | None = None,
    worker: WorkerSettings | None = None,
) -> Contents:
    """What a model folder would hold; the arguments are those of `archive`.

    Raises:
        OfframpError: `checkpoint` is no checkpoint directory, or the name cannot stand in a URL.
    """
    for what, text in (("model name", name), ("model version", version)):
        if not _NAME.fullmatch(text):
            raise OfframpError(
                f"{what} {text!r} cannot stand in a URL; use letters, digits, dots, dashes and underscores."
            )
    settings = model_config(worker or WorkerSettings(), handler or HandlerSettings(), engine or {}, watch or {})
    return Contents.of(
        {
            **{f"{CHECKPOINT}/{file.name}": file for file in _checkpoint_files(checkpoint)},
            str(MANIFEST): f"{json.dumps(_manifest(name, version), indent=2)}\n".encode(),
            HANDLER: _HANDLER_SOURCE.encode(),
            MODEL_CONFIG: yaml.safe_dump(settings, sort_keys=False).encode(),
        }
    )


def archive(
    checkpoint: Path,
    folder: Path,
    *,
    name: str,
    version: str = "1.0",
    engine: dict[str, Any] | None = None,
    watch: dict[str, Any] | None = None,
    handler: HandlerSettings | None = None,
    worker: WorkerSettings | None = None,
    overwrite: bool = False,
) -> Path:
    """Makes a model folder.

    The folder appears whole or not at all: it is built beside its place and renamed into it.

    Args:
        checkpoint: A checkpoint directory.
        folder: The model folder to make; its parent is TorchServe's model store.
        name: The model's name, in the URL and in `model` of requests.
        version: Its version, in the URL.
        engine: `EngineConfig` fields that differ from their defaults.
        watch: `WatchSettings` fields that do.
        handler: Settings of the handler.
        worker: Settings of TorchServe's worker.
        overwrite: Replace a model folder that is already there.

    Returns:
        `folder`.

    Raises:
        OfframpError: `checkpoint` is no checkpoint directory, the name cannot stand in a URL, or `folder` exists, lies
            in the checkpoint or cannot be written.
    """
    made = contents(checkpoint, name=name, version=version, engine=engine, watch=watch, handler=handler, worker=worker)
    if folder.exists():
        if not overwrite:
            raise OfframpError(f"{folder} already exists; choose another place or overwrite it with --force.")
        if not (folder / MANIFEST).is_file():
            raise OfframpError(f"{folder} is not a model folder, so it is not overwritten; choose another place.")
    if checkpoint.resolve() in folder.resolve().parents:
        raise OfframpError(f"{folder} lies in the checkpoint directory {checkpoint}; choose a place outside of it.")
    return write(made, folder)


def write(made: Contents, folder: Path) -> Path:
    """Puts a model folder where it belongs, whole or not at all, in place of one that is there.

    Raises:
        OfframpError: It cannot be written.
    """
    try:
        _build(made, folder)
    except (OSError, shutil.Error) as fault:
        raise OfframpError(f"{folder} cannot be written: {fault}; choose another place.") from fault
    return folder


def _build(made: Contents, folder: Path) -> None:
    folder.parent.mkdir(parents=True, exist_ok=True)
    building = Path(tempfile.mkdtemp(prefix=f"{BUILDING}{folder.name}.", dir=folder.parent))
    try:
        for name, content in {**made.files, str(SUMS): made.sums.encode()}.items():
            place = building / name
            place.parent.mkdir(exist_ok=True)
            if isinstance(content, bytes):
                place.write_bytes(content)
            else:
                _link_or_copy(content, place)
        building.chmod(0o755)  # mkdtemp's 0700 would lock out a server that runs as another user
        if folder.exists():
            shutil.rmtree(folder)
        building.rename(folder)
    except BaseException:
        shutil.rmtree(building, ignore_errors=True)
        raise


def read_manifest(folder: Path) -> tuple[str, str]:
    """Name and version of a model folder.

    Raises:
        OfframpError: `folder` is no model folder.
    """
    try:
        model = json.loads((folder / MANIFEST).read_text())["model"]
        return str(model["modelName"]), str(model["modelVersion"])
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise OfframpError(f"{folder} is not a model folder ({error}); make one with `offramp archive`.") from error


def is_model_folder(path: Path) -> bool:
    """Whether `path` is what `archive` makes."""
    return (path / MANIFEST).is_file()


def _checkpoint_files(checkpoint: Path) -> list[Path]:
    if not checkpoint.is_dir():
        raise OfframpError(f"{checkpoint} is not a directory; give a checkpoint directory.")
    files = sorted(path for path in checkpoint.iterdir() if path.is_file() and _belongs(path))
    names = {file.name for file in files}
    if "config.json" not in names:
        raise OfframpError(f"{checkpoint} has no config.json, so it is not a checkpoint directory.")
    if not any(name.endswith(".safetensors") for name in names):
        raise OfframpError(f"{checkpoint} has no *.safetensors file; only safetensors weights are served.")
    if not any(name.startswith("tokenizer") or name == "vocab.json" for name in names):
        raise OfframpError(f"{checkpoint} holds no tokenizer; copy tokenizer.json and tokenizer_config.json into it.")
    return files


def _belongs(path: Path) -> bool:
    return path.suffix in _SUFFIXES or path.name.startswith("LICENSE")


def _link_or_copy(source: Path, target: Path) -> None:
    # resolve: a hard link to a symbolic link (a hub cache is made of them) would be a symbolic link again.
    source = source.resolve()
    try:
        os.link(source, target)
    except OSError:  # another file system, or one without hard links
        shutil.copy2(source, target)


def _manifest(name: str, version: str) -> dict[str, Any]:
    return {
        "runtime": "python",
        "archiverVersion": "0.12.0",
        "createdOn": "01/01/1980 00:00:00",  # TorchServe wants some time, and the true one would be another every time
        "model": {
            "modelName": name,
            "modelVersion": version,
            "handler": HANDLER,
            "configFile": MODEL_CONFIG,
        },
    }
