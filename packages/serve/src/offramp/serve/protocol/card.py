"""What is served, and its limits: everything the protocol needs to know about a model."""

from __future__ import annotations

import time
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from offramp.common.exits.kv_policy import KVPolicy
from offramp.common.exits.operating_point import OperatingPoints
from offramp.common.exits.policy import ExitPolicy

if TYPE_CHECKING:  # importing it would import torch
    from offramp.common.checkpoint import AnyCheckpoint


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
        points: Its operating points.
        eos_token_ids: Every token that ends a text.
        max_model_len: Longest prompt and completion together that the model can read, in tokens.
        cache_tokens: Longest prompt and completion together that the KV cache can hold, in tokens.
        max_source_len: Longest prompt that the encoder reads, in tokens, beside which `max_model_len` is for the answer
            alone; None: the model has no encoder.
        decoder_start_token_id: What the decoder of such a model reads first.
        block_size: Tokens that a block of the KV cache holds.
        run_id: The training run that the checkpoint comes from, if it says so.
        config_hash: SHA-256 of that run's settings, if the checkpoint says so.
        archive_sha256: hash of the model folder that it was loaded from, if it was one.
        default_kv_policy: that of requests that name none.
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
    max_source_len: int | None = None
    decoder_start_token_id: int | None = None
    block_size: int = 1
    run_id: str | None = None
    config_hash: str | None = None
    archive_sha256: str | None = None
    points: OperatingPoints = field(default_factory=OperatingPoints)
    default_kv_policy: KVPolicy = "fill"

    @classmethod
    def of(
        cls,
        checkpoint: AnyCheckpoint,
        *,
        name: str,
        version: str,
        max_model_len: int,
        cache_tokens: int,
        max_source_len: int | None = None,
        decoder_start_token_id: int | None = None,
        block_size: int = 1,
        archive_sha256: str | None = None,
        default_kv_policy: KVPolicy = "fill",
    ) -> ModelCard:
        """The card of a checkpoint that has just been loaded; the limits are the engine's."""
        return cls(
            name=name,
            version=version,
            created=int(time.time()),
            vocab_size=checkpoint.model.config.vocab_size,
            num_layers=checkpoint.model.config.num_layers,
            exit_layers=checkpoint.exits.layers,
            policy=checkpoint.policy,
            eos_token_ids=frozenset(checkpoint.eos_token_ids),
            max_model_len=max_model_len,
            cache_tokens=cache_tokens,
            max_source_len=max_source_len,
            decoder_start_token_id=decoder_start_token_id,
            block_size=block_size,
            run_id=checkpoint.provenance.get("run_id"),
            config_hash=checkpoint.provenance.get("settings_sha256"),
            archive_sha256=archive_sha256,
            points=checkpoint.points,
            default_kv_policy=default_kv_policy,
        )

    @property
    def prompt_limit(self) -> int:
        """The most tokens of a prompt that can be answered."""
        longest = self.max_model_len if self.max_source_len is None else self.max_source_len
        return min(longest, self.cache_tokens)

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
                "operating_points": list(self.points.names),
                "default_operating_point": self.points.default,
                "exit_policy": None if self.policy is None else self.policy.to_json(),
                "max_model_len": self.max_model_len,
                "max_source_len": self.max_source_len,
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
