"""Operating points: ways of answering that were calibrated, each under the name by which a request asks for it."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import Any, get_args

from offramp.common.errors import OfframpError
from offramp.common.exits.kv_policy import KVPolicy
from offramp.common.exits.policy import ExitPolicy
from offramp.common.exits.profile import TokenProfile

EXACT = "exact"
"""Full depth: the point that every model has."""

_NAME = re.compile(r"[a-z0-9][a-z0-9._-]{0,63}")


@dataclass(frozen=True)
class OperatingPoint:
    """One way of answering.

    Attributes:
        kv_policy: what upper layers see of a token that left early.
        policy: when a token leaves.
        max_pending: of the KV policies `recompute` and `verify`: tokens that wait for a deeper pass at most.
        profile: of the tokens at its calibration.
    """

    kv_policy: KVPolicy
    policy: ExitPolicy
    max_pending: int = 8
    profile: TokenProfile | None = None

    def to_json(self) -> dict[str, Any]:
        """Plain containers for `exits.json`."""
        return {
            "kv_policy": self.kv_policy,
            "policy": self.policy.to_json(),
            "max_pending": self.max_pending,
            "profile": None if self.profile is None else self.profile.to_json(),
        }

    @classmethod
    def from_json(cls, data: Mapping[str, Any]) -> OperatingPoint:
        """Inverse of `to_json`.

        Raises:
            OfframpError: it is none.
        """
        try:
            kv_policy, pending = data["kv_policy"], data["max_pending"]
            policy, profile = ExitPolicy.from_json(data["policy"]), data["profile"]
            if kv_policy not in get_args(KVPolicy) or kv_policy in ("full", "static") or type(pending) is not int:
                raise ValueError(f"KV policy {kv_policy!r} with max_pending {pending!r}")
        except (TypeError, KeyError, ValueError) as fault:
            raise OfframpError(f"exits.json: an operating point is not understood: {fault}.") from None
        return cls(kv_policy, policy, pending, None if profile is None else TokenProfile.from_json(profile))


@dataclass(frozen=True)
class OperatingPoints:
    """All points of a model but `exact`.

    Attributes:
        by_name: name -> point.
        default: the point of requests that say nothing about depth; None: they take the checkpoint's policy.
    """

    by_name: Mapping[str, OperatingPoint] = field(default_factory=lambda: MappingProxyType({}))
    default: str | None = None

    def __post_init__(self) -> None:
        for name in self.by_name:
            check_name(name)
        if self.default is not None and self.default != EXACT and self.default not in self.by_name:
            raise OfframpError(f"the default point {self.default!r} is none of {', '.join(self.names)}.")

    @property
    def names(self) -> tuple[str, ...]:
        """What requests may ask for."""
        return (EXACT, *self.by_name)

    def check(self, exit_layers: Iterable[int], vocab_size: int, *, has_classifiers: bool) -> None:
        """Raise `OfframpError` if a point asks for what the model does not have."""
        layers = tuple(exit_layers)
        for point in self.by_name.values():
            point.policy.check(layers, vocab_size)
            point.policy.check_measure(has_classifiers=has_classifiers)

    def to_json(self) -> dict[str, Any]:
        """Plain containers for `exits.json`."""
        return {"default": self.default, "by_name": {name: point.to_json() for name, point in self.by_name.items()}}

    @classmethod
    def from_json(cls, data: Mapping[str, Any]) -> OperatingPoints:
        """Inverse of `to_json`.

        Raises:
            OfframpError: they are none.
        """
        try:
            points = {name: OperatingPoint.from_json(point) for name, point in data["by_name"].items()}
            return cls(points, data["default"])
        except (TypeError, KeyError, AttributeError) as fault:
            raise OfframpError(f"exits.json: the section 'points' is not understood: {fault}.") from None


def check_name(name: object) -> None:
    """Raise `OfframpError` if an operating point cannot be called so."""
    if not isinstance(name, str) or _NAME.fullmatch(name) is None:
        raise OfframpError(
            f"an operating point cannot be called {name!r}; use up to 64 small letters, digits, dots, dashes and "
            "underscores."
        )
    if name == EXACT:
        raise OfframpError(f"the name {EXACT!r} belongs to full depth; choose another.")
