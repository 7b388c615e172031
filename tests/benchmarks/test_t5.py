"""The benchmark of T5, on a tiny model and without peers."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from transformers import AutoModelForSeq2SeqLM

from benchmarks import t5
from offramp.common.t5.config import T5Config
from offramp.serve.bench.transformers_contestant import Transformers
from offramp.serve.bench.trial import Question


@pytest.mark.parametrize("shape", t5.SHAPES)
def test_shapes_are_models(shape: str) -> None:
    assert T5Config.from_hf(t5.SHAPES[shape]).num_layers == t5.SHAPES[shape]["num_layers"]


def test_engine_and_transformers_are_measured_on_the_same_sources(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    sizes = ["--batch", "1,3", "--prompt-tokens", "33", "--new-tokens", "4", "--repeat", "1", "--json"]
    assert t5.run(["--shape", "tiny", "--dtype", "fp32", "--assistant-layers", "1", *sizes]) == 0
    captured = capsys.readouterr()
    rows = [json.loads(line) for line in captured.out.splitlines()]
    depths = {"full depth": 3, "static at 1": 1, "fill, all at 1, regroup": 1, "transformers": None}
    assert [(row["batch"], row["contestant"], row["mean_layers"]) for row in rows] == [
        (batch, *depth) for batch in (1, 3) for depth in depths.items()
    ]
    assert all(row["tokens_per_s"] > 0 and row["prefill_tokens_per_s"] > 0 for row in rows)
    assert "ctranslate2 int8: not measured: ctranslate2 int8 cannot be started" in captured.err
    assert "assistant_early_exit of transformers is made for decoder-only models" in captured.err
    # Plain enough for anybody's converter.
    directory = tmp_path / "build/bench/random-tiny"
    assert not (directory / "exits.json").exists()
    AutoModelForSeq2SeqLM.from_pretrained(directory)


def test_transformers_tells_when_each_new_token_came(tmp_path: Path) -> None:
    t5.write_random("tiny", tmp_path / "model")
    contestant = Transformers(tmp_path / "model", "fp32")
    trial = contestant.run(Question([(5, 6, 7), (8, 9)], 4, 2))
    assert [len(times) for times in trial.token_times] == [4, 4]
    assert all(list(times) == sorted(set(times)) for times in trial.token_times)
