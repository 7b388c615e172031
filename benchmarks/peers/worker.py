"""How a peer answers: the process loads its engine once, then gives one line of JSON for each line of JSON.

    <- {"ready": "vllm 0.32.0, bf16"}
    -> {"prompts": [[1, 2, 3], [4, 5, 6]], "new_tokens": 64, "ignore_eos": true, "in_flight": 2}
    <- {"token_times": [[0.021, 0.030, ...], [0.021, 0.030, ...]], "start_times": [0.0, 0.0]}
    <- {"error": "why there are none"}

Times are seconds since the request was read. At most `in_flight` sequences are under way at once: if there are more
prompts, the next one starts when a sequence ends.

Standard library only: it runs in the peer's own environment, where nothing of Offramp is installed.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import time
from collections.abc import Callable, Sequence
from typing import Any

Times = tuple[list[float], list[list[float]]]
"""For each prompt when it was begun, and when each of its tokens came, as readings of `time.perf_counter`."""

Generate = Callable[[Sequence[Sequence[int]], int, bool, int], Times]
"""Greedy tokens for every prompt: (prompts, new tokens, ignore EOS, sequences at once) -> times."""


def serve(load: Callable[[argparse.Namespace], tuple[str, Generate]], switches: Sequence[tuple[str, str]] = ()) -> None:
    """Answer standard input until it ends.

    Args:
        load: makes the engine from the options; what it is, and how it generates.
        switches: options of this engine alone, each with what it means.
    """
    parser = argparse.ArgumentParser()
    parser.add_argument("--model", required=True)
    parser.add_argument("--dtype", choices=("fp32", "bf16"), required=True)
    parser.add_argument("--threads", type=int, required=True)
    parser.add_argument("--max-batch", type=int, required=True)
    parser.add_argument("--max-tokens", type=int, required=True, help="of one sequence, prompt and answer together")
    for name, meaning in switches:
        parser.add_argument(name, action="store_true", help=meaning)
    options = parser.parse_args()
    # Libraries print as they like; only answers may go to standard output.
    answers = os.fdopen(os.dup(1), "w", buffering=1)
    os.dup2(2, 1)

    def answer(**message: Any) -> None:
        print(json.dumps(message), file=answers, flush=True)

    what, generate = load(options)
    answer(ready=what)
    for line in sys.stdin:
        request = json.loads(line)
        start = time.perf_counter()
        try:
            starts, times = generate(
                request["prompts"], request["new_tokens"], request["ignore_eos"], request["in_flight"]
            )
        except Exception as fault:  # the next question may go well
            answer(error=f"{type(fault).__name__}: {fault}")
        else:
            answer(
                token_times=[[moment - start for moment in sequence] for sequence in times],
                start_times=[max(0.0, moment - start) for moment in starts],
            )
