"""KV policies: what upper layers see of a token that left early. Plain data."""

from __future__ import annotations

from typing import Literal

KVPolicy = Literal["full", "fill", "recompute", "verify", "static", "pipeline"]
"""Where the keys and values of skipped layers come from.

`full`: nothing is skipped, no token leaves early. `fill`: the skipped layers make them from the state at the
exit (saturated KV; CALM, section 3.2; approximate). `recompute`: a later pass that goes deeper carries the tokens along
from the layer where they stopped, so the cache ends up exact (EE-LLM, section 4). `verify`: as `recompute`, and the
full model judges every early token before it is handed out, so the answer is the full model's. `static`: every
generated token leaves at one fixed layer, and nothing above it is ever needed (a baseline). `pipeline`: every token
runs through all layers, stage after stage, and is said by the first exit that is sure; the next token need not wait for
the stages above, which make keys and values meanwhile (EE-LLM, section 4, pipeline-based inference; exact)."""
