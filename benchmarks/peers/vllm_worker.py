"""vLLM on the CPU as a peer: its whole engine, stepped in this process, compiled, without prefix caching."""

from __future__ import annotations

import argparse
import itertools
import os
import time
from collections.abc import Sequence

from worker import Generate, Times, serve


def load(options: argparse.Namespace) -> tuple[str, Generate]:
    os.environ.update(
        VLLM_ENABLE_V1_MULTIPROCESSING="0",  # its iterations run here, so each token's time is known
        VLLM_CPU_KVCACHE_SPACE="2",
        VLLM_LOGGING_LEVEL="WARNING",
        VLLM_NO_USAGE_STATS="1",
        HF_HUB_OFFLINE="1",
    )
    os.environ.pop("OMP_NUM_THREADS", None)
    if options.threads < len(os.sched_getaffinity(0)):
        os.environ["OMP_NUM_THREADS"] = str(options.threads)  # otherwise it sets up its threads as it likes best
    import vllm
    from vllm import SamplingParams
    from vllm.engine.arg_utils import EngineArgs
    from vllm.v1.engine.llm_engine import LLMEngine

    arguments = EngineArgs(
        model=options.model,
        dtype={"bf16": "bfloat16", "fp32": "float32"}[options.dtype],
        max_model_len=options.max_tokens + 1,
        max_num_seqs=options.max_batch,
        max_num_batched_tokens=max(2048, options.max_tokens + 1),
        enable_prefix_caching=False,
        disable_log_stats=True,
    )
    engine = LLMEngine.from_engine_args(arguments)
    numbers = itertools.count()

    def generate(prompts: Sequence[Sequence[int]], new_tokens: int, ignore_eos: bool, in_flight: int) -> Times:
        sampling = SamplingParams(temperature=0.0, max_tokens=new_tokens, ignore_eos=ignore_eos)
        waiting = iter(prompts)
        starts: list[float] = []
        times: dict[str, list[float]] = {}

        def begin(count: int) -> None:
            for prompt in itertools.islice(waiting, count):
                name = str(next(numbers))
                starts.append(time.perf_counter())
                times[name] = []
                engine.add_request(name, {"prompt_token_ids": list(prompt)}, sampling)

        begin(in_flight)
        while engine.has_unfinished_requests():
            outputs = engine.step()
            now = time.perf_counter()
            for output in outputs:
                sequence = times[output.request_id]
                sequence += [now] * (len(output.outputs[0].token_ids) - len(sequence))
            begin(sum(output.finished for output in outputs))
        return starts, list(times.values())

    return f"vllm {vllm.__version__}, {options.dtype}", generate


if __name__ == "__main__":
    serve(load)
