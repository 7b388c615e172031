"""lm-eval through its API: its scores are those of transformers at full depth, and exits change what they should."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml
from transformers import AutoModelForCausalLM

from helpers.tiny import tiny_checkpoint
from offramp.common.errors import OfframpError
from offramp.common.exits.config import ExitConfig
from offramp.common.exits.policy import ExitPolicy
from offramp.common.tokenizer import load_tokenizer
from offramp.evaluate.cli.evaluate import main
from offramp.evaluate.results import read_results

pytest.importorskip("lm_eval")

POLICY = ExitPolicy("margin", {1: 0.3, 2: 0.3, 3: 0.3})
QUESTIONS: list[dict[str, Any]] = [
    {"question": "Tiny random models", "choices": [" say one token for ever", " wander"], "answer": 0},
    {"question": "The weights are drawn", "choices": [" wider", " never"], "answer": 1},
    {"question": "Größe: 漢字 und", "choices": [" é", " 字"], "answer": 1},
]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("lm-eval")
    tiny_checkpoint(folder / "model", ExitConfig((1, 2, 3)), POLICY)
    (folder / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in QUESTIONS), encoding="utf-8")
    common = {
        "dataset_path": "json",
        "dataset_kwargs": {
            "data_files": {"test": str(folder / "rows.jsonl")},
            "cache_dir": str(folder / "cache"),
        },
        "test_split": "test",
        "doc_to_text": "{{question}}",
    }
    choose = {
        **{"task": "choose", "output_type": "multiple_choice", "target_delimiter": ""},
        **{"doc_to_choice": "{{choices}}", "doc_to_target": "answer", "metric_list": [{"metric": "acc"}]},
    }
    write = {
        **{"task": "write", "output_type": "generate_until", "doc_to_target": "answer"},
        **{"generation_kwargs": {"until": ["<|never|>"], "max_gen_toks": 12}},
        **{"metric_list": [{"metric": "exact_match"}]},
    }
    (folder / "tasks").mkdir()
    for task in (choose, write):
        (folder / "tasks" / f"{task['task']}.yaml").write_text(yaml.safe_dump({**common, **task}))
    return folder


def run(folder: Path, out: Path, task: str, *more: str) -> dict[str, Any]:
    arguments = ["--task", f"lm-eval:{task}", "--definitions", str(folder / "tasks"), "--out", str(out), *more]
    assert main([str(folder / "model"), *arguments]) == 0
    results = read_results(out, ["evaluation"])
    return {setting["name"]: setting for setting in results["settings"]}


def test_choices(folder: Path, tmp_path: Path) -> None:
    settings = run(folder, tmp_path / "a", "choose")
    model, tokenizer = AutoModelForCausalLM.from_pretrained(folder / "model"), load_tokenizer(folder / "model")
    right = 0
    for row in QUESTIONS:
        sums = []
        for choice in row["choices"]:
            begin = len(tokenizer(row["question"])["input_ids"])
            ids = tokenizer(row["question"] + choice)["input_ids"]
            logprobs = model(torch.tensor([ids])).logits[0].detach().log_softmax(-1)
            sums.append(sum(float(logprobs[at - 1, ids[at]]) for at in range(begin, len(ids))))
        right += sums.index(max(sums)) == row["answer"]
    assert settings["full depth"]["figures"]["acc"]["value"] == pytest.approx(right / 3)
    assert settings["recompute"]["depths"].keys() > {"4"}
    assert settings["full depth"]["figures"]["agreement"]["value"] == 1


def test_answers(folder: Path, tmp_path: Path) -> None:
    settings = run(folder, tmp_path / "a", "write", "--kv-policy", "verify,fill", "--limit", "2")
    same = {name: setting["figures"]["same_texts"]["value"] for name, setting in settings.items()}
    assert same == {"full depth": 1, "verify": 1, "fill": 0}
    assert sum(settings["fill"]["depths"].values()) == 2 * 11
    assert settings["fill"]["figures"]["exact_match"]["value"] == 0


def test_what_is_refused(folder: Path, tmp_path: Path) -> None:
    with pytest.raises(OfframpError, match="give --kv-policy recompute"):
        run(folder, tmp_path, "choose", "--kv-policy", "fill")
    with pytest.raises(OfframpError, match="knows no task 'nothing'"):
        run(folder, tmp_path, "nothing")
    with pytest.raises(OfframpError, match="leave --data out"):
        run(folder, tmp_path, "choose", "--data", str(folder / "rows.jsonl"))
    with pytest.raises(OfframpError, match="leave --seed out"):
        run(folder, tmp_path, "choose", "--limit", "2", "--seed", "1")
