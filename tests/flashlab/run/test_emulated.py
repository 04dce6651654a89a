"""`fl.attention(..., backend="emulator")`: what it takes, what it gives back, what it refuses."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import flashlab as fl
import kernels_cu
from flashlab.run import emulated
from flashlab.verify.cases import LAYOUTS
from flashlab.verify.memory import frame_named, place
from flashlab.verify.rule import expect, judge
from simulator.dtypes import numpy_dtype
from simulator.operations.attention import ATTENTION
from tests.patches import patched
from tests.simulator.problems import scores, taken_by

pytestmark = pytest.mark.compiler

ALGORITHMS = [
    name
    for name in fl.catalogue.with_kernels(ATTENTION, language="cuda")
    if not fl.CATALOGUE[name].arch and not fl.CATALOGUE[name].support.queries
]
SMALL = fl.Problem(batch=1, heads=2, kv_heads=1, len_q=40, len_kv=50, head_dim=32, dtype="float16", causal=True)


def attention(*arrays: Any, **options: Any) -> Any:
    return fl.attention(*arrays, backend="emulator", **options)


@pytest.mark.long
@pytest.mark.parametrize("dtype", ["float32", "float16", "bfloat16"])
@settings(max_examples=6)
@given(data=st.data())
def test_arrays_of_numpy_however_they_lie(dtype: str, data: st.DataObject) -> None:
    """The right numbers in new arrays of the inputs' dtype; of the inputs not a byte is changed."""
    layouts = st.sampled_from(list(LAYOUTS))
    algorithm, changes = data.draw(st.sampled_from(ALGORITHMS)), data.draw(scores)
    p = SMALL.replace(dtype=dtype, head_dim=data.draw(st.sampled_from([32, 19])), causal=data.draw(st.booleans()))
    p = taken_by(algorithm, p.replace(**changes))
    plain: Any = ATTENTION.draw(p, seed=3)
    placed = {name: place(frame_named("numpy"), x, data.draw(layouts), float("nan")) for name, x in plain.items()}
    views: Any = {name: x.view for name, x in placed.items()}
    out, lse = attention(**views, algorithm=algorithm, **p.masks, lse=True, tile=(32, 16))
    assert [x.harm() for x in placed.values() if x.harm()] == []
    assert out.dtype == numpy_dtype(dtype) and lse.dtype == np.float32
    assert out.flags.c_contiguous and out.flags.writeable
    judgement = judge(expect(p, **plain), out, lse)
    assert judgement.passed, judgement.message


def test_reversed_and_broadcast_inputs() -> None:
    """Strides below one that a kernel can't take: copied, never misread."""
    q, k, v = fl.random_inputs(SMALL)
    q, k, v = q[:, :, ::-1], np.broadcast_to(k[:, :, :1], k.shape), v[..., ::-1]
    ref = fl.naive(q, k, v)
    assert abs(attention(q, k, v) - ref.out).max() < 2e-3


def test_lse_only_where_asked_for() -> None:
    arrays = fl.random_inputs(SMALL)
    out = attention(*arrays, causal=True)
    again, lse = attention(*arrays, causal=True, lse=True)
    assert out.tobytes() == again.tobytes() and lse.shape == out.shape[:3]


@pytest.mark.alike("t4", "h100")
@pytest.mark.parametrize("device", ["a100", "t4", "h100", "l40s"])
def test_built_for_a_gpu(device: str) -> None:
    arrays = fl.random_inputs(SMALL)
    judgement = judge(expect(SMALL, *arrays), attention(*arrays, causal=True, device=device), None)
    assert judgement.passed, judgement.message


def test_the_sram_of_a_block_is_the_tile_programs() -> None:
    """Of a ragged batch, too, where a warp tells itself its next units. Seeded: a formula with 16 bytes more, and a device where
    the tile program alone doesn't fit."""
    p = fl.Problem(batch=1, heads=1, lengths=[(1, 1)], head_dim=128, dtype="float16")
    run = fl.emulate("flash_decoding", **ATTENTION.draw(p), **p.masks)
    assert run.passed, run.complaints()
    (launch,) = run.counts.launches
    more = replace(run.counts, launches=(replace(launch, sram_peak=launch.sram_peak + 16),))
    other = replace(run, counts=more)
    assert not other.passed
    (line,) = other.complaints()
    assert line == f"flash_decoding: 222,112 bytes of SRAM per block in the tile program, the formula {222_112 + 16:,}"
    small = replace(run.counts, device=run.counts.device.replace(sram_per_block=10_000))
    (line,) = replace(run, counts=small).complaints()
    assert "bytes of SRAM per block, and h100 has 10,000" in line


@pytest.mark.parametrize(("len_q", "len_kv"), [(0, 5), (5, 0)])
def test_nothing_to_do(len_q: int, len_kv: int) -> None:
    out, lse = attention(*fl.random_inputs(SMALL.replace(len_q=len_q, len_kv=len_kv)), lse=True)
    assert out.shape == (1, 2, len_q, 32) and not out.any()
    assert np.all(lse == -np.inf)


def test_memory_maps_are_arrays_of_numpy(tmp_path: Path) -> None:
    q, k, v = fl.random_inputs(SMALL)
    np.save(tmp_path / "q.npy", q)
    mapped = np.load(tmp_path / "q.npy", mmap_mode="r")
    assert attention(mapped, k, v).tobytes() == attention(q, k, v).tobytes()


# out=


def test_out_is_written_and_returned() -> None:
    arrays = fl.random_inputs(SMALL)
    wide = np.full((1, 40, 2, 64), 7, np.float16)
    out = wide.transpose(0, 2, 1, 3)[..., ::2]  # every other element of rows of another order
    assert attention(*arrays, out=out) is out
    assert out.tobytes() == attention(*arrays).tobytes()
    assert np.all(wide[..., 1::2] == 7)
    same, lse = attention(*arrays, out=out, lse=True)
    assert same is out and lse.shape == (1, 2, 40)


