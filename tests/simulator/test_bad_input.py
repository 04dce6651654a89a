"""Every refusal is one line that names the argument, the value and what is accepted."""

from __future__ import annotations

from functools import partial
from typing import Any

import numpy as np
import pytest

import flashlab as fl
from simulator import Device, Problem, Tile, UsageError
from simulator.operations.backward import BACKWARD

GOOD: dict[str, Any] = dict(batch=1, heads=4, len_q=8, head_dim=16, dtype="float16")


@pytest.mark.parametrize(
    ("change", "line"),
    [
        ({"batch": 0}, "batch = 0: expected an integer of at least 1"),
        ({"heads": True}, "heads = True: expected an integer of at least 1"),
        ({"heads": 2.5}, "heads = 2.5: expected an integer of at least 1"),
        ({"kv_heads": 3}, "kv_heads = 3: expected a divisor of heads = 4"),
        ({"len_q": -1}, "len_q = -1: expected an integer of at least 0"),
        ({"head_dim": "64"}, "head_dim = '64': expected an integer of at least 1"),
        (
            {"dtype": "float17"},
            "dtype = 'float17': expected one of float32, float16, bfloat16, float8_e4m3fn (did you mean float16?)",
        ),
        ({"causal": 1}, "causal = 1: expected True or False"),
        ({"len_q": 2**63}, "len_q = 9223372036854775808: expected an integer of at least 0, up to 2^62"),
        ({"window": 5}, "window = 5: expected a pair (left, right), each None or an integer of at least 0"),
        ({"window": (-1, 0)}, "window = -1: expected a pair (left, right), each None or an integer of at least 0"),
        ({"scale": float("nan")}, "scale = nan: expected a finite number, or None for 1/sqrt(head dim)"),
        ({"scale": 1e38}, "scale = 1e+38: expected a finite number up to 1e+30, or None for 1/sqrt(head dim)"),
        ({"scale": -2e30}, "scale = -2e+30: expected a finite number up to 1e+30, or None for 1/sqrt(head dim)"),
        ({"scale": 1e-39}, "scale = 1e-39: expected a finite number that float32 holds, or None for 1/sqrt(head dim)"),
        ({"scale": True}, "scale = True: expected a finite number, or None for 1/sqrt(head dim)"),
        ({"scale": np.bool_(True)}, "scale = np.True_: expected a finite number, or None for 1/sqrt(head dim)"),
        (
            {"soft_cap": 1e39},
            "soft_cap = 1e+39: expected a finite number of at least 0 up to 1e+30; 0 or None is none",
        ),
        ({"scale": "x"}, "scale = 'x': expected a finite number, or None for 1/sqrt(head dim)"),
        ({"scale": 10**400}, f"scale = 1{'0' * 289} … 00000: expected a finite number, or None for 1/sqrt(head dim)"),
    ],
)
def test_problem(change: dict[str, Any], line: str) -> None:
    with pytest.raises(UsageError) as error:
        Problem(**GOOD | change)
    assert str(error.value) == line


@pytest.mark.parametrize("tile", [(0, 4), "64", "axb", (1, 2, 3), 5, (1.5, 2)])
def test_tile(tile: Any) -> None:
    with pytest.raises(UsageError, match="^tile = .*: expected rows x cols, whole numbers of at least 1 each"):
        Tile.parse(tile)


def test_a_tile_of_any_size_gets_a_short_line() -> None:
    """Python writes no integer of more than 4,300 digits."""
    for tile in ((2**31 + 1, 16), (16, 10**400), (10**5000, 16)):
        with pytest.raises(UsageError, match=r"^tile = .*: expected rows x cols, .*, and up to 2\^31$") as refused:
            fl.count("flash2", Problem(**GOOD), tile=tile)
        assert len(str(refused.value)) < 420
    assert str(UsageError("batch", 10**5000, "less")) == "batch = int of thousands of digits: expected less"


def test_unknown_names_offer_the_nearest() -> None:
    p = Problem(**GOOD)
    with pytest.raises(UsageError, match=r"algorithm = 'flash3x': expected one of .* \(did you mean flash"):
        fl.count("flash3x", p)
    with pytest.raises(UsageError, match=r"device = 'h10': .*\(did you mean h100\?\)"):
        fl.count("flash2", p, device="h10")
    with pytest.raises(UsageError, match=r"field = 'smss'.*did you mean sms"):
        Device.named("t4").replace(smss=3)
    with pytest.raises(UsageError, match=r"Device.sms = 0: expected an integer of at least 1"):
        Device.named("t4").replace(sms=0)
    with pytest.raises(UsageError, match="problem = None"):
        fl.count("flash2")
    with pytest.raises(UsageError, match="length = 4: expected nothing"):
        fl.count("flash2", length=4)


def test_an_unknown_keyword_lists_each_known_one_once() -> None:
    with pytest.raises(UsageError) as error:
        fl.simulate("flash2", *fl.random_inputs(Problem(**GOOD)), bias=1)
    names = str(error.value).split("expected one of ")[1].split(" (did")[0].split(", ")
    assert {"sinks", "mask", "causal"} <= set(names)
    assert len(names) == len(set(names))


