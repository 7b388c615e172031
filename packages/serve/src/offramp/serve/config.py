"""The settings of one engine. What belongs to one request lies in `offramp.serve.request`."""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Literal, get_args

from offramp.common.errors import OfframpError
from offramp.common.exits.kv_policy import KVPolicy
from offramp.serve.number_checks import check_number, check_whole

SyncPolicy = Literal["all", "quantile", "regroup"]
"""`all`: rows leave only together, once every row of the iteration is sure; `quantile`: all leave together as soon as a
share of them is sure, but for those that are not sure and have no threshold there; `regroup`: each row leaves on its
own."""

Kernels = Literal["auto", "native", "packed", "plain"]
"""What computes the layers. `native`: Offramp's C++ operations; `packed`: torch with weights packed by oneDNN; `plain`:
torch alone, the reference; `auto`: the first of them that works here."""

SplitRule = Literal["always", "cost"]
"""`always`: every row that is sure goes; `cost`: rows go only if that saves time, by the measured times of segments."""

Dtype = Literal["fp32", "bf16"]

Quantization = Literal["none", "int8"]
"""What weights are rounded to when they are loaded. `int8`: the matrices of layers and exits and the unembedding, with
a scale for every 64 inputs of an output channel; norms, biases and embeddings stay as they are."""

_DEVICES = re.compile(r"cpu|auto|cuda(:\d{1,3})?")

DEFAULT_KV_CACHE_BYTES = 1 << 30

_MAX_PARKED_ITERATIONS = 256
"""So long a row may wait for company at most: seconds even of short iterations, in which its client hears nothing."""

_MAX_STAGES = 256
_MAX_THREADS = 1024
"""Where the operating system cannot start as many as are asked for, OpenMP ends the process without a word."""


