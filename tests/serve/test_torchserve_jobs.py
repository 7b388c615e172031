from __future__ import annotations

import json
import threading
import time
from collections.abc import Iterator

import pytest

from helpers.fake_engine import FakeEngine
from helpers.tiny import tiny_tokenizer
from offramp.common.errors import OfframpError
from offramp.serve.engine_thread import EngineThread
from offramp.serve.protocol.card import ModelCard
from offramp.serve.protocol.service import OpenAIService
from offramp.serve.request.constraint import Constraint
from offramp.serve.request.request import Request
from offramp.serve.torchserve.jobs import Job, Jobs, Piece
from offramp.serve.torchserve.settings import HandlerSettings

CARD = ModelCard("m", "1.0", 1, 300, 4, (1, 2), None, frozenset(), 100_000, 100_000, run_id="abc")


class Front:
    """TorchServe's side: calls with the live jobs, each with its payload until its first piece, and takes the pieces.

    Attributes:
        held: Jobs that the last call gave nothing.
    """

    def __init__(self, jobs: Jobs) -> None:
        self.jobs = jobs
        self.pieces: dict[str, list[Piece]] = {}
        self.held: set[str] = set()
        self._live: dict[str, Job] = {}

    def send(self, name: str, path: str = "v1/completions", **fields: object) -> None:
        body = json.dumps({"model": "m", "prompt": [4], **fields}).encode()
        self.send_raw(Job(name, path, body))

    def send_raw(self, job: Job) -> None:
        self._live[job.id] = job
        self.pieces[job.id] = []

    def drop(self, name: str) -> None:
        assert self.pieces[name], "TorchServe notices only for jobs that have been given a piece"
        del self._live[name]

    def call(self) -> None:
        given = list(self._live.values())
        pieces = self.jobs.pump(given)
        assert len(pieces) == len(given)
        self.held = {job.id for job, piece in zip(given, pieces, strict=True) if piece is None}
        for job, piece in zip(given, pieces, strict=True):
            if piece is None:
                assert not self.pieces[job.id], "its status is out"
                continue
            self.pieces[job.id].append(piece)
            if piece.last is False:
                self._live[job.id] = Job(job.id, job.path, None)
            else:
                assert (piece.last is None) == (len(self.pieces[job.id]) == 1), "whole at first, or ended later"
                del self._live[job.id]

    def run(self, *names: str) -> None:
        deadline = time.monotonic() + 5
        while any(name in self._live for name in names):
            assert time.monotonic() < deadline
            self.call()

    def run_until_spoken(self, *names: str) -> None:
        """Calls until each of these jobs has had a piece."""
        deadline = time.monotonic() + 5
        while not all(self.pieces[name] for name in names):
            assert time.monotonic() < deadline
            self.call()

    def text(self, name: str) -> str:
        return b"".join(piece.body for piece in self.pieces[name]).decode()


@pytest.fixture
def engine() -> FakeEngine:
    return FakeEngine(delay_s=0.002)


@pytest.fixture
def thread(engine: FakeEngine) -> Iterator[EngineThread]:
    thread = EngineThread(engine, max_requests=8, lease_s=0.3)
    yield thread
    thread.close()


@pytest.fixture
def jobs(thread: EngineThread) -> Jobs:
    return Jobs(OpenAIService(thread, tiny_tokenizer(), CARD), thread, HandlerSettings(wait_ms=5))


@pytest.fixture
def front(jobs: Jobs) -> Front:
    return Front(jobs)


def test_streams_and_whole_answers_side_by_side(front: Front) -> None:
    front.send("s", max_tokens=5, stream=True)
    front.send("w", max_tokens=5)
    front.run("s", "w")
    assert front.text("s").count("data: ") == 6
    assert json.loads(front.text("w"))["choices"][0]["text"] == " 0 1 2 3 4"
    assert front.pieces["s"][0].content_type == "text/event-stream"
    assert front.pieces["w"][0].content_type == "application/json"
    assert front.pieces["s"][0].headers == {"offramp-version": "1.0", "offramp-run-id": "abc"}


def test_a_refusal_is_whole_and_at_once_and_touches_nobody(front: Front) -> None:
    front.send("s", max_tokens=200, stream=True)
    front.run_until_spoken("s")
    front.send_raw(Job("bad", "v1/completions", b"{oops"))
    front.send("lost", path="v1/nowhere")
    front.send("long", max_tokens=200_000)
    front.call()
    assert [front.pieces[name][0].status for name in ("bad", "lost", "long")] == [400, 404, 400]
    assert all(len(front.pieces[name]) == 1 for name in ("bad", "lost", "long"))
    front.run("s")
    assert front.text("s").count("data: ") == 201


