"""Whether calibration data are apart from what a model was trained on, as far as its provenance tells."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from offramp.common.errors import OfframpError
from offramp.common.prompt_sketch import PromptSketch


def compare_with_training(provenance: Mapping[str, Any], prompts: Sequence[str]) -> str:
    """What is known, in a sentence.

    Args:
        provenance: of the checkpoint, and in it that of the checkpoint it was made from, and so on.
        prompts: of the calibration.

    Raises:
        OfframpError: the model was trained on some of them, so that they promise nothing about others.
    """
    overlaps = [sketch.compare(prompts) for sketch in _sketches(provenance)]
    if found := max((overlap.found for overlap in overlaps), default=0):
        known = max(overlap.known for overlap in overlaps)
        raise OfframpError(
            f"the model was trained on {found} of {known} calibration prompts that can be told; what it does with them "
            "promises nothing about others, so calibrate on data that were held out."
        )
    if not overlaps:
        return "whether the model was trained on them is not known: its provenance has no prompts"
    known = min(overlap.known for overlap in overlaps)
    return f"none of the {known} of {overlaps[0].asked} prompts that can be told was trained on"


def _sketches(provenance: Mapping[str, Any]) -> Iterator[PromptSketch]:
    for name, value in provenance.items():
        if name == "prompts" and isinstance(value, Mapping):
            yield PromptSketch.from_json(value)
        elif isinstance(value, Mapping):
            yield from _sketches(value)
