"""The engine: requests in, tokens out, one iteration at a time. It knows nothing of HTTP or threads.

    engine = Engine.from_checkpoint("model", EngineConfig())
    engine.add_request(Request("a", tuple(ids), SamplingParams(max_tokens=16)))
    while engine.has_unfinished:
        for output in engine.step(): ...

One iteration is: the scheduler chooses rows, the executor runs them and gives logits, the sampler makes tokens of them,
the scheduler takes these in, and the text of each request grows. With `EngineConfig.pipeline_stages` an iteration runs
through stages (`offramp.serve.pipeline`), a step begins one of them, and takes in what has come back of any.
"""

from __future__ import annotations

import dataclasses
import logging
import os
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, cast

import torch

from offramp.common.checkpoint import DTYPES, AnyCheckpoint, load_any_checkpoint
from offramp.common.errors import OfframpError
from offramp.common.exits.config import ExitConfig
from offramp.common.exits.policy import ExitPolicy
from offramp.common.families import AnyConfig, AnyModel
from offramp.common.t5.config import T5Config
from offramp.common.tokenizer import load_tokenizer
from offramp.serve.config import EngineConfig
from offramp.serve.devices import choose_device, num_cpus
from offramp.serve.execution.executor import Executor
from offramp.serve.execution.exit_test import ExitRules, RequestExits
from offramp.serve.execution.kv_policy import check_exits, exit_policy
from offramp.serve.kv_cache.block_pool import BlockPool
from offramp.serve.kv_cache.storage import KVStorage
from offramp.serve.measures.iteration_clock import IterationClock
from offramp.serve.measures.records import EngineMetrics, Gauges, Trace
from offramp.serve.model.graphs import captures
from offramp.serve.model.linear import ChosenKernels
from offramp.serve.model.packed import PackedModel, count_cache_layers
from offramp.serve.passes import Passes
from offramp.serve.pipeline.make_stage import StageSettings, make_stage
from offramp.serve.pipeline.pipeline import LaterStages, Pipeline
from offramp.serve.pipeline.processes import StageProcesses
from offramp.serve.pipeline.stages import load_stage
from offramp.serve.probe import PositionReading, probe
from offramp.serve.recorder import Recorder
from offramp.serve.request.iteration_result import IterationResult
from offramp.serve.request.output import RequestOutput
from offramp.serve.request.request import Request, RequestStatus
from offramp.serve.sampling.constraint import Constraints
from offramp.serve.sampling.iteration_results import DecodingState, IterationResults
from offramp.serve.sampling.sampler import SamplingState
from offramp.serve.scheduling.limits import max_source_len
from offramp.serve.scheduling.scheduler import Scheduler
from offramp.serve.scheduling.scheduler_output import SchedulerOutput
from offramp.serve.text import Decoder, TextStream

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

log = logging.getLogger(__name__)


@dataclass(eq=False)
class _Live:
    """What the engine keeps of an unfinished request beside the request itself.

    Attributes:
        exits: the exits its tokens may take where they are sure; None: none.
        decoding: what choosing its tokens needs.
        text: its text so far; None without a tokenizer.
        piece: text that has become certain in this iteration.
    """

    exits: RequestExits | None
    decoding: DecodingState
    text: TextStream | None
    piece: str = ""


USUAL_T5_LEN = 512
"""Relative positions have no end, so neither has a T5; this is the length that they were trained on."""


def max_model_len(config: EngineConfig, model: AnyConfig) -> int:
    """Most tokens of one request, prompt and completion together; and most tokens of a source.

    Raises:
        OfframpError: the settings ask for more than the model takes.
    """
    if isinstance(model, T5Config):
        return config.max_model_len or USUAL_T5_LEN
    limit = model.max_position_embeddings
    if config.max_model_len is not None and config.max_model_len > limit:
        raise OfframpError(
            f"max_model_len {config.max_model_len} is more than the {limit} tokens the model takes; lower it."
        )
    return config.max_model_len or limit


