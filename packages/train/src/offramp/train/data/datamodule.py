"""`TextDataModule`: sources, tokenizer and packing put together for Lightning.

One Lightning batch is this data-parallel rank's share of one optimizer step; the strategy cuts it into micro-batches.
"""

from __future__ import annotations

import os
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, cast

import lightning.pytorch as pl
import numpy as np
from lightning.pytorch.utilities import rank_zero_info, rank_zero_warn
from typing_extensions import override

from offramp.common.errors import OfframpError
from offramp.common.families import read_config
from offramp.common.hf import read_json
from offramp.common.prompt_sketch import PromptSketch
from offramp.common.t5.config import T5Config
from offramp.common.tokenizer import load_tokenizer
from offramp.train.data.batch import AnyBatch
from offramp.train.data.loader import BatchLoader, MapLoader, Share, StreamLoader
from offramp.train.data.sources import SourceConfig, load_rows
from offramp.train.data.tokenize import (
    Example,
    RowEncoder,
    SourceRule,
    describe_skipped,
    describe_truncated,
    encode_rows,
)

if TYPE_CHECKING:
    from datasets import Dataset, IterableDataset
    from transformers import PreTrainedTokenizerBase

Split = Literal["train", "validation", "test"]


@dataclass(frozen=True)
class Prepared:
    """Examples of a map-style source.

    Attributes:
        examples: columns `input_ids` and `labels`, and for pairs `source_ids`, without the rows that gave none.
        lengths: [number of examples] tokens of each; of pairs [number of examples, 2], targets first.
        fingerprint: names them.
        skipped: rows that gave no example, by reason.
        truncated: sources that were cut.
    """

    examples: Dataset
    lengths: np.ndarray
    fingerprint: str
    skipped: dict[str, int]
    truncated: int = 0


