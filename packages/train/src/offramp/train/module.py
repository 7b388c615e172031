"""`MultiExitModule`: multi-exit language modelling as a LightningModule.

One Lightning batch is this data-parallel rank's share of one optimizer step. In one process or under DDP the steps
below run it as it is; the strategy `deepspeed_pipeline` runs the same objective on its stages instead of
`training_step` and `validation_step`, and reports through the same methods, so losses, gradients and names of metrics
do not depend on it.

Legend: B batch, T time (of targets for an encoder-decoder model), D model, X exits.
"""

from __future__ import annotations

import math
import os
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any, cast

import lightning.pytorch as pl
import torch
from torch import Tensor, nn
from typing_extensions import override

from offramp.common.checkpoint import EXITS_JSON, AnyCheckpoint, CheckpointOf, open_any_checkpoint
from offramp.common.errors import OfframpError
from offramp.common.exits.config import ExitConfig
from offramp.common.exits.policy import ExitPolicy
from offramp.common.families import AnyConfig, AnyModel, make_model, read_config
from offramp.common.hf import read_json
from offramp.common.model.transformer import MultiExitTransformer
from offramp.common.t5.config import T5Config
from offramp.train.data.batch import AnyBatch, PairBatch, TokenBatch
from offramp.train.data.loader import BatchLoader
from offramp.train.device_peaks import peak_flops as known_peak
from offramp.train.encoder_decoder import check_module
from offramp.train.evaluation import Evaluation
from offramp.train.exit_weights import WeightRule
from offramp.train.fill_aware import check_probabilities, draw_exit_depths
from offramp.train.freezing import BACKBONE, freeze_parameters, untrained
from offramp.train.layer_dropout import LayerDropout
from offramp.train.lora import LoraConfig, add_lora
from offramp.train.losses import ExitLosses, ExitSums, MicroBatch, Objective, exit_reader
from offramp.train.model_flops import ModelFlops
from offramp.train.model_input import enter
from offramp.train.nonfinite import LOWEST_SCALE, NonfiniteGuard, OnNonfinite, scale_fault
from offramp.train.objective import ObjectiveConfig, RunObjective
from offramp.train.optim import OptimizerConfig, make_optimizer
from offramp.train.pipeline.registration import register_strategy
from offramp.train.random_state import RandomStates
from offramp.train.start_weights import StartWeights
from offramp.train.step_meter import StepMeter
from offramp.train.training_record import RECORD, make_record, plain

register_strategy()

_GUARD = "nonfinite"
"""Key of its state in a checkpoint."""


