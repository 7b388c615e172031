"""What a benchmark measures: experiments, each a few variants of the engine on a few workloads."""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Literal

from offramp.common.exits.kv_policy import KVPolicy
from offramp.serve.config import EngineConfig

Axis = Literal["batch", "prompt_tokens", "new_tokens", "hard_share", "threshold"]
"""What an experiment varies, and a plot's x."""

PlanName = Literal["quick", "full"]

Fields = tuple[tuple[str, Any], ...]
"""Some fields of a dataclass with their values, by name: a mapping that can be a key."""

Head = Literal["whole", "shortlist"]

EXIT_FIELDS = frozenset(
    {"sync_policy", "quantile", "split_rule", "group_by_depth", "deep_quorum", "max_parked_iterations"}
)
"""Fields of `EngineConfig` that mean something only where tokens leave early: full depth is measured without them. All
others (dtype, kernels, ...) decide what the layers cost, so each of their values has a full depth of its own."""


def fields(**values: Any) -> Fields:
    """Some fields, in the order of their names."""
    return tuple(sorted(values.items()))


@dataclass(frozen=True)
class Workload:
    """What is asked.

    Attributes:
        batch: sequences that start together; in a closed loop those that are in flight at any time.
        prompt_tokens: tokens of each prompt; of prompts that a file gives one by one, the most.
        new_tokens: tokens to generate for each, at least 2; the most, where sequences end where the model ends them.
        hard_share: share of the sequences that run at full depth whatever the variant: the adversarial mix, where
            hard sequences share every iteration with easy ones.
        requests: in a closed loop, where a sequence starts when another ends: how many in all. None: `batch` sequences
            start together and nobody comes after them.
    """

    batch: int
    prompt_tokens: int
    new_tokens: int
    hard_share: float = 0.0
    requests: int | None = None

    @property
    def num_sequences(self) -> int:
        """All of them."""
        return self.batch if self.requests is None else self.requests


@dataclass(frozen=True)
class Variant:
    """One way to run the engine.

    Attributes:
        engine: fields of `EngineConfig`; those that are not named are the engine's own defaults.
        kv_policy: of the sequences that are not hard.
        threshold: one for all exits; None takes the checkpoint's policy as it is.
        exit_layer: `static`: the layer; otherwise every token leaves at this exit, whatever it is worth.
        policy: fields of `ExitPolicy` in place of the checkpoint's own.
        head: what the final exit predicts from: `shortlist` is the checkpoint's shortlist only, as its exits do.
    """

    engine: Fields = ()
    kv_policy: KVPolicy = "full"
    threshold: float | None = None
    exit_layer: int | None = None
    policy: Fields = ()
    head: Head = "whole"

    def setting(self, name: str) -> Any:
        """A field of `EngineConfig` as it is for this variant; None if there is none of that name."""
        return dict(self.engine).get(name, getattr(EngineConfig, name, None))

    @property
    def name(self) -> str:
        """What a table calls it, without dtype and kernels."""
        if self.kv_policy == "full":
            what = "full depth"
        elif self.kv_policy == "static":
            what = f"static at {self.exit_layer}"
        elif self.exit_layer is not None:
            what = f"{self.kv_policy}, all at {self.exit_layer}, {self.setting('sync_policy')}"
        else:
            limit = "" if self.threshold is None else f" > {self.threshold:g}"
            what = f"{self.kv_policy}{limit}, {self.setting('sync_policy')}"
        if self.head == "shortlist":
            what += ", shortlist head"
        told = {"dtype", "kernels", "sync_policy"}
        for name, value in (*self.engine, *self.policy):
            if name not in told:
                what += f", {name} {value}"
        return what

    @property
    def choices(self) -> tuple[str, ...]:
        """What was chosen by name, value by value."""
        values = (*self.engine, *self.policy, ("threshold", self.threshold), ("exit_layer", self.exit_layer))
        return tuple(f"{name}={value!r}" for name, value in values)

    @property
    def baseline(self) -> Variant:
        """Full depth with the same numbers and kernels: what speed-ups refer to."""
        return Variant(tuple((name, value) for name, value in self.engine if name not in EXIT_FIELDS))

    @property
    def shortlist_baseline(self) -> Variant:
        """The same full depth, predicting from the shortlist only."""
        return replace(self.baseline, head="shortlist")

    @property
    def depends_on_batch(self) -> bool:
        """Whether exit layers, and so texts, may depend on who else is in the batch."""
        if self.kv_policy in ("full", "static"):
            return False
        return self.setting("sync_policy") != "regroup" or self.setting("split_rule") == "cost"


@dataclass(frozen=True)
class Experiment:
    """Variants that take turns on workloads.

    Attributes:
        name: names files.
        axis: what varies.
        variants: of the engine; the first is full depth, which everybody is compared with.
        workloads: in order.
        peers: whether other engines take part.
    """

    name: str
    axis: Axis
    variants: tuple[Variant, ...]
    workloads: tuple[Workload, ...]
    peers: bool = False


