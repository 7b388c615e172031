"""What the official `openai` client asks of a door, as it comes from PyPI, and what it must see."""

from __future__ import annotations

import asyncio
import traceback
from collections.abc import Callable
from typing import Any

import openai

ANSWER_LIMIT_S = 300.0
"""Nobody may wait longer for an answer: then it hangs."""

TEXTS = ("Once upon a time", "The weights are drawn", "Größe: 漢字 und é", "1, 2, 3, 5, 8,", " ")
TOKENS = 24


class OpenAIClient:
    """The official client at one model.

    Args:
        url: Of the API.
        key: That opens the door.
        model: Which model is asked.
        end_token: A token that ends an answer.
    """

    def __init__(self, url: str, key: str, model: str, end_token: int) -> None:
        # Without retries, so that nothing which goes wrong is hidden.
        self._given: dict[str, Any] = {"base_url": url, "api_key": key, "max_retries": 0, "timeout": ANSWER_LIMIT_S}
        self._client = openai.OpenAI(**self._given)
        self._model = model
        self._end_token = end_token

    def run(self, *, together: int = 32) -> tuple[list[str], list[str]]:
        """Asks everything, at most `together` at once; names of what was tried, and what was wrong."""
        self._at_once = together
        tries: tuple[Callable[[], None], ...] = (
            self._models,
            self._completions,
            self._several_prompts,
            self._chat,
            self._logprobs,
            self._choices,
            self._stop,
            self._structured_answer,
            self._echo,
            self._errors,
            self._leave,
            self._together,
        )
        faults: list[str] = []
        for one in tries:
            try:
                one()
            except (AssertionError, openai.OpenAIError, LookupError, TypeError) as error:
                where = traceback.extract_tb(error.__traceback__)[-1].line
                faults.append(f"{_name(one)}: {where}: {type(error).__name__}: {error!s:.300}")
        return [_name(one) for one in tries], faults

    def _complete(self, prompt: Any, **more: Any) -> Any:
        given: dict[str, Any] = {"model": self._model, "max_tokens": TOKENS, **more}
        return self._client.completions.create(prompt=prompt, **given)

    def _ask(self, text: str, **more: Any) -> Any:
        messages: Any = [{"role": "system", "content": "Be brief."}, {"role": "user", "content": text}]
        given: dict[str, Any] = {"model": self._model, "max_completion_tokens": TOKENS, **more}
        return self._client.chat.completions.create(messages=messages, **given)

    def _models(self) -> None:
        assert [model.id for model in self._client.models.list()] == [self._model]
        assert self._client.models.retrieve(self._model).id == self._model

    def _completions(self) -> None:
        for text in TEXTS:
            whole = self._complete(text, temperature=0)
            chunks = list(self._complete(text, temperature=0, stream=True, stream_options={"include_usage": True}))
            assert "".join(chunk.choices[0].text for chunk in chunks[:-1]) == whole.choices[0].text
            assert chunks[-2].choices[0].finish_reason == whole.choices[0].finish_reason
            assert chunks[-1].choices == []
            assert chunks[-1].usage == whole.usage

    def _several_prompts(self) -> None:
        alone = [self._complete(text, temperature=0).choices[0].text for text in TEXTS]
        together = self._complete(list(TEXTS), temperature=0)
        assert [choice.text for choice in together.choices] == alone
        assert [choice.index for choice in together.choices] == list(range(len(TEXTS)))
        assert len(self._complete([[5, 6], [7]]).choices) == 2

    def _chat(self) -> None:
        for text in TEXTS:
            whole = self._ask(text, temperature=0)
            chunks = list(self._ask(text, temperature=0, stream=True, stream_options={"include_usage": True}))
            said = "".join(chunk.choices[0].delta.content or "" for chunk in chunks[:-1])
            assert said == whole.choices[0].message.content
            assert chunks[0].choices[0].delta.role == whole.choices[0].message.role == "assistant"
            assert chunks[-1].usage == whole.usage

    def _logprobs(self) -> None:
        answer = self._complete(TEXTS[0], temperature=0, logprobs=3)
        [choice] = answer.choices
        assert len(choice.logprobs.tokens) == answer.usage.completion_tokens
        for token, said, top in zip(
            choice.logprobs.tokens, choice.logprobs.token_logprobs, choice.logprobs.top_logprobs, strict=True
        ):
            assert len(top) >= 3
            assert top[token] == said <= 0
        message = self._ask(TEXTS[0], temperature=0, logprobs=True, top_logprobs=2).choices[0]
        events = list(self._ask(TEXTS[0], temperature=0, logprobs=True, top_logprobs=2, stream=True))
        streamed = [entry for event in events for entry in (event.choices[0].logprobs or _Nothing).content or []]
        assert [entry.token for entry in streamed] == [entry.token for entry in message.logprobs.content]
        assert all(len(entry.top_logprobs) == 2 for entry in streamed)

    def _choices(self) -> None:
        asked = {"n": 3, "temperature": 1.0, "seed": 7}
        first, again = (self._complete(TEXTS[0], **asked).choices for _ in range(2))
        assert [choice.index for choice in first] == [0, 1, 2]
        assert len({choice.text for choice in first}) > 1
        assert [choice.text for choice in first] == [choice.text for choice in again]
        texts = ["", "", ""]
        for chunk in self._ask(TEXTS[0], n=3, stream=True):
            texts[chunk.choices[0].index] += chunk.choices[0].delta.content or ""
        assert all(texts)

    def _stop(self) -> None:
        whole = self._complete(TEXTS[0], temperature=0).choices[0].text
        cut = self._complete(TEXTS[0], temperature=0, stop=[whole[4:7]]).choices[0]
        assert (cut.text, cut.finish_reason) == (whole[: whole.index(whole[4:7])], "stop")

    def _structured_answer(self) -> None:
        wanted: Any = {"type": "json_schema", "json_schema": {"name": "answer", "schema": {"enum": ["yes", "no"]}}}
        ends = {"stop_token_ids": [self._end_token]}
        said = self._ask(TEXTS[0], response_format=wanted, extra_body=ends).choices[0].message.content
        assert said.strip() in ('"yes"', '"no"'), said
        said = self._complete(TEXTS[0], extra_body={"structured_outputs": {"regex": "(yes|no)"}, **ends})
        assert said.choices[0].text in ("yes", "no"), said

    def _echo(self) -> None:
        choice = self._complete(TEXTS[0], max_tokens=0, echo=True, logprobs=1).choices[0]
        assert choice.text == TEXTS[0]
        assert choice.logprobs.token_logprobs[0] is None
        assert all(logprob <= 0 for logprob in choice.logprobs.token_logprobs[1:])

    def _errors(self) -> None:
        self._refused(openai.BadRequestError, lambda: self._complete("a", extra_body={"top_q": 1}))
        self._refused(openai.BadRequestError, lambda: self._complete("a", temperature=3))
        self._refused(openai.BadRequestError, lambda: self._complete([5] * 200_000))
        self._refused(openai.BadRequestError, lambda: self._ask("a", n=0, stream=True))
        self._refused(openai.NotFoundError, lambda: self._complete("a", model="gpt"))
        self._refused(openai.NotFoundError, lambda: self._client.models.retrieve("gpt"))
        self._refused(openai.NotFoundError, lambda: self._client.embeddings.create(model=self._model, input="a"))
        wrong = self._client.with_options(api_key="wrong")
        self._refused(openai.AuthenticationError, wrong.models.list)

    def _refused(self, kind: type[openai.APIStatusError], ask: Callable[[], Any]) -> None:
        refusal: openai.APIStatusError | None = None
        try:
            ask()
        except kind as error:
            refusal = error
        assert refusal is not None, f"{kind.__name__} was expected"
        assert refusal.request_id is not None
        assert isinstance(refusal.body, dict)
        assert {"message", "type", "param", "code"} == set(refusal.body)

    def _leave(self) -> None:
        """After some tokens; the next one is answered as if nothing had been."""
        for stream in (self._complete("a", max_tokens=200, stream=True), self._ask("a", stream=True)):
            with stream:
                next(iter(stream))
        assert self._complete("a", max_tokens=1).usage.completion_tokens == 1

    def _together(self) -> None:
        """Many streams at once say what each says alone."""
        alone = [self._complete(text, temperature=0).choices[0].text for text in TEXTS]

        async def say(client: openai.AsyncOpenAI, text: str) -> str:
            stream = await client.completions.create(
                model=self._model, prompt=text, max_tokens=TOKENS, temperature=0, stream=True
            )
            return "".join([chunk.choices[0].text async for chunk in stream])

        async def all_of_them() -> list[str]:
            async with openai.AsyncOpenAI(**self._given) as client:
                return await asyncio.gather(*(say(client, TEXTS[at % len(TEXTS)]) for at in range(self._at_once)))

        said = asyncio.run(all_of_them())
        assert said == [alone[at % len(alone)] for at in range(self._at_once)]


class _Nothing:
    content = None


def _name(one: Callable[[], None]) -> str:
    return one.__name__.strip("_").replace("_", " ")
