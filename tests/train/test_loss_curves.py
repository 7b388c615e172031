from __future__ import annotations

import math
from pathlib import Path

import pytest
from matplotlib.figure import Figure

from offramp.train.priming import ExitPrimingModule
from offramp.train.tracking.loss_curves import MOST_POINTS, Curve, draw


def test_a_long_curve_keeps_its_shape_in_few_points() -> None:
    curve = Curve()
    for step in range(10 * MOST_POINTS):
        curve.add(step, 2.0 * step)
        assert len(curve.points) <= MOST_POINTS
    assert curve.width == 16
    assert all(value == 2.0 * step for step, value in curve.points)
    gaps = {after[0] - before[0] for before, after in zip(curve.points, curve.points[1:], strict=False)}
    assert gaps == {16.0}
    assert curve.points[0][0] == 7.5


@pytest.mark.parametrize("count", [3, MOST_POINTS + 1, 3 * MOST_POINTS + 5])
def test_a_curve_goes_on_from_a_checkpoint(count: int) -> None:
    whole, broken = Curve(), Curve()
    for step in range(count):
        whole.add(step, math.sin(step))
        broken.add(step, math.sin(step))
    broken = Curve.from_state(broken.state_dict())
    for step in range(count, 2 * count):
        whole.add(step, math.sin(step))
        broken.add(step, math.sin(step))
    assert broken.state_dict() == whole.state_dict()


def test_what_is_not_finite_is_left_out() -> None:
    curve = Curve()
    for value in (1.0, math.nan, math.inf, 2.0):
        curve.add(0, value)
    assert [value for _, value in curve.points] == [1.0, 2.0]


def test_a_picture_of_some_curves(tmp_path: Path) -> None:
    curves = {name: Curve() for name in ("02", "04")}
    for step in range(5):
        curves["02"].add(step, 1.0 / (step + 1))
    draw(tmp_path / "one.png", curves, {})
    curves["04"].add(4, 0.5)
    draw(tmp_path / "two.png", {}, curves)
    one, two = ((tmp_path / name).read_bytes() for name in ("one.png", "two.png"))
    assert one.startswith(b"\x89PNG")
    assert one != two


def test_training_that_minimises_something_else_says_what(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    labels: list[str] = []

    def read(figure: Figure, *args: object, **kwargs: object) -> None:
        (axis,) = figure.axes
        labels.extend((axis.get_ylabel(), *axis.get_legend_handles_labels()[1]))

    monkeypatch.setattr(Figure, "savefig", read)
    curve = Curve()
    curve.add(0, 1.0)
    draw(tmp_path / "a.png", {"02": curve}, {"02": curve})
    draw(tmp_path / "b.png", {"02": curve}, {"02": curve}, ExitPrimingModule.kind_of_losses)
    assert labels == [
        "cross-entropy (nats per token)", "exit 02, training", "exit 02, validation",
        "nats per token", "exit 02, training (KL divergence from the full model)", "exit 02, validation",
    ]  # fmt: skip
