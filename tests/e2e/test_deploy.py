"""`offramp deploy` at a real TorchServe that wants keys, from a real registry, under load that comes by the gateway."""

from __future__ import annotations

import contextlib
import json
import shutil
import threading
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx2 as httpx
import mlflow
import openai
import pytest
import torch
from transformers import T5ForConditionalGeneration

from helpers.door import open_door
from helpers.openai_service import Engine
from helpers.processes import start_command
from helpers.sinks import eventually
from helpers.tiny import tiny_checkpoint, tiny_tokenizer
from helpers.tiny_t5 import SHAPES, t5_directory
from offramp.common.checkpoint import load_checkpoint, save_checkpoint
from offramp.common.cli import main
from offramp.common.exits.config import ExitConfig
from offramp.common.exits.policy import ExitPolicy
from offramp.serve.deploy.client import TorchServeClient
from offramp.serve.deploy.keys import KeyFile
from offramp.serve.gateway.settings import GatewaySettings
from offramp.serve.gateway.torchserve_backend import TorchServeBackend
from offramp.serve.http.keys import add_key
from offramp.serve.http.settings import make_settings
from offramp.serve.torchserve.archive import archive
from offramp.serve.torchserve.server import TorchServe
from offramp.train.tracking.register import register

pytestmark = pytest.mark.slow

NAME = "tiny"
LONG, SHORT = 1_500, 30  # tokens


def checkpoint(path: Path, seed: int) -> Path:
    policy = ExitPolicy(measure="max_probability", thresholds={1: 0.3, 2: 0.3})
    return tiny_checkpoint(
        path, ExitConfig(layers=(1, 2)), policy, seed=seed, eos_token_id=None, max_position_embeddings=16_384
    )


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[TorchServe]:
    folder = tmp_path_factory.mktemp("deploy")
    first = archive(checkpoint(folder / "first", 0), folder / "first-folder", name=NAME, engine={"num_threads": 1})
    with TorchServe(first, port=0, run_folder=folder / "run", threads=1, manage=True) as running:
        yield running


@pytest.fixture(scope="module")
def client(server: TorchServe) -> Iterator[TorchServeClient]:
    assert server.key_file is not None
    with contextlib.closing(
        TorchServeClient(server.management_url, server.inference_url, KeyFile(server.key_file))
    ) as asking:
        yield asking


