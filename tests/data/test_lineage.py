from types import SimpleNamespace
from typing import Any

import pytest

from hasten.data.lineage import counts_in_parts, loses_samples
from tests.data.scenarios import Numbers, Stream


def step(name: str, *inner: Any) -> Any:
    made = type(name, (), {})()
    if len(inner) == 1:
        made.ex_iterable = inner[0]
    elif inner:
        made.ex_iterables = list(inner)
    return made


def test_the_steps_of_a_stream_are_found_wherever_they_are():
    plain = step("MappedExamplesIterable", step("ExamplesIterable"))
    buffer, skipping = step("BufferShuffledExamplesIterable", plain), step("SkipExamplesIterable", plain)
    mixed = step("CyclingMultiSourcesExamplesIterable", plain, step("TakeExamplesIterable", buffer))
    found = {
        name: (loses_samples(data), counts_in_parts(data))
        for name, steps in {"plain": plain, "buffer": buffer, "skipping": skipping, "mixed": mixed}.items()
        for data in [SimpleNamespace(_ex_iterable=steps)]
    }
    assert found == {
        "plain": (False, False),
        "buffer": (True, False),
        "skipping": (False, True),
        "mixed": (True, True),
    }


def test_other_datasets_have_no_steps():
    for data in (Numbers(), Stream(), None):
        assert (loses_samples(data), counts_in_parts(data)) == (False, False)


def test_the_real_package_calls_them_so():
    datasets = pytest.importorskip("datasets")
    stream = datasets.Dataset.from_dict({"x": [1, 2, 3]}).to_iterable_dataset()
    assert (loses_samples(stream), counts_in_parts(stream)) == (False, False)
    assert loses_samples(stream.shuffle(seed=1).map(lambda row: row))
    assert counts_in_parts(stream.skip(1).with_format("torch"))
    assert counts_in_parts(datasets.concatenate_datasets([stream, stream.take(1)]))