@dataclass(frozen=True)
class Choices:
    """What somebody chose to measure; the first of several is where sweeps over something else stand.

    Attributes:
        batches: batch sizes.
        prompt_tokens: prompt lengths.
        new_tokens: output lengths.
        hard_shares: see `Workload.hard_share`.
        closed_loop: keep `batch` sequences in flight.
        requests: of a closed loop; None: enough for a steady window.
        engine: field of `EngineConfig` -> its values.
        kv_policies: those beside `full`, which is always measured.
        thresholds: see `Variant`; None among them is the checkpoint's own.
        policy: field of `ExitPolicy` -> its values.
        exit_at: see `Variant.exit_layer`; None lets the checkpoint's policy decide.
        static_layers: layers of `static`.
        has_policy: whether the checkpoint has an exit policy.
        has_shortlist: whether that has a shortlist: full depth is then also measured with a head of its tokens only.
    """

    batches: tuple[int, ...] = (1, 8, 32)
    prompt_tokens: tuple[int, ...] = (128,)
    new_tokens: tuple[int, ...] = (64,)
    hard_shares: tuple[float, ...] = (0.0,)
    closed_loop: bool = False
    requests: int | None = None
    engine: Mapping[str, tuple[Any, ...]] = field(default_factory=lambda: {"sync_policy": ("regroup", "all")})
    kv_policies: tuple[KVPolicy, ...] = ("fill",)
    thresholds: tuple[float | None, ...] = (None,)
    policy: Mapping[str, tuple[Any, ...]] = field(default_factory=dict)
    exit_at: int | None = None
    static_layers: tuple[int, ...] = ()
    has_policy: bool = False
    has_shortlist: bool = False

    def workload(self, batch: int, prompt_tokens: int, new_tokens: int, hard_share: float = 0.0) -> Workload:
        """A workload of the kind that was chosen.

        Without a number of requests a closed loop has six for each seat and at least 24: one for each seat is warm-up,
        about one is cut off the end.
        """
        requests = (self.requests or max(24, 6 * batch)) if self.closed_loop else None
        return Workload(batch, prompt_tokens, new_tokens, hard_share, requests)


def quick_plan(choices: Choices) -> list[Experiment]:
    """Everything chosen against everything, in one experiment."""
    loads = itertools.product(choices.batches, choices.prompt_tokens, choices.new_tokens, choices.hard_shares)
    sizes: dict[Axis, int] = {
        "batch": len(choices.batches),
        "prompt_tokens": len(choices.prompt_tokens),
        "new_tokens": len(choices.new_tokens),
        "hard_share": len(choices.hard_shares),
        "threshold": len(choices.thresholds),
    }
    varied: list[Axis] = [axis for axis, size in sizes.items() if size > 1]
    axis = varied[0] if varied else "batch"
    workloads = tuple(choices.workload(*load) for load in loads)
    return [Experiment("quick", axis, tuple(_variants(choices)), workloads, peers=True)]


def full_plan(choices: Choices) -> list[Experiment]:
    """One thing varied at a time.

    The choices are where the sweeps stand and what the first experiment, over batch sizes, measures.
    """
    first = {name: values if name in EXIT_FIELDS else values[:1] for name, values in choices.engine.items()}
    variants = tuple(_variants(replace(choices, engine=first)))
    batch = sorted(choices.batches)[len(choices.batches) // 2]
    base = choices.workload(batch, choices.prompt_tokens[0], choices.new_tokens[0])
    early = [variant for variant in variants if variant.kv_policy not in ("full", "static")]
    fills = tuple(variant for variant in variants if variant.kv_policy in ("full", "fill"))

    def over(
        name: str, axis: Axis, chosen: Sequence[Variant], values: Sequence[Any], peers: bool = False
    ) -> Experiment:
        sizes = {"prompt_tokens": base.prompt_tokens, "new_tokens": base.new_tokens, "batch": base.batch}
        loads = (choices.workload(**{**sizes, axis: value}) for value in values)
        return Experiment(name, axis, tuple(chosen), tuple(loads), peers)

    experiments = [over("batch", "batch", variants, choices.batches, peers=True)]
    experiments.append(over("prompt", "prompt_tokens", variants[:1], (16, 128, 512, 1024), peers=True))
    experiments.append(over("output", "new_tokens", fills, (16, 64, 256)))
    if early:
        experiments.append(over("hard", "hard_share", fills, (0.0, 0.125, 0.25, 0.5, 1.0)))
        if choices.exit_at is None:
            ruled = [one for one in early if one.engine == early[0].engine and one.policy == early[0].policy]
            swept = [replace(one, threshold=value) for one in ruled for value in (0.5, 0.7, 0.8, 0.9, 0.95, 0.98, 0.99)]
            experiments.append(Experiment("threshold", "threshold", (variants[0], *swept), (base,)))
    crossed = [
        Variant(fields(dtype=dtype, kernels=kernels))
        for dtype, kernels in itertools.product(("bf16", "fp32"), ("native", "packed", "plain"))
    ]
    experiments.append(over("kernels", "batch", crossed, (1, 8, 32)))
    return experiments


def _variants(choices: Choices) -> Iterator[Variant]:
    """For each way to compute the layers: full depth, fixed depths, and all that leaves early."""
    engine = choices.engine
    ways = list(_combinations({name: values for name, values in engine.items() if name not in EXIT_FIELDS}))
    rules = list(_combinations({name: values for name, values in engine.items() if name in EXIT_FIELDS}))
    early: list[KVPolicy] = [one for one in choices.kv_policies if one not in ("full", "static")]
    if not choices.has_policy and choices.exit_at is None:
        early = []
    for way in ways:
        base = Variant(fields(**way))
        yield base
        if choices.has_shortlist:
            yield base.shortlist_baseline
        for layer in choices.static_layers:
            yield replace(base, kv_policy="static", exit_layer=layer)
        for kv_policy, rule, threshold, policy in itertools.product(
            early, rules, choices.thresholds, _combinations(choices.policy)
        ):
            yield Variant(fields(**way, **rule), kv_policy, threshold, choices.exit_at, fields(**policy))


def _combinations(values: Mapping[str, Sequence[Any]]) -> Iterator[dict[str, Any]]:
    """One of each, in every combination."""
    for chosen in itertools.product(*values.values()):
        yield dict(zip(values, chosen, strict=True))