def test_an_answer_that_is_ready_at_once_still_takes_two_pieces(engine: FakeEngine, thread: EngineThread) -> None:
    front = Front(Jobs(OpenAIService(thread, tiny_tokenizer(), CARD), thread, HandlerSettings(wait_ms=200)))
    front.send("s", max_tokens=1, stream=True)
    time.sleep(0.01)
    front.run("s")
    assert len(front.pieces["s"]) >= 2
    assert front.pieces["s"][0].last is False


def test_a_vanished_job_is_cancelled(front: Front, engine: FakeEngine, thread: EngineThread) -> None:
    front.send("gone", max_tokens=50_000, stream=True)
    front.send("stays", max_tokens=20)
    front.run_until_spoken("gone")
    front.drop("gone")
    front.run("stays")
    assert engine.cancelled == ["cmpl-gone-0"]
    assert thread.num_running == 0


def test_when_the_last_client_goes_the_lease_cancels_without_a_call(
    front: Front, engine: FakeEngine, thread: EngineThread
) -> None:
    front.send("gone", max_tokens=50_000, stream=True)
    front.run_until_spoken("gone")
    front.drop("gone")  # and TorchServe, with no job left, calls no more
    deadline = time.monotonic() + 5
    while not engine.cancelled:
        assert time.monotonic() < deadline
        time.sleep(0.01)
    front.send("next", max_tokens=2)
    front.run("next")
    assert json.loads(front.text("next"))["choices"][0]["text"] == " 0 1"


def test_a_front_that_was_only_slow_gets_the_end_of_its_stream(front: Front) -> None:
    front.send("slow", max_tokens=50_000, stream=True)
    front.run_until_spoken("slow")
    time.sleep(0.6)
    front.run("slow")
    assert '"error"' in front.text("slow")
    assert front.text("slow").endswith("data: [DONE]\n\n")


def test_pieces_are_capped(engine: FakeEngine, thread: EngineThread) -> None:
    settings = HandlerSettings(wait_ms=5, max_piece_bytes=64)
    front = Front(Jobs(OpenAIService(thread, tiny_tokenizer(), CARD), thread, settings))
    front.send("w", max_tokens=100)
    front.run("w")
    assert max(len(piece.body) for piece in front.pieces["w"]) <= 64
    assert json.loads(front.text("w"))["usage"]["completion_tokens"] == 100


def test_a_job_that_comes_back_without_its_payload_ends_in_two_pieces(front: Front) -> None:
    front.send_raw(Job("requeued", "v1/completions", None))
    front.send("other", max_tokens=3)
    front.run("requeued", "other")
    assert [piece.last for piece in front.pieces["requeued"]] == [False, True]
    assert "restarted" in front.text("requeued")
    assert json.loads(front.text("other"))["choices"][0]["text"] == " 0 1 2"


def test_models_needs_no_payload(front: Front) -> None:
    front.send_raw(Job("models", "v1/models", None))
    front.run("models")
    assert json.loads(front.text("models"))["data"][0]["id"] == "m"


