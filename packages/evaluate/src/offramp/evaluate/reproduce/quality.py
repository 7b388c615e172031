"""Table 1: ROUGE-L to labels and to the full model, and the share of decoder layers skipped."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from offramp.evaluate import bootstrap
from offramp.evaluate.answering import Answerer, Answers, Setting
from offramp.evaluate.reproduce.answers import FULL, Questions, early, engine_config, exit_rate, to_full, to_label
from offramp.evaluate.reproduce.paper import TABLE_1, TECHNIQUES, Technique, policy
from offramp.serve.request.exit_options import ExitOptions


def measure_quality(
    model: Path, shallow: Path, calibration: Any, questions: Questions, max_tokens: int, device: str, like: str
) -> Any:
    """All rows.

    Args:
        model: with classifiers.
        shallow: the model with half the decoder layers.
        calibration: what `calibrate` gave.
        questions: of the test.
        max_tokens: N.
        device: of the engine.
        like: whose thresholds in the paper are measured too, `small` or `base`.
    """
    answerer, config = Answerer(model), engine_config(device)
    checkpoint = answerer.engine(config).checkpoint
    layers, num_layers = tuple(checkpoint.exits.layers), checkpoint.model.config.num_layers
    full = answerer.answer(Setting("full", FULL, config), questions.prompts, max_tokens)
    full_scores = to_label(full, questions)
    rows: dict[str, Any] = {}

    def add(name: str, answers: Answers, skipped: float, threshold: float | None = None) -> None:
        scores = to_label(answers, questions)
        rows[name] = {
            "threshold": threshold,
            "to_label": bootstrap.mean(scores)._asdict(),
            "less_than_full": bootstrap.difference(full_scores, scores)._asdict(),
            "to_full": bootstrap.mean(to_full(answers.texts, full.texts))._asdict(),
            "exit_rate": skipped,
            "tokens": answers.num_tokens,
            "cut_off": sum(answer.finish_reason == "length" for answer in answers.given) / len(answers.given),
        }

    def add_early(name: str, technique: Technique, threshold: float) -> None:
        setting = early(name, policy(technique, threshold, layers), config)
        answers = answerer.answer(setting, questions.prompts, max_tokens)
        add(name, answers, exit_rate(answers, num_layers), threshold)

    add("full", full, 0.0)
    half = num_layers // 2
    static = Setting("static half", ExitOptions("static", static_layer=half), config)
    answers = answerer.answer(static, questions.prompts, max_tokens)
    add("static half", answers, exit_rate(answers, num_layers))
    add("shallow model", Answerer(shallow).answer(Setting("full", FULL, config), questions.prompts, max_tokens), 0.5)
    for technique in TECHNIQUES:
        chosen = calibration["techniques"][technique]
        add_early(technique, technique, chosen["threshold"])
        if chosen["certified"] is not None:
            add_early(f"{technique}, certified", technique, chosen["certified"])
        theirs = TABLE_1[like][technique].threshold
        assert theirs is not None
        add_early(f"{technique}, the paper's threshold", technique, theirs)
    return {"prompts": len(questions.prompts), "num_layers": num_layers, "rows": rows}
