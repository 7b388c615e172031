"""Sources and targets of an encoder-decoder model: every pair whole, apart from others, and shifted."""

from __future__ import annotations

import copy
import json
import warnings
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from tokenizers.processors import TemplateProcessing

from helpers.rows import counted
from helpers.tiny import EOS_ID, VOCAB_SIZE, tiny_tokenizer
from offramp.common.errors import OfframpError
from offramp.train.data.batch import IGNORED_LABEL, AnyBatch, PairBatch
from offramp.train.data.datamodule import TextDataModule
from offramp.train.data.packing import plan_rows
from offramp.train.data.sources import SourceConfig

START, SOURCE, TARGET = 3, 31, 32
COLUMNS: dict[str, Any] = {"prompt": "{question} {text}", "completion": "answer"}


@pytest.fixture(scope="module")
def directory(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The tokenizer ends sources, as T5's does."""
    path = tmp_path_factory.mktemp("t5")
    tokenizer = copy.deepcopy(tiny_tokenizer(chat_template=False))
    ending = TemplateProcessing(single="$A <|eos|>", special_tokens=[("<|eos|>", EOS_ID)])
    tokenizer.backend_tokenizer.post_processor = ending
    tokenizer.save_pretrained(str(path))
    sizes = {"d_model": 16, "d_kv": 4, "d_ff": 24, "num_layers": 2, "num_heads": 4}
    config = {"model_type": "t5", "vocab_size": VOCAB_SIZE, "decoder_start_token_id": START, **sizes}
    (path / "config.json").write_text(json.dumps(config))
    return path


def data(directory: Path, cache: Path, count: int = 11, streaming: bool = False, **settings: Any) -> TextDataModule:
    options: dict[str, Any] = {"count": count}
    train = SourceConfig("generator", "helpers.rows:counted", options=options, streaming=streaming, **COLUMNS)
    lengths = {"sequence_length": TARGET, "source_length": SOURCE, "cache_directory": str(cache)}
    return TextDataModule(
        str(directory), **{"train": train, "validation": train, "batch_size": 2, **lengths, **settings}
    )


def validation(module: TextDataModule) -> list[AnyBatch]:
    module.setup("validate")
    return list(module.val_dataloader())


def pairs(batches: list[AnyBatch]) -> list[tuple[tuple[int, ...], tuple[int, ...]]]:
    """(source, labels) of every segment; what the decoder reads is checked on the way."""
    found = []
    for batch in batches:
        assert isinstance(batch, PairBatch)
        assert batch.row_length == batch.source_ids.shape[1] + batch.input_ids.shape[1]
        for sources, source_segments, inputs, labels, segments in zip(*batch, strict=True):
            assert torch.equal(labels == IGNORED_LABEL, segments == 0)
            for segment in range(1, int(segments.max()) + 1):
                target = labels[segments == segment].tolist()
                assert inputs[segments == segment].tolist() == [START, *target[:-1]]
                found.append((tuple(sources[source_segments == segment].tolist()), tuple(target)))
    return sorted(found)


def expected(count: int) -> list[tuple[tuple[int, ...], tuple[int, ...]]]:
    tokenizer = tiny_tokenizer(chat_template=False)
    return sorted(
        (
            (*tokenizer(f"{row['question']} {row['text']}")["input_ids"], EOS_ID),
            (*tokenizer(row["answer"])["input_ids"], EOS_ID),
        )
        for row in counted(count)
    )


@pytest.mark.parametrize("streaming", [False, True])
@pytest.mark.parametrize("pack", [False, True])
def test_every_pair_is_there_once_and_whole(directory: Path, tmp_path: Path, pack: bool, streaming: bool) -> None:
    module = data(directory, tmp_path, streaming=streaming, pack=pack, source_length=90, sequence_length=70)
    batches = validation(module)
    assert pairs(batches) == expected(11)
    rows = sum(int((batch.labels != IGNORED_LABEL).any(dim=1).sum()) for batch in batches)
    assert rows < 11 if pack else rows == 11
    assert {(b.source_ids.shape[1], b.input_ids.shape[1]) for b in batches if isinstance(b, PairBatch)} == {(90, 70)}


def test_long_sources_are_left_out_or_cut_before_their_end_and_counted(directory: Path, tmp_path: Path) -> None:
    everything = expected(11)
    long = [source for source, _ in everything if len(source) > SOURCE]
    assert 0 < len(long) < 11
    skipping = data(directory, tmp_path)
    assert pairs(validation(skipping)) == [pair for pair in everything if len(pair[0]) <= SOURCE]
    assert skipping.skipped["validation"] == {"prompt_too_long": len(long)}
    cutting = data(directory, tmp_path, truncate_sources=True)
    cut = [((*s[: SOURCE - 1], EOS_ID) if len(s) > SOURCE else s, target) for s, target in everything]
    assert pairs(validation(cutting)) == sorted(cut)
    assert (cutting.truncated["validation"], cutting.skipped["validation"]) == (len(long), {})
    (message,) = (
        m for m in warnings_of(data(directory, tmp_path, truncate_sources=True, streaming=True)) if "cut" in m
    )
    assert f"cut {len(long)} of 11 sources to {SOURCE} tokens" in message


def test_sources_beyond_a_limit_are_left_out_and_others_cut(directory: Path, tmp_path: Path) -> None:
    everything = expected(11)
    lengths = sorted(len(source) for source, _ in everything if len(source) > SOURCE)
    limit = lengths[len(lengths) // 2]
    kept = [((*s[: SOURCE - 1], EOS_ID) if len(s) > SOURCE else s, t) for s, t in everything if len(s) <= limit]
    cutting = data(directory, tmp_path, truncate_sources=True, max_source_tokens=limit)
    assert pairs(validation(cutting)) == sorted(kept)
    assert cutting.skipped["validation"] == {"prompt_too_long": 11 - len(kept)}
    assert 0 < len(kept) < 11
    assert cutting.truncated["validation"] == sum(SOURCE < length <= limit for length in lengths) > 0


def warnings_of(module: TextDataModule) -> list[str]:
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        validation(module)
    return [str(warning.message) for warning in caught]


def test_long_targets_are_cut_at_the_end(directory: Path, tmp_path: Path) -> None:
    module = data(directory, tmp_path, source_length=90, sequence_length=5)
    assert pairs(validation(module)) == sorted((source, target[:5]) for source, target in expected(11))


def test_an_empty_row_is_all_padding(directory: Path, tmp_path: Path) -> None:
    *_, last = validation(data(directory, tmp_path, pack=False, source_length=90))
    assert isinstance(last, PairBatch)
    assert not last.source_segment_ids[1].any()
    assert not last.segment_ids[1].any()


def test_training_resumes_in_the_middle_of_an_epoch(directory: Path, tmp_path: Path) -> None:
    whole, half = (data(directory, tmp_path, source_length=90, pack=False) for _ in range(2))
    for module in (whole, half):
        module.setup("fit")
    batches = list(whole.train_dataloader())
    loader = half.train_dataloader()
    taken = iter(loader)
    for _ in range(2):
        next(taken)
    again = half.train_dataloader()
    again.load_state_dict(loader.state_dict())
    for one, other in zip(batches[2:], again, strict=True):
        assert all(torch.equal(a, b) for a, b in zip(one, other, strict=True))


REFUSED: dict[str, tuple[dict[str, Any], str]] = {
    "a source without pairs": ({"validation": SourceConfig("generator", "helpers.rows:counted")}, "set 'prompt'"),
    "no length": ({"source_length": 0}, "data.source_length is 0; it must be at least 1"),
    "cutting without a length": ({"source_length": None, "truncate_sources": True}, "set it, too"),
    "a limit without cutting": ({"max_source_tokens": 40}, "set that, and at least as many tokens as are read"),
    "a limit below what is read": (
        {"truncate_sources": True, "max_source_tokens": SOURCE - 1},
        "data.max_source_tokens is 30, which says what is left out",
    ),
}


@pytest.mark.parametrize("fault", REFUSED)
def test_settings_that_make_no_sense_are_refused(directory: Path, tmp_path: Path, fault: str) -> None:
    settings, words = REFUSED[fault]
    with pytest.raises(OfframpError, match=words):
        data(directory, tmp_path, **settings).setup("validate")


def test_a_tokenizer_without_an_encoder_decoder_model_is_refused(tmp_path: Path) -> None:
    tiny_tokenizer().save_pretrained(str(tmp_path / "plain"))
    with pytest.raises(OfframpError, match="holds no encoder-decoder model to say what the decoder reads first"):
        data(tmp_path / "plain", tmp_path).setup("validate")


@pytest.mark.parametrize(("start", "length", "words"), [(3, None, "set data.source_length"), (None, 9, "leave it out")])
def test_data_and_model_must_be_of_one_family(
    directory: Path, tmp_path: Path, start: int | None, length: int | None, words: str
) -> None:
    module = data(directory, tmp_path, source_length=length)
    model = SimpleNamespace(decoder_start_token_id=start, max_sequence_length=None)
    module.trainer = SimpleNamespace(distributed_sampler_kwargs=None, lightning_module=model)  # pyright: ignore[reportAttributeAccessIssue]
    with pytest.raises(OfframpError, match=words):
        module.setup("validate")


@given(st.lists(st.tuples(st.integers(1, 7), st.integers(1, 12)), max_size=60))
def test_rows_of_pairs_have_room_for_both_sides(lengths: list[tuple[int, int]]) -> None:
    rows = plan_rows(lengths, range(len(lengths)), 7, True, 12)
    assert sorted(index for row in rows for index in row) == list(range(len(lengths)))
    for row in rows:
        assert sum(lengths[index][0] for index in row) <= 7
        assert sum(lengths[index][1] for index in row) <= 12
