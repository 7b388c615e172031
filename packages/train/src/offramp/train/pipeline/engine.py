"""DeepSpeed's `PipelineEngine` with a loss on every stage: auxiliary-loss back-propagation (EE-LLM, section 3.1).

Stage i holds the losses of its own exits, L_i, and receives g_i, the gradient of everything later with respect to its
output x_i. The gradient of L_i + <g_i, x_i> with respect to its parameters and its input is that of the whole
objective. No inner product is formed: autograd starts from x_i with g_i, and again from each state that an exit reads.

What an exit reads is remembered in the forward pass, its logits are computed in the backward pass, one exit after the
other, each when the layers above it are done (`back_propagation`). So no stage ever holds the logits of more than one
exit and one micro-batch.

DeepSpeed gives the optimizers (ZeRO-0 and 1) and process groups. The operations of a step and their order are Offramp's
own (`schedule`, `exchange`): what is planned and simulated is what runs. The comments say what the stock engine does
that does not fit.

Legend: B batch, T time, D model, S stages, X exits.
"""

from __future__ import annotations

import contextlib
import math
from collections.abc import Iterator, Sequence
from itertools import zip_longest
from typing import Any, NamedTuple, cast

import torch
from torch import Tensor, nn
from torch.distributed import ProcessGroup

from offramp.common.model.layout import BatchLayout
from offramp.train.agreement import NOT_ASKED, Predictions
from offramp.train.losses import ExitLosses, ExitSums, MicroBatch, Objective
from offramp.train.pipeline import quiet_deepspeed  # noqa: F401 - before deepspeed
from offramp.train.pipeline.averaging import average_gradients
from offramp.train.pipeline.back_propagation import back_propagate, back_propagate_loss
from offramp.train.pipeline.exchange import Exchange, Links, name_of, watched
from offramp.train.pipeline.filling import Weights, backward_rows, rows_of
from offramp.train.pipeline.loss_scale import LossScale
from offramp.train.pipeline.schedule import Kind, Operation, Schedule, forward_only, one_f_one_b
from offramp.train.pipeline.stage_module import StageModule
from offramp.train.pipeline.stages import Cut

# isort: split
import deepspeed
from deepspeed import comm as dist
from deepspeed.runtime.base_optimizer import ZeROOptimizer
from deepspeed.runtime.config import DeepSpeedConfig
from deepspeed.runtime.pipe.engine import PipelineEngine


class _InFlight(NamedTuple):
    """A micro-batch between its forward and its backward pass.

    Attributes:
        number: in the schedule.
        micro_batch: its tokens.
        layout: of them.
        received: [B, T] token ids or [B, T, D] states that this stage read.
        output: [B, T, D] states that it sent on.
        cuts: what its exits read.
        carried: what its layers read beside the states.
    """

    number: int
    micro_batch: MicroBatch
    layout: BatchLayout
    received: Tensor
    output: Tensor
    cuts: dict[int, Cut]
    carried: tuple[Cut, ...]


