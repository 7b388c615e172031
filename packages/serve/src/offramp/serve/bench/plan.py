"""What a benchmark measures: experiments, each a few variants of the engine on a few workloads."""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Literal

from offramp.common.exits.kv_policy import KVPolicy
from offramp.serve.config import Dtype, Kernels, SyncPolicy

Axis = Literal["batch", "prompt_tokens", "new_tokens", "hard_share", "threshold"]
"""What an experiment varies, and a plot's x."""

PlanName = Literal["quick", "full"]


@dataclass(frozen=True)
class Workload:
    """What is asked.

    Attributes:
        batch: sequences that start together.
        prompt_tokens: tokens of each prompt; of prompts that a file gives one by one, the most.
        new_tokens: tokens to generate for each, at least 2.
        hard_share: share of the sequences that run at full depth whatever the variant: the adversarial mix, where
            hard sequences share every iteration with easy ones.
    """

    batch: int
    prompt_tokens: int
    new_tokens: int
    hard_share: float = 0.0


@dataclass(frozen=True)
class Variant:
    """One way to run the engine.

    Attributes:
        dtype: of weights, states and KV cache.
        kernels: what computes the layers.
        kv_policy: of the sequences that are not hard.
        sync_policy: when rows that are sure may leave.
        threshold: one for all exits; None takes the checkpoint's policy as it is.
        exit_layer: `static`: the layer; otherwise every token leaves at this exit, whatever it is worth.
    """

    dtype: Dtype = "bf16"
    kernels: Kernels = "auto"
    kv_policy: KVPolicy = "full"
    sync_policy: SyncPolicy = "regroup"
    threshold: float | None = None
    exit_layer: int | None = None

    @property
    def name(self) -> str:
        """What a table calls it, without dtype and kernels."""
        if self.kv_policy == "full":
            return "full depth"
        if self.kv_policy == "static":
            return f"static at {self.exit_layer}"
        what = "" if self.threshold is None else f" > {self.threshold:g}"
        if self.exit_layer is not None:
            what = f", all at {self.exit_layer}"
        return f"{self.kv_policy}{what}, {self.sync_policy}"

    @property
    def baseline(self) -> Variant:
        """Full depth with the same numbers and kernels: what speed-ups refer to."""
        return Variant(self.dtype, self.kernels)


@dataclass(frozen=True)
class Experiment:
    """Variants that take turns on workloads.

    Attributes:
        name: names files.
        axis: what varies.
        variants: of the engine; the full-depth one of each dtype and kernels comes first.
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
        dtypes: see `Variant`.
        kernels: see `Variant`.
        kv_policies: those beside `full`, which is always measured.
        sync_policies: see `Variant`.
        thresholds: see `Variant`; None among them is the checkpoint's own.
        exit_at: see `Variant.exit_layer`; None lets the checkpoint's policy decide.
        static_layers: layers of `static`.
        has_policy: whether the checkpoint has an exit policy.
    """

    batches: tuple[int, ...] = (1, 8, 32)
    prompt_tokens: tuple[int, ...] = (128,)
    new_tokens: tuple[int, ...] = (64,)
    hard_shares: tuple[float, ...] = (0.0,)
    dtypes: tuple[Dtype, ...] = ("bf16",)
    kernels: tuple[Kernels, ...] = ("auto",)
    kv_policies: tuple[KVPolicy, ...] = ("fill",)
    sync_policies: tuple[SyncPolicy, ...] = ("regroup", "all")
    thresholds: tuple[float | None, ...] = (None,)
    exit_at: int | None = None
    static_layers: tuple[int, ...] = ()
    has_policy: bool = False


def quick_plan(choices: Choices) -> list[Experiment]:
    """Everything chosen against everything, in one experiment."""
    workloads = itertools.product(choices.batches, choices.prompt_tokens, choices.new_tokens, choices.hard_shares)
    variants = [
        variant
        for dtype, kernels in itertools.product(choices.dtypes, choices.kernels)
        for variant in _variants(choices, dtype, kernels)
    ]
    sizes: dict[Axis, int] = {
        "batch": len(choices.batches),
        "prompt_tokens": len(choices.prompt_tokens),
        "new_tokens": len(choices.new_tokens),
        "hard_share": len(choices.hard_shares),
        "threshold": len(choices.thresholds),
    }
    varied: list[Axis] = [axis for axis, size in sizes.items() if size > 1]
    axis = varied[0] if varied else "batch"
    return [Experiment("quick", axis, tuple(variants), tuple(Workload(*load) for load in workloads), peers=True)]


def full_plan(choices: Choices) -> list[Experiment]:
    """One thing varied at a time.

    The choices are where the sweeps stand and what the first experiment, over batch sizes, measures.
    """
    dtype, kernels = choices.dtypes[0], choices.kernels[0]
    variants = tuple(_variants(choices, dtype, kernels))
    batch = sorted(choices.batches)[len(choices.batches) // 2]
    base = Workload(batch, choices.prompt_tokens[0], choices.new_tokens[0])
    early = [variant for variant in variants if variant.kv_policy not in ("full", "static")]
    fills = tuple(variant for variant in variants if variant.kv_policy in ("full", "fill"))

    def over(
        name: str, axis: Axis, chosen: Sequence[Variant], values: Sequence[float], peers: bool = False
    ) -> Experiment:
        return Experiment(name, axis, tuple(chosen), tuple(replace(base, **{axis: value}) for value in values), peers)

    experiments = [over("batch", "batch", variants, choices.batches, peers=True)]
    experiments.append(over("prompt", "prompt_tokens", variants[:1], (16, 128, 512, 1024), peers=True))
    experiments.append(over("output", "new_tokens", fills, (16, 64, 256)))
    if early:
        experiments.append(over("hard", "hard_share", fills, (0.0, 0.125, 0.25, 0.5, 1.0)))
        if choices.exit_at is None:
            ruled = [one for one in early if one.sync_policy == choices.sync_policies[0]]
            swept = [replace(one, threshold=value) for one in ruled for value in (0.5, 0.7, 0.8, 0.9, 0.95, 0.98, 0.99)]
            experiments.append(Experiment("threshold", "threshold", (variants[0], *swept), (base,)))
    crossed = [
        Variant(dtype, kernels) for dtype, kernels in itertools.product(("bf16", "fp32"), ("native", "packed", "plain"))
    ]
    experiments.append(over("kernels", "batch", crossed, (1, 8, 32)))
    return experiments


def _variants(choices: Choices, dtype: Dtype, kernels: Kernels) -> Iterator[Variant]:
    base = Variant(dtype, kernels)
    yield base
    for layer in choices.static_layers:
        yield replace(base, kv_policy="static", exit_layer=layer)
    if not choices.has_policy and choices.exit_at is None:
        return
    for kv_policy, sync_policy, threshold in itertools.product(
        choices.kv_policies, choices.sync_policies, choices.thresholds
    ):
        if kv_policy not in ("full", "static"):
            yield Variant(dtype, kernels, kv_policy, sync_policy, threshold, choices.exit_at)
