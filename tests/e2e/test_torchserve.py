"""A real TorchServe with the real engine and a tiny random model: `offramp serve` starts it once, `openai` asks it."""

from __future__ import annotations

import json
import threading
from pathlib import Path

import openai
import pytest

from helpers.sinks import eventually
from helpers.tiny import EOS_ID, VOCAB_SIZE
from helpers.torchserve import (
    API_KEY,
    CACHE_TOKENS,
    MAX_MODEL_LEN,
    MAX_NUM_SEQS,
    MAX_WAITING,
    NAME,
    Served,
    make_checkpoint,
)
from offramp.common.cli import main
from offramp.serve.torchserve.server import MAX_REQUEST_BYTES

pytestmark = pytest.mark.slow

SECRET = "A prompt that must not be logged"


def test_models(served: Served) -> None:
    [model] = served.client.models.list().data
    assert model.id == NAME
    assert model.model_extra is not None
    about = model.model_extra["offramp"]
    assert (about["version"], about["exit_layers"], about["num_layers"]) == ("1.0", [1, 2], 4)
    assert served.client.models.retrieve(NAME).id == NAME


def test_completion_streamed_and_not(served: Served) -> None:
    asked = {"model": NAME, "prompt": SECRET, "max_tokens": 40, "temperature": 0}
    whole = served.client.completions.create(**asked)
    assert whole.usage is not None
    assert whole.usage.completion_tokens == 40
    assert whole.choices[0].finish_reason == "length"
    chunks = list(served.client.completions.create(**asked, stream=True, stream_options={"include_usage": True}))
    assert "".join(chunk.choices[0].text for chunk in chunks[:-1]) == whole.choices[0].text
    assert chunks[-1].usage == whole.usage


def test_chat_streamed_and_not(served: Served) -> None:
    messages = [
        {"role": "system", "content": "Be brief."},
        {"role": "user", "content": [{"type": "text", "text": SECRET}]},
    ]
    asked = {"model": NAME, "messages": messages, "max_completion_tokens": 40, "seed": 7}
    whole = served.client.chat.completions.create(**asked)
    chunks = list(served.client.chat.completions.create(**asked, stream=True))
    streamed = "".join(chunk.choices[0].delta.content or "" for chunk in chunks)
    assert streamed == whole.choices[0].message.content
    assert chunks[-1].choices[0].finish_reason == whole.choices[0].finish_reason == "length"


def test_several_choices_of_several_prompts(served: Served) -> None:
    asked = {"model": NAME, "prompt": ["a", "b"], "n": 2, "seed": 3, "max_tokens": 20}
    whole = served.client.completions.create(**asked)
    assert [choice.index for choice in whole.choices] == [0, 1, 2, 3]
    texts = [choice.text for choice in whole.choices]
    assert len(set(texts)) == 4
    assert whole.usage is not None
    assert whole.usage.completion_tokens == 80
    streamed = dict.fromkeys(range(4), "")
    for chunk in served.client.completions.create(**asked, stream=True):
        for choice in chunk.choices:
            streamed[choice.index] += choice.text
    assert list(streamed.values()) == texts
    best = served.client.completions.create(**{**asked, "prompt": "a", "n": 1}, best_of=2)
    assert best.choices[0].text in texts[:2]


def test_an_echo_judges_the_prompt(served: Served) -> None:
    asked = {"model": NAME, "prompt": SECRET, "echo": True, "logprobs": 1, "temperature": 0}
    [choice] = served.client.completions.create(**asked, max_tokens=0).choices
    assert choice.text == SECRET
    assert choice.logprobs is not None
    assert choice.logprobs.token_logprobs is not None
    first, *others = choice.logprobs.token_logprobs
    assert first is None
    assert all(logprob <= 0 for logprob in others)
    longer = served.client.completions.create(**asked, max_tokens=1).choices[0].logprobs
    assert longer is not None
    assert longer.token_logprobs is not None
    assert longer.token_logprobs[1:-1] == others


