"""What a request sets about depth in place of the checkpoint's own: the one place that knows what goes together."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Literal

from offramp.common.errors import OfframpError
from offramp.common.exits.kv_policy import KVPolicy
from offramp.common.exits.operating_point import EXACT, OperatingPoint, OperatingPoints
from offramp.common.exits.policy import ExitPolicy, Measure
from offramp.serve.request.exit_options import ExitOptions

_ABOUT_CONFIDENCE = ("measure", "threshold", "thresholds", "min_exit_layer", "shortlist_only")


class ExitOverrideError(OfframpError):
    """An override that contradicts another one or the model.

    Attributes:
        field: the field of `ExitOverrides` at fault.
    """

    def __init__(self, message: str, field: str) -> None:
        super().__init__(message)
        self.field = field


@dataclass(frozen=True)
class ExitOverrides:
    """What was asked for; None everywhere is the checkpoint's own way.

    Attributes:
        operating_point: a calibrated way of answering, in place of all that follows; `exact` is full depth.
        exit_policy: `early`: tokens leave at the exits; `full`: every layer is run, as by the KV policy `full`.
        measure: the confidence measure, in place of the checkpoint's.
        threshold: one threshold at all exits, in place of the checkpoint's.
        thresholds: the same exit by exit; an exit that is not named stays closed.
        min_exit_layer: no token leaves below this layer.
        shortlist_only: whether exits take their tokens from the policy's shortlist alone; see `ExitPolicy`.
        kv_policy: see `KVPolicy`.
        max_pending: under `recompute` and `verify`; see `ExitOptions`.
        exit_layer: under `static`: the exit at which every generated token leaves.
    """

    operating_point: str | None = None
    exit_policy: Literal["early", "full"] | None = None
    measure: Measure | None = None
    threshold: float | None = None
    thresholds: Mapping[int, float] | None = None
    min_exit_layer: int | None = None
    shortlist_only: bool | None = None
    kv_policy: KVPolicy | None = None
    max_pending: int | None = None
    exit_layer: int | None = None

    def first(self, *names: str) -> str | None:
        """The first of these fields that was given."""
        return next((name for name in names if getattr(self, name) is not None), None)

    @property
    def first_of_all(self) -> str | None:
        """The first field that was given, the operating point apart."""
        return self.first(*(field.name for field in dataclasses.fields(self) if field.name != "operating_point"))


def exit_options(
    overrides: ExitOverrides,
    exit_layers: Iterable[int],
    policy: ExitPolicy | None,
    points: OperatingPoints | None = None,
    spell: Callable[[str], str] = str,
    default_kv_policy: KVPolicy = ExitOptions.kv_policy,
) -> ExitOptions:
    """How deep a request's tokens run.

    Args:
        overrides: what was asked for.
        exit_layers: the model's early exits.
        policy: the checkpoint's own exit policy.
        points: the checkpoint's operating points; None: it has none.
        spell: a field of `ExitOverrides` as the one who asks spells it, for messages.
        default_kv_policy: the engine's, for whoever asks for none.

    Raises:
        ExitOverrideError: the overrides contradict each other or the model.
        OfframpError: the engine's own objection to a value.
    """
    layers, points = tuple(exit_layers), points or OperatingPoints()
    if overrides.operating_point is not None:
        return _named(overrides.operating_point, overrides, points, spell)
    if points.default is not None and overrides.first_of_all is None:
        return _named(points.default, overrides, points, spell)
    if overrides.exit_policy == "full" or overrides.kv_policy == "full":
        return _full_depth(overrides, spell)
    if overrides.exit_layer is not None or overrides.kv_policy == "static":
        return _static(overrides, layers, spell)
    kv_policy = overrides.kv_policy or default_kv_policy
    if overrides.max_pending is not None and kv_policy not in ("recompute", "verify"):
        raise ExitOverrideError(
            f"{spell('max_pending')} has a meaning under the KV policies recompute and verify, not under {kv_policy}; "
            "leave it out.",
            "max_pending",
        )
    max_pending = ExitOptions.max_pending if overrides.max_pending is None else overrides.max_pending
    return ExitOptions(kv_policy, _thresholds(overrides, layers, policy, spell), max_pending)


def point_options(point: OperatingPoint) -> ExitOptions:
    """What a request carries that is answered at an operating point."""
    return ExitOptions(point.kv_policy, point.policy, point.max_pending)


def _named(name: str, overrides: ExitOverrides, points: OperatingPoints, spell: Callable[[str], str]) -> ExitOptions:
    if (extra := overrides.first_of_all) is not None:
        raise ExitOverrideError(
            f"{spell('operating_point')} says all about depth, and {spell(extra)} stands beside it; leave one out.",
            extra,
        )
    if name == EXACT:
        return ExitOptions("full")
    if name not in points.by_name:
        raise ExitOverrideError(
            f"{spell('operating_point')} {name!r} is no point of this model; it has {', '.join(points.names)}.",
            "operating_point",
        )
    return point_options(points.by_name[name])


def _full_depth(overrides: ExitOverrides, spell: Callable[[str], str]) -> ExitOptions:
    if overrides.exit_policy == "early" or overrides.kv_policy not in (None, "full"):
        raise ExitOverrideError(f"{spell('exit_policy')} and {spell('kv_policy')} contradict each other.", "kv_policy")
    if extra := overrides.first(*_ABOUT_CONFIDENCE, "max_pending", "exit_layer"):
        raise ExitOverrideError(
            f"{spell(extra)} has no meaning where full depth runs every layer; leave it out.", extra
        )
    return ExitOptions("full")


def _static(overrides: ExitOverrides, layers: tuple[int, ...], spell: Callable[[str], str]) -> ExitOptions:
    if overrides.kv_policy != "static" or overrides.exit_layer is None:
        raise ExitOverrideError(
            f"{spell('exit_layer')} and the KV policy static belong together; give both or neither.", "exit_layer"
        )
    if extra := overrides.first(*_ABOUT_CONFIDENCE, "max_pending"):
        raise ExitOverrideError(
            f"{spell(extra)} has no meaning under the KV policy static, which asks no confidence; leave it out.", extra
        )
    if overrides.exit_layer not in layers:
        known = f"its exits are at {list(layers)}" if layers else "it has none"
        raise ExitOverrideError(
            f"{spell('exit_layer')} {overrides.exit_layer} is no exit of this model; {known}.", "exit_layer"
        )
    return ExitOptions("static", static_layer=overrides.exit_layer)


def _thresholds(
    overrides: ExitOverrides, layers: tuple[int, ...], policy: ExitPolicy | None, spell: Callable[[str], str]
) -> ExitPolicy | None:
    """The exit policy that was asked for; None takes the checkpoint's."""
    asked = overrides.first("exit_policy", *_ABOUT_CONFIDENCE)
    if asked is None:
        return None
    if not layers:
        raise ExitOverrideError(
            f"{spell(asked)} needs early exits, and this model has none; add them on import.", asked
        )
    threshold, thresholds = overrides.threshold, overrides.thresholds
    if threshold is not None and thresholds is not None:
        raise ExitOverrideError(f"give {spell('threshold')} or {spell('thresholds')}, not both.", "threshold")
    if threshold is None and thresholds is None:
        if policy is None or not policy.thresholds:
            raise ExitOverrideError(
                f"this model has exits but no thresholds of its own; give {spell('threshold')}.", "threshold"
            )
        if overrides.measure not in (None, policy.measure):
            raise ExitOverrideError(
                f"this model has no thresholds for the measure {overrides.measure!r}; give {spell('threshold')} as "
                "well.",
                "measure",
            )
    policy = policy or ExitPolicy()
    if overrides.measure is not None:
        policy = dataclasses.replace(policy, measure=overrides.measure)
    if threshold is not None:
        policy = policy.with_threshold(threshold, layers)
    if thresholds is not None:
        policy = dataclasses.replace(policy, thresholds=dict(thresholds))
        try:
            policy.check(layers)
        except OfframpError as fault:
            raise ExitOverrideError(str(fault), "thresholds") from None
        if not thresholds:
            raise ExitOverrideError(
                f"{spell('thresholds')} names no exit; name one, or ask for full depth.", "thresholds"
            )
    if overrides.min_exit_layer is not None:
        policy = dataclasses.replace(policy, min_layer=overrides.min_exit_layer)
    if overrides.shortlist_only is not None:
        if overrides.shortlist_only and policy.shortlist is None:
            raise ExitOverrideError(
                f"{spell('shortlist_only')} needs a shortlist, and this model's exit policy has none; leave it out.",
                "shortlist_only",
            )
        policy = dataclasses.replace(policy, shortlist_only=overrides.shortlist_only)
    return policy
