"""What training starts from: a fresh shape, or an imported model and its lower half."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml

from helpers.tiny_t5 import hugging_face_t5, load_t5
from offramp.common.errors import OfframpError
from offramp.evaluate.reproduce.sizes import SIZES, TINY
from offramp.evaluate.reproduce.tasks import cnn_dailymail
from offramp.evaluate.reproduce.training import shallow_start, start_model, write_recipe
from offramp.train.recipe import load_recipe


def test_a_shallow_model_is_the_lower_half_of_a_pretrained_one(tmp_path: Path) -> None:
    hugging_face_t5(tmp_path / "hf", feed_forward_proj="gated-gelu", tie_word_embeddings=False)
    task = replace(cnn_dailymail(), pretrained={"tiny": str(tmp_path / "hf")})
    start_model(task, TINY, (), tmp_path / "start")
    shallow_start(tmp_path / "start", 2, tmp_path / "half", pretrained=True)
    deep, half = load_t5(tmp_path / "start").model.eval(), load_t5(tmp_path / "half").model.eval()
    assert deep.exit_config.layers == (1, 2, 3)
    assert (half.config.num_layers, half.exit_config.layers) == (2, ())
    source, target = torch.tensor([[5, 9, 1]]), torch.tensor([[0, 7, 8]])
    with torch.no_grad():
        assert torch.equal(half(source, target).logits[2], deep(source, target).logits[2]), "exits share the head"


def test_a_shape_of_its_own_has_the_vocabulary_of_its_tokenizer(tmp_path: Path) -> None:
    task = replace(cnn_dailymail(), pretrained={})
    start_model(task, TINY, ["to be or not to be"], tmp_path / "start")
    vocabulary = json.loads((tmp_path / "start" / "config.json").read_text())["vocab_size"]
    assert 256 < vocabulary <= TINY.vocabulary
    shallow_start(tmp_path / "start", 2, tmp_path / "half", pretrained=False)
    assert json.loads((tmp_path / "half" / "config.json").read_text())["num_decoder_layers"] == 2
    assert json.loads((tmp_path / "half" / "exits.json").read_text())["exits"]["layers"] == []


def test_recipes_have_all_their_values(tmp_path: Path) -> None:
    names = ("model", "data", "out", "row_tokens", "rows", "states", "steps")
    values: dict[str, Any] = dict.fromkeys(names, 1)
    recipe = write_recipe("classifiers", tmp_path / "recipe.yaml", values)
    assert load_recipe([recipe])["trainer"]["max_steps"] == 1
    assert yaml.safe_load(recipe.read_text())["vars"]["states"] == 1
    with pytest.raises(OfframpError, match="differ in states, wrong"):
        write_recipe("classifiers", tmp_path / "recipe.yaml", {**values, "states": "???", "wrong": 1})


def test_a_budget_names_what_sizes_have() -> None:
    for size in SIZES.values():
        assert replace(size, **cnn_dailymail().budget).steps == 20_000
