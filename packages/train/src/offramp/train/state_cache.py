"""States of a frozen backbone on disk: what exits read and what the full model says, for every target token.

The backbone runs once; any number of heads can then be trained on the result, in runs of seconds. A cache is a folder
of safetensors shards and a manifest. Its name is a hash of what the states depend on (weights, token ids, exit layers,
precision), so another model or other data never meet a stale one; which heads are trained plays no part. A shard
appears whole or not at all, so a run that was killed goes on where it stopped.

Of the full model's distribution the K most probable tokens are kept, and the probability of all others together. The
divergence over these K + 1 events is a lower bound of that over the vocabulary.

Legend: N target tokens, X early exits, D model, K most probable tokens, V vocabulary or shortlist.
"""

from __future__ import annotations

import hashlib
import json
import os
import shutil
from collections.abc import Callable, Iterable, Sequence
from itertools import islice
from pathlib import Path
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from safetensors.torch import save_file
from torch import Tensor

from offramp.common.errors import OfframpError
from offramp.common.hf import read_json, read_tensors
from offramp.train.data.batch import IGNORED_LABEL, AnyBatch
from offramp.train.linear_cross_entropy import CHUNK_ROWS

MANIFEST = "manifest.json"
SHARD_BYTES = 64 << 20
"""Size of a shard, about: what is lost at most when a run is killed."""
_LEAST = 1e-6
"""Smallest probability of all other tokens together that is told from 0 in fp32."""


class CachedStates(NamedTuple):
    """States of some target tokens.

    Attributes:
        exits: [N, X, D] bf16, after each early exit's layer.
        tokens: [N, K] int32, the full model's most probable tokens, the first of them first.
        log_p: [N, K] fp32, their log-probabilities.
        log_rest: [N] fp32, log-probability of all other tokens together.
    """

    exits: Tensor
    tokens: Tensor
    log_p: Tensor
    log_rest: Tensor

    @classmethod
    def of(cls, exits: Tensor, final: Tensor, unembedding: Tensor, top: int) -> CachedStates:
        """What is kept of [N, X, D] states and of [N, D], what the unembedding [V, D] of the full model reads."""
        kept: list[tuple[Tensor, Tensor, Tensor]] = []
        for rows in final.split(CHUNK_ROWS):
            log_p = F.linear(rows, unembedding).float().log_softmax(dim=-1)
            best = log_p.topk(min(top, log_p.shape[-1] - 1))
            rest = log_p.scatter(1, best.indices, -torch.inf).logsumexp(dim=-1)
            kept.append((best.indices.int(), best.values, rest))
        tokens, log_p, log_rest = (torch.cat(parts).cpu() for parts in zip(*kept, strict=True))
        return cls(exits.bfloat16().cpu(), tokens, log_p, log_rest)


def divergence(logits: Tensor, states: CachedStates, position: Tensor | None) -> Tensor:
    """Mean divergence to the full model, in nats, over its K most probable tokens and one event for all others.

    Where logits are those of a shortlist, a token outside it belongs to the others: a head learns to be unsure where
    the full model would say what the head cannot.

    Args:
        logits: [N, V] fp32 of a head.
        states: of the same N tokens.
        position: [vocabulary] place of each token in the shortlist, -1 where it has none; None: V is the vocabulary.
    """
    places = states.tokens.long() if position is None else position[states.tokens.long()]
    known = places >= 0
    p = states.log_p.exp() * known
    p_rest = (1.0 - p.sum(dim=-1)).clamp_min(0.0) if position is not None else states.log_rest.exp()
    log_q = logits.log_softmax(dim=-1).gather(1, places.clamp_min(0))
    q_rest = (1.0 - (log_q.exp() * known).sum(dim=-1)).clamp_min(_LEAST)
    inside = (p * (states.log_p - log_q)).sum(dim=-1)
    return (inside + torch.xlogy(p_rest, p_rest) - p_rest * q_rest.log()).mean()


class Survey(NamedTuple):
    """What a pass over the tokens tells before the model runs.

    Attributes:
        digest: of all tokens.
        counts: target tokens of each batch.
        seen: [V] 1 for tokens that are targets.
    """

    digest: str
    counts: list[int]
    seen: Tensor


def survey(batches: Iterable[AnyBatch], vocabulary: int, limit: int) -> Survey:
    """Read batches until `limit` target tokens are there."""
    digest, counts, seen = hashlib.sha256(), [], torch.zeros(vocabulary)
    for batch in batches:
        for tensor in batch:
            digest.update(str(tuple(tensor.shape)).encode())
            digest.update(tensor.contiguous().numpy().tobytes())
        targets = batch.labels[batch.labels != IGNORED_LABEL]
        seen[targets] = 1.0
        counts.append(len(targets))
        if sum(counts) >= limit:
            break
    return Survey(digest.hexdigest(), counts, seen)


