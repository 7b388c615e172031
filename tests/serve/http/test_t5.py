"""An encoder-decoder model behind the door: prompts are sources, and what only a continued text can have is refused."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import openai
import pytest
from transformers import T5ForConditionalGeneration

from helpers.door import open_door
from helpers.openai_service import Engine
from helpers.tiny import tiny_tokenizer
from helpers.tiny_t5 import SHAPES, t5_directory
from offramp.common.exits.config import ExitConfig
from offramp.common.importing import NewExits, import_model
from offramp.serve.config import EngineConfig
from offramp.serve.http.engine_backend import EngineBackend
from offramp.serve.served_model import ServedModel

MAX_SOURCE = 40
TEXT = "so that greedy text wanders"


@pytest.fixture(scope="module")
def directory(tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = tmp_path_factory.mktemp("t5")
    t5_directory(root / "hf", **SHAPES["v1.1"])
    import_model(str(root / "hf"), root / "model", exits=NewExits(ExitConfig((1, 3), "final")))
    return root / "model"


@pytest.fixture(scope="module")
def client(directory: Path) -> Iterator[openai.OpenAI]:
    config = EngineConfig(
        block_size=4, num_blocks=48, max_num_seqs=4, max_tokens_per_iteration=MAX_SOURCE, max_model_len=128
    )
    model = ServedModel.load(directory, config, name="m", version="1.0")
    with open_door(EngineBackend(model.start, model.engine.metrics), Engine()) as opened:
        yield openai.OpenAI(base_url=f"{opened.server.url}/v1", api_key="none", max_retries=0, timeout=60)
        assert model.engine.num_free_blocks == 48


def ask(client: openai.OpenAI, prompt: Any = TEXT, **fields: Any) -> Any:
    """The answer. Fields of ours and of vLLM's are not known to the client."""
    asked: dict[str, Any] = {"model": "m", "prompt": prompt, "temperature": 0, "max_tokens": 10, **fields}
    ours = {name: asked.pop(name) for name in ("offramp", "truncate_prompt_tokens", "ignore_eos") if name in asked}
    return client.completions.create(**asked, extra_body=ours)


def test_answers_are_those_of_transformers(client: openai.OpenAI, directory: Path) -> None:
    theirs: Any = T5ForConditionalGeneration.from_pretrained(directory)
    tokenizer = tiny_tokenizer(chat_template=False)
    texts = [TEXT, "a", "drawn wider"]
    answer = ask(client, texts)
    for text, choice in zip(texts, answer.choices, strict=True):
        source = tokenizer(text, return_tensors="pt")["input_ids"]
        said = theirs.generate(source, max_new_tokens=10, do_sample=False)[0, 1:]
        assert choice.text == tokenizer.decode(said, skip_special_tokens=True)
    assert answer.usage.prompt_tokens == sum(len(tokenizer(text)["input_ids"]) for text in texts)
    alone = ask(client)
    assert alone.choices[0].text == answer.choices[0].text
    chunks = list(ask(client, stream=True))
    assert "".join(chunk.choices[0].text for chunk in chunks) == alone.choices[0].text


def test_exits_and_draws(client: openai.OpenAI) -> None:
    wanted = {"measure": "cosine", "threshold": -2, "return_exit_layers": True}
    early = ask(client, offramp=wanted, ignore_eos=True)
    assert early.choices[0].model_extra["offramp"]["exit_layers"] == [4] + [1] * 9
    drawn = ask(client, n=3, temperature=1, seed=1, logprobs=1, ignore_eos=True)
    assert len({choice.text for choice in drawn.choices}) == 3
    assert all(len(choice.logprobs.tokens) == 10 for choice in drawn.choices)


def test_long_sources_are_refused_or_cut(client: openai.OpenAI) -> None:
    source = [5 + index % 200 for index in range(MAX_SOURCE + 10)]
    with pytest.raises(openai.BadRequestError, match="reads at most 40 tokens, but your prompt has 50; shorten it, or"):
        ask(client, source)
    with pytest.raises(openai.BadRequestError, match="reads at most 40 tokens"):
        ask(client, source, truncate_prompt_tokens=45)
    with pytest.raises(openai.BadRequestError, match="must be at least 1, or -1 for as many as fit"):
        ask(client, source, truncate_prompt_tokens=0)
    cut = ask(client, source, truncate_prompt_tokens=-1)
    assert cut.usage.prompt_tokens == MAX_SOURCE
    assert cut.choices[0].text == ask(client, source[:MAX_SOURCE]).choices[0].text
    # The token that ends a source stays.
    ended = ask(client, [*source, 1], truncate_prompt_tokens=12)
    assert ended.choices[0].text == ask(client, [*source[:11], 1]).choices[0].text
    with pytest.raises(openai.BadRequestError, match="writes at most 127 tokens, but you asked for 128"):
        ask(client, max_tokens=128)
    full = ask(client, source[:MAX_SOURCE], max_tokens=127, ignore_eos=True)
    assert full.usage.completion_tokens == 127


def test_what_needs_a_continued_text_is_refused(client: openai.OpenAI) -> None:
    for fields in ({}, {"logprobs": 1}, {"max_tokens": 0}):
        with pytest.raises(openai.BadRequestError, match="'echo' is not supported by this model") as refused:
            ask(client, echo=True, **fields)
        assert refused.value.param == "echo"
    with pytest.raises(openai.BadRequestError, match="tokenizer has no chat template: use /v1/completions"):
        client.chat.completions.create(model="m", messages=[{"role": "user", "content": "Hi"}])


def test_the_model_tells_its_limits(client: openai.OpenAI) -> None:
    about = client.models.retrieve("m").model_extra
    assert about is not None
    assert (about["offramp"]["max_source_len"], about["offramp"]["max_model_len"]) == (MAX_SOURCE, 128)
