"""What trains exit classifiers, against loops and hand numbers."""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from offramp.train.classifier_objective import area_under_curve, balanced_accuracy, classifier_losses

GENERATOR = torch.Generator().manual_seed(0)
LOGITS = torch.randn(40, 3, generator=GENERATOR)
AGREES = torch.rand(40, 3, generator=GENERATOR) < torch.tensor([0.2, 0.5, 0.8])
SHARES = AGREES.float().mean(dim=0)


def test_both_classes_count_the_same_in_the_independent_objective() -> None:
    losses = classifier_losses(LOGITS, AGREES, "independent", SHARES)
    for exit_ in range(3):
        classes: dict[bool, list[float]] = {True: [], False: []}
        for logit, label in zip(LOGITS[:, exit_].tolist(), AGREES[:, exit_].tolist(), strict=True):
            p = 1 / (1 + math.exp(-logit))
            classes[label].append(-math.log(p if label else 1 - p))
        by_hand = sum(sum(values) / len(values) for values in classes.values()) / 2
        assert float(losses[exit_]) == pytest.approx(by_hand, rel=1e-5)


def test_the_geometric_objective_is_the_probability_of_leaving_where_it_first_agrees() -> None:
    losses = classifier_losses(LOGITS, AGREES, "geometric", SHARES)
    total, reached = 0.0, set()
    for row, labels in zip(LOGITS.sigmoid().tolist(), AGREES.tolist(), strict=True):
        leave = [p * math.prod(1 - other for other in row[:place]) for place, p in enumerate(row)]
        leave.append(math.prod(1 - p for p in row))  # at the final exit
        assert sum(leave) == pytest.approx(1.0)
        first = labels.index(True) if True in labels else 3
        reached.add(first)
        total -= math.log(leave[first])
    assert reached == {0, 1, 2, 3}
    assert float(losses.sum()) == pytest.approx(total / 40, rel=1e-5)


@pytest.mark.parametrize("label", [True, False])
def test_a_class_that_never_occurs_is_no_trouble(label: bool) -> None:
    agrees = torch.full((5, 1), label)
    losses = classifier_losses(torch.zeros(5, 1), agrees, "independent", agrees.float().mean(dim=0))
    assert float(losses) == pytest.approx(math.log(2))
    assert math.isnan(area_under_curve(LOGITS[:5, 0], agrees[:, 0]))
    assert math.isnan(balanced_accuracy(LOGITS[:5, 0], agrees[:, 0]))


@given(st.lists(st.tuples(st.integers(0, 4), st.booleans()), min_size=2, max_size=20))
def test_area_under_curve_is_a_count_of_pairs(rows: list[tuple[int, bool]]) -> None:
    pairs = [(a > b) + 0.5 * (a == b) for a, yes in rows if yes for b, other in rows if not other]
    found = area_under_curve(torch.tensor([float(a) for a, _ in rows]), torch.tensor([yes for _, yes in rows]))
    assert math.isnan(found) if not pairs else found == pytest.approx(sum(pairs) / len(pairs))


def test_balanced_accuracy_by_hand() -> None:
    logits = torch.tensor([1.0, 2.0, -1.0, 0.5, -3.0])
    agrees = torch.tensor([True, True, True, True, False])
    assert balanced_accuracy(logits, agrees) == pytest.approx((3 / 4 + 1) / 2)
