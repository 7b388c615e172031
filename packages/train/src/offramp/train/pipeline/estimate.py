"""What each stage of a plan costs, and a step with and without each way of making it cheaper.

Legend: B batch, T time, D model, L layers, S stages, M micro-batches.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

from torch import nn

from offramp.common.errors import OfframpError
from offramp.common.families import AnyModel
from offramp.common.model.transformer import MultiExitTransformer
from offramp.train.pipeline.costs import BF16, FP32, MicroBatchShape, embedding_working, head_cost
from offramp.train.pipeline.filling import FillSettings
from offramp.train.pipeline.schedule import Schedule, bubble_capacity, cooldown_counts, one_f_one_b, warmup_counts
from offramp.train.pipeline.simulation import HeadWork, StageWork, Timeline, simulate, time_bound
from offramp.train.pipeline.stage_layers import LayerRun, layer_runs, shared_bytes
from offramp.train.pipeline.stages import Stage, StagePlan
from offramp.train.pipeline.t5_stages import make_stage
from offramp.train.pipeline.tensor_parallel import Slice, slices
from offramp.train.pipeline.times import ModuleTimes, Pass

ADAM_BYTES = 2 * FP32
"""Per parameter: both moments of AdamW."""


@dataclass(frozen=True)
class StageMemory:
    """Bytes of a stage that stay from step to step, and parameters.

    Attributes:
        parameters: that the stage holds, shared ones included.
        trained: those of them that are trained.
        weights: fp32, and under autocast the bf16 copies of matrices.
        gradients: fp32.
        optimizer: moments of AdamW; under ZeRO-1 this rank's share of them and of the weights in fp32.
    """

    parameters: int
    trained: int
    weights: float
    gradients: float
    optimizer: float

    @property
    def total(self) -> float:
        """All of them."""
        return self.weights + self.gradients + self.optimizer


@dataclass(frozen=True)
class Estimator:
    """A plan with all that is known about it.

    Attributes:
        plan: the stages.
        model: that is planned; only its shapes and `requires_grad` are read, so it may be on the meta device.
        shape: of a micro-batch.
        times: of its modules.
        micro_batches: M.
        replicas: data-parallel ranks.
        zero_stage: 0 or 1.
        checkpointing: activations are checkpointed; see `Stage`.
        fill: bubbles are filled, and how; None: they are not.
        tensor: ranks that share each stage; numbers are those of the last one, whose share is never the smallest.
    """

    plan: StagePlan
    model: AnyModel
    shape: MicroBatchShape
    times: ModuleTimes
    micro_batches: int
    replicas: int = 1
    zero_stage: int = 0
    checkpointing: bool = False
    fill: FillSettings | None = None
    tensor: int = 1

    def memory(self) -> list[StageMemory]:
        """[S] what stays from step to step."""
        return [self._memory(make_stage(self.model, self.plan, index)) for index in range(self.plan.num_stages)]

    def _memory(self, stage: Stage) -> StageMemory:
        own: dict[str, Slice] = {}
        if self.tensor > 1:
            assert isinstance(self.model, MultiExitTransformer)
            own = slices(stage, self.model.config, self.tensor - 1, self.tensor)
        sizes = {name: (own[name].of(p) if name in own else p).numel() for name, p in stage.named_parameters()}
        trained = sum(sizes[name] for name, p in stage.named_parameters() if p.requires_grad)
        casts = 0
        if self.shape.mixed:
            # Unembeddings are converted whenever an exit is computed; see `head_cost`.
            others = ("embed_tokens.weight", "lm_head.weight", "unembed.weight")
            casts = sum(
                sizes[name] for name, p in stage.named_parameters() if p.dim() == 2 and not name.endswith(others)
            )
        count = sum(sizes.values())
        state = ADAM_BYTES if self.zero_stage == 0 else (ADAM_BYTES + FP32) / self.replicas
        return StageMemory(count, trained, FP32 * count + BF16 * casts, FP32 * trained, state * trained)

    def works(
        self, early_exits: bool = True, deferred: bool = True, checkpointing: bool | None = None
    ) -> list[StageWork]:
        """[S] what a micro-batch costs.

        Args:
            early_exits: count them; the final exit always is.
            deferred: exits are computed in the backward pass.
            checkpointing: layers keep their input only, and are computed again in the backward pass; None: as the
                estimator says.
        """
        checkpointing = self.checkpointing if checkpointing is None else checkpointing
        return [self._work(index, early_exits, deferred, checkpointing) for index in range(self.plan.num_stages)]

    def _work(self, index: int, early_exits: bool, deferred: bool, checkpointing: bool) -> StageWork:
        plan, shape, times = self.plan, self.shape, self.times
        config, start, stop = self.model.config, plan.bounds[index], plan.bounds[index + 1]
        state, runs = float(shape.state_bytes(config.hidden_size)), self._runs(index)
        # Where nothing at or below is trained, no gradient is wanted and nothing is kept for one.
        flows = _is_trained(self.model.embed_tokens) or any(
            _is_trained(run.module) for earlier in range(index) for run in self._runs(earlier)
        )
        forward, backward = (times.embedding.forward, 0.0) if index == 0 else (0.0, 0.0)
        working = ending = 0.0
        if index == 0 and _is_trained(self.model.embed_tokens):
            backward += times.embedding.backward
            ending = embedding_working(config, self.tensor)
        held = state  # the output waits for its gradient
        reached, below = {start: flows}, {start: 0.0}
        for run in runs:
            trained = _is_trained(run.module)
            forward += run.seconds.forward
            backward += _backward(run.seconds, trained, flows)
            flows = flows or trained
            if flows:
                kept = run.state if checkpointing else run.cost.held
                held += kept
                # A layer that runs again has its input already. What layers above it keep is gone when it is at work.
                gathered = run.gathered if checkpointing else 0.0
                working = max(working - kept, run.cost.working - kept + gathered)
                backward += run.seconds.forward if checkpointing else 0.0
            # Exits at the first state of the decoder come after all layers of the encoder.
            reached[run.depth], below[run.depth] = flows, held - state
        if checkpointing and shape.mixed:
            # Autocast shares a weight's copy among micro-batches, so its gradient waits for the end of the pass.
            matrices = (p for run in runs[1:] for p in run.module.parameters() if p.dim() == 2)
            working += BF16 * sum(p.numel() for p in matrices if p.requires_grad) / self.tensor
        heads = []
        for layer in plan.exits_of(index):
            if not early_exits and layer != config.num_layers:
                continue
            trained, weight = self._head_is_trained(layer), self.model.unembedding(layer).requires_grad
            head = head_cost(config, plan.exits, layer, shape, self.tensor, whole_logits=not deferred, trained=weight)
            seconds = times.heads[layer]
            if not reached[layer]:
                held += state  # nothing else keeps what this exit reads
            keeps = trained or reached[layer]
            # The state that the exit reads stays, and the gradient from the layers above waits.
            freed = max(below[stop] - below[layer] - 2 * state, 0.0)
            heads.append(
                HeadWork(
                    seconds.forward,
                    _backward(seconds, trained, reached[layer]),
                    head.held if keeps else 0.0,
                    head.working if keeps else head.held,
                    freed,
                )
            )
        held += shared_bytes(self.model, plan, index, shape, checkpointing)
        return StageWork(forward, backward, held, working, ending, tuple(heads), deferred)

    def _runs(self, index: int) -> list[LayerRun]:
        return layer_runs(self.model, self.plan, index, self.shape, self.times, self.tensor)

    def _head_is_trained(self, layer: int) -> bool:
        final = layer == self.plan.config.num_layers
        own = not final and _is_trained(self.model.exits[str(layer)])
        norm = (final or self.plan.exits.head == "final") and _is_trained(self.model.norm)
        return own or norm or self.model.unembedding(layer).requires_grad

    def run(self, works: Sequence[StageWork], schedule: Schedule | None = None) -> Timeline:
        """Simulate a step; plain 1F1B unless another schedule is given."""
        schedule = schedule or one_f_one_b(self.plan.num_stages, self.micro_batches)
        return simulate(schedule, works, self.times.transfer)

    def filling(self) -> Filling | None:
        """What `fill` puts into the bubbles; None if they are not filled.

        Raises:
            OfframpError: stages share parameters that are trained.
        """
        if self.fill is None:
            return None
        if shared := self.shared_and_trained():
            raise OfframpError(
                f"fill_bubbles cannot be used where stages share trained parameters ({', '.join(shared)}); untie them, "
                "or set fill_bubbles to false."
            )
        works = self.works()
        if self.fill.ratio is not None:
            works = [replace(work, forward=1.0, backward=self.fill.ratio, heads=()) for work in works]
        return fill_bubbles(self, works, self.fill.warmup, self.fill.cooldown)

    def shared_and_trained(self) -> list[str]:
        """Names of trained parameters that several stages hold."""
        return [name for name in self.plan.shared if self.model.get_parameter(name).requires_grad]

    def bound(self, works: Sequence[StageWork]) -> float:
        """Upper bound on a step of plain 1F1B, in seconds."""
        return time_bound(works, self.micro_batches, self.times.transfer)


@dataclass(frozen=True)
class Filling:
    """Micro-batches put into the bubbles.

    Attributes:
        timeline: of the filled schedule.
        warmup: micro-batches put into the warm-up.
        cooldown: micro-batches put into the cool-down.
        capacity: K, what stages of equal times have room for in each part.
        shortfalls: where fewer are there than were asked for, one sentence each.
    """

    timeline: Timeline
    warmup: int
    cooldown: int
    capacity: int
    shortfalls: tuple[str, ...] = ()

    @property
    def inserted(self) -> int:
        """Micro-batches in both parts."""
        return self.warmup + self.cooldown

    def describe(self, micro_batches: int) -> str:
        """One sentence: how many, and how far they come."""
        backs = [sum(one.kind == "backward" for one in own) for own in self.timeline.schedule.operations]
        return (
            f"bubbles: {self.warmup} + {self.cooldown} micro-batches in the warm-up and the cool-down beside "
            f"{micro_batches} whole ones; by stage, {', '.join(map(str, backs))} of {micro_batches + self.inserted} "
            "give parameters a gradient"
        )


def fill_bubbles(
    estimator: Estimator, works: Sequence[StageWork], warmup: int | None = None, cooldown: int | None = None
) -> Filling:
    """Fill both parts of the bubble with as much as does not make the step longer.

    K is exact for stages of equal times. Where they differ, or messages take time, counts go down until the simulated
    step is as short as the plain one.

    Args:
        estimator: the plan.
        works: [S] what a micro-batch costs.
        warmup: at most so many in the warm-up; None: as many as fit.
        cooldown: at most so many in the cool-down; None: as many as fit.
    """
    stages, micro_batches = len(works), estimator.micro_batches
    plan, config = estimator.plan, estimator.model.config
    ratio = sum(w.seconds("backward") for w in works) / max(sum(w.seconds("forward") for w in works), 1e-30)
    capacity = bubble_capacity(stages, ratio)
    with_exits = [s for s in range(stages) if any(layer < config.num_layers for layer in plan.exits_of(s))]
    plain = estimator.run(works)
    best, counts = plain, ((), ())
    limit = plain.seconds * (1.0 + 1e-9)
    for count in range(capacity if warmup is None else min(warmup, capacity), 0, -1):
        early = warmup_counts(stages, count, ratio, with_exits)
        filled = estimator.run(works, one_f_one_b(stages, micro_batches, early))
        if filled.seconds <= limit:
            best, counts = filled, (early, ())
            break
    for count in range(capacity if cooldown is None else min(cooldown, capacity), 0, -1):
        late = cooldown_counts(stages, count, ratio)
        filled = estimator.run(works, one_f_one_b(stages, micro_batches, counts[0], late))
        if filled.seconds <= limit:
            best, counts = filled, (counts[0], late)
            break
    found = {"warmup": max(counts[0], default=0), "cooldown": max(counts[1], default=0)}
    shortfalls = tuple(
        f"fill_bubbles.{name}: {asked} micro-batches were asked for and {found[name]} are run; more would make the "
        f"step longer (stages alike have room for {capacity}), or would meet no exit"
        for name, asked in (("warmup", warmup), ("cooldown", cooldown))
        if asked is not None and asked > found[name]
    )
    return Filling(best, found["warmup"], found["cooldown"], capacity, shortfalls)


@dataclass(frozen=True)
class Variant:
    """One way to run a step.

    Attributes:
        name: in words.
        timeline: of it.
        bound: see `time_bound`; None for schedules that it does not speak of.
        runs: whether this is how `offramp fit` does it; the others are simulated only.
        note: what else there is to know.
        filling: if bubbles are filled.
    """

    name: str
    timeline: Timeline
    bound: float | None
    runs: bool = False
    note: str = ""
    filling: Filling | None = None


def compare(estimator: Estimator, warmup: int | None = None, cooldown: int | None = None) -> list[Variant]:
    """A step without early exits, with them, and with each optimisation; all on the same bounds of stages.

    Args:
        estimator: the plan.
        warmup: see `fill_bubbles`.
        cooldown: see `fill_bubbles`.
    """

    def variant(
        name: str, of: Estimator, runs: bool = False, early: bool = True, deferred: bool = True, again: bool = False
    ) -> Variant:
        works = of.works(early, deferred, checkpointing=again)
        return Variant(name, of.run(works), of.bound(works), runs)

    plan, chosen, again = estimator.plan, estimator.plan.exit_placement, estimator.checkpointing
    if not plan.exits.layers:
        return [
            variant("no early exits", estimator, not again, early=False),
            variant("activation checkpointing", estimator, again, again=True),
        ]
    variants = [variant("no early exits", estimator, early=False)]
    at_bounds = set(plan.exits.layers) & set(plan.bounds[1:-1])
    if at_bounds and chosen == "next_stage":
        ends = replace(estimator, plan=replace(plan, exit_placement="same_stage"))
        variants.append(variant("exits, at the end of their stage", ends, deferred=False))
        variants.append(variant("exits, at the start of the next", estimator, deferred=False))
    else:
        variants.append(variant("exits, computed in the forward pass", estimator, deferred=False))
    filled = estimator.filling()
    unfilled = filled is None or not filled.inserted
    variants.append(variant("exits, deferred to the backward pass", estimator, unfilled and not again))
    variants.append(variant("deferred, activation checkpointing", estimator, unfilled and again, again=True))
    works = estimator.works()
    if plan.num_stages > 1 and not plan.encoder_bounds:  # a T5's cannot be filled
        if shared := estimator.shared_and_trained():
            note = f"not with parameters that stages share ({', '.join(shared)})"
            variants.append(Variant("deferred, bubbles filled", estimator.run(works), None, note=note))
        else:
            name = "deferred, activation checkpointing, bubbles filled" if again else "deferred, bubbles filled"
            if filled is not None:  # its times are those that its counts came from, so run it with those of the plan
                filled = replace(filled, timeline=estimator.run(works, filled.timeline.schedule))
            filling = filled or fill_bubbles(estimator, works, warmup, cooldown)
            note = f"{filling.warmup} + {filling.cooldown} more micro-batches of at most {filling.capacity} each"
            variants.append(Variant(name, filling.timeline, None, not unfilled, note, filling))
    return variants


def _is_trained(module: nn.Module) -> bool:
    return any(parameter.requires_grad for parameter in module.parameters())


def _backward(seconds: Pass, trained: bool, flows: bool) -> float:
    """A backward pass makes gradients of weights and of the input, half its work each."""
    return seconds.backward * (int(trained) + int(flows)) / 2
