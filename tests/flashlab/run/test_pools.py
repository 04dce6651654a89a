"""append_kv and copy_pages on a CPU: what they write, where, and what they refuse. The kernels run on the emulator."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

import flashlab as fl
from simulator.dtypes import numpy_dtype
from simulator.operations.append import APPEND
from simulator.operations.caches import rounded
from simulator.operations.copies import COPIES

pytestmark = pytest.mark.compiler
SIZE, HEADS, DIM, PAGES = 4, 2, 16, 6
TOKEN = {"k_scale": "token", "v_scale": "token"}


def append_arrays(seed: int = 0, **more: Any) -> dict[str, Any]:
    sizes: dict[str, Any] = {
        "batch": 1,
        "heads": HEADS,
        "len_q": 9,
        "len_kv": 7,
        "head_dim": DIM,
        "dtype": "float16",
        **more,
    }
    return APPEND.draw(fl.Problem(**sizes, page_size=SIZE, pages=PAGES), seed)


def copy_arrays(seed: int = 0, **more: Any) -> dict[str, Any]:
    sizes: dict[str, Any] = {"batch": 1, "heads": HEADS, "len_q": 2, "head_dim": DIM, "dtype": "float16", **more}
    return COPIES.draw(fl.Problem(**sizes, page_size=SIZE, pages=PAGES), seed)


def copied(arrays: dict[str, Any]) -> dict[str, Any]:
    return {name: x.copy() for name, x in arrays.items()}


def bits(x: Any) -> list[int]:
    return np.ascontiguousarray(x).view(np.uint8).reshape(-1).tolist()


def same(a: Any, b: Any) -> bool:
    return bits(a) == bits(b)


def by_hand(given: dict[str, Any]) -> dict[str, Any]:
    """The pools after an append, token by token."""
    found = copied({name: given[name] for name in ("k_pool", "v_pool")})
    for token, slot in enumerate(given["slot_mapping"].tolist()):
        for name in "kv" if slot >= 0 else "":
            found[f"{name}_pool"][slot // SIZE, :, slot % SIZE] = given[name][0, :, token]
    return found


def test_each_token_goes_to_its_slot_and_nothing_else_changes() -> None:
    given = append_arrays()
    before, wanted = copied(given), by_hand(given)
    assert fl.append_kv(**given, backend="emulator") is None
    assert all(same(given[name], x) for name, x in wanted.items())
    assert all(same(given[name], before[name]) for name in ("k", "v", "slot_mapping"))


@pytest.mark.parametrize("layout", ["nhd", "packed", "rows of tokens"])
def test_views_are_written_where_they_lie(layout: str) -> None:
    given = append_arrays(1)
    wanted = by_hand(given)
    if layout == "nhd":  # a page's keys one behind the other, all heads of each
        for name in ("k_pool", "v_pool"):
            given[name] = np.ascontiguousarray(given[name].swapaxes(1, 2)).swapaxes(1, 2)
    elif layout == "packed":  # K and V of a key side by side
        both = np.concatenate([given["k_pool"], given["v_pool"]], -1)
        given |= {"k_pool": both[..., :DIM], "v_pool": both[..., DIM:]}
    else:
        for name in "kv":
            given[name] = np.ascontiguousarray(given[name][0].swapaxes(0, 1)).swapaxes(0, 1)[None]
    fl.append_kv(**given, backend="emulator")
    assert all(same(given[name], x) for name, x in wanted.items())


@pytest.mark.parametrize("dtype", ["int8", "float8_e4m3fn"])
@pytest.mark.parametrize("of", ["float16", "bfloat16"])
def test_a_pool_of_8_bits_gets_what_quantize_cache_makes(dtype: str, of: str) -> None:
    given = append_arrays(2, kv_dtype=dtype, dtype=of, len_kv=9, **TOKEN)
    with np.errstate(invalid="ignore", over="ignore"):
        given["k"][0, 0, :4] = (
            np.array([[0.0], [6e-5], [3e4], [1e-35]], np.float32).astype(numpy_dtype(of)) * given["k"][0, 0, :4]
        )
    cache = fl.quantize_cache(given["k"], given["v"], dtype)
    fl.append_kv(**given, backend="emulator")
    page, row = np.divmod(given["slot_mapping"], SIZE)
    for name in "kv":
        wanted, scale = getattr(cache, name), getattr(cache, f"{name}_scale")
        assert same(given[f"{name}_pool"][page, :, row], wanted[0].swapaxes(0, 1))
        assert same(given[f"{name}_scale"][page, :, row], scale[0].T)


@pytest.mark.parametrize(("dtype", "code"), [("int8", 0x80), ("float8_e4m3fn", 0x7F)])
def test_a_nan_stays_one_and_spoils_no_other_row(dtype: str, code: int) -> None:
    given = append_arrays(3, kv_dtype=dtype, len_kv=9, **TOKEN)
    given["k"][0, 1, 4, 3], given["v"][0, 0, 2, 0] = np.nan, np.inf
    with np.errstate(invalid="ignore"):
        wanted = APPEND.judge(APPEND.problem(given), given)
        fl.append_kv(**given, backend="emulator")
        simulated = fl.simulate(
            "append_kv", **append_arrays(3, kv_dtype=dtype, len_kv=9, **TOKEN) | {x: given[x] for x in "kv"}
        )
    page, row = np.divmod(given["slot_mapping"], SIZE)
    assert given["k_pool"][page[4], 1, row[4], 3].view(np.uint8) == code
    assert given["k_scale"][page[4], 1, row[4]] == np.float32(1) / np.float32(127 if dtype == "int8" else 448)
    for name, x in wanted.items():
        for found in (given[name], simulated.outputs[name]):
            assert np.array_equal(found.astype(np.float64), x, equal_nan=True)


def test_rounding_is_to_the_nearest_for_every_value() -> None:
    """Every float16 below 448, in rows whose scale is 1."""
    values = np.arange(2**16, dtype=np.uint16).view(np.float16)
    values = np.resize(values[np.abs(values.astype(np.float32)) < 448], (4096, 15))
    k = np.concatenate([np.full((4096, 1), 448, np.float16), values], 1)[None, None]
    pool = np.zeros((1, 1, 4096, 16), numpy_dtype("float8_e4m3fn"))
    scales = np.zeros((1, 1, 4096), np.float32)
    given = {"k": k, "v": k.copy(), "k_pool": pool, "v_pool": pool.copy(), "k_scale": scales, "v_scale": scales.copy()}
    fl.append_kv(**given, slot_mapping=np.arange(4096), backend="emulator")
    assert (given["k_scale"] == 1).all()
    assert same(given["k_pool"][0, 0], rounded(k[0, 0].astype(np.float32), "float8_e4m3fn"))


@pytest.mark.parametrize("kv_dtype", [None, "int8", "float8_e4m3fn"])
def test_pages_are_copied_with_their_scales(kv_dtype: str | None) -> None:
    given = copy_arrays(4, **({"kv_dtype": kv_dtype, **TOKEN} if kv_dtype else {}))
    given["pairs"] = np.array([[5, 0], [5, 3], [2, 4]], np.int32)
    wanted = copied(given)
    for source, target in given["pairs"]:
        for name in wanted.keys() - {"pairs"}:
            wanted[name][target] = wanted[name][source]
    assert fl.copy_pages(**given, backend="emulator") is None
    assert all(same(given[name], x) for name, x in wanted.items())


def test_torch_on_a_cpu_is_written_in_place() -> None:
    torch = pytest.importorskip("torch")
    given = append_arrays(5, dtype="bfloat16")
    wanted = by_hand(given)
    tensors = {
        name: torch.from_numpy(x.view(np.int16)).view(torch.bfloat16) if name != "slot_mapping" else torch.from_numpy(x)
        for name, x in given.items()
    }
    fl.append_kv(**tensors, backend="emulator")
    for name, x in wanted.items():
        assert same(tensors[name].view(torch.int16).numpy(), x.view(np.int16))


def test_nothing_to_do_is_nothing_done() -> None:
    given, pairs = append_arrays(6, len_q=0, len_kv=0), copy_arrays(6, len_q=0)
    for call, arrays in ((fl.append_kv, given), (fl.copy_pages, pairs)):
        before = copied(arrays)
        call(**arrays, backend="emulator")
        assert all(same(arrays[name], x) for name, x in before.items())


def test_the_simulator_changes_nothing_and_plans_write_in_place() -> None:
    given = append_arrays(7)
    before, wanted = copied(given), by_hand(given)
    run = fl.simulate("append_kv", **given)
    assert all(same(run.outputs[name], x) for name, x in wanted.items())
    assert all(same(given[name], x) for name, x in before.items())
    p = APPEND.problem(given)
    for backend in ("simulator", "emulator"):
        plan, pools = fl.plan("append_kv", p, backend=backend), copied(given)
        outputs = plan.run(pools)
        assert outputs["k_pool"] is pools["k_pool"] and same(pools["v_pool"], wanted["v_pool"])
        with pytest.raises(fl.UsageError, match="k_pool = None: expected an array"):
            plan.run({name: x for name, x in pools.items() if name != "k_pool"})


def frozen(x: Any) -> Any:
    x = x.copy()
    x.flags.writeable = False
    return x


APPENDS: list[tuple[str, dict[str, Any], str]] = [
    (
        "a slot beyond the pool",
        {"slot_mapping": np.array([0, 24] + [-1] * 7)},
        r"slot_mapping\[1\] = 24: expected -1 to skip .* 0 to 23",
    ),
    ("a slot below -1", {"slot_mapping": np.array([-2] + [-1] * 8)}, r"slot_mapping\[0\] = -2"),
    (
        "a slot twice",
        {"slot_mapping": np.array([3, -1, 5, 3, 6, 7, 8, 9, 5])},
        r"slot_mapping\[3\] = 3: expected another slot than slot_mapping\[0\]",
    ),
    ("int32 slots", {"slot_mapping": np.zeros(9, np.int32)}, "slot_mapping.dtype = 'int32': expected int64"),
    ("too few slots", {"slot_mapping": np.arange(8)}, r"slot_mapping.shape = \(8,\): expected \(9,\)"),
    (
        "rows of three axes",
        {"k": np.zeros((2, 9, 16), np.float16)},
        r"k.shape = \(2, 9, 16\): expected \(1, kv_heads, tokens, head_dim\)",
    ),
    ("a batch of two", {"k": np.zeros((2, 2, 9, 16), np.float16)}, r"k.shape = \(2, 2, 9, 16\)"),
    ("another head dim", {"v": np.zeros((1, 2, 9, 8), np.float16)}, r"v.shape = \(1, 2, 9, 8\)"),
    (
        "another dtype",
        {"k_pool": np.zeros((6, 2, 4, 16), np.float32)},
        "k_pool.dtype = 'float32': expected float16, as k has",
    ),
    ("pools of two dtypes", {"v_pool": np.zeros((6, 2, 4, 16), np.int8)}, "v_pool.dtype = 'int8'"),
    ("other pages", {"v_pool": np.zeros((5, 2, 4, 16), np.float16)}, r"v_pool.shape = \(5, 2, 4, 16\)"),
    ("a scale without 8 bits", {"k_scale": np.zeros((6, 2, 4), np.float32)}, "k_scale = 'given': expected None"),
    ("no pool", {"k_pool": None}, "k_pool = None"),
    ("a read-only pool", {"k_pool": frozen(np.zeros((6, 2, 4, 16), np.float16))}, "k_pool = 'read-only array'"),
    ("a list", {"k_pool": [[1.0]]}, "k_pool = 'list': expected an array"),
    ("a wrong tile", {"tile": (6, 16)}, "tile = '6x16': expected a multiple of 4 rows"),
    ("an array for a backend", {"backend": np.zeros((3, 2))}, "backend = .*: expected "),
]


@pytest.mark.parametrize(("change", "message"), [case[1:] for case in APPENDS], ids=[case[0] for case in APPENDS])
def test_a_wrong_append_is_one_line(change: dict[str, Any], message: str) -> None:
    with pytest.raises(fl.UsageError, match=message) as error:
        fl.append_kv(**append_arrays() | {"backend": "emulator"} | change)
    assert "\n" not in str(error.value)


COPY: list[tuple[str, Any, str]] = [
    ("a page beyond", [[0, 6]], r"pairs\[0, 1\] = 6: expected a page of the pool, 0 to 5"),
    ("a page below", [[0, 1], [-1, 2]], r"pairs\[1, 0\] = -1"),
    (
        "a target twice",
        [[0, 1], [2, 1]],
        r"pairs\[1, 1\] = 1: expected another page: this one is the target of another pair",
    ),
    ("a chain", [[0, 1], [1, 2]], r"pairs\[0, 1\] = 1: expected another page: this one is copied, too"),
    ("three columns", [[0, 1, 2]], r"pairs.shape = \(1, 3\)"),
    ("one axis", [0, 1], r"pairs.shape = \(2,\)"),
]


@pytest.mark.parametrize(("pairs", "message"), [case[1:] for case in COPY], ids=[case[0] for case in COPY])
def test_wrong_pairs_are_one_line(pairs: Any, message: str) -> None:
    with pytest.raises(fl.UsageError, match=message):
        fl.copy_pages(**copy_arrays() | {"pairs": np.array(pairs, np.int32)}, backend="emulator")


def test_scales_come_with_a_pool_of_8_bits() -> None:
    given = append_arrays(kv_dtype="int8", **TOKEN)
    for change, message in (
        ({"k_scale": None}, r"k_scale = None: expected \(6, 2, 4\) float32: a pool of int8 gets a scale for each key"),
        ({"v_scale": np.zeros(2, np.float32)}, r"v_scale.shape = \(2,\)"),
        ({"v_scale": np.zeros((6, 2, 4), np.float16)}, "v_scale.dtype = 'float16'"),
    ):
        with pytest.raises(fl.UsageError, match=message):
            fl.append_kv(**given | change, backend="emulator")
    pools = copy_arrays(kv_dtype="int8", **TOKEN)
    with pytest.raises(fl.UsageError, match="k_scale = None|k_scale = 'token'"):
        fl.copy_pages(**pools | {"v_scale": None}, backend="emulator")


def test_pools_that_share_memory_are_refused() -> None:
    given = append_arrays()
    with pytest.raises(fl.UsageError, match="v_pool = 'memory shared with k_pool'"):
        fl.append_kv(**given | {"v_pool": given["k_pool"]}, backend="emulator")
    with pytest.raises(fl.UsageError, match="k_pool = 'memory shared with k'"):
        pool = np.zeros((9, 2, 1, 16), np.float16)
        rows = pool.transpose(2, 1, 0, 3)
        fl.append_kv(rows, given["v"], pool, pool.copy(), slot_mapping=np.arange(9), backend="emulator")
