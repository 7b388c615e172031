"""Settings of the door: where it is, who may pass, and how much of everything."""

from __future__ import annotations

import ipaddress
from pathlib import Path
from typing import Annotated, Any, TypeVar

from pydantic import AfterValidator, BaseModel, ConfigDict, Field, ValidationError, ValidationInfo, model_validator

from offramp.common.errors import OfframpError

_BESIDE = "settings file's folder"


def _beside_settings(path: Path, info: ValidationInfo) -> Path:
    folder = (info.context or {}).get(_BESIDE)
    return path if folder is None else folder / path


NearbyPath = Annotated[Path, Field(strict=False), AfterValidator(_beside_settings)]
"""A path; one that is not absolute begins where the file of settings lies."""

Seconds = Annotated[float, Field(gt=0, le=86_400)]


class Settings(BaseModel):
    """What settings have in common: no unknown field, no number in a string, no infinity."""

    model_config = ConfigDict(extra="forbid", strict=True, allow_inf_nan=False, frozen=True)


class TlsSettings(Settings):
    """A certificate and its key, in PEM files.

    Attributes:
        certificate: The server's, with those of the authorities between it and the root.
        key: Its private key, without a password.
    """

    certificate: NearbyPath
    key: NearbyPath


class DoorSettings(Settings):
    """What is asked of every request, whatever answers it.

    Attributes:
        host: Address to listen at.
        port: And its port; 0 takes a free one.
        keys: File of API keys (see `offramp keys`); without one everybody may ask, from this machine alone.
        tls: Certificate; without one it speaks plain HTTP.
        cors_origins: Origins whose web pages may ask, such as ``https://example.org``; none by default.
        access_log: File for a line about each request; without one they go to standard error.
        max_body_bytes: Longest body of a request.
        max_concurrent: Most requests that are answered at the same time; others get 429.
        max_connections: Most connections at the same time; others are closed.
        header_timeout_s: Longest time for the head of a request, in seconds.
        body_timeout_s: Longest time for its body.
        answer_timeout_s: Longest time for the answer, from the end of the body to the last word.
        write_timeout_s: Longest time for which a client may leave what was sent unread.
        keep_alive_s: How long a connection is kept for the next request.
        drain_timeout_s: Longest time for requests that are under way when the server is to stop.
    """

    host: str = "127.0.0.1"
    port: int = Field(default=8000, ge=0, le=65_535)
    keys: NearbyPath | None = None
    tls: TlsSettings | None = None
    cors_origins: list[Annotated[str, Field(pattern=r"^(\*|https?://[^/\s]+)$")]] = []
    access_log: NearbyPath | None = None
    max_body_bytes: int = Field(default=4_000_000, ge=1)
    max_concurrent: int = Field(default=256, ge=1)
    max_connections: int = Field(default=2048, ge=1)
    header_timeout_s: Seconds = 10.0
    body_timeout_s: Seconds = 30.0
    answer_timeout_s: Seconds = 600.0
    write_timeout_s: Seconds = 30.0
    keep_alive_s: Seconds = 15.0
    drain_timeout_s: Seconds = 30.0

    @model_validator(mode="after")
    def _the_world_needs_keys(self) -> DoorSettings:
        if self.keys is None and not _is_loopback(self.host):
            raise ValueError(
                f"'host' {self.host!r} can be reached from other machines, so 'keys' must name a file of API keys"
            )
        return self


SettingsT = TypeVar("SettingsT", bound=Settings)


def read_settings(path: Path, kind: type[SettingsT]) -> SettingsT:
    """Reads settings from a YAML file.

    Raises:
        OfframpError: It cannot be read, or says what is not allowed; one sentence about the first fault.
    """
    import yaml  # only servers need it, and it comes with them

    try:
        given = yaml.safe_load(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise OfframpError(f"{path} cannot be read ({error.strerror}); give a file of settings.") from error
    except (yaml.YAMLError, UnicodeError) as error:
        raise OfframpError(f"{path} is not YAML: {' '.join(str(error).split())}.") from error
    return make_settings(kind, given or {}, where=str(path), folder=path.parent)


def make_settings(kind: type[SettingsT], given: Any, *, where: str, folder: Path | None = None) -> SettingsT:
    """Settings of plain containers.

    Args:
        kind: Which settings.
        given: Names and values.
        where: Where they were given; a message begins with it.
        folder: Where relative paths begin; None is the working directory.

    Raises:
        OfframpError: They say what is not allowed; one sentence about the first fault.
    """
    try:
        return kind.model_validate(given, context={_BESIDE: folder})
    except ValidationError as error:
        raise OfframpError(f"{where}: {first_fault(error)}.") from None


def first_fault(error: ValidationError) -> str:
    """The first fault that pydantic has found, as the middle of a sentence."""
    fault = error.errors(include_url=False, include_context=False)[0]
    name = ".".join(str(part) for part in fault["loc"])
    message = fault["msg"].removeprefix("Value error, ").removeprefix("Input ").rstrip(".")
    if fault["type"] == "extra_forbidden":
        return f"there is no setting {name!r}"
    if fault["type"] == "missing":
        return f"{name!r} is missing"
    value = fault["input"]
    shown = f", not {str(value)[:60]!r}" if isinstance(value, (str, int, float)) else ""
    return f"{name!r} {message}{shown}" if name else message


def _is_loopback(host: str) -> bool:
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return host == "localhost"