@pytest.mark.parametrize(
    ("shapes", "line"),
    [
        (((4, 8), (1, 4, 8, 16), (1, 4, 8, 16)), r"q.shape = \(4, 8\)"),
        (((1, 4, 8, 16), (2, 4, 8, 16), (2, 4, 8, 16)), r"k.shape = \(2, 4, 8, 16\): expected batch 1 and head_dim 16"),
        (((1, 4, 8, 16), (1, 4, 9, 16), (1, 4, 8, 16)), r"v.shape = \(1, 4, 8, 16\)"),
        (((1, 4, 8, 16), (1, 3, 8, 16), (1, 3, 8, 16)), "kv_heads = 3"),
    ],
)
def test_array_shapes(shapes: tuple[Any, ...], line: str) -> None:
    arrays = [np.zeros(shape, np.float16) for shape in shapes]
    for f in (fl.naive, fl.naive_loop, lambda *x: fl.simulate("flash2", *x)):
        with pytest.raises(UsageError, match=line):
            f(*arrays)


def test_array_dtypes_and_nan() -> None:
    x = np.zeros((1, 1, 4, 8), np.float16)
    with pytest.raises(UsageError, match=r"q.dtype = 'float64': expected one of float32, float16, bfloat16"):
        fl.simulate("flash2", *[x.astype(np.float64)] * 3)
    with pytest.raises(UsageError, match=r"v.dtype = 'float32': expected float16, as q has"):
        fl.simulate("flash2", x, x, x.astype(np.float32))
    with pytest.raises(UsageError, match=r"k = 'NaN or inf': expected finite values"):
        fl.simulate("flash2", x, x * np.float16(np.nan), x, check_finite=True)


def test_check_finite_looks_behind_masks_and_takes_what_infinities_stand_for() -> None:
    """A hidden key's NaN spreads in a kernel. An LSE of -inf is a row without keys, a sink of -inf none."""
    p = Problem(**GOOD | {"len_q": 12, "len_kv": 8, "causal": True})
    q, k, v = fl.random_inputs(p)
    loud = v.copy()
    loud[:, :, -1] = np.nan  # no row but the last one sees it
    with pytest.raises(UsageError, match=r"^v = 'NaN or inf': expected finite values"):
        fl.simulate("flash2", q, k, loud, causal=True, check_finite=True)
    sinks = np.full(4, -np.inf, np.float32)
    run = fl.simulate("flash2", q, k, v, causal=True, lse=True, sinks=sinks, check_finite=True)
    assert run.lse is not None and np.isneginf(run.lse[:, :, :4]).all()
    back: dict[str, Any] = dict(q=q, k=k, v=v, out=run.out, lse=run.lse, dout=run.out)
    fl.simulate("flash2_backward", **back, causal=True, check_finite=True)
    for bad in (np.nan, np.inf):
        with pytest.raises(UsageError, match=r"^lse = 'NaN or inf'"):
            fl.simulate(
                "flash2_backward", **{**back, "lse": np.full_like(run.lse, bad)}, causal=True, check_finite=True
            )


def test_masked_arrays() -> None:
    """NumPy's own functions would drop the mask, and compute with what it hides."""
    x = np.zeros((1, 1, 4, 8), np.float16)
    hidden = np.ma.masked_greater(x, 1)
    line = "^k = masked array: expected an array whose values all count: its mask would be lost$"
    calls = fl.naive, fl.naive_loop, partial(fl.simulate, "flash2"), partial(fl.attention, backend="emulator")
    for f in (*calls, partial(fl.emulate, "flash2")):
        with pytest.raises(UsageError, match=line):
            f(x, hidden, x)
    with pytest.raises(UsageError, match="^x = masked array"):
        fl.softmax("softmax_safe", hidden.reshape(-1))


def test_a_program_names_its_operation() -> None:
    """Its name stands for it. An unknown one is told with the nearest."""

    def body(m: Any, *rest: Any) -> None:
        """Nothing."""

    assert fl.program(body, operation="backward").operation is BACKWARD
    with pytest.raises(UsageError, match=r"operation = 'backwards': expected one of attention.*did you mean backward"):
        fl.program(operation="backwards")


def test_mistakes_in_a_tile_program_are_named() -> None:
    """A forgotten .T, no warps, arrays where a problem is meant."""
    p = Problem(**GOOD)

    def program(**launch: Any) -> Any:
        @fl.program
        def mine(m: Any, q: Any, k: Any, v: Any, problem: Any, tile: Any) -> Any:
            for block in m.launch("mine", rows=1, **launch):
                block.step("s")
                block.matmul(block.load(q, block.i, 64), block.load(k, 0, 64), split=("rows", "none"))
            return m.output("out")

        return mine

    with pytest.raises(UsageError, match=r"matmul = '\(64, 16\) @ \(64, 16\)': .*is a .T missing"):
        fl.count(program(warps=4), p)
    with pytest.raises(UsageError, match="warps = 0: expected an integer of at least 1"):
        fl.count(program(warps=0), p)
    with pytest.raises(UsageError, match="problem = 'ndarray': expected a Problem"):
        fl.count("flash2", np.zeros(3))  # pyright: ignore[reportArgumentType]
    with pytest.raises(UsageError, match="examples = -1: expected an integer of at least 0"):
        fl.verify("flash2", examples=-1)


