"""What stands behind the gateway: each model's version, and whether it answers. Looked after in the background."""

from __future__ import annotations

import asyncio
import json
import logging
import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import aiohttp
from yarl import URL

from offramp.serve.gateway.settings import GatewaySettings, ModelSettings
from offramp.serve.gateway.torchserve_keys import TorchServeKeys
from offramp.serve.http.endpoints import MODEL_NAME
from offramp.serve.protocol.errors import ApiError, unknown_model
from offramp.serve.protocol.faults import log_fault
from offramp.serve.torchserve.key_file import Kind, is_about_the_key

log = logging.getLogger(__name__)

FAULTS = (aiohttp.ClientError, asyncio.TimeoutError, OSError)
"""What TorchServe does not answer with, but is met with instead of an answer."""

_CUT_OFF = "it has ended a connection"


@dataclass(frozen=True)
class Target:
    """Where a request goes.

    Attributes:
        url: TorchServe's inference address.
        model: Name of the model.
        version: Its version.
    """

    url: str
    model: str
    version: str

    @property
    def name(self) -> str:
        """Of model and version, for the access log."""
        return f"{self.model}@{self.version}"

    def address(self, path: str) -> str:
        """The URL of a path of the API, such as ``v1/completions``."""
        return f"{self.url}/predictions/{self.model}/{self.version}/{path}"


class Deployment:
    """One model behind the gateway.

    Args:
        name: Of the model.
        settings: Where it is.
        client: Asks it.
        timeout_s: Longest wait for an answer about it.

    Attributes:
        keys: Those that its TorchServe wants, if it wants any.
        version: The version that answers; None while it is not known.
        card: The model object of ``/v1/models/NAME``; None before its first answer. After a switch it is the old
            version's until the new one has told its own, for a model that answers is never missing from the list.
        unready: Why it does not answer; None while it does.
    """

    def __init__(self, name: str, settings: ModelSettings, client: aiohttp.ClientSession, timeout_s: float) -> None:
        self._name = name
        self._settings = settings
        self._client = client
        self._timeout_s = timeout_s
        self.keys = None
        if settings.key_file is not None and settings.management is not None:
            self.keys = TorchServeKeys(settings.key_file, settings.management, client)
        self.version = settings.version
        self.card: dict[str, Any] | None = None
        self._card_version: str | None = None
        self.unready: str | None = "it has not been asked yet"
        self._cuts = 0

    def cut_off(self) -> None:
        """A request has ended for want of its server: it is taken for not ready until it has been asked again."""
        self._cuts += 1
        if self.unready is None:
            self.unready = _CUT_OFF
            log.warning("Model %s: %s", self._name, self.unready)

    async def look(self) -> None:
        """Asks for its version and whether it answers."""
        before, cuts = (self.unready, self.version), self._cuts
        cause = ""
        try:
            self.unready = await self._look()
        except FAULTS as error:
            # Addresses and errors of what stands behind are for the log; whoever asks whether it is ready gets neither.
            self.unready, cause = "it does not answer", f": {type(error).__name__} {error}"
        except Exception as error:  # whatever it says, it is asked again
            log_fault(log, f"Model {self._name} could not be asked", error)
            self.unready = "what it answers is not understood"
        if self.unready is None and cuts != self._cuts:  # what it said may have been said before
            self.unready = _CUT_OFF
        if self.unready is not None and self.unready != before[0]:
            log.warning("Model %s: %s%s", self._name, self.unready, cause)
        elif self.unready is None and (None, self.version) != before:
            log.info("Model %s: version %s answers", self._name, self.version)

    async def find_version(self) -> None:
        """Asks TorchServe for the version that is its default now, where that is what answers."""
        if self._settings.management is None:
            return
        # Never with a query: one of them makes TorchServe's worker spin.
        response = await self._get(f"{self._settings.management}/models/{self._name}", "management")
        if response.status == 200:
            version = json.loads(response.body)[0]["modelVersion"]
            if not re.fullmatch(MODEL_NAME, version):
                raise ValueError("a version that cannot stand in a URL")
            self.version = version

    def header(self, kind: Kind) -> dict[str, str]:
        """What a request to its TorchServe carries."""
        return {} if self.keys is None else self.keys.header(kind)

    def target(self, version: str | None) -> Target:
        """Where a request for this version goes; None: for the one that answers.

        Raises:
            ApiError: 503 while none is known.
        """
        version = version or self.version
        if version is None:
            raise not_ready(self._name)
        return Target(self._settings.url, self._name, version)

    async def _look(self) -> str | None:
        await self.find_version()
        if self.version is None:
            return "TorchServe does not have it"
        target = self.target(None)
        response = await self._get(target.address("health"), "inference")
        if response.status != 200:
            return "its engine does not run"
        if self._card_version != target.version:
            response = await self._get(target.address(f"v1/models/{self._name}"), "inference")
            if response.status != 200:
                return "it does not say what it is"
            self.card, self._card_version = dict(json.loads(response.body)), target.version
        return None

    async def _get(self, address: str, kind: Kind) -> _Looked:
        key = self.header(kind)
        looked = await self._ask(address, key)
        if self.keys is None or not is_about_the_key(looked.status, looked.body):
            return looked
        await self.keys.refresh(kind, key)
        return await self._ask(address, self.header(kind))

    async def _ask(self, address: str, key: dict[str, str]) -> _Looked:
        limit = aiohttp.ClientTimeout(total=self._timeout_s)
        url = URL(address, encoded=True)
        async with self._client.get(url, timeout=limit, headers=key, allow_redirects=False) as response:
            return _Looked(response.status, await response.read())


@dataclass(frozen=True)
class _Looked:
    """An answer about a model."""

    status: int
    body: bytes


class Deployments:
    """All models behind the gateway.

    Args:
        settings: Which they are.
        client: Asks them.
    """

    def __init__(self, settings: GatewaySettings, client: aiohttp.ClientSession) -> None:
        self._poll_s = settings.poll_s
        timeout_s = max(settings.poll_s, settings.connect_timeout_s)
        self.by_name: Mapping[str, Deployment] = {
            name: Deployment(name, model, client, timeout_s) for name, model in settings.models.items()
        }

    async def watch(self) -> None:
        """Looks after all of them until it is cancelled, each for itself: one that is stuck holds no other up."""
        await asyncio.gather(*(self._watch(deployment) for deployment in self.by_name.values()))

    async def _watch(self, deployment: Deployment) -> None:
        while True:
            await deployment.look()
            await asyncio.sleep(self._poll_s)

    def find(self, model: str) -> tuple[Deployment, str | None]:
        """The model of a request, and the version if it names one: ``NAME`` or ``NAME@VERSION``.

        Raises:
            ApiError: 404 for a model that is not here.
        """
        name, at, version = model.partition("@")
        deployment = self.by_name.get(name)
        if deployment is None or (at and not re.fullmatch(MODEL_NAME, version)):
            raise unknown_model(model[:80], ", ".join(self.by_name))
        return deployment, version or None


def not_ready(model: str) -> ApiError:
    """503: the model is there, and cannot answer now."""
    return ApiError(
        503,
        f"The model {model!r} cannot answer now; try again later.",
        type="server_error",
        code="model_not_ready",
        headers={"Retry-After": "2"},
    )
