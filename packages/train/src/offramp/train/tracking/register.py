"""`offramp register`: a checkpoint directory becomes a version in the MLflow model registry."""

from __future__ import annotations

import argparse
import importlib.metadata
import json
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import mlflow
from mlflow.exceptions import MlflowException
from mlflow.models import ModelSignature
from mlflow.types import ColSpec, ParamSchema, ParamSpec, Schema
from mlflow.utils.validation import (
    _validate_model_alias_name,
    _validate_model_alias_name_reserved,
    _validate_model_name,
)

from offramp.common.checkpoint import load_checkpoint
from offramp.common.errors import OfframpError
from offramp.common.tokenizer import load_tokenizer
from offramp.train.tracking.digest import directory_sha256
from offramp.train.tracking.pyfunc_model import DEFAULT_MAX_NEW_TOKENS
from offramp.train.tracking.secrets import mask
from offramp.train.tracking.sources import ARTIFACT, HASH_TAG, resolve
from offramp.train.tracking.store import REQUEST_TIMEOUT_S, brief_requests, default_tracking_uri, in_words, is_refusal

RUN_TAG = "offramp.run_id"
EXITS_TAG = "offramp.exit_layers"
CONNECT_TIMEOUT_S = REQUEST_TIMEOUT_S
"""How long the store may take to give its first answer; it is asked twice."""
UPLOAD_TIMEOUT_S = 120
"""How long the store may take to keep a file; it is asked three times."""


@dataclass(frozen=True)
class Registered:
    """A model version.

    Attributes:
        name: of the registered model.
        version: number of the version.
        alias: alias that points to it.
        sha256: of the checkpoint directory.
        run_id: run that trained it, as far as the checkpoint knows.
        uri: `models:/NAME/VERSION`.
    """

    name: str
    version: str
    alias: str | None
    sha256: str
    run_id: str | None
    uri: str


def register(
    directory: Path,
    name: str,
    *,
    alias: str | None = None,
    tracking_uri: str | None = None,
    experiment_name: str = "offramp",
) -> Registered:
    """Puts a checkpoint directory into the model registry.

    The directory is loaded first, logged as the artifact of a pyfunc model, and downloaded again; the alias moves to
    the new version only when what came back is what was sent.

    Args:
        directory: a checkpoint directory with a tokenizer.
        name: of the registered model, created when missing.
        alias: to be set on the new version.
        tracking_uri: the MLflow store; `MLFLOW_TRACKING_URI` or `sqlite:///mlflow.db` if None.
        experiment_name: experiment of the run that carries the artifact.

    Raises:
        OfframpError: a name is none, the store does not answer or refuses, the directory is no complete checkpoint, or
            it came back different.
    """
    store = tracking_uri or default_tracking_uri()
    _check_names(name, alias)
    _check_store(store, experiment_name)
    directory = directory.resolve()
    checkpoint = load_checkpoint(directory)
    load_tokenizer(directory)
    digest = directory_sha256(directory)
    trained_by = checkpoint.provenance.get("run_id")
    try:
        with _tracking(store), brief_requests(UPLOAD_TIMEOUT_S, retries=2):
            mlflow.set_experiment(experiment_name)
            tags = {RUN_TAG: str(trained_by), "mlflow.parentRunId": str(trained_by)} if trained_by else {}
            with mlflow.start_run(run_name=f"register {name}", tags=tags):
                info = _log_model(directory)
            client = mlflow.MlflowClient(store)
            # ActiveRun is typed as if it could swallow an exception; it does not.
            version = mlflow.register_model(info.model_uri, name)  # pyright: ignore[reportPossiblyUnboundVariable]
            client.set_model_version_tag(name, version.version, HASH_TAG, digest)
            client.set_model_version_tag(name, version.version, EXITS_TAG, json.dumps(checkpoint.exits.layers))
            if trained_by:
                client.set_model_version_tag(name, version.version, RUN_TAG, str(trained_by))
            uri = f"models:/{name}/{version.version}"
            with tempfile.TemporaryDirectory() as scratch:
                resolve(uri, Path(scratch), store)
            if alias is not None:
                client.set_registered_model_alias(name, alias, version.version)
    except MlflowException as fault:
        verb = "refuses" if is_refusal(fault) else "does not answer, and cannot take"
        raise OfframpError(f"the MLflow store at {mask(store)} {verb} {name!r}: {in_words(fault)}") from fault
    return Registered(name, str(version.version), alias, digest, trained_by, uri)


