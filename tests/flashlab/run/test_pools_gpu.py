"""append_kv and copy_pages on a GPU: every bit, graphs that follow new slots, streams, and pools beyond 2^31 elements."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

import flashlab as fl
from simulator.operations.append import APPEND
from simulator.operations.copies import COPIES

pytestmark = [pytest.mark.gpu, pytest.mark.filterwarnings("default")]

TOKEN = {"k_scale": "token", "v_scale": "token"}
SIZES: dict[str, dict[str, Any]] = {
    "bfloat16": {"dtype": "bfloat16"},
    "float32, wide heads": {"dtype": "float32", "head_dim": 256},
    "pages of one key": {"page_size": 1, "pages": 1500},
    "an odd page": {"page_size": 7, "pages": 250, "head_dim": 80},
    "int8": {"kv_dtype": "int8", **TOKEN},
    "e4m3": {"kv_dtype": "float8_e4m3fn", **TOKEN, "dtype": "bfloat16"},
}


def problem(case: str, **more: Any) -> fl.Problem:
    sizes: dict[str, Any] = {
        "heads": 8,
        "head_dim": 128,
        "dtype": "float16",
        "page_size": 16,
        "pages": 100,
        **SIZES[case],
        **more,
    }
    return fl.Problem(batch=1, **sizes)


def on_the_gpu(arrays: Any) -> dict[str, Any]:
    import cupy

    from flashlab.base.host import from_numpy

    return {name: cupy.ascontiguousarray(from_numpy(np.ascontiguousarray(x), "cupy")) for name, x in arrays.items()}


def bits(x: Any) -> bytes:
    import cupy

    values = (
        cupy.asnumpy(cupy.ascontiguousarray(x).view(np.uint8))
        if not isinstance(x, np.ndarray)
        else np.ascontiguousarray(x).view(np.uint8)
    )
    return values.tobytes()


@pytest.mark.parametrize("case", SIZES)
@pytest.mark.parametrize("kind", APPEND.kinds)
def test_an_append_is_the_simulators_to_the_bit(case: str, kind: str) -> None:
    arrays = APPEND.draw(problem(case, len_q=999, len_kv=800), 1, kind)
    given = on_the_gpu(arrays)
    fl.append_kv(**given)
    for name, x in fl.simulate("append_kv", **arrays).outputs.items():
        assert bits(given[name]) == bits(x), name


@pytest.mark.parametrize("case", SIZES)
def test_a_copy_is_the_simulators_to_the_bit(case: str) -> None:
    arrays = COPIES.draw(problem(case, len_q=40), 2)
    given = on_the_gpu(arrays)
    fl.copy_pages(**given)
    for name, x in fl.simulate("copy_pages", **arrays).outputs.items():
        assert bits(given[name]) == bits(x), name


@pytest.mark.parametrize("layout", ["nhd", "packed"])
def test_views_are_written_where_they_lie(layout: str) -> None:
    import cupy

    arrays = APPEND.draw(problem("bfloat16", dtype="float16", len_q=500, len_kv=400), 3)
    given, wanted = on_the_gpu(arrays), fl.simulate("append_kv", **arrays).outputs
    if layout == "nhd":
        for name in ("k_pool", "v_pool"):
            given[name] = cupy.ascontiguousarray(given[name].swapaxes(1, 2)).swapaxes(1, 2)
    else:
        both = cupy.concatenate([given["k_pool"], given["v_pool"]], -1)
        given |= {"k_pool": both[..., :128], "v_pool": both[..., 128:]}
    for name in "kv":  # rows of tokens
        given[name] = cupy.ascontiguousarray(given[name][0].swapaxes(0, 1)).swapaxes(0, 1)[None]
    fl.append_kv(**given)
    assert all(bits(given[name]) == bits(x) for name, x in wanted.items())


def test_a_pool_that_would_have_to_be_copied_is_refused() -> None:
    import cupy

    k, pool = cupy.zeros((1, 2, 3, 20), np.float16), cupy.zeros((4, 2, 16, 20), np.float16)
    with pytest.raises(fl.UsageError, match="k_pool.strides = .*what is written in place isn't copied"):
        fl.append_kv(k, k.copy(), pool, pool.copy(), slot_mapping=cupy.arange(3))


def test_a_captured_graph_is_replayed_with_other_slots_and_pairs() -> None:
    import cupy

    arrays = APPEND.draw(problem("bfloat16", len_q=64, len_kv=64), 4)
    given = on_the_gpu(arrays)
    pairs = cupy.asarray(np.array([[0, 50], [1, 51]], np.int32))
    pools = {name: given[name] for name in ("k_pool", "v_pool")}
    warm = {name: x.copy() for name, x in given.items()}
    fl.append_kv(**warm)
    fl.copy_pages(warm["k_pool"], warm["v_pool"], pairs.copy())
    cupy.cuda.Device().synchronize()
    stream = cupy.cuda.Stream(non_blocking=True)
    with stream:
        stream.begin_capture()
        fl.copy_pages(**pools, pairs=pairs)
        fl.append_kv(**given)
        graph = stream.end_capture()
    before = {name: bits(x) for name, x in pools.items()}
    assert before == {name: bits(arrays[name]) for name in pools}  # capturing runs nothing
    for turn in range(2):
        slots = np.random.default_rng(turn).permutation(1600)[:64]
        slots[::5] = -1
        told = np.array([[2 + turn, 60 + turn], [7, 70 + turn]], np.int32)
        wanted = {
            name: fl.simulate("copy_pages", **{x: _back(pools[x], arrays) for x in pools}, pairs=told).outputs[name]
            for name in pools
        }
        new = {**arrays, **wanted, "slot_mapping": slots}
        given["slot_mapping"].set(slots)
        pairs.set(told)
        cupy.cuda.Device().synchronize()
        graph.launch(stream)
        stream.synchronize()
        for name, x in fl.simulate("append_kv", **new).outputs.items():
            assert bits(given[name]) == bits(x)


def _back(x: Any, arrays: Any) -> Any:
    return np.frombuffer(bits(x), arrays["k_pool"].dtype).reshape(arrays["k_pool"].shape)


def test_append_and_read_on_two_streams_are_ordered_by_events() -> None:
    """The reader waits for the writer's event, and the writer for the reader's: each round has its own keys and values."""
    import cupy

    p = fl.Problem(batch=1, heads=8, len_q=1, len_kv=4096, head_dim=128, dtype="float16", page_size=16)
    k = cupy.zeros((p.pages, 8, 16, 128), np.float16)
    v = cupy.zeros_like(k)
    table, slots = cupy.arange(p.pages, dtype=np.int32)[None], cupy.arange(4096)
    q = cupy.random.standard_normal((1, 8, 1, 128)).astype(np.float16)
    writer, reader = cupy.cuda.Stream(non_blocking=True), cupy.cuda.Stream(non_blocking=True)
    cupy.cuda.Device().synchronize()
    outs: list[Any] = []
    read = None
    for turn in range(20):
        with writer:
            if read is not None:
                writer.wait_event(read)
            new = cupy.full((1, 8, 4096, 128), turn + 1, np.float16)
            fl.append_kv(new, new, k, v, slot_mapping=slots)
            written = writer.record()
        with reader:
            reader.wait_event(written)
            outs.append(fl.attention(q, k, v, block_table=table))
            read = reader.record()
    cupy.cuda.Device().synchronize()
    for turn, out in enumerate(outs):
        assert float(abs(out - (turn + 1)).max()) < 0.1  # an old row would be off by 1


@pytest.mark.parametrize("kv_dtype", [None, "int8"])
def test_pools_beyond_2_31_elements(kv_dtype: str | None) -> None:
    """The last pages lie more than 2^31 elements behind the first."""
    import cupy

    pages = 2**31 // (8 * 16 * 128) + 100
    dtype = np.float16 if kv_dtype is None else np.int8
    pools = {name: cupy.zeros((pages, 8, 16, 128), dtype) for name in ("k_pool", "v_pool")}
    scales = {} if kv_dtype is None else {f"{x}_scale": cupy.zeros((pages, 8, 16), np.float32) for x in "kv"}
    rows = on_the_gpu(
        {
            name: np.random.default_rng(i).standard_normal((1, 8, 40, 128)).astype(np.float16)
            for i, name in enumerate("kv")
        }
    )
    slots = pages * 16 - 1 - 3 * cupy.arange(40)
    fl.append_kv(**rows, **pools, **scales, slot_mapping=slots)
    fl.copy_pages(**pools, **scales, pairs=cupy.asarray(np.array([[pages - 1, pages - 50], [pages - 2, 0]], np.int32)))
    page, row = slots // 16, slots % 16
    cache = None if kv_dtype is None else fl.quantize_cache(rows["k"], rows["v"], kv_dtype)
    for name in "kv":
        wanted = cupy.asnumpy(rows[name]) if cache is None else getattr(cache, name)
        pool = pools[f"{name}_pool"]
        assert bits(pool[page, :, row]) == bits(wanted[0].swapaxes(0, 1))
        assert bits(pool[pages - 50]) == bits(pool[pages - 1]) and bits(pool[0]) == bits(pool[pages - 2])
        assert int(cupy.count_nonzero(pool[1 : pages - 60])) == 0
        if cache is not None:
            scale = scales[f"{name}_scale"]
            assert bits(scale[page, :, row]) == bits(getattr(cache, f"{name}_scale")[0].T)
            assert bits(scale[0]) == bits(scale[pages - 2])


def test_torch_is_written_in_place() -> None:
    torch = pytest.importorskip("torch")
    arrays = APPEND.draw(problem("bfloat16", dtype="float16", len_q=300, len_kv=200), 5)
    given = {name: torch.from_numpy(x).cuda() for name, x in arrays.items()}
    fl.append_kv(**given)
    for name, x in fl.simulate("append_kv", **arrays).outputs.items():
        assert given[name].cpu().numpy().tobytes() == x.tobytes()
