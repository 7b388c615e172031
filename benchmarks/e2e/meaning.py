"""Meaning representations of E2E NLG, and new ones made of what is known about restaurants.

A meaning representation (MR) is a line like `name[The Eagle], food[Chinese], area[riverside]`. Only its attributes and
their values are used here; nobody has to write a text for a synthetic one, since the full model will.
"""

from __future__ import annotations

import random
import re
from collections.abc import Collection, Iterable, Iterator

ATTRIBUTES = ("name", "eatType", "food", "priceRange", "customer rating", "area", "familyFriendly", "near")
"""In the data set's order."""

SIZES = {3: 1, 4: 2, 5: 2, 6: 4, 7: 6, 8: 6}
"""Number of attributes of a synthetic MR -> weight; most of the data set's have six or more."""

INVENTED = 0.6
"""Share of synthetic names and neighbours that are invented: a model that should copy names must see many."""

# The kinds of place and of food that the task's ontology has; the public training set shows them all.
EAT_TYPES = ("coffee shop", "pub", "restaurant")
FOODS = ("Chinese", "English", "Fast food", "French", "Indian", "Italian", "Japanese")

_FIRST = """
    Amber Anchor Apple Barley Bay Bell Berry Birch Black Bridge Bright Bronze Brook Castle Cedar Cherry Chestnut
    Clover Coach Copper Coral Corner Crown Crystal Daisy Dolphin Dragon Duke Elm Emerald Falcon Fern Fig Fox Garden
    Gate Ginger Globe Grape Green Grey Harbour Harvest Hazel Heron High Holly Honey Iron Ivory Ivy Jade Jasmine King
    Lake Lantern Laurel Lemon Lily Lime Lion Little Lotus Magnolia Maple Market Meadow Mint Moon Moss Mulberry
    Nettle North Oak Orchard Orchid Otter Palm Peach Pear Pearl Pepper Pine Pink Plum Poppy Queen Raven Red River
    Robin Rose Royal Ruby Saffron Sage Salt Scarlet Sea Silver Sky South Spice Spring Star Stone Summer Sun Swan
    Thistle Thyme Tiger Tulip Turtle Velvet Vine Violet Walnut West White Willow Winter Wolf
""".split()  # noqa: SIM905 - words are read more easily so
_SECOND = """
    Arms Bakery Barn Bistro Boat Bowl Brasserie Cafe Canteen Cat Cellar Chef Cottage Court Cup Deli Diner Dish Door
    Feast Fish Fork Grill Grove Hall Head Hearth Hill Horse House Inn Kettle Kitchen Larder Lodge Lounge Mill Nook
    Oven Palace Pan Pantry Parlour Place Plate Pot Room Rooms Spoon Square Stable Table Tavern Terrace Tree Wharf
    Yard
""".split()  # noqa: SIM905 - words are read more easily so
_OWNERS = "Adams Bella Carlo Fisher Giorgio Hassan Jacob Lena Marco Nina Oscar Patel Rosa Sofia Tanaka Wong".split()  # noqa: SIM905 - words are read more easily so
_ONSETS = "b br c ch cl d dr f fl g gl h j k l m n p pl qu r s st t tr v w z".split()  # noqa: SIM905
_VOWELS = "a ai e ea i ie o oo ou u y".split()  # noqa: SIM905
_CODAS = "- - - l ld ll m mp n nne r rd rt s ss t tt v x zz".replace("-", "").split(" ")
_TOWNS = "Ashford Bristol Cambridge Dover Ely Florence Genoa Lisbon London Milan Naples Oxford Paris Rome York".split()  # noqa: SIM905 - words are read more easily so


def parse(mr: str) -> dict[str, str]:
    """Attributes and values of an MR, in its order."""
    return {name.strip(): value for name, value in re.findall(r"([^,\[\]]+)\[([^\]]*)\]", mr)}


def render(values: dict[str, str]) -> str:
    """The MR of some values."""
    return ", ".join(f"{name}[{value}]" for name, value in values.items())


def known_values(mrs: Iterable[str]) -> dict[str, list[str]]:
    """Attribute -> its values in some MRs, and those that the ontology adds; sorted."""
    found: dict[str, set[str]] = {name: set() for name in ATTRIBUTES}
    for mr in mrs:
        for name, value in parse(mr).items():
            found[name].add(value)
    found["eatType"].update(EAT_TYPES)
    found["food"].update(FOODS)
    return {name: sorted(values) for name, values in found.items()}


def synthetic_mrs(values: dict[str, list[str]], count: int, avoid: Collection[str], seed: int) -> Iterator[str]:
    """Yield `count` MRs, all different and none of `avoid`; the same ones for the same arguments.

    Args:
        values: attribute -> what it may be.
        count: how many.
        avoid: MRs that must not appear, such as those of the test.
        seed: of the draws.
    """
    draw, seen = random.Random(seed), {_key(mr) for mr in avoid}
    made = 0
    while made < count:
        size = draw.choices(list(SIZES), list(SIZES.values()))[0]
        # There is always a name, and something to say about it.
        chosen = {"name", *draw.sample(ATTRIBUTES[1:], size - 1)}
        mr = render({name: _value(name, values, draw) for name in ATTRIBUTES if name in chosen})
        if _key(mr) not in seen:
            seen.add(_key(mr))
            made += 1
            yield mr


def _key(mr: str) -> frozenset[tuple[str, str]]:
    return frozenset(parse(mr).items())


def _value(name: str, values: dict[str, list[str]], draw: random.Random) -> str:
    if name in ("name", "near") and draw.random() < INVENTED:
        return _invented_name(draw)
    return draw.choice(values[name])


def _invented_name(draw: random.Random) -> str:
    first, second = draw.choice(_FIRST + [_made_up_word(draw)] * 40), draw.choice(_SECOND)
    shapes = {
        f"The {first} {second}": 4,
        f"{first} {second}": 4,
        f"The {second}": 1,
        first: 1,
        f"{draw.choice(_OWNERS)}'s {second}": 1,
        f"{second} of {draw.choice(_TOWNS)}": 1,
        f"Café {draw.choice(_OWNERS + _TOWNS)}": 2,
        f"{draw.choice(_TOWNS)} {second}": 1,
        draw.choice(_OWNERS): 1,
        _made_up_word(draw): 4,
    }
    return draw.choices(list(shapes), list(shapes.values()))[0]


def _made_up_word(draw: random.Random) -> str:
    """Two syllables or so: a name that can only be copied, piece by piece."""
    syllables = (
        draw.choice(_ONSETS) + draw.choice(_VOWELS) + draw.choice(_CODAS) for _ in range(draw.choice((1, 2, 2)))
    )
    return ("".join(syllables) + draw.choice(("", "", "a", "i", "o", "e"))).capitalize()