def _check_names(name: str, alias: str | None) -> None:
    try:
        _validate_model_name(name)
        if alias is not None:
            _validate_model_alias_name(alias)
            _validate_model_alias_name_reserved(alias)
    except MlflowException as fault:
        raise OfframpError(f"the registry takes no such name: {fault.message}") from None
    if "@" in name:
        raise OfframpError(f"the name {name!r} holds '@', which begins the alias in models:/NAME@ALIAS; leave it out.")


def _check_store(store: str, experiment_name: str) -> None:
    """Ask the store anything before the long work."""
    try:
        with brief_requests(CONNECT_TIMEOUT_S):
            mlflow.MlflowClient(store).get_experiment_by_name(experiment_name)
    except MlflowException as fault:
        raise OfframpError(f"the MLflow store at {mask(store)} does not answer: {in_words(fault)}") from fault


def _log_model(directory: Path) -> Any:
    return mlflow.pyfunc.log_model(
        name="model",
        python_model=str(Path(__file__).with_name("pyfunc_model.py")),
        artifacts={ARTIFACT: str(directory)},
        signature=ModelSignature(
            inputs=Schema([ColSpec("string")]),
            outputs=Schema([ColSpec("string")]),
            params=ParamSchema(
                [
                    ParamSpec("max_new_tokens", "long", DEFAULT_MAX_NEW_TOKENS),
                    ParamSpec("full_depth", "boolean", False),
                ]
            ),
        ),
        input_example=["Once upon a time"],
        # Given, so that MLflow does not start a process to find out, or ask a package index.
        pip_requirements=[
            f"offramp-common=={importlib.metadata.version('offramp-common')}",
            f"mlflow=={mlflow.__version__}",
            "pandas",
        ],
    )


@contextmanager
def _tracking(uri: str) -> Iterator[None]:
    """MLflow's global store set to `uri` for a while."""
    before = mlflow.get_tracking_uri()
    mlflow.set_tracking_uri(uri)
    try:
        yield
    finally:
        mlflow.set_tracking_uri(before)


def main(argv: list[str]) -> int:
    """`offramp register`."""
    parser = argparse.ArgumentParser(
        prog="offramp register",
        description="Put a checkpoint directory into the MLflow model registry, verify what arrived, and set an alias.",
    )
    parser.add_argument("directory", metavar="DIR", type=Path, help="checkpoint directory")
    parser.add_argument("--name", required=True, help="name of the registered model")
    parser.add_argument("--alias", help="alias to set on the new version, such as champion")
    parser.add_argument(
        "--tracking-uri", metavar="URI", help="MLflow store [MLFLOW_TRACKING_URI or sqlite:///mlflow.db]"
    )
    parser.add_argument("--experiment", default="offramp", help="experiment that carries the artifact [%(default)s]")
    parser.add_argument("--json", action="store_true", help="print the result as JSON")
    arguments = parser.parse_args(argv)
    made = register(
        arguments.directory,
        arguments.name,
        alias=arguments.alias,
        tracking_uri=arguments.tracking_uri,
        experiment_name=arguments.experiment,
    )
    if arguments.json:
        print(json.dumps(asdict(made)))
    else:
        known_as = f" and models:/{made.name}@{made.alias}" if made.alias else ""
        print(f"registered {made.uri}{known_as} (sha256 {made.sha256[:12]}...)")
    return 0