@pytest.mark.parametrize(
    ("field", "value", "accepted"),
    [
        ("bandwidth", 3352, "a finite number of bytes per second of at least 1e+09"),
        ("bandwidth", float("inf"), "a finite number of bytes per second"),
        ("tensor_flops", 989.4, "a finite number of FLOPs per second of at least 1e+09"),
        ("fp32_flops", True, "a finite number of FLOPs per second"),
        ("memory", 80, "an integer of bytes of at least 1048576"),
        ("l2", 50, "an integer of bytes of at least 1024"),
        ("l2", 10**400, "up to 2^62"),
        ("sms", 1.5, "an integer of at least 1"),
        ("max_warps_per_sm", 0.5, "an integer of at least 1"),
        ("compute_capability", (), "(major, minor)"),
        ("compute_capability", ("a", "b"), "(major, minor), two integers"),
        ("compute_capability", (9, 0.5), "(major, minor), two integers"),
        ("title", 5, "text"),
    ],
)
def test_devices_that_cannot_be(field: str, value: Any, accepted: str) -> None:
    with pytest.raises(UsageError) as error:
        Device.named("h100").replace(**{field: value})
    assert str(error.value).startswith(f"Device.{field} = ") and accepted in str(error.value)


def test_numbers_of_numpy_are_numbers_of_a_device() -> None:
    assert Device.named("h100").replace(l2=np.int64(5 << 20)).l2 == 5 << 20


@pytest.mark.parametrize(
    ("given", "line"),
    [
        ({"problem": Problem(**GOOD), "length": 8}, "length = 8: expected nothing"),
        ({"problem": Problem(**GOOD), "dtype": "float16"}, "dtype = 'float16': expected nothing"),
    ],
)
def test_what_a_count_would_ignore_is_refused(given: dict[str, Any], line: str) -> None:
    with pytest.raises(UsageError, match=f"^{line}"):
        fl.count("flash2", **given)


def test_a_tile_of_none_is_no_default() -> None:
    for tile in (0, ()):
        with pytest.raises(UsageError, match="^tile = "):
            fl.count("softmax_safe", length=10, tile=tile)  # pyright: ignore


@pytest.mark.parametrize("at", [(-1, 0), (2, 0), (0, -1), (0, 1), (9999, 0)])
def test_a_tile_outside_of_its_tensor_is_refused(at: tuple[int, int]) -> None:
    """It would count bytes that don't exist, or nothing."""
    i, j = at

    @fl.program
    def mine(m: Any, q: Any, k: Any, v: Any, problem: Any, tile: Any) -> Any:
        for block in m.launch("mine", warps=4):
            block.step("load")
            block.load(k, i, 64, j, 16)
        return m.output("out")

    with pytest.raises(UsageError, match="^tile of k = "):
        fl.count(mine, Problem(**GOOD).replace(len_q=128))


@pytest.mark.parametrize("rows", [-1, 1.5, "a"])
def test_blocks_that_cannot_be(rows: Any) -> None:
    @fl.program
    def mine(m: Any, q: Any, k: Any, v: Any, problem: Any, tile: Any) -> Any:
        for block in m.launch("mine", warps=4, rows=rows):
            block.step("load")
        return m.output("out")

    with pytest.raises(UsageError, match="^rows = .*: expected an integer of at least 0"):
        fl.count(mine, Problem(**GOOD))


def test_a_count_that_would_never_end_is_refused() -> None:
    """It looks at each row tile, while other formulas take the same time at any length."""
    few = fl.Problem(batch=1, heads=4, kv_heads=2, len_q=2**40, head_dim=16, dtype="float16", causal=True)
    said = "^len_q = 1099511627776: expected at most 33,554,432 for flash_decoding, which is for few: use flash2$"
    with pytest.raises(fl.UsageError, match=said):
        fl.count("flash_decoding", few, tile=(16, 16))
    for name in fl.catalogue.of():
        if name != "flash_decoding" and fl.CATALOGUE[name].refusal(few) is None:
            assert fl.count(name, few, tile=(16, 16)).hbm.read > 2**40


@pytest.mark.parametrize("head_dim", [257, 512, 4096])
@pytest.mark.parametrize("algorithm", [*fl.catalogue.of()])
def test_heads_that_no_kernel_takes_are_counted_or_refused(algorithm: str, head_dim: int) -> None:
    """A formula holds at any size, and a tile may not fit."""
    p = Problem(**GOOD | {"head_dim": head_dim, "dtype": fl.CATALOGUE[algorithm].dtypes[0]})
    try:
        assert fl.count(algorithm, p, device="h100").hbm.read > 0
    except UsageError as refusal:
        assert "\n" not in str(refusal)