class EarlyExitPipelineEngine(PipelineEngine):
    """Runs one optimizer step, or one evaluation, over a list of micro-batches.

    Attributes:
        objective: of the next step or evaluation; set it before.
        autocast_dtype: None computes in the parameters' dtype.
        fp16_scale: on losses under fp16, or None (`loss_scale` is a method of the parent).
        overflowed: whether the last step was skipped because gradients of scaled losses were not finite.
        grad_norm: of the last step, before clipping; infinite if the step was skipped.
        backward_rows: [S] rows of the last step, on this replica, that gave each stage's parameters a gradient.
    """

    module: StageModule
    device: torch.device
    dp_world_size: int

    def __init__(self, **kwargs: Any) -> None:
        super().__init__(**kwargs)
        self.objective: Objective | None = None
        self.autocast_dtype: torch.dtype | None = None
        self.fp16_scale: LossScale | None = None
        self.overflowed = False
        self.grad_norm = 0.0
        self.backward_rows: tuple[int, ...] = ()
        self.links = Links(self.grid, self.module.groups)
        if isinstance(self.optimizer, ZeROOptimizer):
            setattr(self.optimizer, "scaled_global_norm", self._zero_norm)  # noqa: B010 - see there
        self._queue: Sequence[MicroBatch] = ()
        self._in_flight: dict[int, _InFlight] = {}
        self._whole = 0  # of the queue's micro-batches, those that go all the way
        self._weights = Weights.even(self.num_stages)
        self._counts = torch.zeros(0)
        self._sums: ExitSums | None = None
        trained = torch.zeros(self.num_stages, device=self.device)
        trained[self.stage_id] = float(self.module.stage.trains_backbone)
        if self.is_pipe_parallel:
            dist.all_reduce(trained, group=self.grid.get_pipe_parallel_group())
        self._trains_backbone = trained.bool().tolist()

    def release(self) -> None:
        """Let go of the module, so that another engine can have it."""
        for hook in (self.module_forward_pre_hook, self.module_forward_post_hook):
            if hook is not None:
                hook.remove()
        self.destroy()

    # ---- the two things it does

    def train_batch(  # pyright: ignore
        self, micro_batches: Sequence[MicroBatch], counts: Tensor, schedule: Schedule | None = None
    ) -> ExitSums:
        """Forward, backward and optimizer step.

        Args:
            micro_batches: this data-parallel rank's part of the batch; the same on all of its stages. Shapes may
                differ.
            counts: [X] trained tokens of each exit in the whole global batch.
            schedule: with partial micro-batches, which `filling.arrange` has put into `micro_batches`; None is 1F1B.

        Returns:
            Sums over this rank's tokens of the exits that lie on this stage, zero for the others; all zero on tensor
            ranks other than the first, which have the same.
        """
        self.module.train()
        self._counts = counts
        schedule = schedule or one_f_one_b(self.num_stages, len(micro_batches))
        rows = rows_of(schedule, micro_batches)
        self._weights, self.backward_rows = Weights.of(schedule, rows), backward_rows(schedule, rows)
        sums = self._run(micro_batches, schedule)
        with self.watched("sums of gradients over all processes"):
            if self._unscale():
                self._spread_the_word()
                self._reduce_shared_gradients()
                self._reduce_gradients()
                self._step()
        return sums

    @torch.no_grad()
    def eval_batch(self, micro_batches: Sequence[MicroBatch]) -> ExitSums:  # pyright: ignore
        """Forward only; returns sums as `train_batch` does."""
        was_training = self.module.training
        self.module.eval()
        assert self.objective is not None
        self._counts = torch.ones(len(self.objective.layers))  # only scale a loss that nobody reads
        self._weights = Weights.even(self.num_stages)
        try:
            return self._run(micro_batches, forward_only(self.num_stages, len(micro_batches)))
        finally:
            self.module.train(was_training)

    def _run(self, micro_batches: Sequence[MicroBatch], schedule: Schedule) -> ExitSums:
        assert self.objective is not None
        self._queue, self._sums = micro_batches, ExitSums(self.objective.layers, self.device)
        self._whole = schedule.micro_batches
        exchange = Exchange(self.links, schedule, self._empty_message, self._carries)
        operations = schedule.operations[self.stage_id]
        returning = {one.micro_batch for one in operations if one.kind == "backward"}
        # One region around all micro-batches lets autocast convert each weight once per step.
        with self._autocast():
            for operation, following in zip_longest(operations, operations[1:]):
                exchange.prepare(operation)
                if following is not None:
                    exchange.prepare(following)  # comes while this one is computed
                with self._watched_sums(operation):
                    if operation.kind == "forward":
                        with torch.set_grad_enabled(operation.micro_batch in returning):  # others keep nothing
                            self._forward(operation.micro_batch, exchange)
                    else:
                        self._backward(operation.micro_batch, exchange)
            exchange.finish()
        with self.watched("the predictions of the last stage"):
            self._sums.compare(self._final_predictions())
        self._queue = ()
        if self.module.tensor_rank:
            self._sums.values.zero_()
        return self._sums

    def _final_predictions(self) -> Tensor | None:
        """[P] what the final exit, on the last stage, says at every position of the queue."""
        assert self.objective is not None
        assert self._sums is not None
        said = self._sums.predictions.of(self.objective.final_layer)
        if not self.is_pipe_parallel:
            return said
        if said is None:
            positions = sum(micro.tokens.input_ids.numel() for micro in self._queue[: self._whole])
            said = torch.full((positions,), NOT_ASKED, dtype=torch.int32, device=self.device)
        last = self.grid.stage_to_global(stage_id=self.num_stages - 1)
        dist.broadcast(said, last, group=self.grid.get_pipe_parallel_group())
        return said

    # ---- operations of the schedule

    def _forward(self, micro_batch: int, exchange: Exchange) -> None:
        micro, operation = self._queue[micro_batch], Operation("forward", micro_batch)
        layout = self.module.stage.layout(micro)
        if isinstance(self.optimizer, ZeROOptimizer):
            self.optimizer.clear_backward_seen_flag()
        x = micro.tokens.input_ids
        if exchange.expects(operation):
            x = exchange.receive(operation)
            x.requires_grad_(torch.is_grad_enabled() and exchange.sends(Operation("backward", micro_batch)))
        # The module itself, not DeepSpeedEngine.forward, whose output hooks divide by the number of micro-batches and
        # clear gradients in the middle of the backward pass.
        output, cuts, carried = self.module(x, layout)
        if exchange.sends(operation):
            exchange.send(operation, output.detach().contiguous())
        running = _InFlight(micro_batch, micro, layout, x, output, cuts, carried)
        if torch.is_grad_enabled():
            self._in_flight[micro_batch] = running
        elif not self.module.training:
            with self._losses(running) as losses:
                for _ in losses:
                    pass

    def _backward(self, micro_batch: int, exchange: Exchange) -> None:
        running, operation = self._in_flight.pop(micro_batch), Operation("backward", micro_batch)
        self._running_engine_backward = True
        try:
            self._backward_prologue()  # clears low-precision gradients, so it must come before any backward pass
            with self._losses(running) as losses:
                for loss in losses.spread():  # of all early exits together, so it cannot wait for their turns
                    back_propagate_loss(loss)
                back_propagate(
                    running.output,
                    exchange.receive(operation) if exchange.expects(operation) else None,
                    running.cuts,
                    losses.of,
                    running.carried,
                )
            self._backward_epilogue()
        finally:
            self._running_engine_backward = False
        if exchange.sends(operation):
            received = running.received
            gradient = torch.zeros_like(received) if received.grad is None else received.grad
            factor = self._weights.of_message(micro_batch, self.stage_id)
            exchange.send(operation, gradient if factor == 1.0 else gradient.mul_(factor))

    @contextlib.contextmanager
    def _losses(self, running: _InFlight) -> Iterator[ExitLosses]:
        assert self.objective is not None
        assert self._sums is not None
        stage, states = self.module.stage, {layer: cut.above for layer, cut in running.cuts.items()}
        readers = {layer: stage.reader(layer) for layer in states}
        # Optimizers average gradients over data-parallel ranks, and the counts are those of all ranks together.
        factor = self.dp_world_size * self._weights.of_loss(running.number, self.stage_id)
        if self.fp16_scale is not None:
            factor *= self.fp16_scale.value
        said = self._sums.predictions
        if not 0 <= running.number < self._whole:
            self._sums.predictions = Predictions()  # not every exit is asked about this one
        try:
            yield ExitLosses(
                self.objective, readers, states, running.micro_batch, running.layout, self._counts, self._sums, factor
            )
        finally:
            self._sums.predictions = said

    def watched(self, what: str) -> contextlib.AbstractContextManager[None]:
        """Around something that all processes do together: one that does not answer in time is said so."""
        return watched(self.links.name, what, "another process", self.links.limit)

    def _watched_sums(self, operation: Operation) -> contextlib.AbstractContextManager[None]:
        """Around an operation, in which ranks that share a stage add up every layer; messages are watched as they are.

        One watch for all of its sums, which are many.
        """
        if self.module.sharding is None:
            return contextlib.nullcontext()
        what = f"sums among the tensor ranks in {name_of(operation)}"
        return watched(self.links.name, what, "another rank of the stage", self.links.limit)

    def _carries(self, kind: Kind, sender: int) -> bool:
        """Whether a stage sends; where nothing below is trained, gradients of states would be computed for nobody."""
        return kind == "forward" or any(self._trains_backbone[:sender])

    def _empty_message(self, operation: Operation) -> Tensor:
        # The stock engine negotiates one shape for the whole run. Here it follows from the micro-batch, so sequences
        # and last batches of any size need no message.
        tokens = self._queue[operation.micro_batch].tokens
        size = self.module.stage.plan.config.hidden_size
        return torch.empty(
            tokens.num_rows, tokens.row_length, size, dtype=next(self.module.parameters()).dtype, device=self.device
        )

    # ---- after the last backward pass

    def _unscale(self) -> bool:
        """Whether there is a step to make; see `LossScale`."""
        self.overflowed = False
        if self.fp16_scale is None:
            return True
        gradients = (parameter.grad for parameter in self.module.parameters() if parameter.grad is not None)
        assert self._sums is not None
        if self.fp16_scale.unscale(gradients, self._sums.values, self.device):
            return True
        self.module.zero_grad()
        self.grad_norm, self.overflowed = math.inf, True
        self.skipped_steps += 1
        return False

    def _reduce_shared_gradients(self) -> None:
        self.module.sum_partial_gradients()
        for parameter, group in self.module.get_tied_weights_and_groups():
            if parameter.grad is None:  # no token reached it here; leaving it out would block the others
                parameter.grad = torch.zeros_like(parameter)
            dist.all_reduce(parameter.grad, group=group)

    def _reduce_gradients(self) -> None:
        if self.zero_optimization():
            # ZeRO counts a missing gradient as zero, but passes over it when it adds up those of the replicas: they
            # would add up different ones where only some have it, as after a loss that is not finite.
            for parameter in self.module.parameters():
                if parameter.requires_grad and parameter.grad is None:
                    parameter.grad = torch.zeros_like(parameter)
            self._exec_reduce_grads()
        elif self.is_data_parallel:
            average_gradients(self.module.parameters(), cast("ProcessGroup", self.grid.get_data_parallel_group()))

    def _step(self, lr_kwargs: dict[str, Any] | None = None) -> None:
        if not self.zero_optimization():
            self._clip()
            if not math.isfinite(self.grad_norm):  # ZeRO's optimizer leaves out such a step by itself
                self.zero_grad()
                return
        self._exec_optimizer_step(lr_kwargs)
        if self.zero_optimization():
            self.grad_norm = float(self._global_grad_norm or 0.0)

    def _spread_the_word(self) -> None:
        """Let a loss that is not finite make the gradient so too: its norm is what all ranks learn of.

        Before shared gradients are added up: the norm counts those on another stage.
        """
        assert self._sums is not None
        if not bool(self._sums.values.isfinite().all()):
            for parameter in self.module.parameters():
                if parameter.requires_grad:  # also of a stage whose loss reaches nothing that is trained
                    parameter.grad = torch.full_like(parameter, math.nan)

    def _clip(self) -> None:
        """Global gradient norm over stages and tensor ranks, every parameter counted once, and clipping by it."""
        gradients = [(p, p.grad) for p in self.module.parameters() if p.grad is not None]
        own = [g for p, g in gradients if self.module.counted(p)]
        squares = torch.zeros((), dtype=torch.float64, device=self.device)
        if own:
            squares = torch.nn.utils.get_total_norm(own).to(squares).square()
        if self.is_pipe_parallel or self.is_model_parallel:
            dist.all_reduce(squares, group=self.grid.get_model_parallel_group())
        self.grad_norm = float(squares.sqrt())
        if gradients and 0.0 < self.gradient_clipping() < self.grad_norm:
            scale = self.gradient_clipping() / (self.grad_norm + 1e-6)  # as torch.nn.utils.clip_grad_norm_
            torch._foreach_mul_([gradient for _, gradient in gradients], scale)

    def _zero_norm(self, norm_type: float = 2) -> Tensor:
        """Global gradient norm under ZeRO, all groups of parameters in one sum.

        The stock one asks all stages once for each of its groups (matrices, vectors, exits). Stages need not have
        equally many, and then some would wait for ever.
        """
        zero: Any = self.optimizer
        pairs: list[tuple[Tensor, nn.Parameter]] = []
        for group, parameters in enumerate(zero.params_in_partition):
            own = (g for g in zero.averaged_gradients[group] if not getattr(g, "_zero_padding", False))
            pairs += zip(own, parameters, strict=False)
        return zero.get_grad_norm_direct([g for g, _ in pairs], [p for _, p in pairs], norm_type)

    def clip_fp32_gradients(self) -> None:
        """Done in `_clip`: the stock method counts the parameters of the first stage only."""

    def _autocast(self) -> contextlib.AbstractContextManager[Any]:
        if self.autocast_dtype is None:
            return contextlib.nullcontext()
        return torch.autocast(self.device.type, self.autocast_dtype)


