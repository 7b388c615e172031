"""`offramp study`: one open question about a model, answered by a measurement."""

from __future__ import annotations

import argparse
import sys
from pathlib import Path
from typing import get_args

from offramp.common.errors import OfframpError
from offramp.common.exits.policy import Measure
from offramp.evaluate.cli.options import (
    add_engine_options,
    add_output_options,
    add_task_options,
    check_output,
    engine_config,
    spelled,
    task_options,
    threshold,
)
from offramp.serve.exit_overrides import ExitOverrides, exit_options


def main(argv: list[str]) -> int:
    """Runs the command with its arguments."""
    options = _parser().parse_args(argv)
    config = engine_config(options)

    from offramp.common.checkpoint import open_any_checkpoint
    from offramp.evaluate.evaluation import prompts_of
    from offramp.evaluate.results import circumstances, plain, write_results
    from offramp.evaluate.study import STUDIES, Asked
    from offramp.evaluate.tables import as_text, study_tables
    from offramp.evaluate.tasks import task_named

    if options.study not in STUDIES:
        raise OfframpError(f"study {options.study!r} is unknown; choose one of {', '.join(STUDIES)}.")
    check_output(options)
    task = task_named(options.task)
    examples = task.load(task_options(options))
    if task.kind != "write":
        raise OfframpError(f"a study needs answers, and the task {task.name} has none; choose one that writes.")
    checkpoint, _ = open_any_checkpoint(options.directory)
    overrides = ExitOverrides(threshold=options.threshold, measure=options.measure, kv_policy="fill")
    exits = exit_options(overrides, checkpoint.exits.layers, checkpoint.policy, checkpoint.points, spelled)
    policy = exits.policy or checkpoint.policy
    if policy is None:
        raise OfframpError(f"{options.directory} has no exit policy, so nothing leaves early; give --threshold X.")
    asked = Asked(
        options.directory,
        prompts_of(options.directory, examples, options.chat),
        policy,
        options.max_tokens or task.max_tokens,
        task.stop,
        config,
    )

    def tell(what: str) -> None:
        print(f"{options.study}, {len(examples)} examples: {what} ...", file=sys.stderr, flush=True)

    found = STUDIES[options.study](asked, tell)
    results = plain({**circumstances(["offramp", "study", *argv]), "name": options.study, **found})
    path = write_results(options.out, "study", results)
    if options.json:
        print(path.read_text(encoding="utf-8"), end="")
    else:
        print("\n\n".join([results["question"], *(as_text(table) for table in study_tables(results))]))
    print(f"Results are in {path}; `offramp report` draws them", file=sys.stderr)
    return 0


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="offramp study",
        description="Answer an open question about a model by a measurement on the prompts of a task. position: does "
        "quality fall as an answer goes on, with exact, recomputed and filled keys and values? kv-error: how far are "
        "filled keys and values from exact ones, and where does attention go instead?",
    )
    parser.add_argument("study", metavar="NAME", help="position or kv-error")
    parser.add_argument("directory", type=Path, help="a checkpoint directory with exits")
    add_task_options(parser)
    how = parser.add_argument_group("early exits")
    how.add_argument(
        "--threshold",
        type=threshold,
        metavar="X",
        help="one threshold for all exits; `own` is the checkpoint's (default: own)",
    )
    how.add_argument("--measure", choices=get_args(Measure), help="confidence measure (default: the checkpoint's)")
    add_engine_options(parser)
    out = add_output_options(parser, "study", "results.json")
    out.add_argument("--json", action="store_true", help="print the results as JSON instead of tables")
    return parser
