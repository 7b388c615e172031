"""Results as tables: the same for a terminal and for a page."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

from offramp.evaluate.page import Table

_COST: dict[str, str] = {
    "layers_per_token": "layers",
    "layers_run": "layers run",
    "early_tokens": "early",
    "tokens_per_second": "tokens/s",
    "speedup": "speed-up",
    "inner_token_latency_s": "ms/token",
    "latency_ratio": "latency x",
}
_SHARES = frozenset({"early_tokens", "same_texts", "same_tokens", "agreement", "same_choice", "cut_off"})
_DOUBTFUL = 0.2
_NO_EARLY = "no token left early"


def evaluation_tables(results: Mapping[str, Any]) -> list[Table]:
    """Quality, cost and depth of every setting of an evaluation."""
    settings = results["settings"]
    names: list[str] = list(dict.fromkeys(name for setting in settings for name in setting["figures"]))
    quality = [name for name in names if name not in _COST]
    cost = [name for name in names if name in _COST]
    main = results["task"]["main"]
    # Other ratios than that of the score that stands for the task would make a table that nobody can read.
    quality = [name for name in quality if not name.endswith("_ratio") or name == f"{main}_ratio"]
    quality.sort(key=lambda name: not name.startswith(main))
    drawn = "windows of text" if results["task"]["kind"] == "read" else "examples"
    note = f"{results['data']['examples']} examples; in brackets the 95% interval by bootstrap over {drawn}."
    tables = [
        Table(
            ("setting", *(_COST.get(name) or name for name in some)),
            [(setting["name"], *(cell(setting["figures"].get(name), name) for name in some)) for setting in settings],
            title,
            note,
        )
        for title, some in (("Quality", quality), ("Cost", cost))
    ]
    return [*tables, depth_table(results)]


def depth_table(results: Mapping[str, Any]) -> Table:
    """The share of tokens that ran so many layers; where all ran the same number, that is said."""
    settings = results["settings"]
    layers = sorted({int(layer) for setting in settings for layer in setting["depths"]})
    rows: list[tuple[str, ...]] = []
    for setting in settings:
        total = sum(setting["depths"].values()) or 1
        shares = (setting["depths"].get(str(layer), 0) / total for layer in layers)
        # A threshold that nobody exceeds must not look like a setting that works.
        idle = setting["policy"] is not None and len(setting["depths"]) < 2
        rows.append((setting["name"], *(f"{share:.1%}" for share in shares), _NO_EARLY if idle else ""))
    return Table(
        ("setting", *map(str, layers), ""),
        rows,
        "Tokens by layers run",
        "Without the first token of an answer, which comes from its prompt's pass through all layers."
        if results["task"]["kind"] == "write"
        else "",
    )


def cell(value: Mapping[str, float | None] | None, name: str = "") -> str:
    """A figure with its interval, in as many digits as have a meaning; shares in per cent, seconds in thousandths."""
    if value is None or value["value"] is None or math.isnan(value["value"]):
        return "-"
    scale = 1e3 if name.endswith("_s") else 100 if name in _SHARES else 1
    unit = "%" if name in _SHARES else ""
    numbers = [None if one is None else one * scale for one in (value["value"], value["low"], value["high"])]
    middle, low, high = numbers
    assert middle is not None
    if low is None or high is None:
        return f"{_rounded(middle, abs(middle) / 100)}{unit}"
    step = max((high - low) * _DOUBTFUL, abs(middle) / 100)
    return f"{_rounded(middle, step)}{unit} [{_rounded(low, step)}, {_rounded(high, step)}]"


def _rounded(value: float, step: float) -> str:
    places = min(6, max(0, -math.floor(math.log10(step)))) if step > 0 else 1
    return f"{value:,.{places}f}"


def as_text(table: Table) -> str:
    """A table for a terminal, the first column to the left and the others to the right."""
    lines = [list(table.columns), *(list(row) for row in table.rows)]
    widths = [max(len(line[index]) for line in lines) for index in range(len(table.columns))]
    drawn = [
        "  ".join(text.rjust(width) if index else text.ljust(width) for index, (text, width) in cells)
        for cells in (enumerate(zip(line, widths, strict=True)) for line in lines)
    ]
    return "\n".join(text.rstrip() for text in [table.title, *drawn, *([table.note] if table.note else [])])


def study_tables(results: Mapping[str, Any]) -> list[Table]:
    """The tables of a study, which come as they are shown."""
    return [Table(one["columns"], one["rows"], one["title"], one["note"]) for one in results["tables"]]
