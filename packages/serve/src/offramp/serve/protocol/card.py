"""What is served, and its limits: everything the protocol needs to know about a model."""

from __future__ import annotations

import time
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from offramp.common.exits.policy import ExitPolicy

if TYPE_CHECKING:  # importing it would import torch
    from offramp.common.checkpoint import Checkpoint


@dataclass(frozen=True)
class ModelCard:
    """The model behind an endpoint.

    Attributes:
        name: What requests call it.
        version: Its version, in the URL and in the answers' headers.
        created: When it was loaded, in Unix seconds.
        vocab_size: Token ids it takes are below this.
        num_layers: Its depth, the final exit.
        exit_layers: Its early exits.
        policy: The checkpoint's own exit policy.
        eos_token_ids: Every token that ends a text.
        max_model_len: Longest prompt and completion together that the model can read, in tokens.
        cache_tokens: Longest prompt and completion together that the KV cache can hold, in tokens.
        run_id: The training run that the checkpoint comes from, if it says so.
        config_hash: SHA-256 of that run's settings, if the checkpoint says so.
        archive_sha256: hash of the model folder that it was loaded from, if it was one.
    """

    name: str
    version: str
    created: int
    vocab_size: int
    num_layers: int
    exit_layers: tuple[int, ...]
    policy: ExitPolicy | None
    eos_token_ids: frozenset[int]
    max_model_len: int
    cache_tokens: int
    run_id: str | None = None
    config_hash: str | None = None
    archive_sha256: str | None = None

    @classmethod
    def of(
        cls,
        checkpoint: Checkpoint,
        *,
        name: str,
        version: str,
        max_model_len: int,
        cache_tokens: int,
        archive_sha256: str | None = None,
    ) -> ModelCard:
        """The card of a checkpoint that has just been loaded; the limits are the engine's."""
        return cls(
            name=name,
            version=version,
            created=int(time.time()),
            vocab_size=checkpoint.config.vocab_size,
            num_layers=checkpoint.config.num_layers,
            exit_layers=checkpoint.exits.layers,
            policy=checkpoint.policy,
            eos_token_ids=frozenset(checkpoint.eos_token_ids),
            max_model_len=max_model_len,
            cache_tokens=cache_tokens,
            run_id=checkpoint.provenance.get("run_id"),
            config_hash=checkpoint.provenance.get("settings_sha256"),
            archive_sha256=archive_sha256,
        )

    @property
    def name_and_version(self) -> str:
        """What requests call it that want this version and no other."""
        return f"{self.name}@{self.version}"

    def to_json(self) -> dict[str, Any]:
        """The model object of `GET /v1/models`."""
        return {
            "id": self.name,
            "object": "model",
            "created": self.created,
            "owned_by": "offramp",
            "offramp": {
                "version": self.version,
                "num_layers": self.num_layers,
                "exit_layers": list(self.exit_layers),
                "exit_policy": None if self.policy is None else self.policy.to_json(),
                "max_model_len": self.max_model_len,
                "run_id": self.run_id,
                "config_hash": self.config_hash,
                "archive_sha256": self.archive_sha256,
            },
        }

    def headers(self) -> dict[str, str]:
        """Response headers that tell which model gave an answer."""
        known = {"version": self.version, "run-id": self.run_id, "config-hash": self.config_hash}
        return {f"offramp-{key}": value for key, value in known.items() if value and _fits_a_header(value)}


def _fits_a_header(value: str) -> bool:
    return value.isascii() and value.isprintable()
