"""`models:/NAME@ALIAS` and `models:/NAME/VERSION` -> the checkpoint directory, downloaded once and verified."""

from __future__ import annotations

import re
import shutil
import tempfile
from pathlib import Path
from typing import TYPE_CHECKING

import yaml

from offramp.common.errors import OfframpError
from offramp.train.tracking.digest import directory_sha256
from offramp.train.tracking.secrets import mask
from offramp.train.tracking.store import brief_requests, default_tracking_uri, in_words

if TYPE_CHECKING:
    from mlflow import MlflowClient
    from mlflow.entities.model_registry import ModelVersion

ARTIFACT = "checkpoint"
"""Key of the checkpoint directory among the artifacts of a registered model."""
HASH_TAG = "offramp.sha256"
DOWNLOAD_TIMEOUT_S = 120
"""How long the store may be silent while it sends a file; it is asked three times."""

_URI = re.compile(r"models:/(?P<name>[^/@]+)(?:@(?P<alias>[^/@]+)|/(?P<version>\d+))")


def resolve(uri: str, cache: Path, tracking_uri: str | None = None) -> Path:
    """Fetches a registered checkpoint directory.

    A download becomes visible under its final name only when it is whole and its hash is the one that was registered;
    what lies in the cache is hashed again before it is used.

    Args:
        uri: `models:/NAME@ALIAS` or `models:/NAME/VERSION`.
        cache: where downloads are kept.
        tracking_uri: the MLflow store; `MLFLOW_TRACKING_URI` or `sqlite:///mlflow.db` if None.

    Raises:
        OfframpError: there is no such model, it was not registered by Offramp, or what was downloaded differs from what
            was registered.
    """
    store = tracking_uri or default_tracking_uri()
    client, version, expected = _look_up(uri, store)
    target = cache / version.name / f"{version.version}-{expected[:12]}"
    try:
        return _fetched(uri, client, version, expected, target, store)
    except OSError as fault:
        raise OfframpError(f"cannot keep {uri} in {cache}: {fault}; make room, or choose another --cache") from fault


def _fetched(uri: str, client: MlflowClient, version: ModelVersion, expected: str, target: Path, store: str) -> Path:
    from mlflow.exceptions import MlflowException

    if target.is_dir():
        if directory_sha256(target) == expected:
            return target
        shutil.rmtree(target)
    target.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(prefix=".download-", dir=target.parent) as scratch:
        try:
            with brief_requests(DOWNLOAD_TIMEOUT_S, retries=2):
                found = _download(client, version, Path(scratch), store)
        except (MlflowException, OSError) as fault:
            raise OfframpError(f"cannot download {uri}: {mask(str(fault))}") from fault
        if (actual := directory_sha256(found)) != expected:
            raise OfframpError(
                f"{uri} was damaged on its way: its SHA-256 is {actual[:12]}..., {expected[:12]}... was registered; "
                "try again, or register it again"
            )
        try:
            found.rename(target)
        except OSError:
            # Another process was faster; what it put there is checked as above.
            if not target.is_dir() or directory_sha256(target) != expected:
                raise
    return target


def look_up(uri: str, tracking_uri: str | None = None) -> tuple[str, str]:
    """What a URI points to now, without fetching it: number of the version, and hash of its checkpoint directory.

    Args:
        uri: `models:/NAME@ALIAS` or `models:/NAME/VERSION`.
        tracking_uri: the MLflow store; `MLFLOW_TRACKING_URI` or `sqlite:///mlflow.db` if None.

    Raises:
        OfframpError: the store does not answer, there is no such model, or it was not registered by Offramp.
    """
    _, version, sha256 = _look_up(uri, tracking_uri or default_tracking_uri())
    return str(version.version), sha256


def _look_up(uri: str, store: str) -> tuple[MlflowClient, ModelVersion, str]:
    from mlflow import MlflowClient
    from mlflow.exceptions import MlflowException

    client = MlflowClient(store)
    try:
        with brief_requests():
            version = _find(client, uri)
    except MlflowException as fault:
        raise OfframpError(f"cannot find {uri} in the model registry at {mask(store)}: {in_words(fault)}") from fault
    sha256 = version.tags.get(HASH_TAG)
    if sha256 is None:
        raise OfframpError(f"{uri} (version {version.version}) was not put there by `offramp register`")
    return client, version, sha256


def _find(client: MlflowClient, uri: str) -> ModelVersion:
    match = _URI.fullmatch(uri)
    if match is None:
        raise OfframpError(f"{uri!r} is not a registered model; write models:/NAME@ALIAS or models:/NAME/VERSION")
    if match["alias"] is not None:
        return client.get_model_version_by_alias(match["name"], match["alias"])
    return client.get_model_version(match["name"], match["version"])


def _download(client: MlflowClient, version: ModelVersion, scratch: Path, store: str) -> Path:
    from mlflow.artifacts import download_artifacts

    source = client.get_model_version_download_uri(version.name, version.version)
    model = Path(download_artifacts(artifact_uri=source, dst_path=str(scratch), tracking_uri=store))
    description = yaml.safe_load((model / "MLmodel").read_text(encoding="utf-8"))
    return model / description["flavors"]["python_function"]["artifacts"][ARTIFACT]["path"]
