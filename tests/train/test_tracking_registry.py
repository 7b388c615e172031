from __future__ import annotations

import json
import os
import shutil
import socket
import time
from pathlib import Path

import mlflow
import pandas as pd
import pytest

from helpers.tiny import tiny_checkpoint
from offramp.common.checkpoint import load_checkpoint
from offramp.common.cli import main
from offramp.common.errors import OfframpError
from offramp.common.exits.config import ExitConfig
from offramp.common.exits.policy import ExitPolicy
from offramp.common.generation import generate
from offramp.common.tokenizer import load_tokenizer
from offramp.serve.model_source import resolve_model
from offramp.train.tracking import register as register_module
from offramp.train.tracking.digest import directory_sha256
from offramp.train.tracking.register import Registered, register
from offramp.train.tracking.sources import resolve


@pytest.fixture(scope="module")
def directory(tmp_path_factory: pytest.TempPathFactory) -> Path:
    policy = ExitPolicy(measure="max_probability", thresholds={2: 0.3})
    return tiny_checkpoint(tmp_path_factory.mktemp("models") / "tiny", ExitConfig(layers=(2,)), policy)


@pytest.fixture(scope="module")
def store(tmp_path_factory: pytest.TempPathFactory, empty_store: Path) -> str:
    folder = tmp_path_factory.mktemp("store")
    shutil.copy(empty_store, folder / "mlflow.db")
    uri = f"sqlite:///{folder}/mlflow.db"
    client = mlflow.MlflowClient(uri)
    client.create_experiment("offramp", artifact_location=(folder / "artifacts").as_uri())
    return uri


@pytest.fixture(scope="module")
def registered(directory: Path, store: str) -> Registered:
    return register(directory, "tiny", alias="champion", tracking_uri=store)


def test_a_registered_directory_comes_back_byte_for_byte(
    registered: Registered, directory: Path, store: str, tmp_path: Path
) -> None:
    for uri in ("models:/tiny@champion", "models:/tiny/1", registered.uri):
        got = resolve(uri, tmp_path, store)
        assert directory_sha256(got) == directory_sha256(directory) == registered.sha256
        assert {path.name for path in got.iterdir()} == {path.name for path in directory.iterdir()}
    load_checkpoint(got)
    assert len(list((tmp_path / "tiny").iterdir())) == 1


def test_version_carries_alias_hash_and_exits(registered: Registered, store: str) -> None:
    version = mlflow.MlflowClient(store).get_model_version_by_alias("tiny", "champion")
    assert str(version.version) == registered.version
    assert version.tags == {"offramp.sha256": registered.sha256, "offramp.exit_layers": "[2]"}