def deepspeed_config(zero_stage: int = 0, gradient_clipping: float = 0.0) -> dict[str, Any]:
    """What DeepSpeed is left to do of a step.

    Args:
        zero_stage: 0, or 1 for optimizer states in parts.
        gradient_clipping: largest norm of all gradients together; 0 leaves them as they are.
    """
    return {
        "train_micro_batch_size_per_gpu": 1,  # it only checks and reports it
        "gradient_accumulation_steps": 1,
        "gradient_clipping": gradient_clipping,
        "zero_optimization": {
            "stage": zero_stage,
            "overlap_comm": False,
            "reduce_bucket_size": 5_000_000,
            "allgather_bucket_size": 5_000_000,
        },
        "zero_allow_untested_optimizer": True,
        "steps_per_print": None,
    }


def make_engine(
    module: StageModule, config: dict[str, Any], optimizer: torch.optim.Optimizer | None = None
) -> EarlyExitPipelineEngine:
    """`deepspeed.initialize`, which always makes the stock engine, for ours.

    Args:
        module: this rank's stage.
        config: see `deepspeed_config`.
        optimizer: over the stage's trainable parameters; None to evaluate only.
    """
    grid = module.mpu()
    # The stock engine would cut states into parts between tensor ranks; ours sends them whole.
    config = {**config, "pipeline": {"pipe_partitioned": False, "grad_partitioned": False}}
    parsed = DeepSpeedConfig(config, grid)
    deepspeed.set_optimizer_flags(parsed, module)
    engine = EarlyExitPipelineEngine(
        args=None,
        model=module,
        optimizer=optimizer,
        model_parameters=[parameter for parameter in module.parameters() if parameter.requires_grad],
        mpu=grid,
        dist_init_required=False,
        config=config,
        config_class=parsed,
    )
    engine._configure_python_gc()
    return engine