class StateCache:
    """One cache.

    Args:
        root: folder of all caches.
        identity: what the states depend on, in plain values.
        counts: target tokens of each batch, in the order of the batches.
        limit: keep no more of them.
        row_bytes: size of one token's states.
    """

    def __init__(self, root: Path, identity: dict[str, Any], counts: Sequence[int], limit: int, row_bytes: int) -> None:
        self.count = min(sum(counts), limit)
        self.size = self.count * row_bytes
        self._bounds = [0]  # shard s holds the tokens of batches bounds[s] .. bounds[s + 1]
        rows = 0
        for number, count in enumerate(counts, start=1):
            rows += count
            if rows * row_bytes >= SHARD_BYTES or number == len(counts):
                self._bounds.append(number)
                rows = 0
        self._rows = [sum(counts[a:b]) for a, b in zip(self._bounds, self._bounds[1:], strict=False)]
        self._rows[-1] -= sum(counts) - self.count
        self._manifest = {"identity": identity, "tokens": self.count, "batches": self._bounds}
        text = json.dumps(self._manifest, sort_keys=True)
        self.directory = root / hashlib.sha256(text.encode()).hexdigest()[:24]
        self._shards: list[CachedStates] = []

    @property
    def missing(self) -> list[int]:
        """Shards that are not there, or cut short."""
        return [shard for shard in range(len(self._rows)) if not self._is_whole(shard)]

    def fill(self, batches: Iterable[AnyBatch], states: Callable[[AnyBatch], CachedStates], share: int = 1) -> None:
        """Write what is missing.

        Args:
            batches: the same that were counted.
            states: of the target tokens of a batch, in its order.
            share: processes that write to the same disk.

        Raises:
            OfframpError: the disk has no room for it, or writing fails.
        """
        missing = self.missing
        if not missing:
            return
        try:
            self.directory.mkdir(parents=True, exist_ok=True)
            needed = self.size * sum(self._rows[shard] for shard in missing) // max(self.count, 1)
            free = shutil.disk_usage(self.directory).free // share
            if needed > free:
                raise OfframpError(
                    f"the states of {self.count:,} tokens need {gigabytes(needed)} more in {self.directory}, which has "
                    f"room for {gigabytes(free)}; lower model.max_states, or set model.cache to a larger disk."
                )
            (self.directory / MANIFEST).write_text(json.dumps(self._manifest, indent=2) + "\n", encoding="utf-8")
            stream, at = iter(batches), 0
            for shard in missing:
                start, stop = self._bounds[shard], self._bounds[shard + 1]
                wanted = islice(stream, start - at, stop - at)
                parts = [states(batch) for batch in wanted]
                at = stop
                self._write(shard, CachedStates(*(torch.cat(p)[: self._rows[shard]] for p in zip(*parts, strict=True))))
        except OSError as fault:
            raise OfframpError(f"{self.directory} cannot be written: {fault}; set model.cache to another.") from fault

    def open(self) -> None:
        """Map the shards into memory; the disk is read where rows are taken."""
        found = read_json(self.directory / MANIFEST)
        if found != json.loads(json.dumps(self._manifest)):
            raise OfframpError(f"{self.directory} is the cache of something else; remove it.")
        self._shards = [CachedStates(**read_tensors(self._path(shard))) for shard in range(len(self._rows))]

    def take(self, rows: Tensor) -> CachedStates:
        """The states of `rows` [N], sorted."""
        edges = torch.tensor(self._rows).cumsum(0)
        shards = torch.bucketize(rows, edges, right=True)
        parts = []
        for shard in shards.unique().tolist():
            first = int(edges[shard]) - self._rows[shard]
            inside = (rows[shards == shard] - first).sort().values
            parts.append([tensor[inside] for tensor in self._shards[shard]])
        return CachedStates(*(torch.cat(tensors) for tensors in zip(*parts, strict=True)))

    def _path(self, shard: int) -> Path:
        return self.directory / f"states_{shard:05d}.safetensors"

    def _is_whole(self, shard: int) -> bool:
        try:
            return (
                len(read_tensors(self._path(shard), lambda name: name == "log_rest")["log_rest"]) == self._rows[shard]
            )
        except (OfframpError, KeyError):
            return False

    def _write(self, shard: int, states: CachedStates) -> None:
        path = self._path(shard)
        scratch = path.with_name(f".{path.name}.{os.getpid()}")
        save_file({name: tensor.contiguous() for name, tensor in states._asdict().items()}, scratch)
        with scratch.open("rb") as handle:
            os.fsync(handle.fileno())
        scratch.replace(path)


def gigabytes(size: int) -> str:
    """In words."""
    return f"{size / 1e9:.2f} GB" if size >= 1e8 else f"{size / 1e6:.2f} MB"
