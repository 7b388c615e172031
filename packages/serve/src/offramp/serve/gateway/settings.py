"""Settings of the gateway: the door's, and which models stand behind it."""

from __future__ import annotations

from typing import Annotated

from pydantic import Field, model_validator

from offramp.serve.http.endpoints import MODEL_NAME
from offramp.serve.http.settings import DoorSettings, NearbyPath, Seconds, Settings

Address = Annotated[str, Field(pattern=r"^https?://[A-Za-z0-9.:\[\]_-]+$")]
"""Scheme, host and port, and nothing after them: every path behind the gateway is its own."""


class ModelSettings(Settings):
    """A model, and the TorchServe that has it.

    Attributes:
        url: TorchServe's inference address, such as ``http://127.0.0.1:8080``.
        version: The version that answers.
        management: TorchServe's management address; the version is then TorchServe's default one, also when that
            changes.
        key_file: TorchServe's ``key_file.json``, where it wants keys of its own.
    """

    url: Address
    version: str | None = Field(default=None, pattern=f"^{MODEL_NAME}$")
    management: Address | None = None
    key_file: NearbyPath | None = None

    @model_validator(mode="after")
    def _one_way_to_a_version(self) -> ModelSettings:
        if (self.version is None) == (self.management is None):
            raise ValueError("either 'version' or 'management' says which version answers")
        if self.key_file is not None and self.management is None:
            raise ValueError("'key_file' needs 'management', where a key is asked for when the old one is over")
        return self


class GatewaySettings(DoorSettings):
    """All settings of a gateway.

    Attributes:
        keys: As of the door, but nobody passes without a key.
        models: By name, the one that TorchServe and requests call them.
        connect_timeout_s: Longest time until TorchServe takes a connection.
        silence_timeout_s: Longest time for which TorchServe may say nothing while it answers.
        poll_s: How often every model is asked whether it is ready, and for its version.
    """

    keys: NearbyPath  # pyright: ignore[reportGeneralTypeIssues, reportIncompatibleVariableOverride]
    models: dict[Annotated[str, Field(pattern=f"^{MODEL_NAME}$")], ModelSettings] = Field(min_length=1)
    connect_timeout_s: Seconds = 5.0
    silence_timeout_s: Seconds = 120.0
    poll_s: Seconds = 1.0
