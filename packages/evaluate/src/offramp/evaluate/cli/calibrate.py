"""`offramp calibrate`: operating points with a promise about quality, put into a checkpoint directory."""

from __future__ import annotations

import argparse
import json
import sys
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, get_args

from offramp.common.errors import OfframpError
from offramp.common.exits.kv_policy import KVPolicy
from offramp.common.exits.policy import ExitPolicy, Measure
from offramp.evaluate.cli.options import add_task_options, comma_separated, one_of, task_options
from offramp.evaluate.learn_then_test import Bound, check_probability
from offramp.evaluate.risks import Risk
from offramp.serve.cli.engine_options import add_engine_options, engine_settings
from offramp.serve.config import EngineConfig, SyncPolicy

if TYPE_CHECKING:
    from offramp.evaluate.calibration import Calibration, Losses, Tried
    from offramp.evaluate.calibration_record import Promise
    from offramp.evaluate.examples import Example
    from offramp.evaluate.tasks import Task

_EARLY: tuple[KVPolicy, ...] = ("fill", "recompute", "verify")


def main(argv: list[str]) -> int:
    """Runs the command with its arguments."""
    options = _parser().parse_args(argv)
    config = EngineConfig(**{"prefix_caching": False, **engine_settings(options)})
    check_probability("epsilon", options.epsilon)
    for _, delta in options.point:
        check_probability("delta", delta)

    from offramp.common.checkpoint import open_any_checkpoint, write_record
    from offramp.evaluate.answering import Answerer
    from offramp.evaluate.calibration import calibrate, make_chains
    from offramp.evaluate.calibration_record import Asked, Promise, operating_points, put_into, record
    from offramp.evaluate.evaluation import prompts_of
    from offramp.evaluate.examples import sha256_of
    from offramp.evaluate.tasks import task_named
    from offramp.evaluate.training_data import compare_with_training

    promise = Promise(dict(options.point), options.epsilon, options.risk, options.bound, options.default)
    checkpoint, _ = open_any_checkpoint(options.directory)
    template = checkpoint.policy or ExitPolicy()
    if options.no_shortlist:
        template = replace(template, shortlist=None, shortlist_only=False)
    measures = options.measure or (template.measure,)
    for measure in measures:
        ExitPolicy(measure).check_measure(has_classifiers=checkpoint.exits.classifier)
    chains = make_chains(
        template,
        checkpoint.exits.layers,
        measures=measures,
        kv_policies=options.kv_policy,
        sync_policies=options.try_sync_policy or (config.sync_policy,),
        decays=options.decay,
        thresholds=options.threshold,
        each_exit=options.each_exit,
        max_pending=options.max_pending,
    )
    task = task_named(options.task)
    if task.kind != "write" or task.score is None:
        raise OfframpError(f"the task {task.name} asks for no text, and a promise is about texts; choose another.")
    examples = task.load(task_options(options))
    known = compare_with_training(checkpoint.provenance, [example.prompt for example in examples])
    max_tokens = options.max_tokens or task.max_tokens
    _say(f"{len(examples)} examples of {task.name}; {known}")

    calibration = calibrate(
        Answerer(options.directory),
        config,
        prompts_of(options.directory, examples, options.chat),
        _losses(promise.risk, task, examples),
        chains,
        sorted(set(promise.points.values())),
        epsilon=promise.epsilon,
        bound=promise.bound,
        max_tokens=max_tokens,
        stop=task.stop,
        on_answered=_tell,
    )
    points = operating_points(calibration, promise)
    data = None if options.data is None else str(options.data)
    asked = Asked(
        task.name,
        data,
        sha256_of(examples),
        len(examples),
        options.seed,
        known,
        options.chat,
        max_tokens,
        task.stop,
    )
    found = record(calibration, promise, asked)
    put_into(checkpoint, points, found, template)
    if not options.dry_run:
        write_record(options.directory, checkpoint)
    if options.mlflow:
        from offramp.evaluate.mlflow_log import log_calibration

        found["mlflow_run_id"] = log_calibration(found, str(options.directory))
    if options.json:
        print(json.dumps({"points": points.to_json(), "calibration": found}))
    else:
        print(_table(calibration, promise, points.default))
        if options.try_sync_policy is not None:
            print(f"This holds for engines with --sync-policy {calibration.engine.sync_policy}.")
    return 0


def _losses(risk: Risk, task: Task, examples: list[Example]) -> Losses:
    from offramp.evaluate.risks import consistency_losses, quality_losses

    if risk == "consistency":
        return consistency_losses
    score = task.score
    assert score is not None
    return lambda texts, full: quality_losses(texts, full, lambda some: score(some, examples)[task.main])


def _tell(chain: str, tried: Tried | None) -> None:
    if tried is None:
        _say("full depth answered")
        return
    policy = tried.candidate.policy
    certified = f"certified for {', '.join(map(str, sorted(tried.certified)))}" if tried.certified else "not certified"
    failed = f"{tried.num_failed} failed, " if tried.num_failed else ""
    _say(
        f"{chain}, {max(policy.thresholds.values()):g}: {failed}risk {tried.risk:.4f}, {tried.layers:.2f} layers, "
        f"{certified}"
    )


