"""`trainer.strategy: deepspeed_pipeline`: a `MultiExitModule` on pipeline stages, on CPU (gloo) and CUDA.

One Lightning batch is one optimizer step: the strategy cuts it into micro-batches and runs the whole 1F1B schedule
and the step within `training_step`. So `global_step`, schedules, `max_steps` and checkpoint intervals all count
optimizer steps.

What the trainer may say with it: `devices` (times `num_nodes`) a multiple of `pipe`, the rest being data-parallel
replicas; `precision` 32-true, bf16-mixed or 16-mixed (autocast over fp32 weights); `gradient_clip_val` by norm;
`accumulate_grad_batches: 1`, since `micro_batches` says how a batch is cut. The steps of the module are not called, nor
are its hooks `on_before_backward`, `on_after_backward`, `on_before_optimizer_step` and `configure_gradient_clipping`.

The ranks of one pipeline read the same rows; `distributed_sampler_kwargs` speaks of data-parallel replicas.

Legend: S stages.
"""

from __future__ import annotations

import math
import os
from contextlib import contextmanager
from datetime import timedelta
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, cast

import torch
from lightning.fabric.utilities.seed import reset_seed
from lightning.pytorch.strategies import DeepSpeedStrategy
from lightning.pytorch.trainer.states import TrainerFn
from lightning.pytorch.utilities import rank_zero_info, rank_zero_warn
from torch import Tensor, nn
from typing_extensions import override

from offramp.common.errors import OfframpError
from offramp.common.families import AnyModel
from offramp.common.hf import read_json
from offramp.common.model.transformer import MultiExitTransformer
from offramp.common.t5.config import T5Config
from offramp.train.encoder_decoder import check_pipeline
from offramp.train.losses import ExitSums, MicroBatch, Objective
from offramp.train.module import MultiExitModule
from offramp.train.pipeline import checkpoints
from offramp.train.pipeline.costs import MicroBatchShape
from offramp.train.pipeline.engine import EarlyExitPipelineEngine, deepspeed_config, make_engine
from offramp.train.pipeline.estimate import Estimator
from offramp.train.pipeline.filling import FillSettings, arrange
from offramp.train.pipeline.loss_scale import LossScale
from offramp.train.pipeline.placement import Placement
from offramp.train.pipeline.quiet_deepspeed import use_device
from offramp.train.pipeline.registration import NAME, register_strategy
from offramp.train.pipeline.report import StageReport, stage_records, stage_table
from offramp.train.pipeline.schedule import Schedule
from offramp.train.pipeline.stage_module import StageModule
from offramp.train.pipeline.stages import ExitPlacement, StagePlan, plan_stages
from offramp.train.pipeline.tensor_parallel import check_tensor_parallel
from offramp.train.pipeline.times import estimated, matrix_speed
from offramp.train.stage_files import STAGES
from offramp.train.start_weights import StartWeights
from offramp.train.training_checkpoint import FILES, RECORD_FILE, remove

# isort: split
from deepspeed import comm as dist

if TYPE_CHECKING:
    from collections.abc import Iterator

    import lightning.pytorch as pl

register_strategy()

PRECISIONS = {"32-true": None, "bf16-mixed": torch.bfloat16, "16-mixed": torch.float16}
"""Allowed `trainer.precision`, and the dtype that stages compute in where it is not that of the weights."""

_LOSS_SCALE = "loss_scale"
"""Key of its state in Lightning's checkpoint."""


