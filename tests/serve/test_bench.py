from __future__ import annotations

import csv
import json
import sys
from collections import Counter
from collections.abc import Sequence
from pathlib import Path

import pytest

from helpers.tiny import tiny_checkpoint, tiny_tokenizer
from offramp.common.cli import main
from offramp.common.errors import OfframpError
from offramp.common.exits.config import ExitConfig
from offramp.common.exits.policy import ExitPolicy
from offramp.serve.bench import measure
from offramp.serve.bench.contestants import Identity
from offramp.serve.bench.engine_contestant import with_fields
from offramp.serve.bench.measure import Measured, Note, compare
from offramp.serve.bench.peer import Peer
from offramp.serve.bench.plan import Choices, Variant, Workload, fields, full_plan, quick_plan
from offramp.serve.bench.prompts import PromptLines, RandomTokens, TextStretches, read_prompts
from offramp.serve.bench.quality import Answers, Quality, ratio_of_means, read_references, rouge_l
from offramp.serve.bench.run import Bench, Settings
from offramp.serve.bench.trial import Question, Trial
from offramp.serve.config import EngineConfig
from offramp.serve.measures.iteration_clock import PARTS
from offramp.serve.measures.records import IterationRecord, SegmentRun

ROOT = Path(__file__).parents[2]
_ENDS = ("gap_full_depth_us", "gap_by_layers_us", "gap_realised_us")
WORKER = """
import sys, time
sys.path.insert(0, {peers!r})
from worker import serve

def load(options):
    def generate(prompts, new_tokens, ignore_eos, in_flight):
        print("a library prints")
        if in_flight > 2:
            raise ValueError("too many")
        starts = [time.perf_counter() + 100 * (index // in_flight) for index in range(len(prompts))]
        return starts, [[start + 0.5 * step for step in range(new_tokens)] for start in starts]
    return f"fake {{options.dtype}} {{options.max_tokens}}", generate

serve(load)
"""


@pytest.fixture(scope="module")
def directory(tmp_path_factory: pytest.TempPathFactory) -> Path:
    policy = ExitPolicy("margin", {1: 0.3, 2: 0.3})
    return tiny_checkpoint(tmp_path_factory.mktemp("bench") / "model", ExitConfig((1, 2), "norm"), policy)


