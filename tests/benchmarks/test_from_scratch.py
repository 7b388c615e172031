"""The benchmark that trains from scratch: vocabulary, models and what is said of two runs."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from benchmarks.from_scratch import EXITS, PLAIN, compare, draw, overrides, write_model, write_tokenizer

from offramp.common.tokenizer import load_tokenizer
from offramp.train.recipe import load_recipe

TEXTS = ["The quick brown fox jumps over the lazy dog.", "Return the value, or raise ValueError."] * 5


def test_vocabulary_spells_any_text_and_has_the_tokens_that_the_model_names(tmp_path: Path) -> None:
    write_tokenizer(tmp_path / "tokenizer", TEXTS, 300)
    tokenizer = load_tokenizer(tmp_path / "tokenizer")
    text = "Größe: fox → 10\n"
    assert tokenizer.decode(tokenizer(text, add_special_tokens=False)["input_ids"]) == text
    write_model(tmp_path / "model", len(tokenizer), (3, 6))
    config = json.loads((tmp_path / "model" / "config.json").read_text())
    assert config["vocab_size"] == len(tokenizer) <= 300
    assert (config["bos_token_id"], config["eos_token_id"]) == (tokenizer.bos_token_id, tokenizer.eos_token_id)


def test_runs_differ_in_their_exits_alone(tmp_path: Path) -> None:
    recipe = Path(__file__).parents[2] / "configs" / "train" / "tiny.yaml"
    resolved = {}
    for name, exits in ((PLAIN, ()), (EXITS, (3, 6))):
        write_model(tmp_path / name, 300, exits)
        given = overrides(name, tmp_path / "tokenizer", tmp_path / name, 40)
        resolved[name] = load_recipe([recipe], [(key, str(value)) for key, value in given.items()])
        assert json.loads((tmp_path / name / "exits.json").read_text())["exits"]["layers"] == list(exits)
    plain, exits = (resolved[name]["model"]["init_args"] for name in (PLAIN, EXITS))
    assert (plain.pop("exit_weights"), exits.pop("exit_weights")) == ("[]", [0.25, 0.5])
    assert {plain.pop("checkpoint"), exits.pop("checkpoint")} == {str(tmp_path / PLAIN), str(tmp_path / EXITS)}
    assert resolved[PLAIN] == resolved[EXITS]


def test_final_exits_are_compared(tmp_path: Path) -> None:
    def curve(*losses: float) -> list[tuple[int, float]]:
        return [(10 * index, loss) for index, loss in enumerate(losses, 1)]

    speed = {"train/tokens_per_second": curve(100.0, 300.0, 200.0)}
    found = {
        EXITS: {"val/loss_exit_3": curve(8.0, 6.0), "val/loss_exit_8": curve(8.1, 5.0), **speed},
        PLAIN: {"val/loss_exit_8": curve(8.2, 5.25), **speed},
    }
    report = compare(found)
    assert report["final_exit_minus_plain"] == pytest.approx(-0.25)
    assert report[EXITS]["val/loss_exit_3"] == {"first": 8.0, "last": 6.0}
    assert report[PLAIN]["tokens_per_second"] == 200.0
    draw(tmp_path / "losses.png", found)
    assert (tmp_path / "losses.png").stat().st_size > 5000