@dataclass(frozen=True)
class EngineConfig:
    """Settings that hold for every request of an engine.

    Attributes:
        block_size: tokens per block of the KV cache.
        num_blocks: blocks in the KV cache. Give this or `kv_cache_bytes`, not both.
        kv_cache_bytes: bytes for the keys and values of all layers, taken as given: what the requests that run leave of
            it keeps beginnings for later ones (`prefix_caching`). None, with `num_blocks` None, is 1 GiB, or less
            where all of `max_num_seqs` at full length need less.
        max_num_seqs: most requests (sequences) in one iteration.
        max_tokens_per_iteration: token budget: most rows, of prompts and generated tokens together, in one iteration.
            At least `max_num_seqs`, so that every running request can advance in every iteration. A longer prompt is
            prefilled in chunks.
        max_waiting: most requests that wait for a seat; one more is refused (`QueueFullError`).
        max_model_len: most tokens of one request, prompt and completion together; None is the model's own limit. Rotary
            frequencies of `dynamic` scaling are made for this length, so that tokens do not depend on neighbours.
        sync_policy: when rows that are sure may leave an iteration; see `SyncPolicy`.
        quantile: `quantile`: the share of rows that must be sure, above 0 and at most 1.
        split_rule: `regroup`: see `SplitRule`; `cost` makes exit layers depend on batch mates.
        deep_quorum: `regroup`: rows that are not sure at an exit are parked there until rows of this share of the
            iteration's decoding requests want the layers above, which cost nearly the same for one row as for several.
            0 parks none, 1 waits for all. Answers stay what they are, and may come later. Not with `split_rule` `cost`.
        max_parked_iterations: most iterations that a row is parked for; at most 256.
        prefix_caching: whether requests share the exact keys and values of equal beginnings.
        group_by_depth: whether iterations run sequences of similar expected exit depth together.
        kernels: what computes the layers; see `Kernels`.
        dtype: of weights, states and KV cache; logits, confidences and sampling are always float32.
        quantization: of weights, beside `dtype` for all the rest; see `Quantization`.
        num_threads: CPU threads of the engine's operations; None leaves torch's own choice.
        device: what holds weights and KV cache and computes: `cpu`, `cuda`, `cuda:N`, or `auto`, which is a CUDA device
            if there is one. There torch computes the layers, so `kernels` must be `auto` or `plain`; with `dtype` bf16
            and a `block_size` of 256 (or a multiple) attention is FlashAttention over the cache's blocks.
        cuda_graphs: whether decoding on CUDA replays captured graphs, which saves the host's time for each operation.
        pipeline_stages: run the layers in so many stages, each of them in a process of its own (the first in this one),
            with the KV policies `pipeline` and `full` alone; `num_threads` is then for each of them. None: no stages,
            and all other KV policies.
    """

    block_size: int = 16
    num_blocks: int | None = None
    kv_cache_bytes: int | None = None
    max_num_seqs: int = 32
    max_tokens_per_iteration: int = 512
    max_waiting: int = 256
    max_model_len: int | None = None
    sync_policy: SyncPolicy = "regroup"
    quantile: float = 0.75
    split_rule: SplitRule = "always"
    deep_quorum: float = 0.0
    max_parked_iterations: int = 8
    prefix_caching: bool = True
    group_by_depth: bool = False
    kernels: Kernels = "auto"
    dtype: Dtype = "fp32"
    quantization: Quantization = "none"
    num_threads: int | None = None
    device: str = "cpu"
    cuda_graphs: bool = True
    pipeline_stages: int | None = None

    def __post_init__(self) -> None:
        for name in ("block_size", "max_num_seqs", "max_tokens_per_iteration", "max_waiting"):
            check_whole(name, getattr(self, name), low=1)
        check_whole("max_parked_iterations", self.max_parked_iterations, low=1, high=_MAX_PARKED_ITERATIONS)
        for name in ("num_blocks", "kv_cache_bytes", "max_model_len"):
            if getattr(self, name) is not None:
                check_whole(name, getattr(self, name), low=1)
        if self.num_threads is not None:
            check_whole("num_threads", self.num_threads, low=1, high=_MAX_THREADS)
        if self.pipeline_stages is not None:
            self._check_stages()
        if self.num_blocks is not None and self.kv_cache_bytes is not None:
            raise OfframpError(
                f"num_blocks {self.num_blocks} and kv_cache_bytes {self.kv_cache_bytes} both give the size of the KV "
                "cache; give one of them."
            )
        if self.max_tokens_per_iteration < self.max_num_seqs:
            raise OfframpError(
                f"max_tokens_per_iteration {self.max_tokens_per_iteration} is below max_num_seqs {self.max_num_seqs}, "
                "so running requests would have to wait for each other; raise the first or lower the second."
            )
        if self.dtype == "fp16":
            raise OfframpError(
                "dtype 'fp16' is not served: states of T5 overflow in it, and bf16 is as fast; choose fp32, bf16."
            )
        for what, value, known in (
            ("sync policy", self.sync_policy, get_args(SyncPolicy)),
            ("split rule", self.split_rule, get_args(SplitRule)),
            ("choice of kernels", self.kernels, get_args(Kernels)),
            ("dtype", self.dtype, get_args(Dtype)),
            ("quantization", self.quantization, get_args(Quantization)),
        ):
            if value not in known:
                raise OfframpError(f"{what} {value!r} is unknown; choose one of {', '.join(known)}.")
        if isinstance(self.quantile, bool) or not isinstance(self.quantile, (int, float)) or not 0 < self.quantile <= 1:
            raise OfframpError(f"quantile {self.quantile!r} must be a number above 0 and at most 1 (1 is all rows).")
        quorum = self.deep_quorum
        if isinstance(quorum, bool) or not isinstance(quorum, (int, float)) or not 0 <= quorum <= 1:
            raise OfframpError(f"deep_quorum {quorum!r} must be a number from 0 (no row is parked) to 1.")
        if quorum and (self.sync_policy != "regroup" or self.split_rule == "cost"):
            raise OfframpError(
                f"deep_quorum {quorum} needs sync policy 'regroup' with split rule 'always', where rows leave on their "
                f"own, not {self.sync_policy!r} with {self.split_rule!r}; change these, or leave the quorum out."
            )
        if not isinstance(self.device, str) or _DEVICES.fullmatch(self.device) is None:
            raise OfframpError(f"device {self.device!r} is unknown; choose cpu, cuda, cuda:N or auto.")
        if self.device.startswith("cuda"):
            self._check_cuda()
        for name in ("prefix_caching", "group_by_depth", "cuda_graphs"):
            if not isinstance(getattr(self, name), bool):
                raise OfframpError(f"{name} {getattr(self, name)!r} must be true or false.")

    @property
    def default_kv_policy(self) -> KVPolicy:
        """The KV policy of requests that name none."""
        return "fill" if self.pipeline_stages is None else "pipeline"

    def _check_stages(self) -> None:
        """Raise `OfframpError` if some setting has no meaning in stages."""
        check_whole("pipeline_stages", self.pipeline_stages, low=1, high=_MAX_STAGES)
        if self.device != "cpu":
            raise OfframpError(
                f"pipeline_stages {self.pipeline_stages} compute on the CPU; use device cpu, not {self.device!r}, or "
                "leave the stages out."
            )
        for name in ("sync_policy", "split_rule", "deep_quorum", "group_by_depth"):
            value = getattr(self, name)
            if value != getattr(EngineConfig, name):
                raise OfframpError(
                    f"{name} {value!r} decides when rows leave a batch, and in pipeline_stages "
                    f"{self.pipeline_stages} none does; leave one of them out."
                )

    def _check_cuda(self) -> None:
        """Raise `OfframpError` if some setting needs the CPU."""
        if self.kernels in ("native", "packed"):
            raise OfframpError(
                f"kernels {self.kernels!r} compute on the CPU, and device {self.device!r} is none; use kernels auto, "
                "or device cpu."
            )
        if self.split_rule == "cost":
            raise OfframpError(
                f"split rule 'cost' goes by the times of segments, which the host does not see on device "
                f"{self.device!r}; use split rule always, or device cpu."
            )

    def cache_blocks(self, block_bytes: int) -> int:
        """Number of blocks in the KV cache.

        Args:
            block_bytes: bytes of one block, keys and values of all layers together.

        Raises:
            OfframpError: if not one block fits into `kv_cache_bytes`.
        """
        if self.num_blocks is not None:
            return self.num_blocks
        budget = DEFAULT_KV_CACHE_BYTES if self.kv_cache_bytes is None else self.kv_cache_bytes
        if budget < block_bytes:
            raise OfframpError(
                f"kv_cache_bytes {budget} holds no block: one block of {self.block_size} tokens takes {block_bytes} "
                "bytes; raise it."
            )
        return budget // block_bytes