def test_an_answer_follows_the_schema(served: Served) -> None:
    schema = {
        "type": "object",
        "properties": {"a": {"type": "boolean"}},
        "required": ["a"],
        "additionalProperties": False,
    }
    asked = {"model": NAME, "messages": [{"role": "user", "content": SECRET}], "max_tokens": 100}
    answer = served.client.chat.completions.create(
        **asked,
        response_format={"type": "json_schema", "json_schema": {"name": "answer", "schema": schema}},
        extra_body={"stop_token_ids": [EOS_ID], "top_k": 50},
    )
    assert answer.choices[0].finish_reason == "stop"
    assert isinstance(json.loads(answer.choices[0].message.content or "")["a"], bool)
    with pytest.raises(openai.BadRequestError) as caught:
        served.client.chat.completions.create(**asked, extra_body={"structured_outputs": {"regex": "("}})
    assert caught.value.param == "structured_outputs"


def test_exit_layers(served: Served) -> None:
    def ask(**options: object) -> dict[str, object]:
        extra = {"offramp": {"return_exit_layers": True, **options}}
        answer = served.client.completions.create(
            model=NAME, prompt=[5, 6, 7], max_tokens=32, temperature=0, extra_body=extra
        )
        assert answer.model_extra is not None
        return answer.model_extra["offramp"]

    full, early, own = ask(exit_policy="full"), ask(threshold=-1.0), ask()
    assert full == {"exit_layers": [4] * 32, "mean_layers": 4.0}
    # The first token comes from the prompt, which runs all layers.
    assert early["exit_layers"] == [4] + [1] * 31
    layers = own["exit_layers"]
    assert isinstance(layers, list)
    assert set(layers) <= {1, 2, 4}
    assert len(set(layers)) > 1, "the checkpoint's own thresholds let some tokens leave and others not"


def test_bad_requests_get_their_4xx_while_others_stream_on(served: Served) -> None:
    client = served.client
    streamed: dict[int, int] = {}

    def stream(seed: int) -> None:
        # Read raw: parsing thousands of events would keep this process from sending anything else.
        asked = {"model": NAME, "prompt": [9], "max_tokens": 2200, "seed": seed, "stream": True, "logprobs": 0}
        status, body = served.post(json.dumps(asked).encode())
        assert status == 200
        streamed[seed] = sum(event.count(b'"tokens":["') for event in body.split(b"data: "))

    threads = [threading.Thread(target=stream, args=(seed,)) for seed in range(3)]
    for thread in threads:
        thread.start()
    eventually(lambda: served.gauge("offramp_running_requests") == 3, 20, every_s=0.05)

    status, body = served.post(b'{"model": "tiny", "prompt": ' + SECRET.encode())
    assert (status, "JSON" in json.loads(body)["error"]["message"]) == (400, True)
    status, body = served.post(b"{}", "application/x-www-form-urlencoded")
    assert (status, "application/json" in json.loads(body)["error"]["message"]) == (400, True)
    # TorchServe's own answer, given before the body comes; while it comes, a client may only see a broken pipe.
    assert served.announce(MAX_REQUEST_BYTES + 1) == 413
    with pytest.raises(openai.BadRequestError, match=rf"{MAX_MODEL_LEN} tokens, but your prompt has 20000"):
        client.completions.create(model=NAME, prompt=[5] * 20_000)
    with pytest.raises(openai.BadRequestError, match=f"KV cache holds {CACHE_TOKENS} tokens"):
        client.completions.create(model=NAME, prompt=[5], max_tokens=CACHE_TOKENS)
    with pytest.raises(openai.BadRequestError, match="Unrecognized request argument supplied: top_q"):
        client.completions.create(model=NAME, prompt="a", extra_body={"top_q": 3})
    with pytest.raises(openai.NotFoundError, match="'gpt' does not exist; served here: 'tiny'"):
        client.completions.create(model="gpt", prompt="a")
    with pytest.raises(openai.NotFoundError, match="Unknown endpoint 'v1/embeddings'"):
        client.embeddings.create(model=NAME, input="a")
    with pytest.raises(openai.BadRequestError, match=f"outside 0..{VOCAB_SIZE - 1}"):
        client.completions.create(model=NAME, prompt=[VOCAB_SIZE])
    assert any(thread.is_alive() for thread in threads), "the streams ended before the bad requests were sent"
    for thread in threads:
        thread.join()
    assert streamed == dict.fromkeys(range(3), 2200)


