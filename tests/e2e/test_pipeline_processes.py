"""Stages in processes of their own: what they say, and what happens when one of them is killed."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from helpers.engines import Job, random_jobs, run_jobs
from helpers.tiny import tiny_checkpoint, tiny_model
from offramp.common.errors import OfframpError
from offramp.common.exits.config import ExitConfig
from offramp.common.exits.policy import ExitPolicy
from offramp.serve.config import EngineConfig
from offramp.serve.engine import Engine
from offramp.serve.engine_thread import EngineThread
from offramp.serve.pipeline.processes import StageProcesses

EXITS = ExitConfig((1, 2), "norm")
MARGIN = ExitPolicy("margin", {1: 0.2, 2: 0.2})
CONFIG = EngineConfig(pipeline_stages=3, block_size=4, num_blocks=256, max_model_len=128, num_threads=1)


def later_stages(engine: Engine) -> StageProcesses:
    assert engine._pipeline is not None
    later = engine._pipeline._later
    assert isinstance(later, StageProcesses)
    return later


def is_there(process_id: int) -> bool:
    try:
        os.kill(process_id, 0)
    except ProcessLookupError:
        return False
    return True


class Ears:
    """A sink that keeps what failed."""

    def __init__(self) -> None:
        self.causes: list[Exception] = []

    def put(self, output: object) -> None:
        del output

    def fail(self, request_id: str, cause: Exception) -> None:
        del request_id
        self.causes.append(cause)


@pytest.mark.slow
def test_processes_say_what_one_says_and_a_killed_one_ends_all(tmp_path: Path) -> None:
    path = tiny_checkpoint(tmp_path / "tiny", EXITS, MARGIN)
    engine = Engine.from_checkpoint(path, CONFIG)
    later = later_stages(engine)
    try:
        plain = random_jobs([MARGIN, MARGIN, MARGIN, None])
        jobs = [Job(job.prompt, job.max_tokens, job.policy, "pipeline") for job in plain]
        assert run_jobs(engine, jobs) == [job.naive(tiny_model(EXITS)) for job in jobs]
        thread = EngineThread(engine, max_requests=4)
        ears = Ears()
        for name in "ab":
            thread.submit(Job((5, 6, 7), 120, MARGIN, "pipeline").request(name), ears)
        os.kill(later.process_ids[1], signal.SIGKILL)
        deadline = time.monotonic() + 10
        while thread.failure is None and time.monotonic() < deadline:
            time.sleep(0.05)
        assert isinstance(thread.failure, OfframpError)
        assert "stage 3 of 3 has ended without a word (exit status -9" in str(thread.failure)
        assert len(ears.causes) == 2
        assert not any(map(is_there, later.process_ids))
    finally:
        later.close()


@pytest.mark.slow
def test_a_lost_stage_is_noticed_while_nobody_asks(tmp_path: Path) -> None:
    path = tiny_checkpoint(tmp_path / "tiny", EXITS, MARGIN)
    engine = Engine.from_checkpoint(path, EngineConfig(pipeline_stages=2, max_model_len=64, num_threads=1))
    later = later_stages(engine)
    try:
        assert not engine.has_unfinished
        thread = EngineThread(engine, max_requests=4)
        os.kill(later.process_ids[0], signal.SIGKILL)
        deadline = time.monotonic() + 10
        while thread.failure is None and time.monotonic() < deadline:
            time.sleep(0.05)
        assert "stage 2 of 2" in str(thread.failure)
    finally:
        later.close()


OWNER = """
import sys, time
from offramp.serve.config import EngineConfig
from offramp.serve.engine import Engine
engine = Engine.from_checkpoint(sys.argv[1], EngineConfig(pipeline_stages=2, max_model_len=64, num_threads=1))
print(*engine._pipeline._later.process_ids, flush=True)
time.sleep(600)
"""


@pytest.mark.slow
def test_no_process_outlives_the_first_stage(tmp_path: Path) -> None:
    path = tiny_checkpoint(tmp_path / "tiny", EXITS, MARGIN)
    owner = subprocess.Popen([sys.executable, "-c", OWNER, str(path)], stdout=subprocess.PIPE, text=True)
    assert owner.stdout is not None
    [process_id] = map(int, owner.stdout.readline().split())
    assert is_there(process_id)
    owner.kill()
    owner.wait()
    deadline = time.monotonic() + 5
    while is_there(process_id) and time.monotonic() < deadline:
        time.sleep(0.02)
    assert not is_there(process_id)