@pytest.fixture(autouse=True)
def no_rest(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(measure, "REST_S", 0.0)


@pytest.fixture
def worker(tmp_path: Path) -> str:
    script = tmp_path / "fake_worker.py"
    script.write_text(WORKER.format(peers=str(ROOT / "benchmarks" / "peers")), encoding="utf-8")
    return f"{sys.executable} {script}"


def test_figures_are_made_of_the_times_of_tokens() -> None:
    trial = Trial([[1.0, 1.5, 2.0, 3.0], [2.0, 3.0, 4.0]], exit_layers=[(2.0, 9), (2.5, 1), (4.0, 2)])
    assert trial.window == (2.0, 4.0)
    assert trial.rate == 1.5  # 3.0 of the first, 3.0 and 4.0 of the second: 2.0 is not after 2.0
    assert trial.num_tokens == 7
    assert trial.gaps == [0.5, 0.5, 1.0, 1.0, 1.0]
    assert trial.first_token_s == [1.0, 2.0]
    assert trial.window_layers == [1, 2]
    assert trial.request_rate is None
    assert Trial([[1.0], [2.0]]).rate is None


def test_in_a_closed_loop_only_the_time_with_all_seats_taken_counts() -> None:
    # Two seats: the first two end at 2 and 3, their followers start then; the last one starts at 7.
    times = [[1.0, 2.0], [1.0, 3.0], [3.0, 6.0], [4.0, 7.0], [7.0, 9.0], [8.0, 12.0]]
    trial = Trial(times, starts=[0.0, 0.0, 2.0, 3.0, 6.0, 7.0], in_flight=2)
    assert trial.window == (3.0, 7.0)
    assert trial.rate == pytest.approx(4 / 4)  # 4, 6, 7 and 7; what came at 3 is warm-up, what comes after 7 the tail
    assert trial.request_rate == pytest.approx(2 / 4)
    assert trial.mean_in_flight == pytest.approx(2.0)
    assert trial.first_token_s == [1.0, 1.0]  # of those that start at 3 and 6
    assert trial.gaps == [3.0, 3.0]


def test_hard_sequences_are_spread_evenly() -> None:
    question = Question([[0]] * 8, 2, 4, hard_share=0.25)
    assert question.closed_loop
    assert [question.is_hard(index) for index in range(8)] == [False, False, False, True] * 2
    assert not any(Question([[0]] * 8, 2, 8).is_hard(index) for index in range(8))
    assert all(Question([[0]] * 8, 2, 8, hard_share=1.0).is_hard(index) for index in range(8))


def _measured(variant: Variant, depth: int, runs: Sequence[tuple[int, int, int, float]], **parts: float) -> Measured:
    """One repetition of one iteration that gives two tokens of `depth`; `runs` are (start, stop, rows, seconds)."""
    one = Measured("x", Identity("one", "fp32", variant, "plain"), Workload(2, 1, 3))
    segments = tuple(SegmentRun(*run) for run in runs)
    seconds = dict.fromkeys(PARTS, 0.0)
    seconds["layers"] = sum(run.seconds for run in segments)
    seconds.update((part, parts[part]) for part in PARTS if part in parts)
    record = IterationRecord(0, seconds, segments, decode_rows=2, new_tokens=2, token_layers=2 * depth)
    # The first tokens and the prompts come before the window.
    prompt = IterationRecord(0, dict.fromkeys(PARTS, 99.0), prefill_rows=7, new_tokens=2)
    one.add(
        Trial([[1.0, 2.0]] * 2, exit_layers=[(2.0, depth)] * 2, iterations=[(1.0, prompt), (2.0, record)]),
        prefill_rate=1.0,
    )
    return one


def test_the_ideal_speedup_leaves_only_layers_and_head() -> None:
    base = _measured(Variant(), 4, [(0, 4, 2, 16.0)], head=4.0)
    early = _measured(Variant(kv_policy="fill"), 1, [(0, 1, 2, 6.0)], head=5.0, fill=1.0)
    early.full_depth = base
    early.rates, base.rates = [3.0, None, 8.0], [2.0, 1.0, 4.0]  # the second had no window
    assert early.ideal is not None
    assert early.proportional is not None
    assert early.realised is not None
    assert early.decode_speedup is not None
    assert early.ideal.median == pytest.approx(10 / (3 + 2.5))
    assert early.proportional.median == pytest.approx(10 / (2 + 2))
    assert early.decode_speedup.median == pytest.approx(10 / 6)
    assert early.realised.median == pytest.approx(5.5 / 6)
    assert early.speedup is not None
    assert (early.speedup.median, early.speedup.low, early.speedup.high) == (1.75, 1.5, 2.0)
    assert base.ideal is None
    assert early.exit_layers == Counter({1: 2})


def test_the_gap_is_told_step_by_step() -> None:
    base = _measured(Variant(), 4, [(0, 4, 2, 16.0)], head=4.0, scheduling=2.0)  # a row of a layer takes 2 s
    early = _measured(
        Variant(kv_policy="recompute"),
        2,
        # Both tokens leave at 2, one row of an earlier token is carried on, alone.
        [(0, 2, 2, 8.0), (2, 4, 1, 6.0)],
        head=3.0,
        exit_test=1.0,
        fill=0.5,
        scheduling=2.5,
    )
    early.full_depth = base
    gap = early.gap
    assert gap is not None
    us = 1e6 / 2  # of a second of the iteration, per token
    assert gap.full_depth_us == pytest.approx(22 * us)
    assert gap.by_layers_us == pytest.approx((8 + 4 + 2) * us)
    assert gap.steps == {
        "carried_on": pytest.approx(4 * us),
        "smaller_batches": pytest.approx(2 * us),
        "exit_test": pytest.approx(1 * us),
        "fill": pytest.approx(0.5 * us),
        "head": pytest.approx(-1 * us),
        "rest": pytest.approx(0.5 * us),
    }
    assert gap.by_layers_us + sum(gap.steps.values()) == pytest.approx(gap.realised_us)
    assert gap.realised_us == pytest.approx(sum(early.part_us.values()))
    assert early.rows_per_layer == pytest.approx(1.5)


def test_the_share_of_prefill_is_what_newest_tokens_leave() -> None:
    one = Measured("x", Identity("one", "fp32", Variant(), "plain"), Workload(1, 1, 3, requests=3))
    alone = IterationRecord(0, {**dict.fromkeys(PARTS, 0.0), "layers": 2.0}, decode_rows=2, new_tokens=2)
    mixed = IterationRecord(
        1, {**dict.fromkeys(PARTS, 0.0), "layers": 6.0}, decode_rows=2, prefill_rows=9, new_tokens=3
    )
    one.iterations = [alone, mixed]
    assert one.prefill_share == pytest.approx((6 - 2) / 8)
    one.iterations = [mixed]
    assert one.prefill_share is None


def test_plans() -> None:
    choices = Choices(batches=(1, 4), exit_at=2, static_layers=(2,), thresholds=(None,))
    (quick,) = quick_plan(choices)
    assert [variant.name for variant in quick.variants] == [
        "full depth", "static at 2", "fill, all at 2, regroup", "fill, all at 2, all",
    ]  # fmt: skip
    assert [(load.batch, load.new_tokens, load.requests) for load in quick.workloads] == [(1, 64, None), (4, 64, None)]
    # Without a policy or an exit to force there is nothing to be sure of.
    assert [variant.name for variant in quick_plan(Choices())[0].variants] == ["full depth"]
    names = [experiment.name for experiment in full_plan(Choices(has_policy=True))]
    assert names == ["batch", "prompt", "output", "hard", "threshold", "kernels"]
    for experiment in full_plan(Choices(has_policy=True, engine={"dtype": ("bf16", "fp32"), "quantile": (0.5, 0.9)})):
        assert len(set(experiment.variants)) == len(experiment.variants)
        for variant in experiment.variants:
            assert variant.baseline in experiment.variants
    loop = quick_plan(Choices(batches=(1, 8), closed_loop=True))[0]
    assert [load.requests for load in loop.workloads] == [24, 48]


def test_any_setting_can_be_swept() -> None:
    choices = Choices(
        engine={"dtype": ("bf16", "fp32"), "split_rule": ("always", "cost")},
        policy={"min_layer": (1, 2)},
        has_policy=True,
        has_shortlist=True,
    )
    (quick,) = quick_plan(choices)
    of_bf16 = [variant for variant in quick.variants if variant.setting("dtype") == "bf16"]
    assert [variant.name for variant in of_bf16] == [
        "full depth",
        "full depth, shortlist head",
        "fill, regroup, split_rule always, min_layer 1",
        "fill, regroup, split_rule always, min_layer 2",
        "fill, regroup, split_rule cost, min_layer 1",
        "fill, regroup, split_rule cost, min_layer 2",
    ]
    assert len(quick.variants) == 12
    for variant in of_bf16:
        # What decides when tokens leave means nothing at full depth; what computes the layers does.
        assert variant.baseline == of_bf16[0]
        assert variant.shortlist_baseline == of_bf16[1]
    assert [variant.depends_on_batch for variant in of_bf16] == [False, False, False, False, True, True]


def test_settings_that_do_not_exist() -> None:
    with pytest.raises(OfframpError, match="EngineConfig has no field 'nonsense'"):
        with_fields(EngineConfig(), fields(nonsense=1))
    with pytest.raises(OfframpError, match="quantile"):
        with_fields(EngineConfig(), fields(quantile=2.0))
    assert with_fields(ExitPolicy(), fields(min_layer=3)) == ExitPolicy(min_layer=3)


def test_prompts_are_the_same_each_time(tmp_path: Path) -> None:
    for prompts in (RandomTokens(300), TextStretches(list(range(100)))):
        drawn = prompts.draw(3, 7)
        assert [len(prompt) for prompt in drawn] == [7] * 3
        assert prompts.draw(3, 7) == drawn
        assert len({tuple(prompt) for prompt in drawn}) == 3
    with pytest.raises(OfframpError, match="longer text"):
        TextStretches([1, 2]).draw(1, 3)
    assert PromptLines([[1, 2, 3], [4]]).draw(3, 2) == [[2, 3], [4], [2, 3]]

    tokenizer = tiny_tokenizer()
    lines = tmp_path / "prompts.jsonl"
    lines.write_text('{"prompt": "ab"}\n\n"cd"\n', encoding="utf-8")
    assert [tokenizer.decode(ids) for ids in read_prompts(lines, tokenizer).draw(2, 99)] == ["ab", "cd"]
    text = tmp_path / "text.txt"
    text.write_text("a long text " * 20, encoding="utf-8")
    assert [len(ids) for ids in read_prompts(text, tokenizer).draw(2, 5)] == [5, 5]
    lines.write_text('{"prompt": "ab"}\n{"text": "cd"}\n', encoding="utf-8")
    with pytest.raises(OfframpError, match="line 2"):
        read_prompts(lines, tokenizer)
    lines.write_text('{"prompt": "half of a character: \\ud800"}\n', encoding="utf-8")
    with pytest.raises(OfframpError, match="line 1: the prompt is not Unicode"):
        read_prompts(lines, tokenizer)


def test_a_peer_answers_by_lines_and_its_faults_are_notes(worker: str, tmp_path: Path) -> None:
    loads = [Workload(2, 3, 4), Workload(3, 3, 4)]
    peer = Peer("fake", worker, tmp_path, "fp32", loads)
    try:
        assert peer.what == "fake fp32 7"
        (found,) = compare("x", [peer], loads[0], RandomTokens(10), repetitions=1)
        assert isinstance(found, Measured)
        assert found.rates == [pytest.approx(4.0)]  # two tokens every half second
        (note,) = compare("x", [peer], loads[1], RandomTokens(10), repetitions=1)
        assert note == Note("fake", "fake failed: ValueError: too many.")
        (found,) = compare("x", [peer], Workload(2, 3, 5, requests=6), RandomTokens(10), repetitions=1)
        assert isinstance(found, Measured)
        # From the end of the first two (2) to the start of the last two (200): one pair begins and ends.
        assert found.rates == [pytest.approx(10 / 198 + 2 / 198, rel=0.2)]
        assert found.request_rates == [pytest.approx(2 / 198, rel=0.01)]
        assert found.prefill == []
    finally:
        peer.close()
    with pytest.raises(OfframpError, match="cannot be started"):
        Peer("none", str(tmp_path / "nowhere"), tmp_path, "fp32", loads)
    with pytest.raises(OfframpError, match="has ended"):
        Peer("none", f"{sys.executable} -c pass", tmp_path, "fp32", loads)


def test_the_command_measures_everybody_and_writes_what_it_found(
    directory: Path, worker: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out = tmp_path / "out"
    sizes = ["--batch", "1,3", "--prompt-tokens", "4", "--new-tokens", "5", "--repeat", "2", "--exit-at", "1"]
    beside = ["--against", "transformers", "--peer", f"fake={worker}", "--peer", f"missing={tmp_path}/nowhere"]
    command = ["bench", "engine", str(directory), *sizes, *beside]
    assert main([*command, "--json", "--out", str(out), "--plots"]) == 0
    captured = capsys.readouterr()
    rows = [json.loads(line) for line in captured.out.splitlines()]
    assert [(row["batch"], row["contestant"], row["mean_layers"]) for row in rows] == [
        (1, "full depth", 4),
        (1, "fill, all at 1, regroup", 1),
        (1, "fill, all at 1, all", 1),
        (1, "transformers", None),
        (1, "fake", None),
        (3, "full depth", 4),
        (3, "fill, all at 1, regroup", 1),
        (3, "fill, all at 1, all", 1),
        (3, "transformers", None),
    ]
    for row in rows:
        low, middle, high = (row[f"tokens_per_s{end}"] for end in ("_lowest", "", "_highest"))
        assert 0 < low <= middle <= high
        assert row["prefill_tokens_per_s"] > 0
    early = rows[1]
    assert early["exit_layers"] == {"1": 8}  # four tokens after the first, twice
    assert {(run["start"], run["stop"], run["rows"]) for run in early["segments"]} == {(0, 1, 1)}
    assert early["speedup"] > 0
    assert early["layers_us_per_token"] > 0
    assert early["fill_us_per_token"] > 0
    assert early["ideal_speedup"] > 0
    assert early["kernels"] in ("native", "packed", "plain")
    assert rows[0]["fill_us_per_token"] == 0
    steps = [value for name, value in early.items() if name.startswith("gap_") and name not in _ENDS]
    assert early["gap_by_layers_us"] + sum(steps) == pytest.approx(early["gap_realised_us"], rel=1e-3)
    assert "missing: not measured" in captured.err
    assert "fake: not measured: fake failed: ValueError: too many" in captured.err

    with (out / "results.csv").open(encoding="utf-8") as file:
        table = list(csv.DictReader(file))
    assert [row["contestant"] for row in table] == [row["contestant"] for row in rows]
    details = [json.loads(line) for line in (out / "results.jsonl").read_text(encoding="utf-8").splitlines()]
    assert details[0]["threads"] >= 1
    assert details[1 : 1 + len(rows)] == rows
    names = {file.name for file in out.glob("*.png")}
    assert names == {f"quick-{name}.png" for name in ("decode", "prefill", "latency", "breakdown", "gap", "speedup")}


def test_hard_sequences_run_at_full_depth(directory: Path, capsys: pytest.CaptureFixture[str]) -> None:
    sizes = ["--batch", "4", "--prompt-tokens", "4", "--new-tokens", "3", "--repeat", "1", "--exit-at", "1"]
    shares = ["--hard-share", "0,0.5", "--sync-policy", "regroup"]
    assert main(["bench", "engine", str(directory), *sizes, *shares, "--json"]) == 0
    rows = [json.loads(line) for line in capsys.readouterr().out.splitlines()]
    assert [(row["hard_share"], row["mean_layers"]) for row in rows] == [(0, 4), (0, 1), (0.5, 4), (0.5, 2.5)]
    assert rows[3]["exit_layers"] == {"1": 4, "4": 4}


def test_what_does_not_fit_the_model_is_a_note_and_the_rest_goes_on(
    directory: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    sizes = ["--batch", "2", "--prompt-tokens", "253,4", "--new-tokens", "5", "--repeat", "1"]
    assert main(["bench", "engine", str(directory), *sizes, "--sync-policy", "regroup", "--json"]) == 0
    captured = capsys.readouterr()
    rows = [json.loads(line) for line in captured.out.splitlines()]
    assert [(row["contestant"], row["prompt_tokens"]) for row in rows] == [("full depth", 4), ("fill, regroup", 4)]
    assert captured.err.count("more than the 256 that the model takes") == 2


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--new-tokens", "1"], "give at least 2"),
        (["--hard-share", "1.5"], "no share"),
        (["--kv-policy", "full"], "none of"),
        (["--peer", "vllm"], "NAME=COMMAND"),
        (["--plots"], "--out"),
        (["--closed-loop", "--requests", "20"], "give at least 96"),
        (["--engine", "nonsense=1"], "is not FIELD=X"),
        (["--engine", "dtype=bf16"], "is not FIELD=X"),
        (["--policy", "measure"], "is not FIELD=X"),
    ],
)
def test_options_that_make_no_sense(
    directory: Path, options: list[str], message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit):
        main(["bench", "engine", str(directory), *options])
    assert message in capsys.readouterr().err


def test_any_batch_is_measured(directory: Path, capsys: pytest.CaptureFixture[str]) -> None:
    # More than an engine lets wait by default.
    options = ["--batch", "300", "--prompt-tokens", "1", "--new-tokens", "2", "--repeat", "1", "--sync-policy", "all"]
    assert main(["bench", "engine", str(directory), *options, "--json"]) == 0
    assert [json.loads(line)["batch"] for line in capsys.readouterr().out.splitlines()] == [300, 300]


def test_quality_is_told_beside_speed_in_a_closed_loop(
    directory: Path, worker: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    references = tmp_path / "references.jsonl"
    lines = [{"prompt": "ab cd"[: 2 + index], "references": ["a b", "cd"]} for index in range(3)]
    references.write_text("\n".join(map(json.dumps, lines)), encoding="utf-8")
    sizes = ["--batch", "1,2", "--prompt-tokens", "8", "--new-tokens", "5", "--repeat", "1"]
    what = ["--closed-loop", "--requests", "7", "--references", str(references), "--out", str(tmp_path), "--plots"]
    rules = ["--sync-policy", "regroup,all", "--policy", "min_layer=2", "--against", "transformers"]
    command = ["bench", "engine", str(directory), *sizes, *what, *rules, "--peer", f"fake={worker}"]
    assert main([*command, "--json"]) == 0
    captured = capsys.readouterr()
    rows = [json.loads(line) for line in captured.out.splitlines()]
    names = ["full depth", "fill, regroup, min_layer 2", "fill, all, min_layer 2", "fake"]
    assert [(row["batch"], row["contestant"]) for row in rows] == [(n, name) for n in (1, 2) for name in names]
    assert captured.err.count("transformers: not measured: starts all its sequences together") == 2
    for row in rows:
        assert row["closed_loop"] is True
        assert row["sequences"] == 7
        assert row["tokens_per_s"] > 0
        assert row["requests_per_s"] > 0
        assert row["prefill_tokens_per_s"] is None
    for row in rows[:3] + rows[4:7]:
        assert row["in_flight"] == pytest.approx(row["batch"], rel=0.05)
        assert row["quality_prompts"] == 3
        assert 0 <= row["quality_same_texts"] <= 1
        assert set(row["exit_layers"]) <= {"2", "4"}  # layer 1 is closed
    for row in (rows[0], rows[4]):
        assert row["quality_same_texts"] == 1
    assert (tmp_path / "quick-gap.png").is_file()
    assert main(command) == 0
    told = capsys.readouterr().out
    assert "closed loop, 2 in flight, 7 in all" in told
    assert "of the time in prefill" in told
    assert "identical to full depth" in told


def test_references_and_what_they_say(tmp_path: Path) -> None:
    tokenizer = tiny_tokenizer()
    file = tmp_path / "references.jsonl"
    file.write_text('{"prompt": "ab", "references": ["a", "b"]}\n\n{"prompt": "c", "references": "d"}\n')
    found = read_references(file, tokenizer)
    assert [tokenizer.decode(ids) for ids in found.prompts] == ["ab", "c"]
    assert found.texts == [["a", "b"], ["d"]]
    for wrong in ('{"prompt": "ab"}', '{"prompt": "ab", "references": []}', "[]", "{"):
        file.write_text(wrong, encoding="utf-8")
        with pytest.raises(OfframpError, match="line 1"):
            read_references(file, tokenizer)
    file.write_text('{"prompt": "\\ud800", "references": "a"}', encoding="utf-8")
    with pytest.raises(OfframpError, match="line 1: the prompt is not Unicode"):
        read_references(file, tokenizer)
    file.write_text("", encoding="utf-8")
    with pytest.raises(OfframpError, match="no references"):
        read_references(file, tokenizer)

    # Longest common subsequence "the sat": precision 2/3, recall 2/4.
    assert rouge_l(["the cat sat"], [["the dog here sat"]]) == [pytest.approx(2 * (2 / 3) * (1 / 2) / (2 / 3 + 1 / 2))]
    assert rouge_l(["the cat sat", "x"], [["nothing", "The cat sat."], ["y"]]) == [1.0, 0.0]


def test_the_ratio_has_an_interval() -> None:
    base = [0.2, 0.4, 0.6, 0.8] * 25
    assert ratio_of_means(base, base) == (pytest.approx(1.0), pytest.approx(1.0), pytest.approx(1.0))
    mine = [score if index % 10 else 0.0 for index, score in enumerate(base)]
    ratio, low, high = ratio_of_means(mine, base)
    assert ratio == pytest.approx(sum(mine) / sum(base))
    assert low < ratio < high <= 1.0
    # The normal approximation of a paired ratio, for a sample of this size: within a tenth of the width.
    error = [a - ratio * b for a, b in zip(mine, base, strict=True)]
    width = 2 * 1.96 * (sum(e * e for e in error) / len(error)) ** 0.5 / len(error) ** 0.5 / (sum(base) / len(base))
    assert high - low == pytest.approx(width, rel=0.1)
    assert all(value != value for value in ratio_of_means([0.0, 0.0], [0.0, 0.0]))

    full = Answers(["a", "b"], [0.5, 0.5], Counter({4: 2}))
    early = Answers(["a", "x"], [0.5, 0.25], Counter({2: 1, 4: 1}))
    quality = Quality.of(early, full)
    assert (quality.rouge_l, quality.ratio, quality.same_texts) == (0.375, 0.75, 0.5)


def test_references_longer_than_the_seats(directory: Path, tmp_path: Path) -> None:
    file = tmp_path / "references.jsonl"
    file.write_text('{"prompt": "a long prompt", "references": "a"}', encoding="utf-8")
    with pytest.raises(OfframpError, match="raise --prompt-tokens"):
        Bench(directory, "quick", Choices(prompt_tokens=(2,)), Settings(references=file))