def cache_blocks(config: EngineConfig, model: AnyModel) -> int:
    """Number of blocks in the KV cache of a model, whose weights may be absent.

    Raises:
        OfframpError: the settings do not fit the model, or not one block fits into them.
    """
    shape = model.config
    size = KVStorage.block_bytes(
        count_cache_layers(model), config.block_size, shape.num_kv_heads, shape.head_dim, DTYPES[config.dtype]
    )
    num_blocks = config.cache_blocks(size)
    if config.num_blocks is not None or config.kv_cache_bytes is not None:
        return num_blocks
    # Nobody asked for so much, and all seats at full length need no more.
    longest = max_model_len(config, shape)
    lengths = (longest, max_source_len(config, longest) if isinstance(shape, T5Config) else 0)
    return min(num_blocks, config.max_num_seqs * sum(-(-length // config.block_size) for length in lengths))


class Engine:
    """A model with its cache and its queue. Not thread-safe: one owner calls it.

    Attributes:
        checkpoint: the model served, its exits and its policy.
        config: settings.
        max_model_len: most tokens of one request, prompt and completion together.
        max_source_len: most tokens of a source; None for a model without an encoder.
        decoder_start_token_id: what the decoder reads first, for which a prompt is the source; None without an encoder.
        cache_tokens: tokens that the KV cache holds, of all requests together.
    """

    def __init__(
        self,
        checkpoint: AnyCheckpoint,
        config: EngineConfig | None = None,
        tokenizer: PreTrainedTokenizerBase | None = None,
        *,
        release_weights: bool = False,
        poison_cache: bool = False,
        shortlist_head: bool = False,
        later_stages: LaterStages | None = None,
    ) -> None:
        """Pack the weights and allocate the cache.

        Args:
            checkpoint: the model.
            config: settings; the defaults if None.
            tokenizer: of the model; None makes no text and takes no stop strings.
            release_weights: take the weights of the layers out of `checkpoint.model` as they are packed, so that they
                are in memory once. The checkpoint can then be served, but not run or saved.
            poison_cache: start with a cache of NaN, so that attending to a slot that was never written fails the
                request instead of going unseen. For tests.
            shortlist_head: the final exit predicts from the shortlist of the checkpoint's exit policy only: full depth
                at the price of a small head. For benchmarks.
            later_stages: what runs the layers that this engine does not, where `pipeline_stages` is above 1.

        Raises:
            OfframpError: the settings do not fit the model or each other.
        """
        self.checkpoint, self._tokenizer = checkpoint, tokenizer
        self.config = config = config or EngineConfig()
        device = choose_device(config)
        if config.num_threads is not None:
            torch.set_num_threads(config.num_threads)
        model, dtype = checkpoint.model.config, DTYPES[config.dtype]
        self.max_model_len = max_model_len(config, model)
        self.max_source_len = self.decoder_start_token_id = None
        if isinstance(model, T5Config):
            self.max_source_len = max_source_len(config, self.max_model_len)
            self.decoder_start_token_id = model.decoder_start_token_id
        shortlist = None if checkpoint.policy is None else checkpoint.policy.shortlist
        if shortlist_head and shortlist is None:
            raise OfframpError("the checkpoint's exit policy has no shortlist to make a head of; calibrate with one.")
        if shortlist_head and config.pipeline_stages is not None:
            raise OfframpError("a final exit with a shortlist is made without pipeline_stages; leave one of them out.")
        self._clock = IterationClock()
        self._pool = BlockPool(num_blocks := cache_blocks(config, checkpoint.model))
        self.cache_tokens = num_blocks * config.block_size
        self._scheduler = Scheduler(config, self._pool, self.max_model_len, model.num_layers)
        self._executor: Executor | None = None
        self._pipeline: Pipeline | None = None
        if config.pipeline_stages is None:
            capture = captures(device) if config.cuda_graphs else None
            with torch.no_grad():
                self._model = PackedModel(
                    checkpoint.model,
                    dtype,
                    config.kernels,
                    quantization=config.quantization,
                    release=release_weights,
                    final_shortlist=shortlist if shortlist_head else None,
                    device=device,
                    capture=capture,
                )
            cache = KVStorage(
                self._model.num_cache_layers,
                num_blocks,
                config.block_size,
                model.num_kv_heads,
                model.head_dim,
                dtype,
                poison_cache,
                device,
                with_scratch=capture is not None,
            )
            self._executor = Executor(self._model, cache, self.max_model_len, config, self._clock)
            self._rules = ExitRules(self._model)
        else:
            settings = StageSettings(config, 0, num_blocks, self.max_model_len)
            stage = make_stage(checkpoint.model, settings, release_weights, poison_cache, self._clock)
            self._model, self._rules = stage.model, stage.rules
            self._pipeline = Pipeline(stage, config.pipeline_stages, later_stages)
            self._passes = Passes(self._pipeline, self._scheduler, self._read, model.num_layers, self._clock)
        self._constraints = Constraints(tokenizer, model.vocab_size)
        self._live: dict[str, _Live] = {}
        self._recorder = Recorder()

    @classmethod
    def from_checkpoint(
        cls,
        path: str | os.PathLike[str],
        config: EngineConfig | None = None,
        *,
        exits: ExitConfig | None = None,
        shortlist_head: bool = False,
    ) -> Engine:
        """Load a checkpoint directory, or a plain Hugging Face one, which has no early exits.

        Args:
            path: the directory.
            config: settings; the defaults if None.
            exits: exits to declare on a plain directory; see `load_any_checkpoint`.
            shortlist_head: see `Engine`.

        Raises:
            OfframpError: the directory is not complete and consistent, or does not fit the settings.
        """
        config = config or EngineConfig()
        tokenizer = load_tokenizer(path)
        if config.pipeline_stages is not None and config.pipeline_stages > 1:
            return cls._in_stages(path, config, tokenizer, exits)
        checkpoint = load_any_checkpoint(path, dtype=DTYPES[config.dtype], exits=exits)
        return cls(checkpoint, config, tokenizer, release_weights=True, shortlist_head=shortlist_head)

    @classmethod
    def _in_stages(
        cls,
        path: str | os.PathLike[str],
        config: EngineConfig,
        tokenizer: PreTrainedTokenizerBase,
        exits: ExitConfig | None,
    ) -> Engine:
        """The first stage, and the others in processes of their own, which load their parts at the same time."""
        num_stages = config.pipeline_stages
        assert num_stages is not None
        if config.num_threads is None:
            config = dataclasses.replace(config, num_threads=max(1, num_cpus() // num_stages))
        checkpoint = load_stage(path, 0, num_stages, DTYPES[config.dtype], exits=exits)
        model = checkpoint.model
        settings = StageSettings(config, 0, cache_blocks(config, model), max_model_len(config, model.config))
        later = StageProcesses(path, settings, exits)
        try:
            engine = cls(checkpoint, config, tokenizer, release_weights=True, later_stages=later)
            later.wait_until_ready()
        except BaseException:
            later.close()
            raise
        return engine

    @property
    def tokenizer(self) -> PreTrainedTokenizerBase:
        """The model's tokenizer.

        Raises:
            OfframpError: the engine was made without one.
        """
        if self._tokenizer is None:
            raise OfframpError("this engine has no tokenizer; give prompts as token ids.")
        return self._tokenizer

    @property
    def has_unfinished(self) -> bool:
        """Whether another step has anything to do."""
        # What a lost stage leaves to do is to say so.
        return self._scheduler.has_unfinished or (self._pipeline is not None and self._pipeline.is_lost)

    @property
    def num_waiting(self) -> int:
        """Requests that wait for a seat or for blocks."""
        return self._scheduler.num_waiting

    @property
    def num_running(self) -> int:
        """Requests that were admitted and have not finished."""
        return self._scheduler.num_running

    @property
    def num_free_blocks(self) -> int:
        """Blocks of the KV cache that no request owns."""
        return self._pool.num_available

    @property
    def num_kept_tokens(self) -> int:
        """Tokens that left early and whose states wait for a deeper pass; 0 when no request is unfinished."""
        return 0 if self._executor is None else self._executor.num_kept

    @property
    def num_parked_rows(self) -> int:
        """Rows that wait at an exit for company (`EngineConfig.deep_quorum`); 0 when no request is unfinished."""
        return 0 if self._executor is None else self._executor.num_parked

    @property
    def kernels(self) -> ChosenKernels:
        """What computes the layers here: what `auto` has chosen."""
        return self._model.kernels

    @property
    def device(self) -> torch.device:
        """What computes here: what `auto` has chosen."""
        return self._model.device

    @property
    def metrics(self) -> EngineMetrics:
        """What the iterations did, and where their time went."""
        return self._recorder.metrics

    def check(self, request: Request) -> None:
        """Raise `OfframpError` if this engine can never run a request, as far as can be told at once.

        Whether a constraint can be compiled is left to `prepare`. Any thread may call it and both of them, at any time.
        """
        size = self.checkpoint.model.config.vocab_size
        self._check_source(request, size)
        if wrong := [token for token in request.prompt_token_ids if not 0 <= token < size]:
            raise OfframpError(f"the prompt holds token {wrong[0]}, outside the vocabulary of {size}.")
        request.sampling.check_vocabulary(size)
        if request.sampling.min_tokens and all(token in request.stop_ids for token in range(size)):
            raise OfframpError(
                f"stop_token_ids name every token of the vocabulary of {size}, so none can be among the min_tokens "
                f"{request.sampling.min_tokens} before an end; leave one of them out."
            )
        self._constraints.check(request)
        if self._tokenizer is None and request.sampling.stop:
            raise OfframpError("stop strings need a tokenizer, and this engine has none; give stop_token_ids.")
        self._scheduler.check(request)
        check_exits(request.exits, self.checkpoint.policy, self.checkpoint.exits, size)

    def prepare(self, request: Request) -> None:
        """Do beforehand what may take seconds of `add_request`: compile the request's constraint.

        Raises:
            OfframpError: it cannot be compiled.
        """
        self._constraints.prepare(request)

    def prepare_known(self, request: Request) -> bool:
        """Do the same if it takes no time: there is no constraint, or what is to be found out about it is known.

        Returns:
            Whether it is done.

        Raises:
            OfframpError: it is known that it cannot be compiled.
        """
        return self._constraints.prepare_known(request)

    def add_request(self, request: Request) -> None:
        """Take a request in.

        Raises:
            QueueFullError: too many requests wait; later it may be accepted.
            OfframpError: the request can never run here, or its id is in use.
        """
        self.check(request)
        exits, constraint = self._compile(request), self._constraints.start(request)
        self._scheduler.add(request)
        text = None if self._tokenizer is None else TextStream(cast(Decoder, self._tokenizer), request.sampling.stop)
        self._recorder.arrived(request.request_id)
        self._live[request.request_id] = _Live(
            exits, DecodingState(SamplingState(request, constraint), self.checkpoint.model.config.num_layers), text
        )

    def cancel(self, request_id: str) -> bool:
        """Forget a request and free what it held; no output speaks of it any more.

        Returns:
            Whether it was still unfinished.
        """
        self._live.pop(request_id, None)
        if self._executor is not None:
            self._executor.forget(request_id)
        self._recorder.forget(request_id)
        return self._scheduler.cancel(request_id) is not None

    def check_probe(self) -> None:
        """Raise `OfframpError` where the model cannot be probed."""
        if self.max_source_len is not None:
            raise OfframpError("a probe reads a text with every exit of a decoder-only model; this one has an encoder.")
        if self._pipeline is not None:
            raise OfframpError("a probe reads a text with all layers in one process; leave pipeline_stages out.")

    def probe(self, token_ids: Sequence[int], top: int = 5, policy: ExitPolicy | None = None) -> list[PositionReading]:
        """What every exit says of a text, position by position; no request notices. See `offramp.serve.probe`.

        Args:
            token_ids: prompt and answer in a row.
            top: tokens to report for each exit.
            policy: whose exit test is reported; None takes the checkpoint's.

        Raises:
            OfframpError: see `offramp.serve.probe`; or the model reads its prompts with an encoder.
        """
        self.check_probe()
        return probe(
            self._model,
            token_ids,
            max_model_len=self.max_model_len,
            top=top,
            policy=policy or self.checkpoint.policy,
        )

    def step(self) -> list[RequestOutput]:
        """Run one iteration.

        An error while running the model ends the requests of that iteration as failed, with the cause, and no others.
        In stages it ends the engine.

        Returns:
            One output for each request that got a token or failed.

        Raises:
            OfframpError: a stage of the pipeline has ended; the engine cannot go on.
        """
        self._clock.start()
        if self._executor is None:
            advanced, trace = self._advance_stages()
        else:
            advanced, trace = self._advance(self._executor)
        self._recorder.advanced(request for request, _ in advanced)
        self._clock.lap("scheduling")
        reports = [
            self._report(request, first)
            for request, first in advanced
            if len(request.output_token_ids) > first or request.status.is_finished
        ]
        self._recorder.finished(self._clock.stop(), trace, self._gauges())
        return reports

    def _advance(self, executor: Executor) -> tuple[list[tuple[Request, int]], Trace]:
        """Run one iteration; its requests with the tokens that they had before, and what was run."""
        output = self._schedule()
        before = [(item.request, len(item.request.output_token_ids)) for item in output.scheduled]
        try:
            executor.prepare(output)
            results = self._run(executor, output) if output.scheduled else {}
        except Exception as fault:
            log.exception("iteration %d failed", output.iteration)
            cause = f"the engine failed in iteration {output.iteration}: {type(fault).__name__}: {fault}"
            results = {}
            for item in output.scheduled:
                self._scheduler.fail(item.request.request_id, cause)
        self._scheduler.update(output, results, self._read)
        return before, executor.trace

    def _advance_stages(self) -> tuple[list[tuple[Request, int]], Trace]:
        """Begin one iteration and take in what is known of any; requests with the tokens that they had before."""
        assert self._pipeline is not None
        before: dict[str, tuple[Request, int]] = {}

        def note(advanced: Iterable[tuple[Request, int]]) -> None:
            for request, first in advanced:
                before.setdefault(request.request_id, (request, first))

        while not self._pipeline.has_room:
            note(self._passes.take_in(wait=True))
        output = self._schedule()
        live = [self._live[item.request.request_id] for item in output.scheduled]
        note(self._passes.advance(output, [one.exits for one in live], [one.decoding for one in live]))
        return list(before.values()), self._pipeline.first.trace

    def _schedule(self) -> SchedulerOutput:
        output = self._scheduler.schedule()
        self._recorder.scheduled(output)
        self._clock.lap("scheduling")
        return output

    def _run(self, executor: Executor, output: SchedulerOutput) -> dict[str, IterationResult]:
        """Run the model and choose tokens; requests for which that fails end as failed."""
        items = output.scheduled
        live = [self._live[item.request.request_id] for item in items]
        states = [entry.decoding for entry in live]
        results = IterationResults(states, self.checkpoint.model.config.num_layers, self._scheduler.fail)
        asks_prompts = any(item.request.sampling.prompt_logprobs is not None for item in items)
        departures = executor.run(
            items,
            [entry.exits for entry in live],
            [state.logits_use for state in states],
            results.add_prompt if asks_prompts else None,
        )
        results.add(departures)
        self._clock.lap("sampling")
        return results.by_id

    def _gauges(self) -> Gauges:
        pool = self._pool
        return Gauges(
            running=self._scheduler.num_running,
            waiting=self._scheduler.num_waiting,
            live_blocks=pool.num_live,
            cached_blocks=pool.num_cached,
            free_blocks=pool.num_available,
        )

    def _read(self, request: Request, token_id: int) -> bool:
        """Append a token to its request's text; whether a stop string is complete (`scheduler.TextStops`)."""
        live = self._live[request.request_id]
        if live.text is None:
            return False
        self._clock.lap("scheduling")
        try:
            live.piece += live.text.push(token_id, request.may_stop)
        except Exception as fault:  # a tokenizer's; its other requests must not pay for it
            log.exception("token %d of request %s cannot be read", token_id, request.request_id)
            self._scheduler.fail(
                request.request_id, f"token {token_id} cannot be read: {type(fault).__name__}: {fault}"
            )
            return False
        finally:
            self._clock.lap("detokenising")
        return live.text.stopped

    def _report(self, request: Request, first_token: int) -> RequestOutput:
        live = self._live[request.request_id]
        metrics = None
        if request.status.is_finished:
            metrics = self._recorder.left(request)
            del self._live[request.request_id]
            if self._executor is not None:
                self._executor.forget(request.request_id)
            if live.text is not None and request.status is not RequestStatus.FAILED:
                live.piece += live.text.flush()
        text, live.piece = live.piece, ""
        return RequestOutput.of(request, first_token, text, metrics)

    def _check_source(self, request: Request, vocab_size: int) -> None:
        """Raise `OfframpError` where a request and the model do not agree on whether there is a source."""
        if self.max_source_len is None:
            if request.source_token_ids:
                raise OfframpError("the request has a source, and this model has no encoder; give a prompt alone.")
            return
        if not request.source_token_ids:
            raise OfframpError("the source has no token; give at least one: the model's encoder reads it.")
        if wrong := [token for token in request.source_token_ids if not 0 <= token < vocab_size]:
            raise OfframpError(f"the source holds token {wrong[0]}, outside the vocabulary of {vocab_size}.")
        if request.sampling.prompt_logprobs is not None:
            raise OfframpError(
                "prompt_logprobs are those of a text that the model continues, and this one reads it with its encoder; "
                "leave them out."
            )

    def _compile(self, request: Request) -> RequestExits | None:
        """Exits of a request."""
        policy = exit_policy(request.exits, self.checkpoint.policy)
        return None if policy is None else self._rules.compile(policy)