@pytest.fixture
def registry(tmp_path: Path, empty_store: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    shutil.copy(empty_store, tmp_path / "mlflow.db")
    uri = f"sqlite:///{tmp_path}/mlflow.db"
    mlflow.MlflowClient(uri).create_experiment("offramp", artifact_location=(tmp_path / "artifacts").as_uri())
    monkeypatch.setenv("MLFLOW_TRACKING_URI", uri)
    return uri


def deploy_command(server: TorchServe, source: str | Path, cache: Path, *options: str) -> list[str]:
    command = ["deploy", str(source), "--to", server.management_url, "--inference", server.inference_url]
    command += ["--store", str(server.store), "--key-file", str(server.key_file), "--name", NAME, "--num-threads", "1"]
    return [*command, "--cache", str(cache), "--drain-grace", "4", "--ready-timeout", "120", *options]


def deploy(server: TorchServe, source: str | Path, cache: Path, *options: str) -> int:
    return main(deploy_command(server, source, cache, *options))


@dataclass(frozen=True)
class Gateway:
    """What clients know: an address and a key."""

    url: str
    key: str


@pytest.fixture(scope="module")
def gateway(server: TorchServe, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Gateway]:
    keys = tmp_path_factory.mktemp("gateway") / "keys.json"
    key = add_key(keys, "test")
    model = {"url": server.inference_url, "management": server.management_url, "key_file": str(server.key_file)}
    settings = make_settings(GatewaySettings, {"keys": str(keys), "models": {NAME: model}}, where="test")
    with open_door(TorchServeBackend(settings), Engine(), keys=str(keys)) as opened:
        eventually(lambda: opened.ask("GET", "/health/ready")[0] == 200, 60, every_s=0.1)
        yield Gateway(opened.server.url, key)


class Load:
    """Clients of the gateway that never stop asking, for whatever version is the default one."""

    def __init__(self, gateway: Gateway) -> None:
        self._gateway = gateway
        self._end = threading.Event()
        self.answered: dict[str, int] = {}
        self.faults: list[str] = []
        self._lock = threading.Lock()
        work = [*([lambda: self._ask(SHORT, False)] * 2), *([lambda: self._ask(SHORT, True)] * 2)]
        self._threads = [threading.Thread(target=self._repeat, args=(one,)) for one in work]
        self._threads.append(threading.Thread(target=self._ask, args=(LONG, True)))  # begun on the old version

    def __enter__(self) -> Load:
        for thread in self._threads:
            thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._end.set()
        for thread in self._threads:
            thread.join(120)
            assert not thread.is_alive()

    def count(self, version: str) -> int:
        with self._lock:
            return self.answered.get(version, 0)

    def _repeat(self, work: Any) -> None:
        while not self._end.wait(0.02):
            work()

    def _ask(self, tokens: int, stream: bool) -> None:
        body = {"model": NAME, "prompt": [5, 6], "max_tokens": tokens, "temperature": 0, "stream": stream}
        version = "?"
        try:
            response = httpx.post(
                f"{self._gateway.url}/v1/completions",
                json={**body, "logprobs": 0},
                headers={"authorization": f"Bearer {self._gateway.key}"},
                timeout=120,
                trust_env=False,
            )
            text = response.text
            events = [event for event in text.split("\n\n") if event] if stream else [f"data: {text}", "data: [DONE]"]
            assert response.status_code == 200, text
            assert events.pop() == "data: [DONE]"
            pieces = [json.loads(event.removeprefix("data: ")) for event in events]
            said = sum(len(choice["logprobs"]["tokens"]) for piece in pieces for choice in piece["choices"])
            assert said == tokens, f"{said} of {tokens} tokens"
            version = response.headers["offramp-version"]
        except Exception as fault:
            with self._lock:
                self.faults.append(f"{version}: {type(fault).__name__} {fault}")
            return
        with self._lock:
            self.answered[version] = self.answered.get(version, 0) + 1


def test_a_new_version_takes_over_under_load_and_no_request_fails(
    server: TorchServe,
    client: TorchServeClient,
    gateway: Gateway,
    registry: str,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    caplog: pytest.LogCaptureFixture,
) -> None:
    register(checkpoint(tmp_path / "second", 1), NAME, alias="champion", tracking_uri=registry)
    capsys.readouterr()  # what MLflow said
    with Load(gateway) as load:
        while load.count("1.0") < 4 and not load.faults:
            time.sleep(0.05)
        assert deploy(server, f"models:/{NAME}@champion", tmp_path / "cache", "--json") == 0
        while load.count("1") < 8 and not load.faults:
            time.sleep(0.05)
    assert load.faults == []
    assert load.answered["1.0"] > 4, "it answered while the other was loaded"
    [now] = client.versions(NAME)
    assert now.version == "1"
    said = capsys.readouterr()
    events = [json.loads(line) for line in said.out.splitlines()]
    assert [(event["kind"], event["version"]) for event in events] == [
        ("registering", "1"),
        ("deployed", "1"),
        ("removed", "1.0"),
    ]
    assert server.key_file is not None
    keys = [entry["key"] for entry in json.loads(server.key_file.read_text()).values()] + [gateway.key]
    written = said.out + said.err + server.log.read_text() + caplog.text
    assert not [key for key in keys if key in written]


def test_a_roll_out_that_is_killed_is_taken_up_by_the_next(
    server: TorchServe, client: TorchServeClient, tmp_path: Path
) -> None:
    [before] = client.versions(NAME)
    source, log = checkpoint(tmp_path / "killed", 4), tmp_path / "log"
    log.touch()
    [process] = start_command(deploy_command(server, source, tmp_path / "cache", "--version", "killed"), log)
    eventually(lambda: "is being loaded" in log.read_text() or not process.is_alive(), 120, every_s=0.02)
    eventually(lambda: len(client.versions(NAME)) == 2 or not process.is_alive(), 120, every_s=0.02)
    process.kill()
    process.join(60)
    assert "answers after" not in log.read_text()
    default = client.default_version(NAME)
    assert default is not None
    assert default.version == before.version
    assert deploy(server, source, tmp_path / "cache", "--version", "killed") == 0
    assert [version.version for version in client.versions(NAME)] == ["killed"]
    assert len([path for path in server.store.glob(f"{NAME}-*") if path.is_dir()]) == 1


def test_a_version_that_cannot_be_loaded_or_says_nothing_sound_is_rolled_back(
    server: TorchServe, client: TorchServeClient, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    before = client.versions(NAME)
    folders = {path.name for path in server.store.iterdir() if not path.name.startswith(".")}
    [answering] = before
    torn, broken = checkpoint(tmp_path / "torn", 2), load_checkpoint(checkpoint(tmp_path / "sound", 3))
    weights = torn / "model.safetensors"
    weights.write_bytes(weights.read_bytes()[:-4])
    for parameter in broken.model.parameters():
        parameter.data.fill_(torch.nan)
    infinite = save_checkpoint(tmp_path / "infinite", broken, assets=tmp_path / "sound")
    for source in (torn, infinite):
        assert deploy(server, source, tmp_path / "cache") == 1
        said = capsys.readouterr().err
        assert f"was not put in place, {answering.version} still answers" in said
        assert len(said.splitlines()) == 1
        assert ("Failed to start workers" in said) == (source == torn)
        client.generate(NAME, answering.version, 60)
        assert client.versions(NAME) == before
        assert {path.name for path in server.store.iterdir() if not path.name.startswith(".")} == folders


def test_a_key_that_has_grown_too_old_is_renewed(server: TorchServe, client: TorchServeClient) -> None:
    assert server.key_file is not None
    kept = json.loads(server.key_file.read_text())
    for kind in ("management", "inference"):
        kept[kind] = {"key": "too-old", "expiration time": "2020-01-01T00:00:00.123456789Z"}
    server.key_file.write_text(json.dumps(kept))
    [version] = client.versions(NAME)
    client.generate(NAME, version.version, 60)
    assert "too-old" not in server.key_file.read_text()


def test_an_encoder_decoder_model_beside_a_decoder_only_one(
    server: TorchServe, client: TorchServeClient, tmp_path: Path
) -> None:
    source = t5_directory(tmp_path / "t5", **SHAPES["v1.1"])
    command = deploy_command(server, source, tmp_path / "cache", "--version", "1.0", "--max-model-len", "64")
    command[command.index("--name") + 1] = "t5"
    assert main(command) == 0
    assert server.key_file is not None
    headers = KeyFile(server.key_file).header("inference")

    def asking(path: str) -> openai.OpenAI:
        base_url = f"{server.inference_url}/predictions/{path}/v1"
        key = headers["authorization"].removeprefix("Bearer ")
        return openai.OpenAI(base_url=base_url, api_key=key, max_retries=0, timeout=120)

    tokenizer = tiny_tokenizer(chat_template=False)
    theirs: Any = T5ForConditionalGeneration.from_pretrained(source)
    text = "so that greedy text wanders"
    said = theirs.generate(tokenizer(text, return_tensors="pt")["input_ids"], max_new_tokens=12, do_sample=False)
    t5 = asking("t5/1.0")
    answer = t5.completions.create(model="t5", prompt=text, max_tokens=12, temperature=0)
    assert answer.choices[0].text == tokenizer.decode(said[0, 1:], skip_special_tokens=True)
    with pytest.raises(openai.BadRequestError, match="reads at most 64 tokens"):
        t5.completions.create(model="t5", prompt=[5] * 65)
    [beside] = client.versions(NAME)
    other = asking(f"{NAME}/{beside.version}").completions.create(model=NAME, prompt=text, max_tokens=4)
    assert other.usage is not None
    assert other.usage.completion_tokens == 4