class MultiExitModule(pl.LightningModule):
    """Trains a checkpoint directory: the final exit and all early ones together.

    Args:
        checkpoint: directory with `config.json`, `exits.json` and, unless `from_scratch`, weights.
        exit_weights: weight of each early exit in the loss, in the order of their layers; 0.3 each if None. Or the
            name of a rule that weighs all exits; see `offramp.train.exit_weights`.
        final_weight: weight of the final exit, 1 if None; a rule makes its own. Layers above the deepest exit with a
            weight are frozen, and neither loaded nor run, unless weights are drawn (`from_scratch`) or the objective
            reads the states of exits above it.
        objective: how weights change over time, and what is minimised at exits beside cross-entropy.
        layer_dropout: rows skip layers at random while training; see `offramp.train.layer_dropout`.
        fill_aware: exit layer -> probability that a target token is frozen there while training; see
            `offramp.train.fill_aware`.
        freeze: what stays as it is: names of parameters or modules, patterns of names (`layers.*.mlp.*`), or
            `backbone`.
        lora: train low-rank corrections of the backbone's matrices instead of the backbone; see `offramp.train.lora`.
        from_scratch: start with random weights.
        compile_layers: compile each layer with `torch.compile`, which fuses what is not a matrix product. Needs a C++
            compiler on CPU, takes a while at the start, and changes rounding.
        seed: of random weights and random exit depths.
        optimizer: learning rates, weight decay and schedule.
        on_nonfinite: when the loss or the gradient is infinite or no number, `stop` the run or `skip` the step; see
            `offramp.train.nonfinite`.
        peak_tflops: of each device, in 10^12 operations per second, for `train/mfu`; None is what is known of some
            GPUs (`offramp.train.device_peaks`), and without it there is no such metric.

    Attributes:
        losses_of_step: losses of the last step by name, such as `loss_exit_06`, over all ranks.
        kind_of_losses: what they are, in nats per token; those of validation are cross-entropies whatever is trained.
    """

    kind_of_losses = "cross-entropy"

    def __init__(
        self,
        checkpoint: str,
        exit_weights: list[float] | WeightRule | None = None,
        final_weight: float | None = None,
        objective: ObjectiveConfig | None = None,
        layer_dropout: LayerDropout | None = None,
        fill_aware: dict[int, float] | None = None,
        freeze: list[str] | None = None,
        lora: LoraConfig | None = None,
        from_scratch: bool = False,
        compile_layers: bool = False,
        seed: int = 0,
        optimizer: OptimizerConfig | None = None,
        on_nonfinite: OnNonfinite = "stop",
        peak_tflops: float | None = None,
    ) -> None:
        super().__init__()
        self.save_hyperparameters()
        self.checkpoint = checkpoint
        self.exit_weights: list[float] | WeightRule | None = exit_weights
        self.final_weight = final_weight
        self.objective_config, self.layer_dropout = objective or ObjectiveConfig(), layer_dropout
        self.fill_aware = {int(layer): float(share) for layer, share in (fill_aware or {}).items()}
        self.freeze_patterns = list(freeze or ())
        self.lora = lora
        self.from_scratch, self.compile_layers, self.seed = from_scratch, compile_layers, seed
        self.optimizer_config = optimizer or OptimizerConfig()
        if peak_tflops is not None and not peak_tflops > 0.0:
            raise OfframpError(f"model.peak_tflops is {peak_tflops}; it must be above 0, or left out.")
        self.peak_tflops = peak_tflops
        self._guard = NonfiniteGuard(on_nonfinite)
        self.losses_of_step: dict[str, float] = {}
        # Exactly one of these two is there after `configure_model`.
        self.model: AnyModel | None = None
        self.stages: nn.Module | None = None
        self._source: AnyCheckpoint | None = None
        self._run_objective: RunObjective | None = None
        self._meter: StepMeter | None = None
        self._evaluation: Evaluation | None = None

    # ---- the model

    @override
    def configure_model(self) -> None:
        """Load or draw the weights; under `deepspeed_pipeline`, those of this process's part of the model."""
        if self._source is not None:
            return
        config, exits = self._configs()
        if isinstance(config, T5Config):
            lora, precision = self.lora is not None, str(self.trainer.precision)
            check_module(config, lora=lora, compiled=self.compile_layers, precision=precision)
        self._run_objective = RunObjective(
            self.objective_config, self.exit_weights, self.final_weight, exits.layers, config.num_layers
        )
        self._source, start = self._open(config, exits)
        model = self._source.model.train()  # on the meta device
        check_probabilities(self.fill_aware, model.exit_config.layers)
        backbone = [] if self.lora is None else [BACKBONE]
        widest = self._run_objective.widest
        freeze_parameters(model, [*self.freeze_patterns, *backbone, *untrained(model, widest)])
        if self.lora is not None:
            assert isinstance(model, MultiExitTransformer)
            add_lora(model, self.lora, widest.deepest)
        device, peak = self.trainer.strategy.root_device, self.peak_tflops
        peak_flops = known_peak(device, str(self.trainer.precision)) if peak is None else 1e12 * peak
        ranks = self.trainer.world_size
        flops = ModelFlops.of(model) if isinstance(model, MultiExitTransformer) else None
        self._meter = StepMeter(flops, device, peak_flops, self.trainer.global_rank, ranks)
        if self.compile_layers:
            compiler = os.environ.get("CXX", "g++")
            if self.trainer.strategy.root_device.type == "cpu" and shutil.which(compiler) is None:
                raise OfframpError(
                    f"model.compile_layers needs a C++ compiler, and there is no {compiler}; install one, name another "
                    "in CXX, or set compile_layers to false."
                )
            for block in model.layers:
                block.compile(dynamic=False)  # in place: names of parameters stay, and all layers share the code
        build_stages = getattr(self.trainer.strategy, "build_stages", None)
        if build_stages is None:
            start.materialise(model)
            self.model = model
        else:
            self.stages = build_stages(model, start)

    @property
    def decoder_start_token_id(self) -> int | None:
        """What the decoder reads first, None if there is no encoder; known before the model is loaded."""
        config = self._configs()[0]
        return config.decoder_start_token_id if isinstance(config, T5Config) else None

    @property
    def max_sequence_length(self) -> int | None:
        """Tokens that the model has positions for, None if there is no end; known before it is loaded."""
        config = self._configs()[0]
        return None if isinstance(config, T5Config) else config.max_position_embeddings

    @property
    def source(self) -> AnyCheckpoint:
        """The checkpoint that training starts from."""
        assert self._source is not None, "the model is loaded by configure_model"
        return self._source

    @property
    def run_objective(self) -> RunObjective:
        """What the run minimises, step by step."""
        assert self._run_objective is not None, "the objective is known after configure_model"
        return self._run_objective

    @property
    def objective(self) -> Objective:
        """What the current optimizer step minimises."""
        return self.run_objective.at(self.global_step)

    @property
    def exported_policy(self) -> ExitPolicy | None:
        """The exit policy that an exported checkpoint gets, but for its thresholds."""
        return self.source.policy

    def trained_parameters(self) -> Iterator[tuple[str, nn.Parameter]]:
        """Parameters of this process that are trained, under their names in the whole model."""
        network = self.model if self.model is not None else getattr(self.stages, "stage", None)
        assert network is not None
        yield from ((name, parameter) for name, parameter in network.named_parameters() if parameter.requires_grad)
        idle = getattr(self.stages, "idle", None)  # stands in on a stage where everything is frozen
        if idle is not None:
            yield "idle", idle

    @override
    def configure_optimizers(self) -> Any:
        """One optimizer and one schedule, stepped once per optimizer step."""
        parameters = list(self.trained_parameters())
        if not parameters:
            raise OfframpError(f"freeze {self.freeze_patterns} leaves nothing to train.")
        total = int(self.trainer.estimated_stepping_batches)
        optimizer, scheduler = make_optimizer(parameters, self.optimizer_config, total)
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": scheduler, "interval": "step"}}

    @override
    def configure_callbacks(self) -> list[pl.Callback]:
        """What belongs to every run."""
        known = any(isinstance(callback, RandomStates) for callback in getattr(self.trainer, "callbacks"))  # noqa: B009
        return [] if known else [RandomStates()]

    # ---- steps without a pipeline

    @override
    def setup(self, stage: str) -> None:
        """Check the trainer's settings."""
        if self.trainer.accumulate_grad_batches != 1:
            raise OfframpError(
                f"trainer.accumulate_grad_batches is {self.trainer.accumulate_grad_batches}, but one batch is one "
                "optimizer step here; set it to 1, enlarge the batch, and let the strategy deepspeed_pipeline (pipe: 1 "
                "is enough) cut it into micro_batches."
            )

    @override
    def training_step(self, batch: AnyBatch, batch_idx: int) -> Tensor:
        """The objective on a whole batch, with gradients that DDP's averaging makes those of the global batch."""
        micro, objective = self.prepare(batch, training=True), self.objective
        counts = self.sum_over_ranks(objective.counts(micro))
        sums = ExitSums(objective.layers, self.device)
        loss = torch.stack(list(self._losses(objective, micro, counts, sums, objective.trained_layers))).sum()
        sums.compare(sums.predictions.of(objective.final_layer))
        tokens = micro.tokens
        self.log_training(sums, tokens.num_rows * tokens.row_length, tokens.input_ids.shape[1])
        return loss * self.trainer.world_size

    @override
    def on_before_optimizer_step(self, optimizer: torch.optim.Optimizer) -> None:
        """Log the gradient norm before clipping."""
        gradients = [p.grad for _, p in self.trained_parameters() if p.grad is not None]
        norm = torch.nn.utils.get_total_norm(gradients)
        self.log("train/grad_norm", norm, on_step=True, on_epoch=False, batch_size=1)
        scaler = getattr(self.trainer.precision_plugin, "scaler", None)  # leaves out steps that overflow by itself
        if self.watch_step(norm := float(norm), scaled=scaler is not None):
            if scaler is not None and not math.isfinite(norm) and scaler.get_scale() <= LOWEST_SCALE:
                raise scale_fault(scaler.get_scale())
        else:
            for _, parameter in self.trained_parameters():
                parameter.grad = None  # an optimizer passes over parameters without a gradient

    @override
    def optimizer_step(self, *args: Any, **kwargs: Any) -> None:
        """As the stock one, but a loss that is not finite does not lower the scale of losses, which is not to blame."""
        scaler = getattr(self.trainer.precision_plugin, "scaler", None)
        scale = None if scaler is None else float(scaler.get_scale())
        super().optimizer_step(*args, **kwargs)
        if scaler is not None and not all(map(math.isfinite, self.losses_of_step.values())):
            scaler.update(scale)

    @override
    def validation_step(self, batch: AnyBatch, batch_idx: int, dataloader_idx: int = 0) -> None:
        """Add a batch to the sums of this evaluation."""
        self.add_evaluated(self._evaluate(self.prepare(batch, training=False)))

    def _evaluate(self, micro: MicroBatch) -> ExitSums:
        objective = self.run_objective.evaluated
        sums = ExitSums(objective.layers, self.device)
        assert self.model is not None
        reached = tuple(layer for layer in objective.layers if layer <= self.model.depth)
        for _ in self._losses(objective, micro, torch.ones(len(objective.layers)), sums, reached):
            pass
        sums.compare(sums.predictions.of(objective.final_layer))
        return sums

    @override
    def test_step(self, batch: AnyBatch, batch_idx: int, dataloader_idx: int = 0) -> None:
        """As `validation_step`."""
        self.validation_step(batch, batch_idx)

    def _losses(
        self, objective: Objective, micro: MicroBatch, counts: Tensor, sums: ExitSums, exit_layers: tuple[int, ...]
    ) -> ExitLosses:
        model = self.model
        assert model is not None
        h, layout = enter(model, micro)
        depth, states = 0, {}
        for layer in exit_layers:
            h, depth = model.run_layers(h, depth, layer, cast("Any", layout)), layer
            states[layer] = h
        readers = {layer: exit_reader(model, layer) for layer in states}
        return ExitLosses(objective, readers, states, micro, layout, counts, sums)

    # ---- what the pipeline strategy shares

    def prepare(self, batch: AnyBatch, training: bool) -> MicroBatch:
        """A batch with exit depths and skipped layers drawn for this step, or without in evaluation."""
        pairs = isinstance(self.source.model.config, T5Config)
        if not isinstance(batch, PairBatch if pairs else TokenBatch):
            wanted = "sources and targets (PairBatch)" if pairs else "tokens"
            raise OfframpError(f"{type(self).__name__} takes batches of {wanted}, not {type(batch).__name__}.")
        if not training:
            return MicroBatch(batch)
        num_layers, seed, step = self.run_objective.weights.num_layers, self.seed, self.global_step
        depths = draw_exit_depths(batch, self.fill_aware, num_layers, seed, step) if self.fill_aware else None
        dropout = self.layer_dropout
        return MicroBatch(batch, depths, None if dropout is None else dropout.draw(batch, num_layers, seed, step))

    def sum_over_ranks(self, values: Tensor) -> Tensor:
        """Sum over all processes."""
        return cast("Tensor", self.trainer.strategy.reduce(values, reduce_op="sum"))

    def log_training(self, sums: ExitSums, positions: int, length: int, grad_norm: float | None = None) -> None:
        """Log a step under stable names, with equal values on all ranks.

        Args:
            sums: of the tokens and exits that are this rank's alone.
            positions: input tokens that are this rank's alone, prompts, sources and padding included.
            length: T.
            grad_norm: before clipping.
        """
        meter = self._meter
        assert meter is not None, "the model is loaded by configure_model"
        own = sums.values.new_tensor(meter.measure(positions))
        packed = self.sum_over_ranks(torch.cat((sums.values.flatten(), own)))  # one message for all of it
        sums = ExitSums(sums.layers, packed.device, packed[: -len(own)].view_as(sums.values))
        objective = self.objective
        metrics = {f"train/{name}": value for name, value in sums.report(objective).items()}
        metrics |= {f"train/weight_exit_{layer:02d}": weight for layer, weight in objective.weights.items()}
        metrics["train/lr"] = self.trainer.optimizers[0].param_groups[0]["lr"]
        if grad_norm is not None:
            metrics["train/grad_norm"] = grad_norm
        trained = dict(zip(sums.layers, sums.values[4].tolist(), strict=True))
        measured = meter.metrics(packed[-len(own) :].tolist(), length, max(objective.trained_layers), trained)
        metrics |= {f"train/{name}": value for name, value in measured.items()}
        self.losses_of_step = {
            name.removeprefix("train/"): value for name, value in metrics.items() if name.startswith("train/loss")
        }
        self._forget_exits_without(metrics)
        loss = metrics.pop("train/loss")
        self.log("train/loss", loss, on_step=True, on_epoch=False, prog_bar=True, batch_size=1)
        self.log_dict(metrics, on_step=True, on_epoch=False, batch_size=1)

    def watch_step(self, grad_norm: float, *, scaled: bool) -> bool:
        """Whether the step that was logged last has finite losses and gradients; see `NonfiniteGuard.watch`.

        Args:
            grad_norm: before clipping.
            scaled: losses were multiplied by a scale for fp16, whose search for the highest that does not overflow
                explains gradients that are not finite. It explains no such loss.
        """
        if scaled and not math.isfinite(grad_norm) and all(map(math.isfinite, self.losses_of_step.values())):
            return True
        counts = self._guard.watch(self.global_step, self.losses_of_step, grad_norm, self._samples_of_step)
        if self._guard.skipped:
            self.log("train/skipped_steps", float(self._guard.skipped), on_step=True, on_epoch=False, batch_size=1)
        return counts

    def _samples_of_step(self) -> list[int] | None:
        loader = self.trainer.train_dataloader
        return loader.last_taken().samples if isinstance(loader, BatchLoader) else None

    def _forget_exits_without(self, metrics: dict[str, float]) -> None:
        """Keep Lightning from logging once more what an exit had in an earlier step and does not have in this one."""
        results: dict[str, Any] = getattr(self.trainer, "_results", None) or {}
        for key in [key for key in results if key.startswith("training_step.train/") and "_exit_" in key]:
            if key.removeprefix("training_step.") not in metrics:
                del results[key]

    @torch.no_grad()
    def most_probable(self, batch: TokenBatch) -> Tensor:
        """[X, B] what each exit says at the labelled position of each row, -1 where an exit is not run.

        For use in evaluation. All ranks take part: they give the same rows, and get the same answer.

        Args:
            batch: with one label in each row; which one it is does not matter.
        """
        micro = self.prepare(TokenBatch(*(tensor.to(self.device) for tensor in batch)), training=False)
        evaluate = getattr(self.trainer.strategy, "evaluate", None)
        if evaluate is not None:
            sums = evaluate(micro)
        else:
            with self.trainer.precision_plugin.forward_context():
                sums = self._evaluate(micro)
        said = sums.predictions.by_row(sums.layers, micro.tokens.labels)
        return cast("Tensor", self.trainer.strategy.reduce(said, reduce_op="max"))

    def add_evaluated(self, sums: ExitSums) -> None:
        """Add sums of tokens and exits that are this rank's alone to those of the running evaluation."""
        assert self._evaluation is not None, "an epoch of evaluation has not started"
        self._evaluation.add(sums)

    def _start_evaluation(self) -> None:
        self._evaluation = Evaluation(self.run_objective.evaluated, self.device)
        if self._meter is not None:
            self._meter.pause()

    def _end_evaluation(self, prefix: str) -> None:
        assert self._evaluation is not None, "an epoch of evaluation has not started"
        for name, value in self._evaluation.means(self.sum_over_ranks).items():
            # Equal on all ranks already; sync_dist only tells Lightning that this was thought of.
            self.log(f"{prefix}/{name}", value, prog_bar=name == "loss", sync_dist=True, batch_size=1)
        self._evaluation = None

    @override
    def on_validation_epoch_start(self) -> None:
        """Start the sums."""
        self._start_evaluation()

    @override
    def on_validation_epoch_end(self) -> None:
        """Log means over all tokens under `val/`."""
        self._end_evaluation("val")

    @override
    def on_test_epoch_start(self) -> None:
        """Start the sums."""
        self._start_evaluation()

    @override
    def on_test_epoch_end(self) -> None:
        """Log means over all tokens under `test/`."""
        self._end_evaluation("test")

    # ---- checkpoints

    @override
    def on_save_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        """Add the record that `offramp export` needs."""
        settings = plain(self.hparams)
        run_id = getattr(self.logger, "run_id", None) if self.trainer.is_global_zero else None
        describe = getattr(getattr(self.trainer, "datamodule", None), "describe", None)
        provenance = {
            "run_id": run_id,
            "step": self.global_step,
            "data": None if describe is None else describe(),
            "trained_with": type(self.trainer.strategy).__name__,
        }
        depth = self.source.model.config.num_layers if self.from_scratch else self.run_objective.widest.depth
        checkpoint[RECORD] = make_record(self.source, self.exported_policy, provenance, settings, depth)
        if self.lora is not None:
            checkpoint[RECORD]["lora_scale"] = self.lora.scale
        checkpoint[_GUARD] = self._guard.state_dict()
        if "hyper_parameters" in checkpoint:
            checkpoint["hyper_parameters"] = plain(checkpoint["hyper_parameters"])

    @override
    def on_load_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        """Go on counting the steps that were skipped."""
        if _GUARD in checkpoint:
            self._guard.load_state_dict(checkpoint[_GUARD])

    def _configs(self) -> tuple[AnyConfig, ExitConfig]:
        directory = Path(self.checkpoint)
        if not directory.is_dir():
            raise OfframpError(f"{directory} is not a directory; give a checkpoint directory.")
        exits = ExitConfig()
        if (directory / EXITS_JSON).is_file():
            exits = ExitConfig.from_json(read_json(directory / EXITS_JSON)["exits"])
        return read_config(read_json(directory / "config.json")), exits

    def _open(self, config: AnyConfig, exits: ExitConfig) -> tuple[AnyCheckpoint, StartWeights]:
        """The checkpoint with its model on the meta device, and what the parameters start with."""
        if not self.from_scratch:
            source, stored = open_any_checkpoint(self.checkpoint, depth=self.run_objective.widest.depth)
            return source, StartWeights(stored, source.model.fresh_spread, self.seed)
        directory = Path(self.checkpoint)
        with torch.device("meta"):
            model = make_model(config, exits)
        source: AnyCheckpoint = CheckpointOf(model, read_json(directory / "config.json"), path=directory)
        return source, StartWeights(None, model.fresh_spread, self.seed)
