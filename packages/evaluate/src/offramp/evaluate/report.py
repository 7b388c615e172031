"""Results of evaluations and studies as one page."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from offramp.common.errors import OfframpError
from offramp.evaluate.page import Page, Section, Table
from offramp.evaluate.plots import curve_picture, evaluation_pictures
from offramp.evaluate.results import read_results
from offramp.evaluate.tables import evaluation_tables, study_tables

KINDS = ("evaluation", "study")


def page_of(paths: Sequence[Path], title: str) -> Page:
    """All results, in the order given: a section for each, and one that says how they were made.

    Args:
        paths: folders with results, or such files.
        title: of the page.

    Raises:
        OfframpError: one of them holds none that a page can show.
    """
    found = [read_results(path, KINDS) for path in paths]
    sections: list[Section] = []
    for path, results in zip(paths, found, strict=True):
        try:
            sections.append(_evaluation(results) if results["kind"] == "evaluation" else _study(results))
        except KeyError as fault:
            raise OfframpError(
                f"{path} holds results that are not whole: something lacks {fault}; measure again."
            ) from None
    return Page(title, [*sections, _circumstances(found)])


def _evaluation(results: Mapping[str, Any]) -> Section:
    task, data, model = results["task"], results["data"], results["models"]["model"]
    where = f" of {data['path']} (SHA-256 {data['sha256'][:12]})" if data["path"] else ""
    text = [
        f"{data['examples']} examples{where}, scored by {task['main']}.",
        f"The model {model['path']} has {model['layers']} layers and {_exits(model['exits'])}.",
    ]
    if baseline := results["models"].get("baseline"):
        text.append(f"The baseline {baseline['path']} has {baseline['layers']} layers.")
    return Section(
        f"{task['name']}, {Path(model['path']).name}",
        text=text,
        commands=(results["command"],),
        tables=[*evaluation_tables(results), _settings(results["settings"])],
        figures=evaluation_pictures(results),
    )


def _exits(layers: Sequence[int]) -> str:
    return f"exits at {', '.join(map(str, layers))}" if layers else "no exits"


def _settings(settings: Iterable[Mapping[str, Any]]) -> Table:
    rows = [
        (
            one["name"],
            one["kv_policy"] if one["static_layer"] is None else f"layer {one['static_layer']}",
            _thresholds(one["policy"]),
            ", ".join(f"{name} {value}" for name, value in one["engine"].items()) or "defaults",
        )
        for one in settings
    ]
    return Table(("setting", "KV policy", "exit policy", "engine"), rows, "Settings")


def _thresholds(policy: Mapping[str, Any] | None) -> str:
    if policy is None:
        return "-"
    limits = ", ".join(f"{layer}: {value:g}" for layer, value in policy["thresholds"].items())
    more = [f"{name} {policy[name]}" for name in ("min_layer", "decay", "shortlist_only") if policy[name]]
    if policy["shortlist"]:
        more.append(f"shortlist of {len(policy['shortlist'])}")
    return "; ".join([f"{policy['measure']} > {limits}", *more])


def _study(results: Mapping[str, Any]) -> Section:
    return Section(
        results["question"],
        text=results["about"],
        commands=(results["command"],),
        tables=study_tables(results),
        figures=[curve_picture(curves) for curves in results["curves"]],
    )


def _circumstances(found: Sequence[Mapping[str, Any]]) -> Section:
    names = list(dict.fromkeys(name for results in found for part in ("machine", "versions") for name in results[part]))
    rows: list[tuple[str, ...]] = [("made", *(str(results["made_at"]) for results in found))]
    for name in names:
        values = [{**results["machine"], **results["versions"]}.get(name) for results in found]
        rows.append((name, *("-" if value is None else str(value) for value in values)))
    if all(len(set(row[1:])) == 1 for row in rows[1:]):
        rows = [(row[0], row[1]) for row in rows[1:]]
        columns: tuple[str, ...] = ("", "all of it")
    else:
        columns = ("", *(str(number) for number in range(1, len(found) + 1)))
    return Section("Versions and machine", tables=(Table(columns, rows),))