@dataclass(frozen=True)
class WatchSettings:
    """How a served model watches itself; see `offramp.serve.watch`.

    Attributes:
        audit_share: share of greedy answers with early exits that are made once more at full depth while nobody waits;
            0 audits none.
        adapt_to: share of agreement with full depth that a token must be expected to have, to leave early: where audits
            show less, thresholds are raised above the calibrated ones, and never put below them; None: they stay.
        drift_alarm: stability index of depths or confidences against those at calibration from which on the alarm is
            raised; by convention 0.25 is a great change, and below 0.1 is none.
    """

    audit_share: float = 0.0
    adapt_to: float | None = None
    drift_alarm: float = 0.25

    def __post_init__(self) -> None:
        check_number("audit_share", self.audit_share)
        if not 0 <= self.audit_share <= 1:
            raise OfframpError(f"audit_share {self.audit_share} must be in 0..1 (0 audits no answer).")
        if self.adapt_to is not None:
            check_number("adapt_to", self.adapt_to)
            if not 0 < self.adapt_to < 1:
                raise OfframpError(f"adapt_to {self.adapt_to} must be above 0 and below 1.")
            if not self.audit_share:
                raise OfframpError(
                    f"adapt_to {self.adapt_to} learns from audits, and there are none; set audit_share above 0."
                )
        check_number("drift_alarm", self.drift_alarm)
        if not self.drift_alarm > 0:
            raise OfframpError(f"drift_alarm {self.drift_alarm} must be above 0.")
