"""The engine: requests in, tokens out, one iteration at a time. It knows nothing of HTTP or threads.

    engine = Engine.from_checkpoint("model", EngineConfig())
    engine.add_request(Request("a", tuple(ids), SamplingParams(max_tokens=16)))
    while engine.has_unfinished:
        for output in engine.step(): ...

One iteration is: the scheduler chooses rows, the executor runs them and gives logits, the sampler makes tokens of them,
the scheduler takes these in, and the text of each request grows.
"""

from __future__ import annotations

import logging
import os
from dataclasses import dataclass
from typing import TYPE_CHECKING, cast

import torch

from offramp.common.checkpoint import DTYPES, Checkpoint, load_checkpoint
from offramp.common.errors import OfframpError
from offramp.common.exits.config import ExitConfig
from offramp.common.tokenizer import load_tokenizer
from offramp.serve.config import EngineConfig
from offramp.serve.executor import Executor, ExecutorStats
from offramp.serve.exit_test import ExitRules, RequestExits
from offramp.serve.kv_cache.block_pool import BlockPool
from offramp.serve.kv_cache.storage import KVStorage
from offramp.serve.kv_policy import exit_policy
from offramp.serve.model.packed import PackedModel
from offramp.serve.request import IterationResult, Request, RequestOutput, RequestStatus, SampledToken
from offramp.serve.sampler import SamplingState, sample
from offramp.serve.scheduler import Scheduler
from offramp.serve.scheduler_output import SchedulerOutput
from offramp.serve.sync_policy import SYNC_POLICIES
from offramp.serve.text import Decoder, TextStream

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

log = logging.getLogger(__name__)


@dataclass(eq=False)
class _Live:
    """What the engine keeps of an unfinished request beside the request itself.

    Attributes:
        exits: the exits its tokens may take; None runs all layers.
        sampling: what the sampler knows of it.
        text: its text so far; None without a tokenizer.
        piece: text that has become certain in this iteration.
    """

    exits: RequestExits | None
    sampling: SamplingState
    text: TextStream | None
    piece: str = ""


