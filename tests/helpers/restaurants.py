"""Files in the shape of the E2E NLG challenge's, two references for each source."""

from __future__ import annotations

import csv
import itertools
from pathlib import Path

_NAMES = ("Alimentum", "Zizzi", "The Vaults", "Cotto", "Blue Spice", "Strada", "Aromi", "Loch Fyne")
_FOODS, _AREAS = ("Thai", "French", "Indian", "Italian"), ("city centre", "riverside")


def write_restaurants(directory: Path) -> None:
    """`devset.csv` and `testset_w_refs.csv`: half the names each."""
    for file, names in (("devset.csv", _NAMES[::2]), ("testset_w_refs.csv", _NAMES[1::2])):
        with (directory / file).open("w", newline="", encoding="utf-8") as stream:
            rows = csv.writer(stream)
            rows.writerow(("mr", "ref"))
            for name, food, area in itertools.product(names, _FOODS, _AREAS):
                source = f"name[{name}], food[{food}], area[{area}]"
                rows.writerow((source, f"{name} serves {food} food in the {area}."))
                rows.writerow((source, f"In the {area} there is {name} with {food} food."))
