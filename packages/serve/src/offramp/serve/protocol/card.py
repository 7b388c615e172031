"""What is served, and its limits: everything the protocol needs to know about a model."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from offramp.common.exits.policy import ExitPolicy


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
        config_hash: Hash of that run's resolved configuration, if the checkpoint says so.
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
            },
        }

    def headers(self) -> dict[str, str]:
        """Response headers that tell which model gave an answer."""
        known = {"version": self.version, "run-id": self.run_id, "config-hash": self.config_hash}
        return {f"offramp-{key}": value for key, value in known.items() if value is not None}