class TextDataModule(pl.LightningDataModule):
    """Text of any source as `TokenBatch`es, or as `PairBatch`es for an encoder-decoder model.

    Args:
        tokenizer: checkpoint directory whose tokenizer is used; usually the one the model starts from.
        train: what to train on.
        validation: what to validate on.
        test: what `offramp test` measures on.
        sequence_length: T, tokens in a row; of targets with `source_length`.
        source_length: M, source tokens in a row, for an encoder-decoder model: sources' `prompt` is what the encoder
            reads, their `completion` what the decoder writes. None: the model is decoder-only.
        truncate_sources: cut sources that are longer than `source_length` at the end, instead of leaving out their
            rows; both are counted.
        max_source_tokens: leave out rows whose sources are longer than this before they are cut; they are counted, too.
            None: all sources are cut.
        batch_size: rows per data-parallel rank and optimizer step.
        pack: put several examples into a row, each attending to itself only; otherwise one, padded.
        shuffle: train in a new order every epoch.
        shuffle_buffer: rows that are shuffled together when the training source is streamed.
        validation_share: without a validation source, this share of the training rows is held out for it, chosen by
            `seed`, before anything is tokenised.
        seed: of orders and of the held-out share.
        num_workers: processes that prepare batches.
        cache_directory: for corpora and tokenised examples; None is `$XDG_CACHE_HOME/offramp` or `~/.cache/offramp`.
    """

    def __init__(
        self,
        tokenizer: str,
        train: SourceConfig,
        validation: SourceConfig | None = None,
        test: SourceConfig | None = None,
        sequence_length: int = 512,
        batch_size: int = 8,
        pack: bool = True,
        shuffle: bool = True,
        shuffle_buffer: int = 1000,
        validation_share: float = 0.0,
        seed: int = 0,
        num_workers: int = 0,
        cache_directory: str | None = None,
        source_length: int | None = None,
        truncate_sources: bool = False,
        max_source_tokens: int | None = None,
    ) -> None:
        super().__init__()
        numbers = (("sequence_length", sequence_length), ("batch_size", batch_size), ("source_length", source_length))
        for name, value in numbers:
            if value is not None and value < 1:
                raise OfframpError(f"data.{name} is {value}; it must be at least 1")
        if not 0 <= validation_share < 1:
            raise OfframpError(f"data.validation_share is {validation_share}; it must lie in [0, 1)")
        if validation_share and validation is not None:
            raise OfframpError("data.validation and data.validation_share are both set; keep one of them")
        if validation_share and train.streaming:
            raise OfframpError("data.validation_share cannot hold out rows of a stream; give a data.validation source")
        if truncate_sources and source_length is None:
            raise OfframpError("data.truncate_sources cuts sources to data.source_length; set it, too")
        if max_source_tokens is not None and not (truncate_sources and max_source_tokens >= (source_length or 0)):
            raise OfframpError(
                f"data.max_source_tokens is {max_source_tokens}, which says what is left out of sources that "
                f"data.truncate_sources cuts to data.source_length ({source_length}); set that, and at least as many "
                "tokens as are read"
            )
        self.tokenizer_path = tokenizer
        self.source_length, self.truncate_sources = source_length, truncate_sources
        self.max_source_tokens = max_source_tokens
        self.sources: dict[Split, SourceConfig | None] = {"train": train, "validation": validation, "test": test}
        self.sequence_length, self.batch_size, self.pack = sequence_length, batch_size, pack
        self.shuffle, self.shuffle_buffer, self.validation_share = shuffle, shuffle_buffer, validation_share
        self.seed, self.num_workers = seed, num_workers
        cache = cache_directory or os.path.join(os.environ.get("XDG_CACHE_HOME") or "~/.cache", "offramp")
        self.cache_directory = Path(cache).expanduser()
        self.skipped: dict[Split, dict[str, int]] = {}
        self.truncated: dict[Split, int] = {}
        self._prepared: dict[Split, Prepared | IterableDataset] = {}
        self._prompts: dict[str, Any] | None = None  # a sketch of the training data's, see `PromptSketch`
        self._tokenizer: PreTrainedTokenizerBase | None = None
        self._train_loader: BatchLoader | None = None

    @property
    def tokenizer(self) -> PreTrainedTokenizerBase:
        """The tokenizer, loaded on first use."""
        if self._tokenizer is None:
            self._tokenizer = load_tokenizer(self.tokenizer_path)
        return self._tokenizer

    @override
    def prepare_data(self) -> None:
        """Downloads, collects and tokenises once per machine; the other processes then find it in the caches."""
        trainer = getattr(self, "trainer", None)
        if trainer is not None and trainer.world_size > 1:
            for split in self._splits(trainer.state.fn):
                self._prepare(split)

    @override
    def setup(self, stage: str) -> None:
        """Loads what a stage (fit, validate, test) needs."""
        for split in self._splits(stage):
            if split not in self._prepared:
                self._prepare(split)

    @override
    def train_dataloader(self) -> BatchLoader:
        """Batches of the training data."""
        self._train_loader = self._loader("train", train=True)
        return self._train_loader

    @override
    def val_dataloader(self) -> BatchLoader | list[Any]:
        """Batches that cover every validation row once."""
        return self._loader("validation", train=False) if self._has("validation") else []

    @override
    def test_dataloader(self) -> BatchLoader | list[Any]:
        """Batches that cover every test row once."""
        return self._loader("test", train=False) if self._has("test") else []

    @override
    def on_before_batch_transfer(self, batch: AnyBatch, dataloader_idx: int) -> AnyBatch:
        """Tells a streaming loader that its batch is used, see `StreamLoader`."""
        if isinstance(self._train_loader, StreamLoader) and self.trainer is not None and self.trainer.training:
            self._train_loader.mark_taken()
        return batch

    def describe(self) -> dict[str, Any]:
        """What was trained on, in plain containers, for the provenance of a checkpoint."""
        source, prepared = self.sources["train"], self._prepared.get("train")
        assert source is not None
        known = (
            {"examples": len(prepared.examples), "fingerprint": prepared.fingerprint}
            if isinstance(prepared, Prepared)
            else {}
        )
        lengths = {"sequence_length": self.sequence_length}
        if self.source_length is not None:
            lengths["source_length"] = self.source_length
        prompts = {} if self._prompts is None else {"prompts": self._prompts}
        return {"source": source.name, **lengths, "seed": self.seed, **known, **prompts}

    def _has(self, split: Split) -> bool:
        return self.sources[split] is not None or (split == "validation" and self.validation_share > 0)

    def _splits(self, stage: str | None) -> list[Split]:
        wanted: dict[str | None, list[Split]] = {"fit": ["train", "validation"], "test": ["test"]}
        splits = wanted.get(stage, ["validation"])
        if stage in ("validate", "test") and not self._has(splits[0]):
            name = str(getattr(stage, "value", stage))  # Lightning's enumeration, or a plain word
            raise OfframpError(f"there is nothing to {name}: set data.{splits[0]} to a source")
        return [split for split in splits if self._has(split)]

    def _check_length(self) -> None:
        module = self.trainer.lightning_module if self.trainer is not None else None
        pairs = getattr(module, "decoder_start_token_id", None) is not None
        if pairs and self.source_length is None:
            raise OfframpError(
                "the model has an encoder, so data needs room for what it reads; set data.source_length (tokens of "
                "sources in a row)"
            )
        if module is not None and not pairs and self.source_length is not None:
            raise OfframpError(
                f"data.source_length is {self.source_length}, but the model has no encoder that would read sources; "
                "leave it out"
            )
        limit = getattr(module, "max_sequence_length", None)
        if limit is not None and self.sequence_length > limit:
            raise OfframpError(
                f"data.sequence_length is {self.sequence_length}, but the model has positions for {limit} tokens "
                "(max_position_embeddings in its config.json); lower it"
            )

    def _source_rule(self) -> SourceRule | None:
        if self.source_length is None:
            return None
        module = self.trainer.lightning_module if self.trainer is not None else None
        start: int | None = getattr(module, "decoder_start_token_id", None)
        file = Path(self.tokenizer_path) / "config.json"
        if start is None and file.is_file():  # without a model, the one that the tokenizer lies beside
            config = read_config(read_json(file))
            start = config.decoder_start_token_id if isinstance(config, T5Config) else None
        if start is None:
            raise OfframpError(
                f"data.source_length is set, but {self.tokenizer_path} holds no encoder-decoder model to say what the "
                "decoder reads first; let data.tokenizer be the directory that the model starts from"
            )
        return SourceRule(self.source_length, self.truncate_sources, start, self.max_source_tokens)

    def _encoder(self, source: SourceConfig) -> RowEncoder:
        return RowEncoder(self.tokenizer, source, self.sequence_length, self._source_rule())

    def _prepare(self, split: Split) -> None:
        self._check_length()  # before an hour of tokenising
        source = self.sources[split]
        held_out = split in ("train", "validation") and self.validation_share > 0
        if held_out:
            source = self.sources["train"]
        assert source is not None
        rows = load_rows(source, self.cache_directory)
        encoder = self._encoder(source)
        if source.streaming:
            self._prepared[split] = cast("IterableDataset", rows)
            return
        rows = cast("Dataset", rows)
        if held_out:
            parts = rows.train_test_split(test_size=self.validation_share, seed=self.seed, load_from_cache_file=False)
            rows = parts["train" if split == "train" else "test"]
        if split == "train" and source.prompt is not None:
            sketch = PromptSketch.of(filter(None, (encoder.prompt(cast("dict[str, Any]", row)) for row in rows)))
            self._prompts = sketch.to_json()
        prepared = _encode(rows, encoder, f"{split} ({source.name})", self.cache_directory)
        self.skipped[split], self.truncated[split] = prepared.skipped, prepared.truncated
        self._prepared[split] = prepared

    def _loader(self, split: Split, *, train: bool) -> BatchLoader:
        kwargs = (self.trainer.distributed_sampler_kwargs if self.trainer is not None else None) or {}
        share = Share(self.batch_size, kwargs.get("num_replicas", 1), kwargs.get("rank", 0))
        # Any token can stand in padding; the end of sequence is one that every model knows.
        eos = self.tokenizer.eos_token_id
        pad_id = int(eos) if isinstance(eos, int) else 0
        prepared = self._prepared[split]
        if isinstance(prepared, Prepared):
            return MapLoader(
                prepared.examples,
                prepared.lengths,
                share,
                capacity=self.sequence_length,
                pack=self.pack,
                pad_id=pad_id,
                shuffle=train and self.shuffle,
                drop_last=train,
                seed=self.seed,
                num_workers=self.num_workers,
                fingerprint=prepared.fingerprint,
                source_capacity=self.source_length,
            )
        source = self.sources[split]
        assert source is not None
        encoder = self._encoder(source)
        rows = prepared
        if train and self.shuffle:
            rows = rows.shuffle(seed=self.seed, buffer_size=self.shuffle_buffer)
        stream = _Stream(rows, encoder, f"{split} ({source.name})")
        return StreamLoader(
            stream,
            share,
            capacity=self.sequence_length,
            pack=self.pack,
            pad_id=pad_id,
            drop_last=train,
            seed=self.seed,
            num_workers=self.num_workers,
            count_taken=train and self.trainer is not None,
            name=source.name,
            source_capacity=self.source_length,
        )