def read_only(x: Any) -> Any:
    x.flags.writeable = False
    return x


Q = np.zeros((1, 2, 40, 32), np.float16)
BAD_OUT = [
    (
        lambda _: np.zeros((1, 2, 40, 16), "f2"),
        "out.shape = (1, 2, 40, 16): expected (1, 2, 40, 32), its axes are batch",
    ),
    (lambda _: np.zeros(Q.shape, "f4"), "out.dtype = 'float32': expected float16"),
    (lambda q: q, "out = 'memory shared with q': expected an array apart from the inputs"),
    (lambda _: read_only(np.zeros(Q.shape, "f2")), "out = 'read-only array'"),
    (
        lambda _: np.ma.array(np.zeros(Q.shape, "f2"), mask=True, hard_mask=True),
        "out = masked array: expected an array",
    ),
    (lambda _: np.lib.stride_tricks.as_strided(Q.copy(), Q.shape, (0, 0, 64, 2)), "don't overlap each other"),
    (lambda _: [[1.0]], "out = 'list': expected a NumPy array"),
]


@pytest.mark.parametrize(("made", "line"), BAD_OUT, ids=[line for _, line in BAD_OUT])
def test_out_that_cannot_be_written(made: Any, line: str, monkeypatch: pytest.MonkeyPatch) -> None:
    def never(*_: Any, **__: Any) -> None:
        raise AssertionError("ran")

    monkeypatch.setattr(emulated, "emulate_problem", never)
    q, k, v = fl.random_inputs(SMALL)
    with pytest.raises(fl.UsageError) as refused:
        attention(q, k, v, out=made(q))
    assert line in str(refused.value) and "\n" not in str(refused.value)


# Bad input

WIDE = np.zeros((1, 2, 4, 264), np.float16)
BAD = [
    ({"algorithm": "flsh2"}, "did you mean flash2?"),
    ({"device": "h10"}, "device = 'h10'"),
    ({"tile": "2048x2048"}, "bytes of SRAM per block"),
    ({"tile": (24, 32)}, "tile = '24x32': expected multiples of 16"),
    ({"window": 3}, "window = 3"),
    ({"scale": float("inf")}, "scale = inf"),
    ({"q": [1.0]}, "q"),
    ({"k": [1.0]}, "k = 'list': expected an array of the same kind as q (ndarray)"),
    ({"k": Q[:, :1, :, :16]}, "head_dim"),
    ({"k": Q[0]}, "k.shape"),
    ({"q": Q.astype("f8"), "k": Q.astype("f8"), "v": Q.astype("f8")}, "float64"),
    ({"v": Q[:, :1].astype("f4")}, "v.dtype = 'float32': expected float16"),
    ({"q": np.zeros((1, 3, 4, 32), "f2"), "k": Q, "v": Q}, "kv_heads = 2: expected a divisor of heads = 3"),
    ({"q": WIDE, "k": WIDE, "v": WIDE}, "head_dim = 264"),
]


@pytest.mark.parametrize(("change", "line"), BAD, ids=[line for _, line in BAD])
def test_bad_input_gets_one_line(change: dict[str, Any], line: str) -> None:
    given: dict[str, Any] = {"q": Q, "k": Q[:, :1], "v": Q[:, :1]} | change
    with pytest.raises(fl.UsageError) as refused:
        attention(given.pop("q"), given.pop("k"), given.pop("v"), **given)
    assert line in str(refused.value) and "\n" not in str(refused.value)


def test_a_program_of_ones_own_has_no_kernel() -> None:
    @fl.program
    def mine(m: Any, q: Any, k: Any, v: Any, problem: Any, tile: Any) -> Any: ...

    with pytest.raises(fl.UsageError, match="one with a kernel"):
        attention(*fl.random_inputs(SMALL), algorithm=mine)


# A kernel that misuses the machine


@pytest.fixture
def changed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Any:
    """Puts a changed copy in the place of an algorithm's source; how code is found: tests/patches.py."""
    real = kernels_cu.source

    def change(name: str, step: str | None, old: str, new: str) -> None:
        text = patched(real(name).read_text(encoding="utf-8"), old, new, step=step)
        (tmp_path / real(name).name).write_text(text, encoding="utf-8")
        monkeypatch.setattr(kernels_cu, "source", lambda asked: tmp_path / real(asked).name)

    return change


def test_misuse_raises_and_leaves_out_alone(changed: Any) -> None:
    changed("flash2", "load_k", "copy_wait<0>(); … barrier();", "")
    q, k, v = fl.random_inputs(SMALL)
    out = np.full_like(q, 7)
    with pytest.raises(fl.EmulationError) as misused:
        attention(q, k, v, out=out)
    races = [line for line in str(misused.value).splitlines() if " race: " in line]
    assert "flash2.cu:" in races[0] and ", step " in races[0] and "in SRAM" in races[0]
    assert np.all(out == 7)


def test_what_is_not_written_raises(changed: Any) -> None:
    changed("flash2", None, "const bool inside = row < shape.len_q;", "const bool inside = row < shape.len_q - 1;")
    with pytest.raises(fl.EmulationError, match="never written"):
        attention(*fl.random_inputs(SMALL.replace(len_q=3)))


@pytest.mark.long
def test_verify_names_the_misuse(changed: Any) -> None:
    changed("flash2", "load_k", "copy_wait<0>(); … barrier();", "")
    report = fl.verify("flash2", backend="emulator", dtypes=["float16"], checks=["gqa"], examples=1)
    assert not report.passed
