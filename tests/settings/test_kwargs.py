from dataclasses import dataclass, field

from hasten.settings.kwargs import KwargsHandler


@dataclass
class Options(KwargsHandler):
    size: int = 3
    names: list[str] = field(default_factory=list)
    label: str = field(default="fixed", init=False)


def test_to_kwargs_holds_what_differs_from_the_defaults():
    assert Options().to_kwargs() == {}
    assert Options(3, ["a"]).to_kwargs() == {"names": ["a"]}
    assert Options(size=4).to_kwargs() == {"size": 4}


def test_what_cannot_be_given_is_not_forwarded():
    options = Options()
    options.label = "changed"
    assert options.to_kwargs() == {}


def test_to_dict_is_a_deep_copy():
    options = Options(names=["a"])
    options.to_dict()["names"].append("b")
    options.to_kwargs()["names"].append("c")
    assert options.to_dict() == {"size": 3, "names": ["a"]}


def test_subclasses_compare_with_their_own_defaults():
    @dataclass
    class Larger(Options):
        size: int = 5

    assert Larger().to_kwargs() == {}
    assert Larger(3).to_kwargs() == {"size": 3}
