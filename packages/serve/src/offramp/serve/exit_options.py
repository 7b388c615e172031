"""From what somebody wishes about depth to `ExitOptions`: the one place that knows which wishes go together."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Literal

from offramp.common.errors import OfframpError
from offramp.common.exits.policy import ExitPolicy, Measure
from offramp.serve.request import ExitOptions, KVPolicy

_ABOUT_CONFIDENCE = ("measure", "threshold", "thresholds", "min_exit_layer")


class ExitWishError(OfframpError):
    """A wish that contradicts another one or the model.

    Attributes:
        field: the field of `ExitWishes` at fault.
    """

    def __init__(self, message: str, field: str) -> None:
        super().__init__(message)
        self.field = field


@dataclass(frozen=True)
class ExitWishes:
    """What was asked for; None everywhere is the checkpoint's own way.

    Attributes:
        exit_policy: `early`: tokens leave at the exits; `full`: every layer is run, as by the KV policy `full`.
        measure: the confidence measure, in place of the checkpoint's.
        threshold: one threshold at all exits, in place of the checkpoint's.
        thresholds: the same exit by exit; an exit that is not named stays closed.
        min_exit_layer: no token leaves below this layer.
        kv_policy: see `KVPolicy`.
        max_pending: under `recompute` and `verify`; see `ExitOptions`.
        exit_layer: under `static`: the exit at which every generated token leaves.
    """

    exit_policy: Literal["early", "full"] | None = None
    measure: Measure | None = None
    threshold: float | None = None
    thresholds: Mapping[int, float] | None = None
    min_exit_layer: int | None = None
    kv_policy: KVPolicy | None = None
    max_pending: int | None = None
    exit_layer: int | None = None

    def first(self, *names: str) -> str | None:
        """The first of these fields that was given."""
        return next((name for name in names if getattr(self, name) is not None), None)


def exit_options(
    wishes: ExitWishes,
    exit_layers: Iterable[int],
    policy: ExitPolicy | None,
    spell: Callable[[str], str] = str,
) -> ExitOptions:
    """How deep a request's tokens run.

    Args:
        wishes: what was asked for.
        exit_layers: the model's early exits.
        policy: the checkpoint's own exit policy.
        spell: a field of `ExitWishes` as the one who asks spells it, for messages.

    Raises:
        ExitWishError: the wishes contradict each other or the model.
        OfframpError: the engine's own objection to a value.
    """
    layers = tuple(exit_layers)
    if wishes.exit_policy == "full" or wishes.kv_policy == "full":
        return _full_depth(wishes, spell)
    if wishes.exit_layer is not None or wishes.kv_policy == "static":
        return _static(wishes, layers, spell)
    kv_policy = wishes.kv_policy or ExitOptions.kv_policy
    if wishes.max_pending is not None and kv_policy not in ("recompute", "verify"):
        raise ExitWishError(
            f"{spell('max_pending')} has a meaning under the KV policies recompute and verify, not under {kv_policy}; "
            "leave it out.",
            "max_pending",
        )
    max_pending = ExitOptions.max_pending if wishes.max_pending is None else wishes.max_pending
    return ExitOptions(kv_policy, _thresholds(wishes, layers, policy, spell), max_pending)


def _full_depth(wishes: ExitWishes, spell: Callable[[str], str]) -> ExitOptions:
    if wishes.exit_policy == "early" or wishes.kv_policy not in (None, "full"):
        raise ExitWishError(f"{spell('exit_policy')} and {spell('kv_policy')} contradict each other.", "kv_policy")
    if extra := wishes.first(*_ABOUT_CONFIDENCE, "max_pending", "exit_layer"):
        raise ExitWishError(f"{spell(extra)} has no meaning where full depth runs every layer; leave it out.", extra)
    return ExitOptions("full")


def _static(wishes: ExitWishes, layers: tuple[int, ...], spell: Callable[[str], str]) -> ExitOptions:
    if wishes.kv_policy != "static" or wishes.exit_layer is None:
        raise ExitWishError(
            f"{spell('exit_layer')} and the KV policy static belong together; give both or neither.", "exit_layer"
        )
    if extra := wishes.first(*_ABOUT_CONFIDENCE, "max_pending"):
        raise ExitWishError(
            f"{spell(extra)} has no meaning under the KV policy static, which asks no confidence; leave it out.", extra
        )
    if wishes.exit_layer not in layers:
        known = f"its exits are at {list(layers)}" if layers else "it has none"
        raise ExitWishError(
            f"{spell('exit_layer')} {wishes.exit_layer} is no exit of this model; {known}.", "exit_layer"
        )
    return ExitOptions("static", static_layer=wishes.exit_layer)


def _thresholds(
    wishes: ExitWishes, layers: tuple[int, ...], policy: ExitPolicy | None, spell: Callable[[str], str]
) -> ExitPolicy | None:
    """The exit policy that was asked for; None takes the checkpoint's."""
    asked = wishes.first("exit_policy", *_ABOUT_CONFIDENCE)
    if asked is None:
        return None
    if not layers:
        raise ExitWishError(f"{spell(asked)} needs early exits, and this model has none; add them on import.", asked)
    threshold, thresholds = wishes.threshold, wishes.thresholds
    if threshold is not None and thresholds is not None:
        raise ExitWishError(f"give {spell('threshold')} or {spell('thresholds')}, not both.", "threshold")
    if threshold is None and thresholds is None:
        if policy is None or not policy.thresholds:
            raise ExitWishError(
                f"this model has exits but no thresholds of its own; give {spell('threshold')}.", "threshold"
            )
        if wishes.measure not in (None, policy.measure):
            raise ExitWishError(
                f"this model has no thresholds for the measure {wishes.measure!r}; give {spell('threshold')} as well.",
                "measure",
            )
    policy = policy or ExitPolicy()
    if wishes.measure is not None:
        policy = dataclasses.replace(policy, measure=wishes.measure)
    if threshold is not None:
        policy = policy.with_threshold(threshold, layers)
    if thresholds is not None:
        policy = dataclasses.replace(policy, thresholds=dict(thresholds))
        try:
            policy.check(layers)
        except OfframpError as fault:
            raise ExitWishError(str(fault), "thresholds") from None
        if not thresholds:
            raise ExitWishError(f"{spell('thresholds')} names no exit; name one, or ask for full depth.", "thresholds")
    if wishes.min_exit_layer is not None:
        policy = dataclasses.replace(policy, min_layer=wishes.min_exit_layer)
    return policy
