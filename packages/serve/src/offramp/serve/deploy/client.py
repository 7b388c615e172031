"""A client of TorchServe's management API, and of its inference API as far as a roll-out needs it."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any
from urllib.parse import quote

import httpx2 as httpx

from offramp.common.errors import OfframpError
from offramp.serve.deploy.keys import KeyFile
from offramp.serve.torchserve.key_file import Kind, is_about_the_key

_BRIEF_S = 10.0
"""How long TorchServe may take to answer what needs no model."""


class UnreachableError(OfframpError):
    """TorchServe does not answer; it may be back later."""


class LateError(OfframpError):
    """TorchServe is there, and does not answer in time."""


class RefusedError(OfframpError):
    """TorchServe answers, and says no.

    Attributes:
        status: HTTP status code.
    """

    def __init__(self, message: str, status: int) -> None:
        super().__init__(message)
        self.status = status


class WarmUpError(OfframpError):
    """A version does not say what it should."""


@dataclass(frozen=True)
class RegisteredVersion:
    """A version of a model as TorchServe describes it.

    Attributes:
        version: In the URL.
        url: What it was registered from, the folder in the model store.
        ready: Whether a worker is there.
        pending: Requests that wait in TorchServe's own queue.
    """

    version: str
    url: str
    ready: bool
    pending: int

    @classmethod
    def of(cls, description: dict[str, Any]) -> RegisteredVersion:
        """From one object of a description."""
        return cls(
            version=str(description["modelVersion"]),
            url=str(description["modelUrl"]),
            ready=any(worker["status"] == "READY" for worker in description["workers"]),
            pending=int(description.get("jobQueueStatus", {}).get("pendingRequests", 0)),
        )


class TorchServeClient:
    """Asks one TorchServe.

    Args:
        management: Address of its management API.
        inference: Address of its inference API.
        keys: Its keys, where it wants any.
        transport: What carries requests, for tests.

    Raises:
        OfframpError: An address is none.
    """

    def __init__(
        self, management: str, inference: str, keys: KeyFile | None = None, transport: httpx.BaseTransport | None = None
    ) -> None:
        self.management = check_url(management)
        self._inference = check_url(inference)
        self._keys = keys
        # trust_env: neither a proxy nor a .netrc with a password of its own belongs between here and TorchServe.
        self._http = httpx.Client(trust_env=False, timeout=_BRIEF_S, transport=transport)

    def close(self) -> None:
        """Gives the connections back."""
        self._http.close()

    def default_version(self, name: str) -> RegisteredVersion | None:
        """The version that requests without one get; None when TorchServe does not know the model."""
        described = self._describe(f"/models/{quote(name)}")
        return described[0] if described else None

    def versions(self, name: str) -> list[RegisteredVersion]:
        """All versions of a model, none when TorchServe does not know it."""
        return self._describe(f"/models/{quote(name)}/all")

    def register(self, name: str, folder: str, timeout_s: float) -> None:
        """Has a folder of the model store loaded; returns when its worker is ready.

        Raises:
            OfframpError: It cannot be loaded, or not in time.
        """
        asked = {"url": folder, "model_name": name, "initial_workers": "1", "synchronous": "true"}
        try:
            self._manage("POST", "/models", params=asked, timeout_s=timeout_s)
        except RefusedError as refused:
            if refused.status == 405:
                raise RefusedError(
                    f"TorchServe at {self.management} lets nobody register models; start it with "
                    "enable_model_api=true.",
                    405,
                ) from refused
            if refused.status == 404:
                raise RefusedError(f"{refused} Is --store the model_store of that TorchServe?", 404) from refused
            raise

    def set_default(self, name: str, version: str) -> None:
        """From now on, requests without a version get this one."""
        self._manage("PUT", f"/models/{quote(name)}/{quote(version)}/set-default")

    def unregister(self, name: str, version: str) -> None:
        """Ends a version and its worker; what it is answering is cut. One that is not there is fine."""
        try:
            self._manage("DELETE", f"/models/{quote(name)}/{quote(version)}")
        except RefusedError as refused:
            if refused.status != 404:
                raise

    def archive_sha256(self, name: str, version: str) -> str | None:
        """The hash of the archive that a version's worker has really loaded."""
        body = self._ask(name, version, "GET", f"v1/models/{quote(name)}")
        about = body.get("offramp")
        return about.get("archive_sha256") if isinstance(about, dict) else None

    def generate(self, name: str, version: str, timeout_s: float) -> None:
        """Has a version say a few tokens.

        Raises:
            WarmUpError: It does not, or is as sure of them as only a broken model is.
        """
        prompt = {"model": name, "prompt": [0], "max_tokens": 4, "temperature": 0, "logprobs": 0, "ignore_eos": True}
        body = self._ask(name, version, "POST", "v1/completions", prompt, timeout_s)
        try:
            [choice] = body["choices"]
            count, logprobs = body["usage"]["completion_tokens"], choice["logprobs"]["token_logprobs"]
        except (LookupError, TypeError, ValueError):
            raise WarmUpError(f"{name} {version} gave no completion: {_cause(body)}") from None
        if count < 1 or len(logprobs) != count:
            raise WarmUpError(f"{name} {version} generated no token.")
        if not all(isinstance(value, float | int) and math.isfinite(value) and value <= 0 for value in logprobs):
            raise WarmUpError(
                f"{name} {version} gives its tokens the log-probabilities {logprobs}, which are none; its weights "
                "are probably not finite."
            )

    def load(self, name: str, version: str) -> int:
        """Requests that a version's engine has taken in and not ended."""
        body = self._ask(name, version, "GET", "health")
        try:
            return int(body.get("running", 0)) + int(body.get("waiting", 0))
        except (TypeError, ValueError):
            raise WarmUpError(f"{name} {version} does not say how many requests it has.") from None

    def _describe(self, path: str) -> list[RegisteredVersion]:
        try:
            return [RegisteredVersion.of(description) for description in self._manage("GET", path).json()]
        except RefusedError as refused:
            if refused.status == 404:
                return []
            raise
        except (ValueError, LookupError, TypeError, AttributeError) as fault:
            raise RefusedError(
                f"{self.management} does not describe models as TorchServe's management API does; is it one?", 200
            ) from fault

    def _ask(
        self, name: str, version: str, method: str, path: str, body: object = None, timeout_s: float = _BRIEF_S
    ) -> dict[str, Any]:
        url = f"{self._inference}/predictions/{quote(name)}/{quote(version)}/{path}"
        response = self._send("inference", method, url, body=body, timeout_s=timeout_s)
        try:
            answer = response.json()
        except ValueError:
            answer = None
        if response.status_code != 200 or not isinstance(answer, dict):
            cause = _cause(answer) or response.reason_phrase
            raise WarmUpError(f"{name} {version} answers {path} with {response.status_code}: {cause}")
        return answer

    def _manage(
        self, method: str, path: str, *, params: dict[str, str] | None = None, timeout_s: float = _BRIEF_S
    ) -> httpx.Response:
        response = self._send("management", method, self.management + path, params=params, timeout_s=timeout_s)
        if response.status_code >= 400:
            try:
                cause = _cause(response.json())
            except ValueError:
                cause = ""
            raise RefusedError(
                f"TorchServe at {self.management} answers {method} {path} with {response.status_code}: "
                f"{cause or response.reason_phrase}.",
                response.status_code,
            )
        return response

    def _send(
        self,
        kind: Kind,
        method: str,
        url: str,
        *,
        params: dict[str, str] | None = None,
        body: object = None,
        timeout_s: float,
    ) -> httpx.Response:
        """One request with its key; once more where the key had grown too old."""
        response = self._try(kind, method, url, params, body, timeout_s)
        if not is_about_the_key(response.status_code, response.content):
            return response
        if self._keys is None:
            raise RefusedError(
                f"TorchServe at {self.management} wants a key; give its key_file.json with --key-file.",
                response.status_code,
            )
        if self._keys.is_expired(kind):
            # Asking for a new key ends the old one, which is over anyway; TorchServe writes the new one into its file.
            address = f"{self.management}/token"
            self._carry("GET", address, {"type": kind}, None, self._keys.renewal_header(), _BRIEF_S)
        # Or somebody else has just renewed it.
        response = self._try(kind, method, url, params, body, timeout_s)
        if is_about_the_key(response.status_code, response.content):
            raise RefusedError(
                f"TorchServe at {self.management} does not take the {kind} key of {self._keys.path}; give the "
                "key_file.json that it wrote when it was started.",
                response.status_code,
            )
        return response

    def _try(
        self, kind: Kind, method: str, url: str, params: dict[str, str] | None, body: object, timeout_s: float
    ) -> httpx.Response:
        headers = {} if self._keys is None else self._keys.header(kind)
        return self._carry(method, url, params, body, headers, timeout_s)

    def _carry(
        self,
        method: str,
        url: str,
        params: dict[str, str] | None,
        body: object,
        headers: dict[str, str],
        timeout_s: float,
    ) -> httpx.Response:
        timeout = httpx.Timeout(timeout_s, connect=_BRIEF_S)
        try:
            return self._http.request(method, url, params=params, json=body, headers=headers, timeout=timeout)
        except (httpx.ReadTimeout, httpx.WriteTimeout) as fault:
            raise LateError(f"TorchServe at {_origin(url)} has not answered within {timeout_s:g} s.") from fault
        except httpx.RequestError as fault:
            raise UnreachableError(f"TorchServe at {_origin(url)} does not answer: {fault}.") from fault


def check_url(url: str) -> str:
    """An address without its last slash.

    Raises:
        OfframpError: It is none, or holds what belongs elsewhere.
    """
    try:
        parsed = httpx.URL(url)
    except (httpx.InvalidURL, TypeError):
        raise OfframpError(f"{url!r} is no address; write http://HOST:PORT.") from None
    if parsed.userinfo:
        # Not quoted, because a password is in it.
        raise OfframpError("an address must not hold user and password; TorchServe takes a key, see --key-file.")
    if parsed.scheme not in ("http", "https") or not parsed.host or parsed.query or parsed.fragment:
        raise OfframpError(f"{url!r} is no address; write http://HOST:PORT.")
    return url.rstrip("/")


def _origin(url: str) -> str:
    parsed = httpx.URL(url)
    return f"{parsed.scheme}://{parsed.netloc.decode()}"


def _cause(answer: object) -> str:
    """What an error says, TorchServe's or OpenAI's."""
    if not isinstance(answer, dict):
        return ""
    error = answer.get("error")
    message = error.get("message") if isinstance(error, dict) else answer.get("message")
    return str(message or "")[:500].rstrip(".")
