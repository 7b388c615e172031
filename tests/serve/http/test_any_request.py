"""Requests that schemathesis makes of the OpenAPI document, right and wrong ones: what comes back is what it says.

Its checks want a status, a content type and a body that the document names, and no fault of ours; a refusal of what the
document does not allow; and no answer without the key that it asks for.
"""

from __future__ import annotations

import json
import re
from collections import Counter
from collections.abc import Iterator
from typing import Any

import pytest
from hypothesis import HealthCheck, Phase, given, settings

from helpers.behind import Behind, engine_behind
from helpers.tiny import VOCAB_SIZE, tiny_checkpoint
from helpers.torchserve import NAME
from offramp.common.exits.config import ExitConfig
from offramp.common.exits.policy import ExitPolicy

pytest.importorskip("schemathesis", reason="schemathesis wants Python 3.11")

import schemathesis
from schemathesis import Case, GenerationMode
from schemathesis.schemas import BaseSchema
from schemathesis.specs.openapi.checks import positive_data_acceptance

RIGHT, WRONG = (GenerationMode(name) for name in ("positive", "negative"))
COMPLETIONS, CHAT = "/v1/completions", "/v1/chat/completions"
MAX_MODEL_LEN = 512  # so that nobody gets a long answer
NO_DOCUMENT_CAN_SAY = (
    "it has no tokens|maximum context length|cannot be followed|within its constraint|the model has exits at|"
    "at least 'n'|above 'n'|leave one of them out|not both"
)
"""Why a request may be refused that is as the document says: what depends on the model, or on two fields together."""


@pytest.fixture(scope="module")
def behind(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Behind]:
    folder = tmp_path_factory.mktemp("door")
    checkpoint = tiny_checkpoint(
        folder / "checkpoint",
        ExitConfig(layers=(1, 2)),
        ExitPolicy(thresholds={1: 0.3, 2: 0.3}),
        max_position_embeddings=MAX_MODEL_LEN,
    )
    with engine_behind(folder, checkpoint) as behind:
        yield behind


@pytest.fixture(scope="module")
def headers(behind: Behind) -> dict[str, str]:
    return {"Authorization": f"Bearer {behind.key}"}


@pytest.fixture(scope="module")
def api(behind: Behind, headers: dict[str, str]) -> BaseSchema:
    return schemathesis.openapi.from_url(f"{behind.opened.server.url}/openapi.json", headers=headers)


@pytest.mark.parametrize("mode", [RIGHT, WRONG], ids=lambda mode: mode.name.lower())
@pytest.mark.parametrize(
    "operation",
    [f"POST {COMPLETIONS}", f"POST {CHAT}", "GET /v1/models", "GET /v1/models/{model}"],
)
def test_whatever_is_asked(api: BaseSchema, headers: dict[str, str], operation: str, mode: GenerationMode) -> None:
    seen = Counter[int]()

    def ask(case: Case[Any]) -> None:
        # Without its name, nothing else would be looked at.
        if isinstance(case.body, dict) and isinstance(case.body.get("model"), str):
            case.body["model"] = NAME
        # What the document allows may be more than this model can do; the next test looks at why it is refused.
        response = case.call_and_validate(headers=headers, excluded_checks=[positive_data_acceptance], timeout=60)
        seen[response.status_code] += 1

    try_some(api, operation, mode, ask)
    if operation.startswith("POST") and mode.is_negative:
        assert seen[400] > 10


@pytest.mark.parametrize("path", [COMPLETIONS, CHAT])
def test_what_could_be_answered(api: BaseSchema, headers: dict[str, str], path: str) -> None:
    """Hardly a request made by chance fits this model; these nearly do."""
    answers = Counter[str]()

    def ask(case: Case[Any]) -> None:
        case.body = fitting(case.body)
        response = case.call_and_validate(headers=headers, excluded_checks=[positive_data_acceptance], timeout=60)
        if response.status_code == 200:
            answers[response.headers["content-type"][0]] += 1
        else:
            assert re.search(NO_DOCUMENT_CAN_SAY, response.json()["error"]["message"])

    try_some(api, f"POST {path}", RIGHT, ask)
    assert answers["application/json"] > 2
    assert answers["text/event-stream"] > 2


def test_every_example_is_answered(api: BaseSchema, headers: dict[str, str]) -> None:
    for path in (COMPLETIONS, CHAT):
        operation = api[path]["POST"]
        examples = api.raw_schema["paths"][path]["post"]["requestBody"]["content"]["application/json"]["examples"]
        assert len(examples) == 4
        for example in examples.values():
            case = operation.Case(body=example["value"], media_type="application/json")
            assert case.call_and_validate(headers=headers, timeout=60).status_code == 200


def try_some(api: BaseSchema, operation: str, mode: GenerationMode, ask: Any) -> None:
    found = api.find_operation_by_label(operation)
    assert found is not None

    @given(case=found.as_strategy(generation_mode=mode))
    @settings(
        max_examples=40,
        derandomize=True,
        deadline=None,
        database=None,
        phases=[Phase.generate],
        suppress_health_check=[*HealthCheck.__members__.values()],
    )
    def try_it(case: Case[Any]) -> None:
        ask(case)

    try_it()


def fitting(body: Any) -> Any:
    """The same request with what this model cannot do put right; it still is as the document says."""
    body = {**body, "model": NAME}
    for name, most in {"n": 2, "best_of": 2, "min_tokens": 4}.items():
        if body.get(name) is not None:
            body[name] = min(body[name], most)
    if body.get("max_tokens") != 0:
        body["max_tokens"] = 8
    body.pop("max_completion_tokens", None)
    if body.get("logit_bias"):
        body["logit_bias"] = {str(int(token) % VOCAB_SIZE): bias for token, bias in body["logit_bias"].items()}
    for name in ("prompt", "stop_token_ids"):
        if name in body:
            body[name] = _in_vocabulary(body[name])
    for name in ("response_format", "structured_outputs", "offramp"):  # for the most part they contradict each other
        if len(json.dumps(body)) % 4:
            body.pop(name, None)
    return body


def _in_vocabulary(value: Any) -> Any:
    if isinstance(value, list):
        return [_in_vocabulary(item) for item in value][:8]
    return int(value) % VOCAB_SIZE if isinstance(value, (int, float)) else value