class _Stream:
    """The examples of a streamed source, epoch by epoch."""

    def __init__(self, rows: IterableDataset, encoder: RowEncoder, name: str) -> None:
        self._rows, self._encoder, self._name = rows, encoder, name

    def __call__(self, epoch: int) -> Iterator[Example]:
        self._rows.set_epoch(epoch)
        skipped: Counter[str] = Counter()
        total = truncated = 0
        for row in self._rows:
            total += 1
            result = self._encoder.encode(cast("dict[str, Any]", row))
            if isinstance(result, str):
                skipped[result] += 1
            else:
                truncated += sum(example.truncated for example in result)
                yield from result
        if total == sum(skipped.values()):
            raise OfframpError(f"{self._name}: no row of the stream gives an example; check the source's columns")
        if message := describe_skipped(skipped, total, self._name):
            rank_zero_warn(message)
        rule = self._encoder.source_rule
        if rule is not None and (message := describe_truncated(truncated, total, rule, self._name)):
            rank_zero_warn(message)


def _encode(rows: Dataset, encoder: RowEncoder, name: str, cache_directory: Path) -> Prepared:
    """Tokenises a data set, or finds its tokens in the cache; counts and leaves out the rows that give no example."""
    fingerprint = f"{rows._fingerprint}-{encoder.fingerprint}"
    cache_directory.mkdir(parents=True, exist_ok=True)
    encoded = rows.map(
        lambda batch: encode_rows(encoder, batch),
        batched=True,
        remove_columns=rows.column_names,
        cache_file_name=str(cache_directory / f"tokens-{fingerprint}.arrow"),
        new_fingerprint=fingerprint[:64],
        features=_features(encoder.source_rule is not None),
        desc=f"Tokenising {name}",
    )
    reasons = np.asarray(encoded["skipped"])
    skipped = {str(reason): int(count) for reason, count in Counter(reasons.tolist()).items() if reason}
    kept = encoded.select(np.flatnonzero(reasons == "")).remove_columns("skipped")
    message = describe_skipped(skipped, len(rows), name)
    rule, truncated = encoder.source_rule, 0
    if rule is not None:
        truncated = int(np.asarray(encoded["truncated"]).sum())
        kept = kept.remove_columns("truncated")
        if cut := describe_truncated(truncated, len(rows), rule, name):
            rank_zero_warn(cut)
    if len(kept) == 0:
        raise OfframpError(f"no row gives an example: {message}")
    if message:
        rank_zero_warn(message)
    kept = kept.with_format("numpy")
    lengths = _lengths(kept, "input_ids")
    if rule is not None:
        lengths = np.stack((lengths, _lengths(kept, "source_ids")), axis=1)
    rank_zero_info(f"{name}: {len(kept)} examples, {int(lengths.sum())} tokens")
    return Prepared(kept, lengths, fingerprint, skipped, truncated)


def _features(pairs: bool) -> Any:
    from datasets import Features, List, Value

    tokens = List(Value("int32"))
    more = {"source_ids": tokens, "truncated": Value("bool")} if pairs else {}
    return Features({"input_ids": tokens, "labels": tokens, "skipped": Value("string"), **more})


def _lengths(examples: Dataset, name: str) -> np.ndarray:
    import pyarrow.compute as pc

    column = examples.with_format("arrow")[name]
    return np.asarray(pc.list_value_length(column[:] if not hasattr(column, "chunks") else column))  # pyright: ignore[reportAttributeAccessIssue]
