"""The experiment's report: `results.json`, `report.html` (one page) and `report.md`, the paper beside ours."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from offramp.evaluate.page import Page, Section, Table, colours, picture, write
from offramp.evaluate.reproduce.calibration import ERROR, QUALITY_KEPT, TOLERATED
from offramp.evaluate.reproduce.conclusions import at_figure_batch, conclude
from offramp.evaluate.reproduce.drawings import draw_all
from offramp.evaluate.reproduce.paper import DECAY, FIGURES, TABLE_1, TECHNIQUES, TITLES
from offramp.evaluate.reproduce.sizes import Size
from offramp.evaluate.reproduce.stage import record_of
from offramp.evaluate.reproduce.tasks import Task
from offramp.evaluate.results import circumstances, write_results

KIND = "reproduction"


def write_report(out: Path, stages: Sequence[str], task: Task, size: Size, device: str, command: Sequence[str]) -> Path:
    """Write all three, and each figure as a file; the page's path.

    Args:
        out: folder of the experiment, whose stages are done.
        stages: their names.
        task: what it ran on.
        size: of it.
        device: that trained and served.
        command: words as they were typed.
    """
    records = {name: record_of(out, name) for name in stages}
    results: dict[str, Any] = {
        **circumstances(command),
        "size": size.name,
        "like": size.name if size.name in TABLE_1 else "small",
        "task": task.title,
        "device": device,
        "stages": {name: {"wall_s": r["wall_s"], "cpu_s": r["cpu_s"]} for name, r in records.items()},
        **{name: record["result"] for name, record in records.items()},
    }
    results["conclusions"] = conclude(results)
    write_results(out, KIND, results)
    with colours():
        pictures = {name: picture(figure, caption) for name, figure, caption in draw_all(results)}
    for name, figure, _ in draw_all(results):  # black on white, for whatever is no page
        figure.savefig(out / f"{name}.png", dpi=110)
    sections = _sections(results, pictures)
    title = f"CALM-T5 in the engine, {size.name}, on {task.title}"
    page = Page(title, sections, summary=_summary(results))
    write(page, out / "report.html")
    captions = {name: one.caption for name, one in pictures.items()}
    (out / "report.md").write_text(_markdown(page, captions), encoding="utf-8")
    return out / "report.html"


def _summary(results: Mapping[str, Any]) -> tuple[str, ...]:
    total = sum(stage["cpu_s"] for stage in results["stages"].values()) / 60
    full, shallow = results["full"], results["shallow"]
    return (
        "An Efficient Inference Framework for Early-exit Large Language Models (arXiv 2407.20272), repeated: CALM's T5 "
        "trained, its thresholds chosen, and Table 1 and Figures 1 and 2 measured in Offramp's engine. Models, data "
        "and machine are other than the paper's, so absolute numbers cannot be compared; orders and ratios can.",
        f"The model has {full['parameters']:,} parameters, {full['encoder_layers']} encoder and "
        f"{full['decoder_layers']} decoder layers, the shallow one {shallow['parameters']:,} and "
        f"{shallow['decoder_layers']}. Both were trained for {full['steps']} steps on the same "
        f"tokens, which cost {results['stages']['full']['cpu_s'] / 60:.1f} and "
        f"{results['stages']['shallow']['cpu_s'] / 60:.1f} CPU minutes; of each the checkpoint with the smallest "
        f"validation loss was taken (steps {full['best_step']} and {shallow['best_step']}).",
        f"All of it took {total:.1f} CPU minutes.",
    )


def _sections(results: Mapping[str, Any], pictures: Mapping[str, Any]) -> list[Section]:
    return [
        Section("Conclusions", text=[_conclusion(*one) for one in results["conclusions"]]),
        Section("Table 1", tables=(_table_1(results),)),
        Section(
            "Figures 1 and 2",
            tables=(_speeds(results),),
            figures=(pictures["figure_1"], pictures["figure_2"]),
        ),
        Section("Throughput against batch size", tables=(_batches(results),), figures=(pictures["batch_sizes"],)),
        Section("Quality against output position", tables=(_positions(results),), figures=(pictures["positions"],)),
        Section("Cost of filling and of confidence", tables=(_parts(results),), figures=(pictures["parts"],)),
        Section("Thresholds", tables=_thresholds(results)),
        Section("How it was made", commands=(results["command"],), tables=(_stages(results), _machine(results))),
    ]


def _conclusion(question: str, paper: str, here: str, verdict: str) -> str:
    ending = "" if verdict == "open" else f" Verdict: {verdict}."
    return f"{question} The paper: {paper}. Here: {here}.{ending}"


def _table_1(results: Mapping[str, Any]) -> Table:
    paper, rows = TABLE_1[results["like"]], results["quality"]["rows"]
    shown: list[tuple[str, ...]] = []
    for name, row in rows.items():
        theirs = paper.get(name)
        title = _named(name) if row["threshold"] is None else f"{_named(name)} > {row['threshold']:g}"
        shown.append(
            (
                title,
                _interval(row["to_label"]),
                "-" if theirs is None else f"{theirs.to_label:.4f}",
                _interval(row["to_full"]),
                "-" if theirs is None or theirs.to_full is None else f"{theirs.to_full:.4f}",
                f"{row['exit_rate']:.1%}",
                "-" if theirs is None or theirs.exit_rate is None else f"{theirs.exit_rate:.2%}",
            )
        )
    columns = ("", "ROUGE-L to label", "paper", "ROUGE-L to full", "paper", "layers skipped", "paper")
    return Table(
        columns,
        shown,
        note=f"{results['quality']['prompts']} sources of the test; in brackets 95% bootstrap intervals. Greedy "
        "answers of the engine, in which each row leaves on its own and skipped layers are filled; of every token, the "
        "first of each answer included, which runs all layers. The shallow model is another one. Thresholds without a "
        f"word are the smallest that keep {QUALITY_KEPT:.0%} of ROUGE-L on the calibration sources.",
    )


def _speeds(results: Mapping[str, Any]) -> Table:
    paper = FIGURES[results["like"]]
    rows: list[tuple[str, ...]] = []
    for name, one in at_figure_batch(results).items():
        theirs = paper.get(name)
        full = paper["full"]
        rows.append(
            (
                _named(name),
                _range(one["tokens_per_second"], 0),
                _range(one["speedup"], 2),
                "-" if theirs is None else f"{theirs.tokens_per_second / full.tokens_per_second:.2f}",
                _range(one["latency_s"], 2, 1e3),
                _range(one["latency_ratio"], 2),
                "-" if theirs is None else f"{full.latency_s / theirs.latency_s:.2f}",
                f"{one['exit_rate']:.1%}",
                f"{one['to_label']:.3f}",
            )
        )
    speed = results["speed"]
    prompts = speed["batches"][str(speed["figure_batch"])]["prompts"]
    return Table(
        (
            "",
            "tokens/s",
            "speed-up",
            "paper",
            "latency (ms)",
            "times lower",
            "paper",
            "layers skipped",
            "ROUGE-L",
        ),
        rows,
        note=f"{prompts} sources, {speed['figure_batch']} at once, until their answers end; medians over "
        f"{speed['rounds']} rounds in turns, in brackets the range. Measures leave all together (Algorithm 1); "
        "'regroup' lets each row leave on its own. Throughput: all tokens over the time from the first question "
        "to the last token. Inner-token latency: time from first to last token, summed over answers, over all tokens. "
        f"Kernels: {speed['kernels']}.",
    )


def _batches(results: Mapping[str, Any]) -> Table:
    batches = results["speed"]["batches"]
    names = list(at_figure_batch(results))
    rows = []
    for name in names:
        cells = []
        for one in batches.values():
            found = one["contestants"][name]
            rate, speedup = found["tokens_per_second"]["value"], found["speedup"]["value"]
            cells.append(f"{rate:,.0f} ({speedup:.2f}x, {found['exit_rate']:.0%})")
        rows.append((_named(name), *cells))
    note = "Tokens/s, times those of full depth, and layers skipped."
    return Table(("sequences at once", *batches), rows, note=note)


def _positions(results: Mapping[str, Any]) -> Table:
    positions = results["positions"]
    rows: list[tuple[str, ...]] = []
    for technique in TECHNIQUES:
        for kind in ("exact", "filled", "masked"):
            one = positions["techniques"][technique][kind]
            curve = (
                f"{point['value']:.3f} ({same:.0%})" for point, same in zip(one["to_full"], one["same"], strict=True)
            )
            rows.append((f"{TITLES[technique]}, {kind}", f"{one['exit_rate']:.1%}", _interval(one["to_label"]), *curve))
    columns = ("", "layers skipped", "ROUGE-L to label", *(f"{length} tokens" for length in positions["lengths"]))
    return Table(
        columns,
        rows,
        note=f"{positions['prompts']} sources of the test. By length of an answer's beginning: ROUGE-L to that of the "
        "full model's answer, and in brackets the share of beginnings that are the full model's to the token. Exact: "
        "skipped layers are recomputed later; masked: naive generation, in which they are absent.",
    )


def _parts(results: Mapping[str, Any]) -> Table:
    contestants = at_figure_batch(results)
    parts = list(next(iter(contestants.values()))["parts_us_per_token"])
    rows = []
    for name, one in contestants.items():
        spent = one["parts_us_per_token"]
        whole = f"{sum(spent.values()):.1f}", f"{one['wall_us_per_token']:.1f}"
        rows.append((_named(name), *(f"{spent[part]:.1f}" for part in parts), *whole))
    return Table(
        ("", *parts, "sum", "wall"),
        rows,
        note=f"Microseconds for each token at {results['speed']['figure_batch']} sequences at once: sums over all "
        "rounds by all tokens. Wall is the time from the first question to the last token; what it has beyond the sum "
        "lies outside the engine's iterations.",
    )


def _thresholds(results: Mapping[str, Any]) -> list[Table]:
    tables = []
    for technique in TECHNIQUES:
        chosen = results["calibration"]["techniques"][technique]
        rows = [
            (
                f"{point['threshold']:g}",
                f"{point['to_label']:.4f}",
                f"{point['to_full']:.4f}",
                f"{point['exit_rate']:.1%}",
                f"{point['loss']:.4f}",
                f"{point['p_value']:.2g}",
            )
            for point in chosen["points"]
        ]
        certified = "none" if chosen["certified"] is None else f"{chosen['certified']:g}"
        enough = "" if chosen["good_enough"] else " (which keeps less; none keeps as much)"
        tables.append(
            Table(
                ("threshold", "ROUGE-L to label", "ROUGE-L to full", "layers skipped", "loss", "p-value"),
                rows,
                TITLES[technique],
                f"Chosen: {chosen['threshold']:g}{enough}, the smallest that keeps {QUALITY_KEPT:.0%} of ROUGE-L. "
                f"Certified: {certified}, by Learn-then-Test (Hoeffding-Bentkus, loss of ROUGE-L at most {TOLERATED} "
                f"except with probability {ERROR}). {results['calibration']['prompts']} sources; thresholds decay with "
                f"tau = {DECAY:g}.",
            )
        )
    return tables


def _stages(results: Mapping[str, Any]) -> Table:
    stages = results["stages"]
    rows = [(name, f"{one['wall_s']:.0f}", f"{one['cpu_s']:.0f}") for name, one in stages.items()]
    total = [sum(one[key] for one in stages.values()) for key in ("wall_s", "cpu_s")]
    rows.append(("all", *(f"{value:.0f} ({value / 60:.1f} min)" for value in total)))
    return Table(("stage", "seconds", "CPU seconds"), rows, note="CPU seconds are those of all cores together.")


def _machine(results: Mapping[str, Any]) -> Table:
    known = {"made": results["made_at"], "device": results["device"], **results["machine"], **results["versions"]}
    return Table(("", "value"), [(str(name), str(value)) for name, value in known.items()], "Machine and versions")


def _markdown(page: Page, captions: Mapping[str, str]) -> str:
    lines = [f"# {page.title}", "", *(line for text in page.summary for line in (text, ""))]
    files = {caption: name for name, caption in captions.items()}
    for section in page.sections:
        lines += [f"## {section.title}", ""]
        lines += [line for text in section.text for line in (f"- {text}", "")]
        lines += [line for command in section.commands for line in (f"    {command}", "")]
        for table in section.tables:
            lines += [f"### {table.title}", ""] if table.title else []
            lines += [_row(table.columns), _row(["---", *["---:"] * (len(table.columns) - 1)])]
            lines += [*map(_row, table.rows), "", *([table.note, ""] if table.note else [])]
        for figure in section.figures:
            lines += [f"![{figure.caption}]({files[figure.caption]}.png)", ""]
    return "\n".join(lines)


def _row(cells: Sequence[str]) -> str:
    return "| " + " | ".join(cell.replace("|", "\\|") for cell in cells) + " |"


def _named(name: str) -> str:
    base, comma, rest = name.partition(", ")
    titles: Mapping[str, str] = {**TITLES}
    return f"{titles.get(base, base)}{comma}{rest}"


def _interval(value: Mapping[str, float]) -> str:
    return f"{value['value']:.4f} [{value['low']:.4f}, {value['high']:.4f}]"


def _range(value: Mapping[str, float], places: int, scale: float = 1.0) -> str:
    middle, low, high = (scale * value[name] for name in ("value", "low", "high"))
    return f"{middle:,.{places}f} [{low:,.{places}f}, {high:,.{places}f}]"