def _table(calibration: Calibration, promise: Promise, default: str | None) -> str:
    rows = [("point", "delta", "risk", "p-value", "layers", "tokens/s", "how")]
    full = calibration.full
    rows.append(("exact", "0", "0", "", f"{full.layers_per_token:.2f}", f"{full.tokens_per_second:.0f}", "full depth"))
    for name, delta in promise.points.items():
        tried = calibration.chosen[delta]
        if tried is None:
            rows.append((name, f"{delta:g}", "", "", "", "", "nothing is certified that saves a layer: no such point"))
            continue
        policy, value = tried.candidate.policy, max(tried.candidate.policy.thresholds.values())
        how = f"{tried.candidate.kv_policy}, {policy.measure} > {value:g} at {', '.join(map(str, policy.thresholds))}"
        rows.append(
            (
                name,
                f"{delta:g}",
                f"{tried.risk:.4f}",
                f"{tried.p_values[delta]:.2g}",
                f"{tried.layers:.2f}",
                f"{tried.tokens_per_second:.0f}",
                how + ("" if policy.decay is None else f", decay {policy.decay:g}"),
            )
        )
    widths = [max(len(row[column]) for row in rows) for column in range(len(rows[0]))]
    lines = ["  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip() for row in rows]
    lines.append(f"\nRequests that say nothing about depth are answered at {default!r}.")
    return "\n".join(lines)


def _say(what: str) -> None:
    print(what, file=sys.stderr, flush=True)


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="offramp calibrate",
        description="Find thresholds that keep a promise: answers lose at most DELTA, on prompts like those given. "
        "That the calibration was unlucky has a probability of at most EPSILON. Every candidate answers by the engine "
        "that serves. Options that take several values take them with commas.",
    )
    parser.add_argument("directory", type=Path, help="a checkpoint directory; its exits.json is written anew")
    add_task_options(parser)
    promise = parser.add_argument_group("the promise")
    promise.add_argument(
        "--point",
        type=_point,
        action="append",
        required=True,
        metavar="NAME=DELTA",
        help="an operating point and the risk that it may have, such as safe=0.01; may be given several times",
    )
    promise.add_argument(
        "--epsilon", type=float, default=0.05, help="probability that a promise may be wrong (default: %(default)s)"
    )
    promise.add_argument(
        "--risk",
        choices=get_args(Risk),
        default="consistency",
        help="1 - ROUGE-L to the full model's answer; or what is lost of the task's own score (default: %(default)s)",
    )
    promise.add_argument(
        "--bound", choices=get_args(Bound), default="hoeffding_bentkus", help="p-value (default: %(default)s)"
    )
    promise.add_argument(
        "--default",
        metavar="NAME",
        help="point of requests that say nothing about depth (default: the certified one of the least DELTA)",
    )
    what = parser.add_argument_group("what is tried; each combination is a chain, and chains share EPSILON")
    what.add_argument(
        "--measure",
        type=comma_separated(one_of(get_args(Measure))),
        metavar="NAME,...",
        help="confidence measures (default: the checkpoint's)",
    )
    what.add_argument(
        "--kv-policy",
        type=comma_separated(one_of(_EARLY)),
        default=("fill",),
        metavar="NAME,...",
        help=f"some of {', '.join(_EARLY)} (default: fill)",
    )
    what.add_argument(
        "--try-sync-policy",
        type=comma_separated(one_of(get_args(SyncPolicy))),
        metavar="NAME,...",
        help="sync policies of the engine, of which the one with the cheapest points is kept (default: --sync-policy)",
    )
    what.add_argument(
        "--decay",
        type=comma_separated(_decay),
        default=(None,),
        metavar="TAU,...",
        help="thresholds that fall within an answer, as CALM's with 4; `none` for those that stay (default: none)",
    )
    what.add_argument(
        "--threshold",
        type=comma_separated(float),
        metavar="X,...",
        help="thresholds from strict to loose, chosen without a look at these data (default: by measure)",
    )
    what.add_argument("--each-exit", action="store_true", help="also open only the exits from each layer on")
    what.add_argument(
        "--max-pending", type=int, default=8, metavar="N", help="of recompute and verify (default: %(default)s)"
    )
    what.add_argument("--no-shortlist", action="store_true", help="test exits on the whole vocabulary")
    add_engine_options(parser, queue=False)
    out = parser.add_argument_group("results")
    out.add_argument("--dry-run", action="store_true", help="leave the directory as it is")
    out.add_argument("--mlflow", action="store_true", help="log to MLFLOW_TRACKING_URI")
    out.add_argument("--json", action="store_true", help="print points and record as JSON")
    return parser


def _point(text: str) -> tuple[str, float]:
    name, _, delta = text.partition("=")
    try:
        return name, float(delta)
    except ValueError:
        raise argparse.ArgumentTypeError(f"{text!r} is not NAME=DELTA, such as safe=0.01") from None


def _decay(text: str) -> Any:
    return None if text == "none" else float(text)
