"""`offramp evaluate`: quality against cost, at full depth and under every setting asked."""

from __future__ import annotations

import argparse
import dataclasses
import itertools
import json
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any, get_args

from offramp.common.errors import OfframpError
from offramp.common.exits.kv_policy import KVPolicy
from offramp.common.exits.policy import Measure
from offramp.evaluate.cli.options import (
    add_engine_options,
    add_output_options,
    add_task_options,
    check_output,
    comma_separated,
    engine_config,
    one_of,
    spelled,
    task_options,
    threshold,
)
from offramp.serve.config import EngineConfig, SyncPolicy
from offramp.serve.exit_overrides import ExitOverrides, exit_options

if TYPE_CHECKING:
    from offramp.common.checkpoint import AnyCheckpoint
    from offramp.evaluate.answering import Setting

_EARLY: tuple[KVPolicy, ...] = ("fill", "recompute", "verify")
ANSWERS = "answers.jsonl"


def main(argv: list[str]) -> int:
    """Runs the command with its arguments."""
    parser = _parser()
    options = parser.parse_args(argv)
    if options.list:
        from offramp.evaluate.tasks import TASKS

        for task in TASKS.values():
            print(f"{task.name:16} {task.about}")
        return 0
    if options.directory is None or options.task is None:
        parser.error("give a checkpoint directory and --task NAME; --list names the tasks")
    config = engine_config(options)  # before what takes seconds to import

    from offramp.common.checkpoint import open_any_checkpoint
    from offramp.evaluate.evaluation import Asked, evaluate
    from offramp.evaluate.lm_eval_tasks import PREFIX, evaluate_lm_eval
    from offramp.evaluate.results import circumstances, plain, write_results
    from offramp.evaluate.tables import as_text, evaluation_tables
    from offramp.evaluate.tasks import task_named

    check_output(options)
    foreign = options.task.startswith(PREFIX)
    task = None if foreign else task_named(options.task)
    examples = [] if task is None else task.load(task_options(options))
    checkpoint, _ = open_any_checkpoint(options.directory)
    if checkpoint.policy is None and options.threshold is None and options.point is None:
        print(f"{options.directory} has no exit policy, so nothing leaves early; give --threshold X", file=sys.stderr)
    settings = _settings(options, config, checkpoint, writes=task is not None and task.kind == "write")
    asked = Asked(options.directory, settings, options.baseline, options.chat, options.max_tokens, options.window)

    def tell(what: str) -> None:
        print(f"{options.task}: {what} ...", file=sys.stderr, flush=True)

    if task is None:
        if options.data is not None:
            raise OfframpError(f"the task {options.task} knows its own data; leave --data out.")
        if options.seed is not None:
            raise OfframpError(f"the task {options.task} takes its examples from the front; leave --seed out.")
        name = options.task.removeprefix(PREFIX)
        rows: list[dict[str, Any]] = []
        found = evaluate_lm_eval(name, asked, limit=options.limit, definitions=options.definitions, tell=tell)
    else:
        found, rows = evaluate(task, examples, asked, options.data, tell)
    results = plain({**circumstances(["offramp", "evaluate", *argv]), **found})
    path = write_results(options.out, "evaluation", results)
    if rows:
        with (options.out / ANSWERS).open("w", encoding="utf-8") as file:
            for row in rows:
                print(json.dumps(plain(row), ensure_ascii=False), file=file)
    if options.json:
        print(path.read_text(encoding="utf-8"), end="")
    else:
        print("\n\n".join(as_text(table) for table in evaluation_tables(results)))
    print(f"Results are in {path}", file=sys.stderr)
    return 0


def _settings(
    options: argparse.Namespace, config: EngineConfig, checkpoint: AnyCheckpoint, *, writes: bool
) -> list[Setting]:
    """Every combination of what was asked; none where the model has no exits and nobody asked for any."""
    from offramp.evaluate.answering import Setting

    asked: list[tuple[str, ExitOverrides]] = [
        (name, ExitOverrides(operating_point=name)) for name in options.point or ()
    ]
    if options.threshold is not None or (checkpoint.policy is not None and not asked):
        thresholds: tuple[float | None, ...] = options.threshold or (None,)
        kv_policies: tuple[KVPolicy, ...] = options.kv_policy or (("fill",) if writes else ("recompute",))
        for limit, kv_policy in itertools.product(thresholds, kv_policies):
            overrides = ExitOverrides(measure=options.measure, threshold=limit, kv_policy=kv_policy)
            asked.append((kv_policy if limit is None else f"{kv_policy} > {limit:g}", overrides))
    found: list[Setting] = []
    sync_policies: tuple[SyncPolicy, ...] = options.sync_policy
    for (name, overrides), sync_policy in itertools.product(asked, sync_policies):
        exits = exit_options(overrides, checkpoint.exits.layers, checkpoint.policy, checkpoint.points, spelled)
        engine = dataclasses.replace(config, sync_policy=sync_policy, quantile=options.quantile)
        found.append(Setting(f"{name}, {sync_policy}" if len(sync_policies) > 1 else name, exits, engine))
    return found


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="offramp evaluate",
        description="Measure a model's quality and cost on a task, at full depth and under every combination of the "
        "settings asked: scores, agreement with full depth, depth and speed, each with its 95% interval. Options that "
        "take several values take them with commas.",
    )
    parser.add_argument("directory", type=Path, nargs="?", help="a checkpoint directory, or a plain Hugging Face one")
    parser.add_argument("--list", action="store_true", help="name the built-in tasks and what they need, and exit")
    what = add_task_options(parser, required=False)
    what.add_argument(
        "--window",
        type=int,
        metavar="TOKENS",
        help="perplexity: tokens read at once (default: 512, or what the model takes)",
    )
    what.add_argument(
        "--definitions",
        type=Path,
        metavar="DIR",
        help="lm-eval:NAME: a folder of tasks in YAML, in place of lm-eval's own",
    )
    how = parser.add_argument_group("settings beside full depth")
    how.add_argument(
        "--threshold",
        type=comma_separated(threshold),
        metavar="X,...",
        help="one threshold for all exits; `own` is the checkpoint's (default: own)",
    )
    how.add_argument(
        "--point",
        type=comma_separated(str),
        metavar="NAME,...",
        help="operating points of the checkpoint, as calibrated",
    )
    how.add_argument("--measure", choices=get_args(Measure), help="confidence measure (default: the checkpoint's)")
    how.add_argument(
        "--kv-policy",
        type=comma_separated(one_of(_EARLY)),
        metavar="NAME,...",
        help=f"some of {', '.join(_EARLY)} (default: fill; texts that are given are read as under recompute)",
    )
    how.add_argument(
        "--sync-policy",
        type=comma_separated(one_of(get_args(SyncPolicy))),
        default=("regroup",),
        metavar="NAME,...",
        help=f"some of {', '.join(get_args(SyncPolicy))} (default: regroup)",
    )
    how.add_argument(
        "--quantile",
        type=float,
        default=EngineConfig.quantile,
        metavar="Q",
        help="share that must be sure for quantile (default: %(default)s)",
    )
    how.add_argument(
        "--baseline",
        type=Path,
        metavar="DIR",
        help="also measure another model at its full depth, such as a shallower one",
    )
    add_engine_options(parser)
    out = add_output_options(parser, "evaluation", "results.json and answers.jsonl")
    out.add_argument("--json", action="store_true", help="print the results as JSON instead of tables")
    return parser
