from __future__ import annotations

from collections.abc import Iterator

import pytest

from helpers.openai_service import Engine, card
from helpers.tiny import tiny_tokenizer
from offramp.serve.engine_thread import EngineThread
from offramp.serve.protocol.service import OpenAIService


@pytest.fixture
def engine() -> Engine:
    return Engine()


@pytest.fixture
def thread(engine: Engine) -> Iterator[EngineThread]:
    thread = EngineThread(engine, max_requests=4)
    yield thread
    thread.close()


@pytest.fixture
def service(thread: EngineThread) -> OpenAIService:
    return OpenAIService(thread, tiny_tokenizer(), card())