def test_a_full_queue_is_429_and_the_others_are_answered(served: Served) -> None:
    client = served.client
    together = MAX_NUM_SEQS + MAX_WAITING
    stream = client.completions.create(model=NAME, prompt=[[5]] * together, max_tokens=500, stream=True, logprobs=0)
    chunks = [next(stream)]
    with pytest.raises(openai.RateLimitError, match=f"as many requests as it takes, {together}") as caught:
        client.completions.create(model=NAME, prompt=[5], max_tokens=1)
    assert caught.value.response.headers["retry-after"] == "1"
    chunks += stream
    finished = [choice.index for chunk in chunks for choice in chunk.choices if choice.finish_reason == "length"]
    assert sorted(finished) == list(range(together))
    assert client.completions.create(model=NAME, prompt=[5], max_tokens=1).choices[0].finish_reason == "length"


def test_a_client_that_goes_away_is_cancelled_though_it_was_the_last(served: Served) -> None:
    before = served.gauge("offramp_generated_tokens_total")
    stream = served.client.completions.create(model=NAME, prompt=[5], max_tokens=10_000, stream=True)
    next(iter(stream))
    eventually(lambda: served.gauge("offramp_running_requests") == 1, 20, every_s=0.05)
    stream.close()
    # From here on nobody calls: TorchServe has no job left, and metrics are not asked of the worker.
    eventually(lambda: served.gauge("offramp_running_requests") == 0, 20, every_s=0.05)
    assert served.gauge("offramp_generated_tokens_total") - before < 9_500


def test_metrics(served: Served) -> None:
    served.client.completions.create(model=NAME, prompt=[5], max_tokens=8)
    assert served.gauge("offramp_generated_tokens_total") >= 8
    assert 1 <= served.gauge("offramp_mean_layers") <= 4
    assert served.gauge("offramp_request_seconds_count") >= 1


def test_the_log_holds_no_prompt_and_no_key(served: Served) -> None:
    with pytest.raises(openai.BadRequestError):
        served.client.completions.create(model=NAME, prompt=SECRET, temperature=9)
    assert "Serving tiny 1.0" in served.log()
    for secret in (SECRET, API_KEY, "Authorization"):
        assert secret not in served.log()
    assert len(served.log()) < 50_000, "something is written for every request or call"


def test_a_killed_worker_comes_back(served: Served) -> None:
    children = served.process.children(recursive=True)
    [worker] = [child for child in children if any("model_service_worker" in part for part in child.cmdline())]
    stream = served.client.completions.create(model=NAME, prompt=[5], max_tokens=10_000, stream=True)
    next(iter(stream))
    worker.kill()
    with pytest.raises(openai.APIError):
        list(stream)
    answer = served.client.completions.create(model=NAME, prompt=[5], max_tokens=4)
    assert answer.usage is not None
    assert answer.usage.completion_tokens == 4


def test_a_model_that_cannot_be_loaded_says_why_instead_of_hanging(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    checkpoint = make_checkpoint(tmp_path / "checkpoint")
    weights = checkpoint / "model.safetensors"
    weights.write_bytes(weights.read_bytes()[:-4])
    assert main(["serve", str(checkpoint), "--port", "0", "--run-folder", str(tmp_path / "run")]) == 1
    said = capsys.readouterr().err.splitlines()[-1]
    assert f"the model could not be loaded: {weights}" in said
    assert [path.name for path in tmp_path.iterdir()] == ["checkpoint", "run"], "the copy that was served is gone"
