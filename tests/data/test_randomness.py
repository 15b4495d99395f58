import io
import random
from typing import Any

import numpy
import torch

from hasten.data.randomness import ALL, TORCH, Glance, capture, differs, restore, rewound


def draw() -> list[float]:
    return [torch.rand(()).item(), random.random(), numpy.random.rand(), random.gauss(0, 1), numpy.random.randn()]


def test_states_are_put_back():
    own = torch.Generator().manual_seed(1)
    draw()  # half of a pair of normal numbers is kept by the generators
    state = capture(ALL, [own])
    first = draw(), torch.rand((), generator=own).item()
    restore(state, [own])
    assert (draw(), torch.rand((), generator=own).item()) == first


def test_states_are_plain():
    file = io.BytesIO()
    torch.save(capture(ALL), file)
    file.seek(0)
    loaded: Any = torch.load(file, weights_only=True)
    first = draw()
    restore(loaded)
    assert draw() == first


def test_rewinding_leaves_everything_as_it_was():
    own = torch.Generator().manual_seed(1)
    earlier = capture(ALL, [own])
    first = draw(), torch.rand((), generator=own).item()
    now = capture(ALL, [own])
    with rewound(earlier, [own]):
        assert (draw(), torch.rand((), generator=own).item()) == first
    later = capture(ALL, [own])
    assert not differs({kind: now[kind] for kind in ALL}, later)
    assert torch.equal(now["generators"][0], later["generators"][0])


def test_only_the_kinds_asked_for_are_touched():
    state = capture(TORCH)
    assert set(state) == {"torch", "generators"}
    first = random.random()
    with rewound(state):
        pass
    assert random.random() != first


def test_drawing_is_seen():
    for number, kind in enumerate(ALL):
        before = capture(ALL)
        [lambda: torch.rand(()), random.random, numpy.random.rand][number]()
        after = capture(ALL)
        assert [each for each in ALL if differs({each: before[each]}, after)] == [kind]


def test_a_glance_sees_what_is_drawn_and_holds_what_was_before():
    draws = {"torch": lambda: torch.rand(()), "python": random.random, "numpy": numpy.random.rand}
    first = Glance(ALL)
    for quick in (None, first):
        for kind, draw in draws.items():
            glance = Glance(ALL, quick)
            assert glance.changed() == []
            drawn = draw()
            assert glance.changed() == [kind]
            restore(glance.state([kind]))
            assert draw() == drawn


def test_a_glance_holds_what_capture_takes():
    taken, seen = capture(ALL), Glance(ALL).state(ALL)
    seen["generators"] = []
    assert not differs(taken, seen)
