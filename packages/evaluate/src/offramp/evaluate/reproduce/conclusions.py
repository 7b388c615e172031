"""What the paper says, and what came out here: each answer is computed from the figures, whichever way they fall."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any, NamedTuple

from offramp.evaluate.reproduce.calibration import QUALITY_KEPT
from offramp.evaluate.reproduce.paper import FIGURES, TABLE_1, TECHNIQUES, TITLES


class Conclusion(NamedTuple):
    """One question.

    Attributes:
        question: that the paper answers, or leaves open.
        paper: its answer.
        here: ours.
        verdict: `same`, `differs`, `mixed`; or `open` where the paper says nothing.
    """

    question: str
    paper: str
    here: str
    verdict: str


def conclude(results: Mapping[str, Any]) -> list[Conclusion]:
    """All questions, answered from the results of the stages."""
    contestants = at_figure_batch(results)
    return [
        _quality(results),
        _likeness(results),
        _fastest(results, contestants),
        _throughput(results, contestants),
        _latency(results, contestants),
        _shallow(results, contestants),
        _regroup(contestants),
        _filling(results),
        _masking(results),
        _cost(contestants),
        _batches(results),
    ]


def at_figure_batch(results: Mapping[str, Any]) -> Mapping[str, Any]:
    """Figures of all contestants at the batch size of Figures 1 and 2."""
    speed = results["speed"]
    return speed["batches"][str(speed["figure_batch"])]["contestants"]


def _quality(results: Mapping[str, Any]) -> Conclusion:
    rows, paper = results["quality"]["rows"], TABLE_1[results["like"]]
    best = rows["full"]["to_label"]["value"] or math.nan  # a model that has learnt nothing
    kept = {t: rows[t]["to_label"]["value"] / best for t in TECHNIQUES}
    theirs = [paper[t].to_label / paper["full"].to_label for t in TECHNIQUES]
    worse = [TITLES[t] for t in TECHNIQUES if rows[t]["less_than_full"]["low"] > 0]
    here = ", ".join(f"{TITLES[t]} keeps {kept[t]:.1%} at {rows[t]['exit_rate']:.0%} skipped" for t in TECHNIQUES)
    here += f"; worse than full depth beyond chance: {', '.join(worse) or 'none'}"
    return Conclusion(
        "Do early exits keep the full model's ROUGE-L while half the layers are skipped?",
        f"yes: {min(theirs):.1%} to {max(theirs):.1%} at 53% to 67% skipped",
        here,
        _verdict([kept[t] >= QUALITY_KEPT - 0.02 and rows[t]["exit_rate"] >= 0.45 for t in TECHNIQUES]),
    )


def _likeness(results: Mapping[str, Any]) -> Conclusion:
    rows, paper = results["quality"]["rows"], TABLE_1[results["like"]]
    mine = sorted(TECHNIQUES, key=lambda t: -rows[t]["to_full"]["value"])
    theirs = sorted(TECHNIQUES, key=lambda t: -(paper[t].to_full or 0.0))
    return Conclusion(
        "Whose answers are most like the full model's?",
        " > ".join(f"{TITLES[t]} ({paper[t].to_full:.3f})" for t in theirs),
        " > ".join(f"{TITLES[t]} ({rows[t]['to_full']['value']:.3f})" for t in mine),
        "same" if mine == theirs else "mixed" if mine[0] == theirs[0] else "differs",
    )


def _fastest(results: Mapping[str, Any], contestants: Mapping[str, Any]) -> Conclusion:
    paper = FIGURES[results["like"]]
    mine = sorted(TECHNIQUES, key=lambda t: -contestants[t]["speedup"]["value"])
    return Conclusion(
        "Which measure is fastest under Algorithm 1 (all leave together)?",
        f"state similarity ({paper['state'].tokens_per_second / paper['full'].tokens_per_second:.2f} times full depth)",
        " > ".join(f"{TITLES[t]} ({contestants[t]['speedup']['value']:.2f})" for t in mine),
        "same" if mine[0] == "state" else "differs",
    )


def _throughput(results: Mapping[str, Any], contestants: Mapping[str, Any]) -> Conclusion:
    paper = FIGURES[results["like"]]
    theirs = {t: paper[t].tokens_per_second / paper["full"].tokens_per_second for t in TECHNIQUES}
    ours = {t: contestants[t]["speedup"] for t in TECHNIQUES}
    faster = [ours[t]["low"] > 1.0 for t in TECHNIQUES]
    return Conclusion(
        "Does early exit under Algorithm 1 raise throughput?",
        "yes: " + ", ".join(f"{TITLES[t]} {theirs[t]:.2f} times" for t in TECHNIQUES),
        ", ".join(
            f"{TITLES[t]} {_times(ours[t])} ({contestants[t]['exit_rate']:.0%} of layers skipped in the batch)"
            for t in TECHNIQUES
        ),
        _verdict(faster),
    )


def _latency(results: Mapping[str, Any], contestants: Mapping[str, Any]) -> Conclusion:
    paper = FIGURES[results["like"]]
    theirs = {t: paper["full"].latency_s / paper[t].latency_s for t in TECHNIQUES}
    ours = {t: contestants[t]["latency_ratio"]["value"] for t in TECHNIQUES}
    # The paper's latency gains are 2 to 3 times its throughput gains.
    apart = [ours[t] > 1.5 * contestants[t]["speedup"]["value"] for t in TECHNIQUES]
    return Conclusion(
        "Does inner-token latency fall much more than throughput rises?",
        "yes: " + ", ".join(f"{TITLES[t]} {theirs[t]:.2f} times lower" for t in TECHNIQUES),
        ", ".join(
            f"{TITLES[t]} {ours[t]:.2f} times lower, {contestants[t]['speedup']['value']:.2f} times the throughput"
            for t in TECHNIQUES
        ),
        _verdict(apart),
    )


def _shallow(results: Mapping[str, Any], contestants: Mapping[str, Any]) -> Conclusion:
    rows = results["quality"]["rows"]
    settings = [*TECHNIQUES, *(f"{t}, regroup" for t in TECHNIQUES)]
    fastest = max(settings, key=lambda name: contestants[name]["speedup"]["value"])
    shallow, best = contestants["shallow model"]["speedup"], contestants[fastest]["speedup"]
    value, full = rows["shallow model"]["to_label"], rows["full"]["to_label"]
    return Conclusion(
        "Is a statically shallower model, trained on as many tokens and served, as good and as fast?",
        "not measured",
        f"with half the decoder layers it is {_times(shallow)} as fast as full depth, and the fastest early "
        f"exit ({_named(fastest)}) {_times(best)}; its ROUGE-L is {value['value']:.3f} "
        f"[{value['low']:.3f}, {value['high']:.3f}] against {full['value']:.3f} of the full model, "
        f"so {_faster(shallow, best)}, and the shallow model's answers are "
        f"{'not told apart from' if _touches_zero(rows['shallow model']) else 'of other quality than'} full depth's",
        "open",
    )


def _regroup(contestants: Mapping[str, Any]) -> Conclusion:
    pairs = {
        t: (contestants[t]["speedup"]["value"], contestants[f"{t}, regroup"]["speedup"]["value"]) for t in TECHNIQUES
    }
    return Conclusion(
        "Is it better to let each row leave on its own (regroup) than all together?",
        "not measured; the batch waits for its slowest sequence",
        ", ".join(f"{TITLES[t]} {alone:.2f} times against {together:.2f}" for t, (together, alone) in pairs.items()),
        "open",
    )


def _filling(results: Mapping[str, Any]) -> Conclusion:
    here, harmed = _gaps(results, "filled_less_exact")
    return Conclusion(
        "Is filling sound: what is lost against exact keys and values?",
        "nothing is measured; states are said to saturate",
        f"{here}: worse labels beyond chance for {', '.join(harmed) or 'none'}",
        "open",
    )


def _masking(results: Mapping[str, Any]) -> Conclusion:
    here, harmed = _gaps(results, "masked_less_filled")
    return Conclusion(
        "Is filling needed: what if skipped layers' keys and values were simply absent?",
        "said to be needed, not measured",
        f"{here}: worse labels than with filling beyond chance for {', '.join(harmed) or 'none'}",
        _verdict([TITLES[t] in harmed for t in TECHNIQUES]),
    )


def _gaps(results: Mapping[str, Any], gap: str) -> tuple[str, list[str]]:
    """Differences of ROUGE-L over the same sources in words, and the measures with a loss beyond chance to labels."""
    found = {t: results["positions"]["techniques"][t][gap] for t in TECHNIQUES}
    words = (
        f"{TITLES[t]} {_signed(one['to_label'])} of ROUGE-L to labels, {_signed(one['to_full'])} to the full model"
        for t, one in found.items()
    )
    return "; ".join(words), [TITLES[t] for t, one in found.items() if one["to_label"]["high"] < 0]


def _signed(gap: Mapping[str, float]) -> str:
    return f"{gap['value']:+.3f} [{gap['low']:+.3f}, {gap['high']:+.3f}]"


def _cost(contestants: Mapping[str, Any]) -> Conclusion:
    parts = []
    for t in TECHNIQUES:
        spent = contestants[t]["parts_us_per_token"]
        whole = sum(spent.values())
        parts.append(f"{TITLES[t]} {spent['fill'] / whole:.1%} and {spent['exit_test'] / whole:.1%}")
    return Conclusion(
        "What do filling and confidence cost, as shares of the engine's time?",
        "called cheap, not measured",
        "; ".join(parts),
        "open",
    )


def _batches(results: Mapping[str, Any]) -> Conclusion:
    batches = results["speed"]["batches"]
    parts = []
    for t in TECHNIQUES:
        values = (f"{one['contestants'][t]['speedup']['value']:.2f}" for one in batches.values())
        parts.append(f"{TITLES[t]} {', '.join(values)}")
    return Conclusion(
        f"How does the speed-up under Algorithm 1 depend on the batch ({', '.join(batches)} sequences)?",
        "one batch size, not said which",
        "; ".join(parts),
        "open",
    )


def _faster(shallow: Mapping[str, float], early: Mapping[str, float]) -> str:
    if shallow["low"] > early["high"]:
        return "the shallow model is faster"
    if early["low"] > shallow["high"]:
        return "early exit is faster"
    return "the ranges of their speeds overlap"


def _times(spread: Mapping[str, float]) -> str:
    return f"{spread['value']:.2f} times [{spread['low']:.2f}, {spread['high']:.2f}]"


def _named(contestant: str) -> str:
    base, comma, rest = contestant.partition(", ")
    titles: Mapping[str, str] = {**TITLES}
    return f"{titles[base]}{comma}{rest}"


def _touches_zero(row: Mapping[str, Any]) -> bool:
    return row["less_than_full"]["low"] <= 0 <= row["less_than_full"]["high"]


def _verdict(holds: list[bool]) -> str:
    return "same" if all(holds) else "mixed" if any(holds) else "differs"
