"""An error tells an array by its dtype and shape, wherever in the arguments it stood: never by its values, never in two lines."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

import flashlab as fl
from flashlab.base.host import from_numpy
from simulator.quantize import quantize

P = fl.Problem(batch=1, heads=2, len_q=8, head_dim=16, dtype="float16")
Q, K, V = fl.random_inputs(P)
TOLD = "7.25"  # the value of every element
ARRAY = np.full((7, 30), float(TOLD), np.float32)
KINDS = ["numpy", pytest.param("torch", marks=pytest.mark.torch), pytest.param("jax", marks=pytest.mark.jax)]
IN_WORDS = "array of float32, (7, 30)"

NESTED: Mapping[str, Callable[[Any], Any]] = {
    "alone": lambda x: x,
    "in a list": lambda x: [x],
    "beside None": lambda x: (x, None),
    "a pair": lambda x: (x, x),
    "three": lambda x: [x, x, x],
    "as scales": lambda x: fl.Scales(x, x, x),
    "in a dictionary": lambda x: {"x": x},
    "deep": lambda x: [[{"x": (x,)}]],
}


class Entry(NamedTuple):
    """A public function with arguments that it takes, and those among them that an array may be mistaken for."""

    call: Callable[..., Any]
    good: Mapping[str, Any]
    tried: str


QKV: Mapping[str, Any] = {"q": Q, "k": K, "v": V}
MASKS = "causal window scale soft_cap"
NUMBERS = "sinks alibi_slopes"
ENTRIES = {
    "attention": Entry(
        fl.attention, {**QKV, "backend": "emulator"}, f"q k v algorithm {MASKS} {NUMBERS} out tile device scales"
    ),
    "attention on a GPU": Entry(fl.attention, QKV, "q k v device"),
    "simulate": Entry(
        fl.simulate, {"algorithm": "flash2", **QKV}, f"q k v algorithm {MASKS} {NUMBERS} tile device lse trace scales"
    ),
    "emulate": Entry(
        fl.emulate, {"algorithm": "flash2", **QKV}, f"q k v algorithm {MASKS} {NUMBERS} tile device lse scales"
    ),
    "naive": Entry(fl.naive, QKV, f"q k v {MASKS} {NUMBERS}"),
    "naive_loop": Entry(fl.naive_loop, QKV, f"q k v {MASKS} {NUMBERS}"),
    "compare": Entry(fl.compare, {"what": P, "algorithms": ["flash2"]}, f"what algorithms {MASKS} tile device"),
    "compare arrays": Entry(fl.compare, {"what": (Q, K, V), "algorithms": ["flash2"]}, f"{MASKS} tile device"),
    "count": Entry(fl.count, {"algorithm": "flash2", "problem": P}, "algorithm problem tile device length"),
    "count a softmax": Entry(fl.count, {"algorithm": "softmax_safe", "length": 8}, "length dtype"),
    "shape_run": Entry(fl.shape_run, {"algorithm": "flash2", "problem": P}, "algorithm problem tile device"),
    "check_formula": Entry(
        fl.check_formula,
        {"program": "flash2", "formula": fl.CATALOGUE["flash2"].formula, "problem": P},
        "program problem tile",
    ),
    "softmax": Entry(fl.softmax, {"name": "softmax_safe", "x": Q[0, 0, 0]}, "name x tile"),
    "plan": Entry(
        fl.plan, {"algorithm": "flash2", "problem": P, "backend": "simulator"}, "algorithm problem tile device"
    ),
    "plan.run": Entry(fl.plan("flash2", P, backend="simulator").run, QKV, "q k v"),
    "timeline": Entry(fl.timeline, {"algorithm": "flash3", "problem": P}, "algorithm problem tile device"),
    "sweep": Entry(fl.sweep, {"algorithms": "flash2", "problem": P}, "problem device len_q"),
    "random_inputs": Entry(fl.random_inputs, {"problem": P}, "problem"),
    "quantize": Entry(quantize, QKV, "q k v"),
    "player": Entry(fl.player, {"trace": fl.simulate("flash2", Q, K, V, trace=True)}, "trace other step"),
    "Problem": Entry(
        fl.Problem,
        {"batch": 1, "heads": 2, "len_q": 8, "head_dim": 16, "dtype": "float16"},
        f"batch heads kv_heads len_q len_kv head_dim head_dim_v dtype {MASKS} sinks alibi",
    ),
    "Tile": Entry(fl.Tile.parse, {}, "tile"),
    "Device": Entry(fl.DEVICES["h100"].replace, {}, "name sms sram_per_block l2 bandwidth memory"),
    "Device.named": Entry(fl.Device.named, {}, "device"),
    "Scales": Entry(fl.Scales.of, {}, "given"),
    "verify": Entry(fl.verify, {"target": "flash2", "checks": ["gqa"]}, "target"),
}
TRIED = [(name, argument) for name, entry in ENTRIES.items() for argument in entry.tried.split()]


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize(("name", "argument"), TRIED, ids=[".".join(each) for each in TRIED])
def test_an_array_in_the_wrong_place(name: str, argument: str, kind: str) -> None:
    call, good, _ = ENTRIES[name]
    x = from_numpy(ARRAY, kind)
    for made in NESTED.values():
        try:
            call(**{**good, argument: made(x)})
        except (fl.UsageError, fl.Unavailable) as error:
            line = str(error)
            assert TOLD not in line and "\n" not in line and len(line) < 700, line  # all algorithms' names take 520
        else:
            assert name == "Scales", (
                made
            )  # three arrays are what it takes: their shapes are looked at when they are used


NONE = "a finite number of at least 0; 0 or None is none"
SHAPE = "(2,), its axes are heads"
FINITE = "finite numbers"
OF_SCORES: list[tuple[dict[str, Any], str]] = [
    ({"soft_cap": -1.0}, f"soft_cap = -1.0: expected {NONE}"),
    ({"soft_cap": math.nan}, f"soft_cap = nan: expected {NONE}"),
    ({"soft_cap": math.inf}, f"soft_cap = inf: expected {NONE}"),
    ({"sinks": np.zeros(3, "f4")}, f"sinks.shape = (3,): expected {SHAPE}"),
    ({"sinks": np.zeros((1, 2), "f4")}, f"sinks.shape = (1, 2): expected {SHAPE}"),
    ({"sinks": np.zeros(2, "f2")}, "sinks.dtype = 'float16': expected float32"),
    (
        {"sinks": np.float32([0, math.nan])},
        f"sinks[1] = nan: expected {FINITE} up to 1e+30, or -inf for a head without one",
    ),
    (
        {"sinks": np.float32([math.inf, 0])},
        f"sinks[0] = inf: expected {FINITE} up to 1e+30, or -inf for a head without one",
    ),
    (
        {"sinks": np.float32([0, -2e38])},
        f"sinks[1] = -1.9999999360571385e+38: expected {FINITE} up to 1e+30, or -inf for a head without one",
    ),
    ({"alibi_slopes": np.zeros(1, "f4")}, f"alibi_slopes.shape = (1,): expected {SHAPE}"),
    ({"alibi_slopes": np.zeros(2, "f8")}, "alibi_slopes.dtype = 'float64': expected float32"),
    ({"alibi_slopes": np.float32([math.nan, 0])}, f"alibi_slopes[0] = nan: expected {FINITE} up to 1e+30"),
    ({"alibi_slopes": np.float32([0, -math.inf])}, f"alibi_slopes[1] = -inf: expected {FINITE} up to 1e+30"),
    (
        {"alibi_slopes": np.float32([0, 2e38])},
        f"alibi_slopes[1] = 1.9999999360571385e+38: expected {FINITE} up to 1e+30",
    ),
]
"""What is wrong with a soft cap, sinks or slopes, and its line."""


@pytest.mark.parametrize("name", ["attention", "simulate", "emulate", "naive", "naive_loop"])
@pytest.mark.parametrize(("wrong", "line"), OF_SCORES, ids=[line.split(":")[0] for _, line in OF_SCORES])
def test_a_soft_cap_sinks_and_slopes_that_are_none(name: str, wrong: dict[str, Any], line: str) -> None:
    call, good, _ = ENTRIES[name]
    with pytest.raises(fl.UsageError) as refused:
        call(**good, **wrong)
    assert str(refused.value) == line


ONES = np.ones(2, np.float32)
UNKNOWN = [
    ({"soft_cap": 5.0}, {"soft_cap": 5.0}, "soft_cap = 5.0"),
    ({"sinks": ONES}, {"sinks": True}, "sinks = True"),
    ({"alibi_slopes": ONES}, {"alibi": True}, "alibi = True"),
]
"""What changes the scores, as a call and as a problem say it, and how a line names it."""


@pytest.mark.parametrize("name", ["attention", "simulate", "emulate", "count"])
@pytest.mark.parametrize("algorithm", ["online_softmax", "flash1", "flash3_3"])
@pytest.mark.parametrize(("said", "field", "named"), UNKNOWN, ids=[named for *_, named in UNKNOWN])
def test_an_algorithm_never_computes_without(name: str, algorithm: str, said: Any, field: Any, named: str) -> None:
    call, good, _ = ENTRIES[name]
    asked = {"problem": P.replace(**field)} if name == "count" else said
    with pytest.raises(fl.UsageError) as refused:
        call(**{**good, **asked, "algorithm": algorithm})
    assert str(refused.value) == f"{named}: expected nothing: {algorithm} knows causal, window, scale"


@pytest.mark.parametrize(("said", "field", "named"), UNKNOWN, ids=[named for *_, named in UNKNOWN])
def test_this_backward_pass_knows_none_of_them(said: Any, field: Any, named: str) -> None:
    with pytest.raises(
        fl.UsageError, match=f"^{named}: expected nothing: flash1_backward knows causal, window, scale, dropout, dlse$"
    ):
        fl.count("flash1_backward", P.replace(**field))
    lse = np.zeros(Q.shape[:3], np.float32)
    with pytest.raises(fl.UsageError) as refused:
        fl.simulate("flash1_backward", Q, K, V, Q, lse, Q, **said)
    assert next(iter(said)) in str(refused.value) and "\n" not in str(refused.value)


@given(
    st.recursive(
        st.just(ARRAY) | st.just(ARRAY.astype(np.float16)) | st.none() | st.integers() | st.text("ab\n'", max_size=5),
        lambda inner: (
            st.lists(inner, max_size=4) | st.tuples(inner, inner) | st.dictionaries(st.text("xy"), inner, max_size=3)
        ),
    )
)
def test_arrays_within_anything(value: Any) -> None:
    line = str(fl.UsageError("x", value, "something else"))
    assert TOLD not in line and "\n" not in line and len(line) < 350


def test_what_is_shown() -> None:
    shown = {
        IN_WORDS: ARRAY,
        f"[{IN_WORDS}, 3]": [ARRAY, 3],
        f"({IN_WORDS}, None)": (ARRAY, None),
        f"{{'x': {IN_WORDS}}}": {"x": ARRAY},
        f"Scales(q={IN_WORDS}, k=1, v='k')": fl.Scales(ARRAY, 1, "k"),
        "Tile(rows=3, cols=4)": fl.Tile(3, 4),
        "np.float32(7.25)": np.float32(7.25),  # one number is what the error is about
    }
    for words, value in shown.items():
        assert str(fl.UsageError("x", value, "y")) == f"x = {words}: expected y"