class DeepSpeedPipelineStrategy(DeepSpeedStrategy):
    """See the module.

    Args:
        pipe: stages, S.
        tensor: ranks that share every matrix of a stage; see `offramp.train.pipeline.tensor_parallel`. They exchange
            states in every layer, so they belong on one machine; neighbouring ranks are taken.
        micro_batches: parts that a batch is cut into. Parts may differ by a row, so any batch of at least as many rows
            will do; the bubble is (S - 1) / (micro_batches + S - 1) of a step.
        zero_stage: 1 divides the optimizer's state among data-parallel replicas.
        stage_bounds: last layer of every stage but the last, counted through an encoder and on through the decoder;
            None balances the cost.
        exit_placement: of exits between two stages; see `StagePlan`.
        checkpoint_activations: layers keep their input alone and run again in the backward pass; see `Stage`.
        fill_bubbles: put partial micro-batches into the idle time, beside the whole ones: `true` for as many as fit,
            or any of `warmup`, `cooldown` (counts) and `ratio` (of a backward to a forward pass); see `filling`.
        labelled_share: expected share of positions with a label, for balancing: only they meet the unembedding.
        timeout_minutes: how long a rank waits for another; then it ends and says which message it was.
        process_group_backend: None chooses gloo on CPU and nccl on CUDA.
    """

    strategy_name = NAME

    def __init__(
        self,
        pipe: int = 2,
        tensor: int = 1,
        micro_batches: int = 4,
        zero_stage: Literal[0, 1] = 0,
        stage_bounds: list[int] | None = None,
        exit_placement: ExitPlacement = "next_stage",
        checkpoint_activations: bool = False,
        fill_bubbles: bool | dict[str, Any] = False,
        labelled_share: float = 0.5,
        timeout_minutes: float = 30.0,
        process_group_backend: str | None = None,
    ) -> None:
        if pipe < 1 or tensor < 1 or micro_batches < 1:
            raise OfframpError(
                f"pipe is {pipe}, tensor {tensor} and micro_batches {micro_batches}; all must be at least 1."
            )
        if zero_stage not in (0, 1):
            raise OfframpError(f"zero_stage is {zero_stage}; pipeline parallelism allows 0 and 1.")
        super().__init__(
            config=deepspeed_config(zero_stage),
            logging_level=40,
            timeout=timedelta(minutes=timeout_minutes),
            process_group_backend=process_group_backend,
        )
        self.pipe, self.tensor, self.micro_batches, self.zero_stage = pipe, tensor, micro_batches, zero_stage
        self.stage_bounds, self.labelled_share = stage_bounds, labelled_share
        self.exit_placement: ExitPlacement = exit_placement
        self.checkpoint_activations = checkpoint_activations
        self.fill_settings = FillSettings.from_value(fill_bubbles)
        self.schedule: Schedule | None = None  # with partial micro-batches
        self.timeout_minutes = timeout_minutes
        self.stage_report: StageReport | None = None  # on rank 0, when the stages are made
        self._engine: EarlyExitPipelineEngine | None = None

    # ---- processes

    @property
    def data_parallel_size(self) -> int:
        """Replicas of the pipeline."""
        return self.placement.replicas

    @property
    def placement(self) -> Placement:
        """Which rank is what, on which node."""
        return Placement.of(self.pipe, self.tensor, self.num_nodes, self.num_processes)

    @property
    @override
    def distributed_sampler_kwargs(self) -> dict[str, int]:
        """Data-parallel replicas and this rank's number among them."""
        placement = self.placement
        return {"num_replicas": placement.replicas, "rank": placement.replica_of(self.global_rank)}

    @override
    def setup_environment(self) -> None:
        """Start the process group; unlike the stock strategy, on CPU as well."""
        precision = str(self.precision_plugin.precision)
        if precision not in PRECISIONS:
            raise OfframpError(
                f"trainer.precision {precision!r} is not supported by {NAME}; choose one of {', '.join(PRECISIONS)}."
            )
        placement = self.placement  # refuses ranks that would be left over, before any waits for another
        if self.num_nodes > 1:
            rank_zero_info(f"{self.num_nodes} nodes of {self.num_processes} processes: {placement.describe()}")
            if placement.splits_tensor_groups:
                rank_zero_warn(
                    f"ranks that share a stage lie on different nodes, and exchange states twice in every layer; let "
                    f"the processes of a node ({self.num_processes}) be a multiple of tensor ({self.tensor})"
                )
        super(DeepSpeedStrategy, self).setup_environment()

    @override
    def setup_distributed(self) -> None:
        """As the stock one, without its demand for CUDA device numbers."""
        use_device(self.root_device)
        reset_seed()
        self.set_world_ranks()
        self._init_deepspeed_distributed()

    @contextmanager
    @override
    def model_sharded_context(self) -> Iterator[None]:
        """Nothing of ZeRO-3 here."""
        yield

    # ---- model and optimizer

    def build_stages(self, model: AnyModel, start: StartWeights) -> StageModule:
        """This rank's stage of a model on the meta device; called by `MultiExitModule.configure_model`."""
        config, exits = model.config, model.exit_config
        module = self.module
        if isinstance(config, T5Config):
            check_pipeline(tensor=self.tensor, fills=self.fill_settings is not None)
        else:
            check_tensor_parallel(config, self.tensor, lora=module.lora is not None, compiled=module.compile_layers)
        plan = plan_stages(
            config, exits, self.pipe, self.stage_bounds, self.labelled_share, self.exit_placement, model.depth,
            self._source_share(),
        )  # fmt: skip
        if self.is_global_zero:
            self.stage_report = self._describe(plan, model)
            rank_zero_info(self.stage_report.text)
        shared = {name: holders for name, holders in plan.shared.items() if model.get_parameter(name).requires_grad}
        if self.num_nodes > 1 and (crossing := self.placement.describe_shared(shared)) is not None:
            rank_zero_info(crossing)
        if isinstance(model, MultiExitTransformer):
            self.schedule = self._filled(plan, model)
        return StageModule(model, plan, self.tensor, self.checkpoint_activations, start)

    def _source_share(self) -> float:
        """Source tokens for each target token, as far as the data say how many there are."""
        data = getattr(self.module.trainer, "datamodule", None)
        source, target = getattr(data, "source_length", None), getattr(data, "sequence_length", None)
        return source / target if source and target else 1.0

    def _describe(self, plan: StagePlan, model: AnyModel) -> StageReport:
        """The stage plan, at the speed that this device has now."""
        shape = self._micro_batch_shape(encoder=bool(plan.encoder_bounds))
        speed = matrix_speed(self.root_device, shape.mixed)
        estimator = self._estimator(plan, model, shape, speed)
        text = (
            f"stage plan for {self.micro_batches} micro-batches of {shape.describe()}, estimated at "
            f"{speed / 1e12:.3g} TFLOP/s:\n{stage_table(estimator)}"
        )
        return StageReport(text, stage_records(estimator))

    def _micro_batch_shape(self, encoder: bool) -> MicroBatchShape:
        """Without data that says how large a batch is, one row of 512 tokens."""
        data = getattr(self.module.trainer, "datamodule", None)
        rows = math.ceil(getattr(data, "batch_size", self.micro_batches) / self.micro_batches)
        mixed = PRECISIONS[str(self.precision_plugin.precision)] is not None
        time = getattr(data, "sequence_length", 512)
        source = round(time * self._source_share()) if encoder else 0
        return MicroBatchShape(rows, time, self.labelled_share, mixed, source)

    def _estimator(self, plan: StagePlan, model: AnyModel, shape: MicroBatchShape, speed: float) -> Estimator:
        return Estimator(
            plan, model, shape, estimated(model.config, plan.exits, shape, speed, "", tensor=self.tensor),
            self.micro_batches, self.data_parallel_size, self.zero_stage, self.checkpoint_activations,
            self.fill_settings, self.tensor,
        )  # fmt: skip

    def _filled(self, plan: StagePlan, model: MultiExitTransformer) -> Schedule | None:
        """1F1B with partial micro-batches, if asked for; the same on every rank, so from no measured speed."""
        if self.fill_settings is None:
            return None
        filling = self._estimator(plan, model, self._micro_batch_shape(encoder=False), speed=1e12).filling()
        if filling is None:
            return None
        for shortfall in filling.shortfalls:
            rank_zero_warn(shortfall)
        rank_zero_info(filling.describe(self.micro_batches))
        return filling.timeline.schedule if filling.inserted else None

    @override
    def setup(self, trainer: pl.Trainer) -> None:
        """Check what is to be trained, then make the engine."""
        module = self.module
        if type(module).training_step is not MultiExitModule.training_step:
            raise OfframpError(f"{type(module).__name__} does not run on {NAME}; train it with strategy: auto or ddp.")
        objective = module.run_objective.evaluated
        check_objective(objective, cast("StageModule", module.stages).stage.plan)
        if objective.depth_spread is not None and self.fill_settings is not None:
            raise OfframpError(
                "depth_spread is no sum over rows, so partial micro-batches in the bubbles would bias it; leave it or "
                "fill_bubbles out."
            )
        super().setup(trainer)

    @property
    def module(self) -> MultiExitModule:
        """The module that is trained."""
        module = self.lightning_module
        if not isinstance(module, MultiExitModule):
            raise OfframpError(f"{NAME} runs a MultiExitModule, not {type(module).__name__}.")
        return module

    @property
    def engine(self) -> EarlyExitPipelineEngine:
        """The engine of this rank."""
        assert self._engine is not None, "the engine is made by setup"
        return self._engine

    @override
    def _format_config(self) -> None:
        # The stock one turns bf16-mixed into bf16 weights, and micro-batches into Lightning's accumulation.
        assert isinstance(self.config, dict)
        self.config["gradient_clipping"] = float(self.module.trainer.gradient_clip_val or 0.0)

    @override
    def _initialize_deepspeed_train(self, model: nn.Module) -> None:
        optimizer, scheduler = self._init_optimizers()
        self.model = engine = self._make_engine(optimizer)
        self.optimizers = [cast("torch.optim.Optimizer", engine.optimizer)]
        # Lightning steps the schedule, once per batch; the optimizers of ZeRO share the groups of the one within them.
        self.lr_scheduler_configs = [] if scheduler is None else [scheduler]

    @override
    def _initialize_deepspeed_inference(self, model: nn.Module) -> None:
        self.model = self._make_engine(None)

    def _make_engine(self, optimizer: torch.optim.Optimizer | None) -> EarlyExitPipelineEngine:
        if self._engine is not None:  # of an earlier fit or validate of this trainer
            self._engine.release()
        config = dict(cast("dict[str, Any]", self.config))
        if optimizer is None:
            config.pop("zero_optimization")
        self._engine = engine = make_engine(cast("StageModule", self.module.stages), config, optimizer)
        engine.links.limit_to(timedelta(minutes=self.timeout_minutes))
        engine.autocast_dtype = PRECISIONS[str(self.precision_plugin.precision)]
        engine.fp16_scale = LossScale() if engine.autocast_dtype == torch.float16 else None
        return engine

    # ---- steps

    @property
    @override
    def handles_gradient_accumulation(self) -> bool:
        """There is none: a batch is a step."""
        return False

    @override
    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        """Forward, backward and optimizer step."""
        module, engine = self.module, self.engine
        parts = self.micro_batches + (0 if self.schedule is None else self.schedule.inserted)
        if batch_idx == 0 and len(batch[0]) < parts:
            inserted = f" ({parts - self.micro_batches} of them in bubbles)" if self.schedule is not None else ""
            raise OfframpError(
                f"a batch of {len(batch[0])} rows cannot be cut into {parts} micro-batches{inserted}; enlarge the "
                "batch or lower micro_batches."
            )
        micro = module.prepare(batch, training=True)
        engine.objective = module.objective
        counts = engine.objective.counts(micro)
        if self.data_parallel_size > 1:
            with engine.watched("the counts of tokens of all replicas"):
                dist.all_reduce(counts, group=engine.grid.get_data_parallel_group())
        scale = None if engine.fp16_scale is None else engine.fp16_scale.value  # of this step
        if self.schedule is None or micro.tokens.num_rows < parts:  # a last batch may be small
            sums = engine.train_batch(micro.split(self.micro_batches), counts)
        else:
            queue = arrange(micro, self.schedule, module.seed, module.global_step)
            sums = engine.train_batch(queue, counts, self.schedule)
            rows = {f"train/rows_stage_{s:02d}": float(count) for s, count in enumerate(engine.backward_rows)}
            module.log_dict(rows, on_step=True, on_epoch=False, batch_size=1)
        if scale is not None and engine.fp16_scale is not None:
            own = {"train/loss_scale": scale, "train/overflows": float(engine.fp16_scale.overflows)}
            module.log_dict(own, on_step=True, on_epoch=False, batch_size=1)
        first = engine.is_first_stage() and engine.module.tensor_rank == 0
        tokens, length = micro.tokens, micro.tokens.input_ids.shape[1]
        positions = tokens.num_rows * tokens.row_length if first else 0
        module.log_training(sums, positions, length, engine.grad_norm)
        # The engine has left the step out already, if there was reason to.
        module.watch_step(engine.grad_norm, scaled=engine.overflowed)
        return torch.zeros((), device=self.root_device)

    @override
    def backward(self, closure_loss: Tensor, *args: Any, **kwargs: Any) -> Tensor:
        """Done in `training_step`."""
        return closure_loss

    @override
    def optimizer_step(self, optimizer: Any, closure: Any, *args: Any, **kwargs: Any) -> Any:
        """Done in `training_step`, which the closure calls."""
        return closure()

    @override
    def validation_step(self, batch: Any, *args: Any) -> None:
        """Forward of a batch of any shape."""
        self.module.add_evaluated(self.evaluate(self.module.prepare(batch, training=False)))

    def evaluate(self, micro: MicroBatch) -> ExitSums:
        """Sums over a batch of the exits on this stage, without gradients."""
        self.engine.objective = self.module.run_objective.evaluated
        return self.engine.eval_batch(micro.split(self.micro_batches))

    @override
    def test_step(self, batch: Any, *args: Any) -> None:
        """As `validation_step`."""
        self.validation_step(batch)

    @override
    def reduce(self, tensor: Any, group: Any = None, reduce_op: Any = "mean") -> Any:
        """As the stock one, but a process that does not answer in time is said so."""
        if self._engine is None:
            return super().reduce(tensor, group, reduce_op)
        with self._engine.watched("sums of metrics over all processes"):
            return super().reduce(tensor, group, reduce_op)

    # ---- checkpoints

    @override
    def save_checkpoint(self, checkpoint: dict[str, Any], filepath: Any, storage_options: Any = None) -> None:
        """Write a directory, whole or not at all; see `offramp.train.pipeline.checkpoints`."""
        if self.engine.fp16_scale is not None:
            checkpoint[_LOSS_SCALE] = self.engine.fp16_scale.state_dict()
        with self.engine.watched(f"all parts of {filepath}"):
            checkpoints.save(self.engine, checkpoint, Path(self.broadcast(os.fspath(filepath))), self._layout())

    @override
    def remove_checkpoint(self, filepath: Any) -> None:
        """Remove a directory."""
        if self.is_global_zero:
            remove(Path(filepath))

    @override
    def load_checkpoint(self, checkpoint_path: Any, weights_only: bool | None = None) -> dict[str, Any]:
        """Resume on any layout of processes, or load weights to evaluate them.

        Raises:
            OfframpError: this is no checkpoint of this strategy, or it is damaged.
        """
        path = Path(self.broadcast(os.fspath(checkpoint_path)))
        if not (path / RECORD_FILE).is_file():
            raise OfframpError(
                f"{path} is not a checkpoint of {NAME}; turn it into a checkpoint directory with 'offramp export' and "
                "start from that."
            )
        record = read_json(path / RECORD_FILE)
        with self.engine.watched(f"{path} to be looked through"):
            checkpoints.verify(path, record.get(FILES, {}))
        if self.module.trainer.state.fn != TrainerFn.FITTING:
            self.engine.module.load_stages(path / STAGES)
            return {"pytorch-lightning_version": record["lightning"], "state_dict": {}, "global_step": 0, "epoch": 0}
        schedules = [config.scheduler for config in self.lr_scheduler_configs]
        if record["processes"] != self._layout():
            rank_zero_info(f"{path} was written by {record['processes']}, and goes on with {self._layout()}")
        checkpoint = checkpoints.load(self.engine, path, schedules[0] if schedules else None)
        if self.engine.fp16_scale is not None and _LOSS_SCALE in checkpoint:
            self.engine.fp16_scale.load_state_dict(checkpoint[_LOSS_SCALE])
        return checkpoint

    def _layout(self) -> dict[str, Any]:
        plan = self.engine.module.stage.plan
        encoder = {"encoder_bounds": list(plan.encoder_bounds)} if plan.encoder_bounds else {}
        return {
            "stage_bounds": list(plan.bounds),
            **encoder,
            "tensor_parallel": self.tensor,
            "exit_placement": self.exit_placement,
            "data_parallel": self.data_parallel_size,
            "zero_stage": self.zero_stage,
        }


def check_objective(objective: Objective, plan: StagePlan) -> None:
    """Raise `OfframpError` if the objective needs exits together that lie on different stages."""
    early = {stage: layers for stage in range(plan.num_stages) if (layers := plan.exits_of(stage))}
    before = [layer for stage, layers in early.items() if stage < plan.num_stages - 1 for layer in layers]
    if objective.distill > 0.0 and before:
        raise OfframpError(
            f"distill {objective.distill} needs the final logits, which the exits {before} before the last stage do "
            "not see; set distill to 0, or choose stage_bounds before the first of them."
        )
    if objective.depth_spread is not None:
        apart = [list(layers) for layers in early.values() if set(layers) - {objective.final_layer}]
        if len(apart) > 1:
            raise OfframpError(
                f"depth_spread compares early exits with each other, but the stages hold those of {apart}; choose "
                "stage_bounds that leave all of them on one stage, or leave depth_spread out."
            )
