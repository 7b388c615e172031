"""`offramp generate --probe`: what every exit would have said, as a table for people or as JSON for programs."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from offramp.common.exits.policy import Measure

if TYPE_CHECKING:
    from offramp.serve.probe import ExitReading, PositionReading

Decode = Callable[[int], str]
"""The text of one token."""


def probe_json(readings: Sequence[PositionReading], decode: Decode) -> list[dict[str, Any]]:
    """One object for each position of prompt and text.

    `position` counts from 0, `token_id` and `token` are what stands there, and `exits` holds for each exit layer (as a
    string, the final exit too) what it says comes next: `top`, the most probable tokens as `token_id`, `token` and
    `probability`; `confidence`, every measure over the whole vocabulary, `classifier` where the exit has one; and
    `tested`, what the exit test compares with the threshold, over the policy's shortlist (null at the final exit, and
    without an exit policy).
    """
    return [
        {
            "position": one.position,
            "token_id": one.token_id,
            "token": decode(one.token_id),
            "exits": {
                str(layer): {
                    "top": [
                        {"token_id": token, "token": decode(token), "probability": share}
                        for token, share in reading.top
                    ],
                    "confidence": reading.confidence,
                    "tested": reading.tested,
                }
                for layer, reading in one.exits.items()
            },
        }
        for one in readings
    ]


def probe_table(
    readings: Sequence[PositionReading], decode: Decode, measure: Measure | None, said_at: Mapping[int, int]
) -> str:
    """Several lines for each position, one for each exit.

    Args:
        readings: of prompt and text.
        decode: see there.
        measure: what the exit test measures; without one the largest probability is shown.
        said_at: for positions whose next token was generated, the exit layer that said it.
    """
    shown = measure or "max_probability"
    width = len(str(max(readings[-1].exits)))
    lines = [
        f"At every position, what each exit says comes next, and its {shown.replace('_', ' ')}. "
        "* marks the exit that said a token of the text."
    ]
    for one in readings:
        lines.append(f"{one.position:4} after {decode(one.token_id)!r}")
        for layer, reading in one.exits.items():
            mark = "*" if said_at.get(one.position) == layer else " "
            best = "  ".join(f"{decode(token)!r} {share:.2f}" for token, share in reading.top)
            lines.append(f"   {mark} layer {layer:{width}} {_confidence(reading, shown)}   {best}")
    return "\n".join(lines)


def _confidence(reading: ExitReading, measure: Measure) -> str:
    value = reading.confidence.get(measure) if reading.tested is None else reading.tested
    return "    -" if value is None else f"{value:5.2f}"  # the final exit has no classifier
