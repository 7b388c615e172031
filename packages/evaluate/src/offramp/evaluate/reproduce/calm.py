"""`offramp reproduce calm`: An Efficient Inference Framework for Early-exit Large Language Models (arXiv 2407.20272).

CALM's models (Schuster et al., 2022) are trained, their thresholds chosen, and Table 1 and Figures 1 and 2 measured in
the engine, with what the paper left out.
"""

from __future__ import annotations

import argparse
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

from offramp.common.file_hash import sha256
from offramp.evaluate.reproduce.answers import Questions, read_questions
from offramp.evaluate.reproduce.calibration import calibrate
from offramp.evaluate.reproduce.paper import TABLE_1
from offramp.evaluate.reproduce.positions import measure_positions
from offramp.evaluate.reproduce.quality import measure_quality
from offramp.evaluate.reproduce.report import write_report
from offramp.evaluate.reproduce.sizes import SIZES, Size
from offramp.evaluate.reproduce.speed import measure_speed
from offramp.evaluate.reproduce.stage import Stage, result_of, run_stages
from offramp.evaluate.reproduce.tasks import Task, find_task, read_parts, write_rows
from offramp.evaluate.reproduce.training import shallow_start, start_model, train_classifiers, train_model


def stages(out: Path, task: Task, size: Size, device: str) -> list[Stage]:
    """All stages of the experiment, in order."""
    trained, what = size.training, _described(task)
    deep, half = out / "classifiers" / "model", out / "shallow" / "model"

    def data(folder: Path) -> Any:
        parts = read_parts(task, folder / "cache")
        training = [{"source": s, "target": t} for s, targets in parts.train.items() for t in targets]
        limit = size.training_pairs
        training = training if limit is None else training[:limit]
        write_rows(folder / "train.jsonl", training)
        held = [{"source": s, "target": t} for s, targets in parts.validation.items() for t in targets]
        write_rows(folder / "validation.jsonl", held)
        start_model(task, size, (text for row in training for text in row.values()), folder / "start")
        for name, sources in (("calibration", parts.calibration), ("test", parts.test)):
            write_rows(folder / f"{name}.jsonl", [{"source": s, "references": t} for s, t in sources.items()])
        return {"title": task.title, "sources": {name: len(s) for name, s in parts._asdict().items()}}

    def full(folder: Path) -> Any:
        return train_model(out / "data" / "start", out / "data", folder, task, size, device)

    def classifiers(folder: Path) -> Any:
        return train_classifiers(out / "full" / "model", out / "data", folder, task, size, device)

    def shallow(folder: Path) -> Any:
        start = folder / "start"
        shallow_start(out / "data" / "start", size.half, start, pretrained=size.name in task.pretrained)
        return train_model(start, out / "data", folder, task, size, device)

    def questions(part: str, limit: int) -> Questions:
        return read_questions(out / "data" / f"{part}.jsonl", deep, task, limit)

    def calibration(folder: Path) -> Any:
        return calibrate(deep, questions("calibration", size.calibration_prompts), task.target_tokens, device)

    def quality(folder: Path) -> Any:
        asked = questions("test", size.test_prompts)
        like = size.name if size.name in TABLE_1 else "small"
        chosen = result_of(out, "calibration")
        return measure_quality(deep, half, chosen, asked, task.target_tokens, device, like)

    def positions(folder: Path) -> Any:
        asked = questions("test", size.masked_prompts)
        return measure_positions(deep, result_of(out, "calibration"), asked, task.target_tokens, device)

    def speed(folder: Path) -> Any:
        asked = questions("test", size.speed_prompts)
        return measure_speed(deep, half, result_of(out, "calibration"), asked, task.target_tokens, size, device)

    return [
        Stage("data", data, (), [trained, what]),
        Stage("full", full, ("data",), [trained, device]),
        Stage("classifiers", classifiers, ("full",), [trained, device]),
        Stage("shallow", shallow, ("data",), [trained, device]),
        Stage("calibration", calibration, ("classifiers",), [size.calibration_prompts, device]),
        Stage("quality", quality, ("calibration", "shallow"), [size.test_prompts, device]),
        Stage("positions", positions, ("calibration",), [size.masked_prompts, device]),
        Stage("speed", speed, ("calibration", "shallow"), [size.measuring, device]),
    ]


def _described(task: Task) -> Any:
    """A task as plain containers, with the hashes of its files."""
    plain = asdict(task)
    del plain["budget"]  # it is in the size
    paths = [source.path for source in task.parts.values() if source.kind == "files"]
    names = [name for path in paths for name in ([path] if isinstance(path, str) else path or ())]
    return plain | {"hashes": [sha256(Path(name)) for name in names]}


def main(argv: list[str]) -> int:
    """`offramp reproduce`."""
    parser = argparse.ArgumentParser(prog="offramp reproduce", description="Repeat a paper's experiment, from nothing.")
    experiments = parser.add_subparsers(dest="experiment", metavar="EXPERIMENT", required=True)
    calm = experiments.add_parser("calm", help="batched early-exit inference of CALM-T5 (arXiv 2407.20272)")
    calm.add_argument("out", metavar="OUT", type=Path, help="folder of the experiment; a run that was cut off goes on")
    calm.add_argument("--size", choices=tuple(SIZES), default="small", help="of models and measurements")
    calm.add_argument(
        "--data", metavar="DIR", help="folder of the E2E NLG challenge's files, or cnn_dailymail (default: docstrings)"
    )
    calm.add_argument("--device", default="cpu", help="what trains and serves: cpu, cuda or cuda:N")
    calm.add_argument("--stages", help="only these, by commas")
    arguments = parser.parse_args(argv)
    task = find_task(arguments.data, arguments.size)
    size = replace(SIZES[arguments.size], **task.budget)
    selected = arguments.stages.split(",") if arguments.stages else ()
    out, device = arguments.out.resolve(), arguments.device
    every = stages(out, task, size, device)
    run_stages(every, out, selected)
    names = [stage.name for stage in every]
    if not selected or names[-1] in selected:
        print(write_report(out, names, task, size, device, ["offramp", "reproduce", *argv]))
    return 0
