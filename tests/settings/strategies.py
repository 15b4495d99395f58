"""Legal values of each kind of setting, as hypothesis strategies."""

from typing import Any

from hypothesis import strategies as st

from hasten.settings.schema import Setting

_NAME = st.from_regex(r"[A-Za-z0-9][A-Za-z0-9_.\-]{0,8}", fullmatch=True).filter(
    lambda text: text.lower() not in ("null",)
)
_FINITE = {"allow_nan": False, "allow_infinity": False, "width": 32}


def legal_values(row: Setting) -> st.SearchStrategy[Any]:
    """Every value that the row may have, as `values.parse` returns it."""
    low = int(row.low) if row.low is not None and row.kind != "float" else -1000
    high = int(row.high) if row.high is not None else 10**6
    whole = st.integers(low, high)
    return {
        "bool": st.booleans(),
        "truth": st.booleans(),
        "amount": st.one_of(st.booleans(), st.integers(2, 1000), st.sampled_from(row.choices or (True,))),
        "choice": st.sampled_from(row.choices or ("",)),
        "int": whole,
        "ints": st.lists(whole, min_size=1, max_size=3).map(tuple),
        "float": st.floats(row.low if row.low is not None else -1e6, 1e6, **_FINITE)
        if row.kind == "float" and row.low == 0
        else st.integers(1, 1000).map(float),
        "range": st.tuples(whole, whole).map(lambda pair: (min(pair), max(pair))),
        "names": st.lists(_NAME, min_size=1, max_size=3, unique=True).map(tuple),
        "pairs": st.lists(st.tuples(_NAME, _NAME), min_size=1, max_size=3).map(tuple),
        "streams": st.sampled_from(["0", "1", "2", "3", "0:3,1:0"]),
        "path": _NAME,
        "str": _NAME,
    }[row.kind]
