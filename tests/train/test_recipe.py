from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from offramp.common.errors import OfframpError
from offramp.train.recipe import load_recipe, parse_command_line


def recipe(tmp_path: Path, *texts: str, overrides: dict[str, str] | None = None) -> dict[str, Any]:
    files = []
    for number, text in enumerate(texts):
        files.append(tmp_path / f"{number}.yaml")
        files[-1].write_text(text)
    return load_recipe(files, list((overrides or {}).items()))


def test_later_files_win_and_overrides_win_over_files(tmp_path: Path) -> None:
    first = "trainer: {max_steps: 1, devices: 2}\nmodel: {lr: 1e-4}"
    assert recipe(tmp_path, first, "trainer: {max_steps: 2}") == {
        "trainer": {"max_steps": 2, "devices": 2},
        "model": {"init_args": {"lr": 1e-4}},
    }
    assert recipe(tmp_path, first, overrides={"trainer.max_steps": "9"})["trainer"] == {"max_steps": "9", "devices": 2}


def test_interpolations_see_later_files_and_overrides(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COMMIT", "6e1234")
    first = "vars: {lr: 0.1, steps: 5}\nmodel: {lr: '${vars.lr}', note: '${oc.env:COMMIT}'}\n"
    first += "trainer: {max_steps: '${vars.steps}'}"
    got = recipe(tmp_path, first, "vars: {lr: 0.2}", overrides={"vars.steps": "7"})
    assert got == {"model": {"init_args": {"lr": 0.2, "note": "6e1234"}}, "trainer": {"max_steps": "7"}}


def test_numbers_are_numbers_and_quoted_texts_stay_texts(tmp_path: Path) -> None:
    got = recipe(tmp_path, "a: {lr: 1e-4, big: 10e2, text: '10e2', id: '007', hash: 6e12ab}")["a"]
    assert got == {"lr": 1e-4, "big": 1000.0, "text": "10e2", "id": "007", "hash": "6e12ab"}
    assert isinstance(got["lr"], float)


def test_both_spellings_of_class_arguments_merge(tmp_path: Path) -> None:
    got = recipe(
        tmp_path,
        "model: {class_path: a.B, init_args: {x: 1, y: 1}}",
        "model: {y: 2}",
        overrides={"model.z": "3", "model.init_args.x": "4", "model.class_path": "a.C"},
    )
    assert got == {"model": {"class_path": "a.C", "init_args": {"x": "4", "y": 2, "z": "3"}}}


def test_references_may_use_either_spelling(tmp_path: Path) -> None:
    text = "model: {init_args: {x: 1}}\ndata: {y: '${model.x}', z: '${model.init_args.x}'}"
    assert recipe(tmp_path, text, overrides={"model.x": "5"})["data"] == {"init_args": {"y": "5", "z": "5"}}


def test_overrides_stay_text_except_where_nothing_has_a_type(tmp_path: Path) -> None:
    keys = {"n": "7", "f": "1e-3", "id": "007", "hash": "6e1234", "on": "on", "yes": "true", "list": "[1, 2]"}
    got = recipe(tmp_path, "{}", overrides={f"data.train.options.{key}": value for key, value in keys.items()})
    want = {"n": 7, "f": 1e-3, "id": "007", "hash": "6e1234", "on": "on", "yes": True, "list": [1, 2]}
    assert got["data"]["init_args"]["train"]["options"] == want
    assert recipe(tmp_path, "{}", overrides={"model.note": "007"})["model"]["init_args"] == {"note": "007"}


def test_overrides_reach_into_lists_and_may_refer(tmp_path: Path) -> None:
    text = "vars: {n: 3}\ntrainer: {callbacks: [{class_path: A, init_args: {n: 1}}]}"
    got = recipe(tmp_path, text, overrides={"trainer.callbacks.0.init_args.n": "${vars.n}"})
    assert got["trainer"]["callbacks"][0]["init_args"]["n"] == 3


def test_null_section_is_replaced_by_an_override(tmp_path: Path) -> None:
    got = recipe(tmp_path, "data: {validation: null}", overrides={"data.validation.path": "x"})
    assert got["data"]["init_args"]["validation"] == {"path": "x"}


@pytest.mark.parametrize(
    ("text", "overrides", "words"),
    [
        ("trainer: {max_steps: '${vars.steps}'}\nvars: {steps: '???'}", {}, "'trainer.max_steps' has no value"),
        (
            "trainer: {max_steps: '${vars.steps}'}",
            {},
            "'trainer.max_steps' has no value: Interpolation key 'vars.steps'",
        ),
        ("model: {lr: '???'}", {}, "'model.lr' has no value"),
        ("model: {note: '${oc.env:NOT_SET_ANYWHERE}'}", {}, "'model.note' has no value.*NOT_SET_ANYWHERE"),
        ("a: {b: 1", {}, "not a valid configuration"),
        ("a: ${oops", {}, "not a valid configuration"),
        ("a: 1\na: 2", {}, "duplicate key a"),
        ("- 1", {}, "must hold a mapping"),
        ("a: !!python/object/apply:os.getcwd []", {}, "not a valid configuration"),
        ("trainer: {callbacks: [1]}", {"trainer.callbacks.4.x": "1"}, "--trainer.callbacks.4.x cannot be set"),
        ("{}", {"trainer..x": "1"}, "not a dotted key"),
    ],
)
def test_faults_name_the_key(tmp_path: Path, text: str, overrides: dict[str, str], words: str) -> None:
    with pytest.raises(OfframpError, match=words):
        recipe(tmp_path, text, overrides=overrides)


def test_missing_file(tmp_path: Path) -> None:
    with pytest.raises(OfframpError, match=r"no configuration file nowhere\.yaml"):
        load_recipe([Path("nowhere.yaml")])


def test_command_line() -> None:
    got = parse_command_line(["-c", "a.yaml", "--config=b.yaml", "--x.y=1=2", "--z", "-3", "--config", "c.yaml"])
    assert got.files == [Path("a.yaml"), Path("b.yaml"), Path("c.yaml")]
    assert got.overrides == [("x.y", "1=2"), ("z", "-3")]
    assert parse_command_line(["-c", "a", "--help"]).help
    for argv, words in ((["x"], "unexpected argument 'x'"), (["-c"], "needs a value"), (["--a", "--b=1"], "--a needs")):
        with pytest.raises(OfframpError, match=words):
            parse_command_line(argv)
