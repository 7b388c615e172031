from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from helpers.tiny import tiny_checkpoint
from offramp.common.cli import main
from offramp.common.exits.config import ExitConfig
from offramp.common.exits.policy import ExitPolicy


@pytest.fixture(scope="module")
def directory(tmp_path_factory: pytest.TempPathFactory) -> Path:
    policy = ExitPolicy("margin", {1: 0.3, 2: 0.3})
    return tiny_checkpoint(tmp_path_factory.mktemp("generate") / "model", ExitConfig((1, 2), "norm"), policy)


def run(capsys: pytest.CaptureFixture[str], *arguments: str | Path) -> tuple[int, str, str]:
    code = main(["generate", *map(str, arguments)])
    captured = capsys.readouterr()
    return code, captured.out, captured.err


def rows(output: str) -> list[dict[str, Any]]:
    return [json.loads(line) for line in output.splitlines()]


def test_json_lines_in_input_order(directory: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    prompts = tmp_path / "prompts.jsonl"
    lines = ['"hello"', '{"prompt": "a b c"}', "", '{"messages": [{"role": "user", "content": "hello"}]}']
    prompts.write_text("\n".join(lines), encoding="utf-8")
    code, out, err = run(capsys, directory, "--prompts", prompts, "--max-tokens", "6", "--json", "--max-num-seqs", "2")
    assert code == 0
    found = rows(out)
    assert [set(row) for row in found] == [{"text", "token_ids", "exit_layers", "finish_reason", "usage"}] * 3
    assert "layers on average" in err
    for line, row in zip(("hello", "a b c"), found, strict=False):
        _, alone, _ = run(capsys, directory, "--prompt", line, "--max-tokens", "6", "--json")
        assert rows(alone) == [row]
    _, chat, _ = run(capsys, directory, "--prompt", "hello", "--chat", "--max-tokens", "6", "--json")
    assert rows(chat) == found[2:]


def test_exits_follow_the_options(directory: Path, capsys: pytest.CaptureFixture[str]) -> None:
    def layers(*options: str) -> object:
        code, out, _ = run(capsys, directory, "--prompt", "hello", "--max-tokens", "5", "--json", *options)
        assert code == 0
        return rows(out)[0]["exit_layers"]

    assert layers("--kv-policy", "full") == [4] * 5
    assert layers("--threshold", "1.5") == [4] * 5
    assert layers("--measure", "cosine", "--threshold", "-2") == [4, 1, 1, 1, 1]
    assert layers("--threshold", "-2", "--sync-policy", "all", "--dtype", "bf16") == [4, 1, 1, 1, 1]


def test_classifiers_decide_where_there_are_some(
    directory: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    policy = ExitPolicy("classifier", {1: 0.0})  # always exceeded
    classified = tiny_checkpoint(tmp_path / "classified", ExitConfig((1, 2), "norm", classifier=True), policy)
    options = ["--prompt", "hello", "--max-tokens", "5", "--probe", "--json"]
    code, out, _ = run(capsys, classified, *options)
    assert code == 0
    (row,) = rows(out)
    assert row["exit_layers"] == [4, 1, 1, 1, 1]
    for one in row["probe"]:
        for layer in ("1", "2"):
            assert one["exits"][layer]["tested"] == one["exits"][layer]["confidence"]["classifier"]
        assert "classifier" not in one["exits"]["4"]["confidence"]
    code, _, err = run(capsys, classified, *options[:-1])
    assert code == 0
    assert "its classifier" in err
    code, _, err = run(capsys, directory, *options, "--measure", "classifier", "--threshold", "0.5")
    assert code == 1
    assert "this model has none; train them" in err


def test_seeds_reproduce_draws(directory: Path, capsys: pytest.CaptureFixture[str]) -> None:
    options = ["--prompt", "hello", "--temperature", "1.5", "--top-k", "50", "--top-p", "0.95", "--json"]
    first, second, other = (
        run(capsys, directory, *options, "--max-tokens", "12", "--seed", seed)[1] for seed in ("1", "1", "2")
    )
    assert first == second != other


def test_exits_one_by_one(directory: Path, capsys: pytest.CaptureFixture[str]) -> None:
    def layers(*options: str) -> object:
        code, out, _ = run(capsys, directory, "--prompt", "hello", "--max-tokens", "5", "--json", *options)
        assert code == 0
        return rows(out)[0]["exit_layers"]

    assert layers("--thresholds", "1=1,2=-2") == [4, 2, 2, 2, 2]
    assert layers("--thresholds", "2=-2") == [4, 2, 2, 2, 2]
    assert layers("--threshold", "-2", "--min-exit-layer", "2") == [4, 2, 2, 2, 2]


def test_several_texts_for_each_prompt(directory: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    prompts = tmp_path / "prompts.jsonl"
    prompts.write_text('"hello"\n"a b c"')
    options = ["--temperature", "1.5", "--seed", "3", "--max-tokens", "8", "--json"]
    _, out, err = run(capsys, directory, "--prompts", prompts, "--n", "3", *options)
    found = rows(out)
    assert len({str(row["token_ids"]) for row in found}) == 6, "sequences that share a seed draw differently"
    assert "48 tokens" in err
    _, alone, _ = run(capsys, directory, "--prompt", "a b c", "--n", "2", *options)
    assert rows(alone) == found[3:5], "sequence j of prompt i at line i * n + j"


def test_sampling_options_reach_the_engine(directory: Path, capsys: pytest.CaptureFixture[str]) -> None:
    def ask(*options: str) -> dict[str, Any]:
        code, out, _ = run(capsys, directory, "--prompt", "hello", "--max-tokens", "8", "--json", *options)
        assert code == 0
        return rows(out)[0]

    plain = ask("--ignore-eos")
    assert plain["finish_reason"] == "length"
    assert ask("--logit-bias", "77=100", "--logit-bias", "78=-100")["token_ids"] == [77] * 8
    assert len(set(ask("--logit-bias", "77=50", "--presence-penalty", "2", "--ignore-eos")["token_ids"])) == 1
    assert len(set(ask("--repetition-penalty", "50", "--ignore-eos")["token_ids"])) == 8
    stop = plain["text"][3]
    stopped = ask("--ignore-eos", "--stop", stop, "--stop", "never said")
    assert (stopped["text"], stopped["finish_reason"]) == (plain["text"].partition(stop)[0], "stop")
    logprobs = ask("--ignore-eos", "--logprobs", "2")["logprobs"]
    assert [entry["token_id"] for entry in logprobs] == plain["token_ids"]
    assert all(len(entry["top"]) == 2 and entry["logprob"] <= 0 for entry in logprobs)


def test_kv_policies_are_options(directory: Path, capsys: pytest.CaptureFixture[str]) -> None:
    def ask(*options: str) -> dict[str, Any]:
        base = ["--prompt", "hello", "--max-tokens", "8", "--ignore-eos", "--json"]
        code, out, _ = run(capsys, directory, *base, *options)
        assert code == 0
        return rows(out)[0]

    full = ask("--kv-policy", "full")
    assert ask("--kv-policy", "verify", "--threshold", "0.1", "--max-pending", "2")["token_ids"] == full["token_ids"]
    assert ask("--kv-policy", "static", "--exit-layer", "1")["exit_layers"] == [4] + [1] * 7
    pending = ask("--kv-policy", "recompute", "--threshold", "-2", "--max-pending", "2")
    assert pending["exit_layers"] == [4, 1, 1, 4, 1, 1, 4, 1]
    assert ask("--sync-policy", "quantile", "--quantile", "0.5", "--threshold", "-2")["exit_layers"] == [4] + [1] * 7


def test_the_text_follows_a_language(directory: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    options = [directory, "--prompt", "hello", "--max-tokens", "60", "--json"]
    _, out, _ = run(capsys, *options, "--regex", "[xyz]{4}", "--temperature", "1.5", "--seed", "1")
    [row] = rows(out)
    assert (len(row["text"]), set(row["text"]) <= set("xyz"), row["finish_reason"]) == (4, True, "stop")
    schema = tmp_path / "schema.json"
    schema.write_text('{"enum": ["yes", "no"]}')
    _, out, _ = run(capsys, *options, "--json-schema", schema)
    assert json.loads(rows(out)[0]["text"]) in ("yes", "no")
    code, _, err = run(capsys, *options, "--regex", "(")
    assert code == 1
    assert "regex" in err.splitlines()[-1]


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--kv-policy", "fill", "--max-pending", "2"], "--max-pending has a meaning under"),
        (["--kv-policy", "static"], "--exit-layer and the KV policy static"),
        (["--kv-policy", "static", "--exit-layer", "3"], "--exit-layer 3 is no exit"),
        (["--threshold", "0.5", "--thresholds", "1=0.5"], "--threshold or --thresholds"),
        (["--thresholds", "3=0.5"], "layers [3]"),
        (["--n", "0"], "--n 0"),
        (["--quantile", "2"], "quantile 2.0"),
        (["--json-schema", "/nowhere.json"], "/nowhere.json holds no JSON schema"),
        (["--presence-penalty", "3"], "presence_penalty 3.0"),
        (["--kv-policy", "full", "--threshold", "0.5"], "runs every layer"),
        (["--measure", "cosine"], "no thresholds for the measure 'cosine'"),
        (["--max-tokens", "1000"], "more than the 256"),
        (["--temperature", "-1"], "temperature -1.0"),
        (["--probe", "--probe-top", "0"], "--probe-top 0 must be at least 1"),
    ],
)
def test_faults_are_one_sentence(
    directory: Path, options: list[str], message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    code, out, err = run(capsys, directory, "--prompt", "hello", *options)
    assert code == 1
    assert out == ""
    assert message in err.splitlines()[-1]


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("", "holds no prompt"),
        ("{", "line 1 is not JSON"),
        ('"ok"\n{"text": 1}', "line 2 is neither"),
        ('{"messages": [{"role": "robot", "content": "x"}]}', "role"),
        ('"ok"\n\n{"messages": []}', "line 3: "),
        ('"ok"\n\n""', "line 3: the prompt has no token"),
        ('"ok"\n"half \\ud800"', r"line 2: the prompt is not Unicode text: character 5 is '\ud800'"),
    ],
)
def test_a_faulty_prompt_file_names_the_place(
    directory: Path, tmp_path: Path, text: str, message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    file = tmp_path / "prompts.jsonl"
    file.write_text(text, encoding="utf-8")
    code, _, err = run(capsys, directory, "--prompts", file)
    assert code == 1
    assert message in err.splitlines()[-1]


def test_an_argument_that_is_not_utf_8_is_refused(directory: Path, capsys: pytest.CaptureFixture[str]) -> None:
    code, _, err = run(capsys, directory, "--prompt", "\udcff")  # as Python hands on the byte 0xff
    assert code == 1
    assert "--prompt: the prompt is not Unicode text" in err.splitlines()[-1]


@pytest.mark.parametrize("option", ["--logit-bias=a=1", "--logit-bias=5", "--thresholds=0.5", "--thresholds=1=0.5,"])
def test_what_cannot_be_read_is_a_usage_error(directory: Path, option: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as caught:
        run(capsys, directory, "--prompt", "hello", option)
    assert caught.value.code == 2
    assert "such as" in capsys.readouterr().err


def test_a_directory_that_is_not_there_is_called_so(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    code, _, err = run(capsys, tmp_path / "nowhere", "--prompt", "hello")
    assert code == 1
    assert f"{tmp_path / 'nowhere'} is not a directory" in err.splitlines()[-1]


def test_a_model_without_exits_has_no_thresholds(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    plain = tiny_checkpoint(tmp_path / "plain")
    code, out, _ = run(capsys, plain, "--prompt", "hello", "--max-tokens", "3", "--json")
    assert code == 0
    assert rows(out)[0]["exit_layers"] == [4, 4, 4]
    code, _, err = run(capsys, plain, "--prompt", "hello", "--threshold", "0.5")
    assert code == 1
    assert "has none" in err


def test_a_probe_shows_every_exit_and_changes_nothing(directory: Path, capsys: pytest.CaptureFixture[str]) -> None:
    options = [directory, "--prompt", "hello", "--max-tokens", "6", "--n", "2", "--json"]
    _, plain, _ = run(capsys, *options)
    code, out, _ = run(capsys, *options, "--probe", "--probe-top", "2")
    assert code == 0
    for row, before in zip(rows(out), rows(plain), strict=True):
        probe = row.pop("probe")
        assert row == before
        text = [one["token_id"] for one in probe]
        assert text[-6:] == row["token_ids"]
        assert [one["position"] for one in probe] == list(range(len(text)))
        for one in probe:
            assert list(one["exits"]) == ["1", "2", "4"]
            for layer, reading in one["exits"].items():
                assert len(reading["top"]) == 2
                assert set(reading["top"][0]) == {"token_id", "token", "probability"}
                assert set(reading["confidence"]) == {"max_probability", "margin", "entropy", "cosine"}
                assert reading["tested"] == (None if layer == "4" else reading["confidence"]["margin"])
        # The first token comes from the prompt at full depth, where the probe and the engine read the same.
        assert probe[-7]["exits"]["4"]["top"][0]["token_id"] == row["token_ids"][0]


def test_a_probe_is_a_table_for_people(directory: Path, capsys: pytest.CaptureFixture[str]) -> None:
    options = [directory, "--prompt", "hello", "--max-tokens", "5", "--threshold", "-2", "--measure", "cosine"]
    _, plain, _ = run(capsys, *options)
    code, out, err = run(capsys, *options, "--probe")
    assert code == 0
    assert out == plain
    assert "its cosine" in err
    table = [line for line in err.splitlines() if " layer " in line and line.startswith("   ")]
    marked = [line.split()[2] for line in table if line.startswith("   *")]
    assert marked == ["4", "1", "1", "1", "1"]