def test_a_fault_of_ours_is_one_500_and_stays_out_of_the_log(
    front: Front, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    words = "quotes the " + "prompt".upper()  # the log may show this line, but not what it says

    def broken(*arguments: object, **named: object) -> None:
        raise TypeError(words)

    front.send("s", max_tokens=50, stream=True)
    front.call()
    monkeypatch.setattr("offramp.serve.protocol.service.encode_prompts", broken)
    front.send("bad")
    front.run("bad", "s")
    assert front.pieces["bad"][0].status == 500
    assert front.text("s").count("data: ") == 51
    assert "TypeError" in caplog.text
    assert "PROMPT" not in caplog.text


def test_when_the_engine_dies_streams_hear_why_and_whole_answers_stay_open(front: Front, engine: FakeEngine) -> None:
    front.send("s", max_tokens=50_000, stream=True)
    front.send("w", max_tokens=50_000)
    front.run_until_spoken("s", "w")

    def explode() -> None:
        raise RuntimeError("the engine is on fire")

    engine.on_step = explode
    front.run("s")
    assert "on fire" in front.text("s")
    front.call()
    # Its 200 is out, so an error in the body would pass for an answer: the worker's end cuts the connection instead.
    assert front.text("w") == ""
    assert all(piece.last is False for piece in front.pieces["w"])
    front.send("late")
    front.call()
    assert front.pieces["late"][0].status == 503
    assert b"on fire" in front.pieces["late"][0].body


def test_a_fault_at_admission_has_a_status_of_its_own(front: Front, engine: FakeEngine) -> None:
    front.send("s", max_tokens=50, stream=True)
    front.run_until_spoken("s")
    engine.refuse = {"cmpl-bad-0", "cmpl-odd-0"}
    front.send("bad", stream=True)
    front.send("odd")
    front.run_until_spoken("bad", "odd")
    assert [[piece.status for piece in front.pieces[name]] for name in ("bad", "odd")] == [[500], [500]]
    assert front.pieces["bad"][0].content_type == "application/json"
    assert b"refused on purpose" in front.pieces["bad"][0].body
    front.run("s")
    assert front.text("s").count("data: ") == 51


@pytest.mark.parametrize("stream", [False, True])
def test_a_fault_in_the_first_iteration_has_a_status_of_its_own(front: Front, engine: FakeEngine, stream: bool) -> None:
    engine.on_step = lambda: time.sleep(0.05)  # longer than a call waits for other news
    engine.fail = {"cmpl-bad-0": "its logits are not finite."}
    front.send("s", max_tokens=3, stream=True)
    front.send("bad", max_tokens=3, stream=stream)
    front.run("s", "bad")
    assert [piece.status for piece in front.pieces["bad"]] == [500]
    assert json.loads(front.text("bad"))["error"]["message"].endswith("its logits are not finite.")
    assert front.text("s").count("data: ") == 4


def test_a_grammar_that_takes_long_holds_nobody_up_and_is_400_if_it_is_bad(front: Front, engine: FakeEngine) -> None:
    go_on = threading.Event()

    def prepare(request: Request) -> None:
        if "slow" in request.request_id:
            assert go_on.wait(5)
        if "good" not in request.request_id:
            raise OfframpError("the regex cannot be followed: unclosed group.")

    engine.on_prepare = prepare
    language = {"regex": "("}
    front.send("s", max_tokens=100, stream=True)
    front.send("bad", structured_outputs=language)
    front.run_until_spoken("bad")
    front.send("slow-bad", structured_outputs=language, stream=True)
    front.send("slow-good", structured_outputs=language, stream=True)
    front.run("s")
    assert front.text("s").count("data: ") == 101
    assert front.held == {"slow-bad", "slow-good"}, "whatever comes of them has its status still before it"
    go_on.set()
    front.run("slow-bad", "slow-good")
    for name in ("bad", "slow-bad"):
        (refusal,) = front.pieces[name]
        assert refusal.status == 400
        assert json.loads(refusal.body)["error"]["param"] == "structured_outputs"
    assert front.pieces["slow-good"][0].status == 200
    assert front.text("slow-good").endswith("data: [DONE]\n\n")


def test_a_client_that_leaves_while_its_grammar_is_compiled_is_noticed(
    engine: FakeEngine, thread: EngineThread
) -> None:
    settings = HandlerSettings(wait_ms=5, prepare_wait_ms=40)
    front = Front(Jobs(OpenAIService(thread, tiny_tokenizer(), CARD), thread, settings))
    go_on = threading.Event()
    engine.on_prepare = lambda request: go_on.wait(30)
    for name in ("compiled", "behind"):
        front.send(name, structured_outputs={"regex": name}, n=4)
    front.call()
    assert front.held == {"compiled", "behind"}
    front.run_until_spoken("compiled", "behind")
    assert [(piece.status, piece.body, piece.last) for piece in front.pieces["behind"][:1]] == [(200, b"", False)]
    front.call()
    assert not front.held, "TorchServe is to look again in every call"
    front.drop("compiled")
    front.drop("behind")
    front.send("next", n=8, max_tokens=2)  # needs all seats
    front.run("next")
    go_on.set()
    assert front.pieces["next"][0].status == 200


@pytest.mark.parametrize("stream", [False, True])
def test_after_its_status_an_answer_hears_in_its_body_that_the_grammar_takes_too_long(
    engine: FakeEngine, thread: EngineThread, stream: bool
) -> None:
    settings = HandlerSettings(wait_ms=5, prepare_wait_ms=20, compile_limit_s=0.1)
    front = Front(Jobs(OpenAIService(thread, tiny_tokenizer(), CARD), thread, settings))
    go_on = threading.Event()
    engine.on_prepare = lambda request: go_on.wait(30)
    front.send("slow", structured_outputs={"regex": "a"}, stream=stream)
    front.run("slow")
    go_on.set()
    assert {piece.status for piece in front.pieces["slow"]} == {200}
    assert "not compiled after 0.1 s" in front.text("slow")
    assert front.text("slow").endswith("data: [DONE]\n\n") == stream


def test_who_waits_for_the_grammars_of_others_is_told_to_come_back(engine: FakeEngine, thread: EngineThread) -> None:
    settings = HandlerSettings(wait_ms=5, prepare_wait_ms=30_000, compile_limit_s=0.1)
    front = Front(Jobs(OpenAIService(thread, tiny_tokenizer(), CARD), thread, settings))
    go_on = threading.Event()
    engine.on_prepare = lambda request: go_on.wait(30)
    engine.known.add(Constraint("regex", "known"))
    front.send("slow", structured_outputs={"regex": "a"})
    front.send("behind", structured_outputs={"regex": "b"}, n=2)
    front.send("known", structured_outputs={"regex": "known"}, max_tokens=2)
    front.run("known")
    assert front.pieces["known"][0].status == 200
    front.run("slow", "behind")
    go_on.set()
    assert [[piece.status for piece in front.pieces[name]] for name in ("slow", "behind")] == [[400], [429]]
    assert front.pieces["behind"][0].headers["Retry-After"] == "1"
    assert "this one's still waits; try again later." in front.text("behind")
    assert engine.seen == ["cmpl-known-0"]


def test_a_payload_is_converted_once(engine: FakeEngine, thread: EngineThread) -> None:
    class Payload(str):
        conversions = 0

        def encode(self, encoding: str = "utf-8", errors: str = "strict") -> bytes:
            Payload.conversions += 1
            return super().encode(encoding, errors)

    front = Front(Jobs(OpenAIService(thread, tiny_tokenizer(), CARD), thread, HandlerSettings(wait_ms=5)))
    go_on = threading.Event()
    engine.on_prepare = lambda request: go_on.wait(30)
    body = {"model": "m", "prompt": [4], "max_tokens": 2, "structured_outputs": {"regex": "a"}}
    front.send_raw(Job("held", "v1/completions", Payload(json.dumps(body))))
    for _ in range(3):
        front.call()
        assert front.held == {"held"}
    go_on.set()
    front.run("held")
    assert json.loads(front.text("held"))["choices"][0]["text"] == " 0 1"
    assert Payload.conversions == 1


def test_a_grammar_that_takes_too_long_is_refused(engine: FakeEngine, thread: EngineThread) -> None:
    settings = HandlerSettings(wait_ms=5, prepare_wait_ms=30_000, compile_limit_s=0.05)
    front = Front(Jobs(OpenAIService(thread, tiny_tokenizer(), CARD), thread, settings))
    go_on = threading.Event()
    engine.on_prepare = lambda request: go_on.wait(5)
    front.send("slow", structured_outputs={"regex": "a"}, n=2)
    front.send("s", max_tokens=200, stream=True)
    front.run("slow", "s")
    go_on.set()
    (refusal,) = front.pieces["slow"]
    assert refusal.status == 400
    assert "not compiled after 0.05 s; simplify it" in json.loads(refusal.body)["error"]["message"]
    assert front.text("s").count("data: ") == 201
    front.send("next", max_tokens=2, structured_outputs={"regex": "b"})
    front.run("next")
    assert json.loads(front.text("next"))["choices"][0]["text"] == " 0 1"
    assert engine.seen == ["cmpl-s-0", "cmpl-next-0"]


def test_a_long_iteration_holds_a_new_answer_back_only_so_long(engine: FakeEngine, thread: EngineThread) -> None:
    front = Front(
        Jobs(OpenAIService(thread, tiny_tokenizer(), CARD), thread, HandlerSettings(wait_ms=5, first_wait_ms=40))
    )
    go_on = threading.Event()
    engine.on_step = lambda: go_on.wait(5)
    front.send("s", max_tokens=3, stream=True)
    front.call()
    assert front.held == {"s"}
    front.run_until_spoken("s")
    assert front.text("s") == ""
    go_on.set()
    front.run("s")
    assert front.text("s").count("data: ") == 4