def test_predict_generates_what_the_checkpoint_generates(
    registered: Registered, directory: Path, store: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("MLFLOW_TRACKING_URI", store)
    mlflow.set_tracking_uri(store)
    model = mlflow.pyfunc.load_model("models:/tiny@champion")
    checkpoint, tokenizer = load_checkpoint(directory), load_tokenizer(directory)
    prompts = ["hello", "the quick brown"]
    for policy, full_depth in ((checkpoint.policy, False), (None, True)):
        want = [
            tokenizer.decode(
                generate(
                    checkpoint.model, tokenizer(prompt)["input_ids"], 6, policy=policy, eos_ids=checkpoint.eos_token_ids
                ).token_ids,
                skip_special_tokens=True,
            )
            for prompt in prompts
        ]
        params = {"max_new_tokens": 6, "full_depth": full_depth}
        assert model.predict(prompts, params=params) == want
        assert model.predict(pd.DataFrame({"prompt": prompts}), params=params) == want
    assert not list(Path(mlflow.artifacts.download_artifacts("models:/tiny/1")).rglob("*.pkl"))


def test_damage_is_found_and_mended_in_the_cache_and_refused_from_the_store(
    directory: Path, store: str, tmp_path: Path
) -> None:
    again = register(directory, "damaged", tracking_uri=store)
    got = resolve(again.uri, tmp_path, store)
    (got / "config.json").write_text("{}")
    assert directory_sha256(resolve(again.uri, tmp_path, store)) == again.sha256
    source = mlflow.MlflowClient(store).get_model_version_download_uri("damaged", again.version)
    for file in Path(mlflow.artifacts.download_artifacts(source, tracking_uri=store)).rglob("exits.json"):
        file.write_text("{}")
    with pytest.raises(OfframpError, match="was damaged on its way"):
        resolve(again.uri, tmp_path / "new", store)
    assert not [path for path in (tmp_path / "new" / "damaged").iterdir() if not path.name.startswith(".")]


def test_command_moves_the_alias_and_serving_finds_it(
    directory: Path, store: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    for version in ("1", "2"):
        arguments = [str(directory), "--name", "moved", "--alias", "live", "--tracking-uri", store, "--json"]
        assert main(["register", *arguments]) == 0
        assert json.loads(capsys.readouterr().out.splitlines()[-1])["version"] == version
    assert str(mlflow.MlflowClient(store).get_model_version_by_alias("moved", "live").version) == "2"
    monkeypatch.setenv("MLFLOW_TRACKING_URI", store)
    assert resolve_model("models:/moved@live", tmp_path) == resolve("models:/moved/2", tmp_path, store)


@pytest.mark.parametrize(
    ("uri", "words"),
    [
        ("models:/nobody@live", "cannot find models:/nobody@live in the model registry"),
        ("models:/tiny@nobody", "cannot find models:/tiny@nobody"),
        ("models:/tiny/99", "cannot find models:/tiny/99"),
        ("models:/tiny", "write models:/NAME@ALIAS"),
        ("models:/tiny/Production", "write models:/NAME@ALIAS"),
    ],
)
def test_what_is_not_there_is_said(registered: Registered, store: str, tmp_path: Path, uri: str, words: str) -> None:
    with pytest.raises(OfframpError, match=words):
        resolve(uri, tmp_path, store)


def test_incomplete_directories_are_refused_before_anything_is_logged(
    directory: Path, store: str, tmp_path: Path
) -> None:
    broken = tmp_path / "broken"
    shutil.copytree(directory, broken)
    (broken / "exits.safetensors").unlink(missing_ok=True)
    (broken / "tokenizer.json").unlink()
    (broken / "tokenizer_config.json").unlink(missing_ok=True)
    with pytest.raises(OfframpError):
        register(broken, "never", tracking_uri=store)
    assert not mlflow.MlflowClient(store).search_registered_models("name = 'never'")


@pytest.mark.parametrize(
    ("name", "alias", "words"),
    [
        ("a/b", None, "cannot contain '/' or ':'"),
        (" ", None, "name"),
        ("a@b", None, "'@', which begins the alias"),
        ("a", "latest", "'latest' alias name"),
        ("a", "v3", "Version alias name 'v3' is reserved"),
        ("a", "two words", "Invalid alias name: 'two words'"),
    ],
)
def test_names_are_checked_before_anything_is_read(name: str, alias: str | None, words: str, tmp_path: Path) -> None:
    with pytest.raises(OfframpError, match=words):
        register(tmp_path / "nothing", name, alias=alias, tracking_uri=f"sqlite:///{tmp_path}/mlflow.db")
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize("silent", [True, False])
def test_a_server_that_is_gone_is_said_soon(silent: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(register_module, "CONNECT_TIMEOUT_S", 1)
    monkeypatch.delenv("MLFLOW_HTTP_REQUEST_TIMEOUT", raising=False)
    with socket.socket() as server:
        server.bind(("127.0.0.1", 0))
        if silent:
            server.listen()  # takes the question, and never answers
        uri = f"http://127.0.0.1:{server.getsockname()[1]}"
        start = time.monotonic()
        with pytest.raises(OfframpError, match=f"the MLflow store at {uri} does not answer: ") as raised:
            register(tmp_path / "nothing", "tiny", tracking_uri=uri)
        assert time.monotonic() - start < 15
    assert "\n" not in str(raised.value)
    assert "MLFLOW_HTTP_REQUEST_TIMEOUT" not in os.environ


def test_digest_sees_names_and_contents_and_no_hidden_files(tmp_path: Path) -> None:
    (tmp_path / "a").write_text("1")
    first = directory_sha256(tmp_path)
    (tmp_path / ".lock").write_text("x")
    assert directory_sha256(tmp_path) == first
    (tmp_path / "a").rename(tmp_path / "b")
    second = directory_sha256(tmp_path)
    (tmp_path / "b").write_text("2")
    assert len({first, second, directory_sha256(tmp_path)}) == 3