class Engine:
    """A model with its cache and its queue. Not thread-safe: one owner calls it.

    Attributes:
        checkpoint: the model served, its exits and its policy.
        config: settings.
        max_model_len: most tokens of one request, prompt and completion together.
        cache_tokens: tokens that the KV cache holds, of all requests together.
    """

    def __init__(
        self,
        checkpoint: Checkpoint,
        config: EngineConfig | None = None,
        tokenizer: PreTrainedTokenizerBase | None = None,
        *,
        release_weights: bool = False,
        poison_cache: bool = False,
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
        """
        self.checkpoint, self._tokenizer = checkpoint, tokenizer
        self.config = config = config or EngineConfig()
        if config.num_threads is not None:
            torch.set_num_threads(config.num_threads)
        model, dtype = checkpoint.config, DTYPES[config.dtype]
        limit = model.max_position_embeddings
        if config.max_model_len is not None and config.max_model_len > limit:
            raise OfframpError(
                f"max_model_len {config.max_model_len} is more than the {limit} tokens the model takes; lower it."
            )
        self.max_model_len = config.max_model_len or limit
        with torch.no_grad():
            packed = PackedModel(checkpoint.model, dtype, release=release_weights)
        num_blocks = self._num_blocks(packed, dtype)
        self.cache_tokens = num_blocks * config.block_size
        cache = KVStorage(
            packed.num_cache_layers,
            num_blocks,
            config.block_size,
            model.num_kv_heads,
            model.head_dim,
            dtype,
            poison_cache,
        )
        self._executor = Executor(packed, cache, self.max_model_len, SYNC_POLICIES[config.sync_policy])
        self._rules = ExitRules(packed)
        self._pool = BlockPool(num_blocks)
        self._scheduler = Scheduler(config, self._pool, self.max_model_len, model.num_layers)
        self._live: dict[str, _Live] = {}

    @classmethod
    def from_checkpoint(
        cls,
        path: str | os.PathLike[str],
        config: EngineConfig | None = None,
        *,
        exits: ExitConfig | None = None,
    ) -> Engine:
        """Load a checkpoint directory, or a plain Hugging Face one, which has no early exits.

        Args:
            path: the directory.
            config: settings; the defaults if None.
            exits: exits to declare on a plain directory; see `load_checkpoint`.

        Raises:
            OfframpError: the directory is not complete and consistent, or does not fit the settings.
        """
        config = config or EngineConfig()
        tokenizer = load_tokenizer(path)
        checkpoint = load_checkpoint(path, dtype=DTYPES[config.dtype], exits=exits)
        return cls(checkpoint, config, tokenizer, release_weights=True)

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
        return self._scheduler.has_unfinished

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
    def stats(self) -> ExecutorStats:
        """What was really run, layer by layer."""
        return self._executor.stats

    def check(self, request: Request) -> None:
        """Raise `OfframpError` if this engine can never run a request."""
        self._compile(request)

    def add_request(self, request: Request) -> None:
        """Take a request in.

        Raises:
            QueueFullError: too many requests wait; later it may be accepted.
            OfframpError: the request can never run here, or its id is in use.
        """
        exits = self._compile(request)
        self._scheduler.add(request)
        text = None if self._tokenizer is None else TextStream(cast(Decoder, self._tokenizer), request.sampling.stop)
        self._live[request.request_id] = _Live(exits, SamplingState(request), text)

    def cancel(self, request_id: str) -> bool:
        """Forget a request and free what it held; no output speaks of it any more.

        Returns:
            Whether it was still unfinished.
        """
        self._live.pop(request_id, None)
        return self._scheduler.cancel(request_id) is not None

    def step(self) -> list[RequestOutput]:
        """Run one iteration.

        An error while running the model ends the requests of that iteration as failed, with the cause, and no others.

        Returns:
            One output for each request that got a token or failed.
        """
        output = self._scheduler.schedule()
        if not output.scheduled:
            self._scheduler.update(output, {})
            return []
        starts = {item.request.request_id: len(item.request.output_token_ids) for item in output.scheduled}
        try:
            sampled = self._sample(output)
        except Exception as fault:
            log.exception("iteration %d failed", output.iteration)
            cause = f"the engine failed in iteration {output.iteration}: {type(fault).__name__}: {fault}"
            sampled = {}
            for item in output.scheduled:
                self._scheduler.fail(item.request.request_id, cause)
        self._scheduler.update(output, sampled, self._read)
        results: list[RequestOutput] = []
        for item in output.scheduled:
            request = item.request
            if item.samples or request.status is RequestStatus.FAILED:
                results.append(self._report(request, starts[request.request_id]))
        return results

    def _sample(self, output: SchedulerOutput) -> dict[str, IterationResult]:
        """Run the model and choose tokens; requests whose logits are not finite fail."""
        items = output.scheduled
        live = [self._live[item.request.request_id] for item in items]
        sampled: dict[str, IterationResult] = {}
        for departure in self._executor.run(items, [entry.exits for entry in live]):
            requests = [items[index].request for index in departure.items]
            choices = sample(departure.logits, [live[index].sampling for index in departure.items])
            for request, choice in zip(requests, choices, strict=True):
                if choice is None:
                    self._scheduler.fail(
                        request.request_id,
                        f"the logits at layer {departure.exit_layer} are not finite, so no token can be chosen; the "
                        f"weights are damaged or too large for {self.config.dtype}",
                    )
                else:
                    token = SampledToken(choice.token_id, departure.exit_layer, logprobs=choice.logprobs)
                    sampled[request.request_id] = IterationResult((token,))
        return sampled

    def _read(self, request: Request, token_id: int) -> bool:
        """Append a token to its request's text; whether a stop string is complete (`scheduler.TextStops`)."""
        live = self._live[request.request_id]
        if live.text is None:
            return False
        try:
            live.piece += live.text.push(token_id, request.may_stop)
        except Exception as fault:  # a tokenizer's; its other requests must not pay for it
            log.exception("token %d of request %s cannot be read", token_id, request.request_id)
            self._scheduler.fail(
                request.request_id, f"token {token_id} cannot be read: {type(fault).__name__}: {fault}"
            )
            return False
        return live.text.stopped

    def _report(self, request: Request, first_token: int) -> RequestOutput:
        live = self._live[request.request_id]
        if request.status.is_finished:
            del self._live[request.request_id]
            if live.text is not None and request.status is not RequestStatus.FAILED:
                live.piece += live.text.flush()
        text, live.piece = live.piece, ""
        return RequestOutput.of(request, first_token, text)

    def _compile(self, request: Request) -> RequestExits | None:
        """Exits of a request, after a check that the request can run."""
        size = self.checkpoint.config.vocab_size
        if wrong := [token for token in request.prompt_token_ids if not 0 <= token < size]:
            raise OfframpError(f"the prompt holds token {wrong[0]}, outside the vocabulary of {size}.")
        request.sampling.check_vocabulary(size)
        if self._tokenizer is None and request.sampling.stop:
            raise OfframpError("stop strings need a tokenizer, and this engine has none; give stop_token_ids.")
        self._scheduler.check(request)
        policy = exit_policy(request.exits, self.checkpoint.policy)
        return None if policy is None else self._rules.compile(policy)

    def _num_blocks(self, model: PackedModel, dtype: torch.dtype) -> int:
        config, shape = self.config, model.config
        size = KVStorage.block_bytes(
            model.num_cache_layers, config.block_size, shape.num_kv_heads, shape.head_dim, dtype
        )
        num_blocks = config.cache_blocks(size)
        if config.num_blocks is not None:
            return num_blocks
        # More than all seats at full length can never be used.
        return min(num_blocks, config.max_num_seqs * -(-self.max_model_len // config.block_size))
