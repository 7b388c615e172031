"""TorchServe's two APIs in memory, as far as a roll-out sees them; faults can be switched on."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

import httpx2 as httpx

from offramp.serve.torchserve.checksums import verify

MANAGEMENT, INFERENCE = "http://fake:8081", "http://fake:8080"


@dataclass
class FakeVersion:
    url: str
    sha256: str = ""
    running: int = 0
    pending: int = 0
    ready: bool = True


@dataclass
class FakeTorchServe:
    """One model's versions, oldest first; `transport` is what a client asks it by.

    Attributes:
        store: The model store.
        away: Whether it answers nothing.
        broken: Versions that cannot be loaded.
        logprob: What every token is given.
        on_request: Called with each request first; an answer of its own replaces the fake's.
    """

    store: Path
    versions: dict[str, FakeVersion] = field(default_factory=dict)
    default: str | None = None
    away: bool = False
    broken: set[str] = field(default_factory=set)
    logprob: float | None = -0.5
    on_request: Callable[[httpx.Request], httpx.Response | None] = lambda request: None
    seen: list[str] = field(default_factory=list)

    @property
    def transport(self) -> httpx.MockTransport:
        return httpx.MockTransport(self._answer)

    def _answer(self, request: httpx.Request) -> httpx.Response:
        if self.away:
            raise httpx.ConnectError("Connection refused")
        self.seen.append(f"{request.method} {request.url.path}")
        own = self.on_request(request)
        if own is not None:
            return own
        path = request.url.path.strip("/").split("/")
        return self._manage(request, path) if request.url.port == 8081 else self._predict(path)

    def _manage(self, request: httpx.Request, path: list[str]) -> httpx.Response:
        if request.method == "POST":
            return self._register(request.url.params["url"])
        if not self.versions:
            return _fault(404, "Model not found: m")
        if request.method == "GET":
            wanted = list(self.versions) if path[-1] == "all" else [str(self.default)]
            return httpx.Response(200, json=[self._description(version) for version in wanted])
        if path[2] not in self.versions:
            return _fault(404, "Model version does not exist")
        if request.method == "PUT":
            self.default = path[2]
        elif path[2] == self.default and len(self.versions) > 1:
            return _fault(403, "Cannot remove default version")
        else:
            del self.versions[path[2]]
            self.default = self.default if self.versions else None
        return httpx.Response(200, json={"status": "done"})

    def _register(self, url: str) -> httpx.Response:
        if not (self.store / url).is_dir():
            return _fault(404, f"Model not found at: {url}")
        version = json.loads((self.store / url / "MAR-INF" / "MANIFEST.json").read_text())["model"]["modelVersion"]
        if version in self.versions:
            return _fault(409, "already registered")
        self.versions[version] = FakeVersion(url, verify(self.store / url), ready=version not in self.broken)
        self.default = self.default or version
        if version in self.broken:
            return _fault(500, f"Failed to start workers for model m version: {version}")
        return httpx.Response(200, json={"status": "registered"})

    def _description(self, version: str) -> dict[str, object]:
        one = self.versions[version]
        return {
            "modelVersion": version,
            "modelUrl": one.url,
            "workers": [{"status": "READY" if one.ready else "UNLOADING"}],
            "jobQueueStatus": {"pendingRequests": one.pending},
        }

    def _predict(self, path: list[str]) -> httpx.Response:
        one = self.versions.get(path[2])
        if one is None:
            return _fault(404, "Model version does not exist")
        if path[3:] == ["health"]:
            return httpx.Response(200, json={"status": "ok", "running": one.running, "waiting": 0})
        if path[3:5] == ["v1", "models"]:
            return httpx.Response(200, json={"offramp": {"archive_sha256": one.sha256}})
        choice = {"logprobs": {"token_logprobs": [self.logprob] * 4}}
        return httpx.Response(200, json={"choices": [choice], "usage": {"completion_tokens": 4}})


def _fault(status: int, message: str) -> httpx.Response:
    return httpx.Response(status, json={"code": status, "type": "SomeException", "message": message})


def write_checkpoint_files(directory: Path) -> Path:
    """What an archive is made of; nobody here loads it."""
    directory.mkdir()
    for name in ("config.json", "model.safetensors", "tokenizer.json"):
        (directory / name).write_text(name)
    return directory
