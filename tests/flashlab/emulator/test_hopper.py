"""Hopper's primitives on the emulator: against NumPy, and seeded faults, each found by its sanitiser at its line."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from flashlab.emulator import Arena, Finding, Launched, build, tensor_map
from flashlab.emulator.build import compiler
from simulator.dtypes import numpy_dtype
from simulator.errors import UsageError
from tests.flashlab.emulator.sums import EIGHT
from tests.patches import patched
from tests.tiers import examples, one_of_each

pytestmark = pytest.mark.compiler

HERE = Path(__file__).parent / "hopper"
Array = np.ndarray[Any, Any]

# Boxes


def swizzled(rows: Array, width: int) -> Array:
    """Rows of bytes (n, pitch) as a box lies in SRAM: 16-byte piece c of 128-byte line r at place c ^ (r % 8), or fewer."""
    lines = np.ascontiguousarray(rows).reshape(-1, 16)
    place = np.arange(len(lines))
    line = place // 8
    out = np.empty_like(lines)
    out[place ^ (line % (width // 16) if width else 0)] = lines
    return out.reshape(-1)


@examples(40)
@given(data=st.data())
def test_boxes_against_numpy(data: st.DataObject) -> None:
    """Any corner, inside or out; any swizzle; elements of 1, 2 or 4 bytes; then the inverted box into another array."""
    draw = data.draw
    itemsize, width = draw(st.sampled_from([1, 2, 4])), draw(st.sampled_from([0, 32, 64, 128]))
    columns = (width or draw(st.sampled_from([16, 48, 128]))) // itemsize
    box = (columns, draw(st.integers(1, 20)), draw(st.integers(1, 2)), 1)
    # a whole number of the swizzle's periods
    box = (box[0], -(-box[1] * box[0] * itemsize // 1024) * 1024 // (box[0] * itemsize) or 1, *box[2:])
    shape = [draw(st.integers(1, n)) for n in (2, 3, 40, 150)]
    corner = [draw(st.integers(-n - 1, n + 1)) for n in shape]
    pitch = -(-shape[3] * itemsize // 16) * 16 + draw(st.sampled_from([0, 16]))
    random = np.random.default_rng(0)
    memory = random.integers(0, 256, (*shape[:3], pitch), np.uint8)
    nbytes = int(np.prod(box)) * itemsize

    inside = np.zeros((box[3], box[2], box[1], box[0] * itemsize), np.uint8)
    grids = np.meshgrid(*[c + np.arange(n) for c, n in zip(corner, reversed(box), strict=True)], indexing="ij")
    valid = np.all([(g >= 0) & (g < n) for g, n in zip(grids, shape, strict=True)], axis=0)
    elements = memory[..., : shape[3] * itemsize].reshape(*shape, itemsize)
    inside.reshape(*valid.shape, itemsize)[valid] = elements[tuple(g[valid] for g in grids)]

    arena = Arena()
    arena.put("x", memory)
    arena.buffers["x"].read_only = True
    copy = arena.put("y", memory)
    arena.new("seen", nbytes)
    strides = (pitch, pitch * shape[2], pitch * shape[2] * shape[1])
    maps = [tensor_map(arena.pointer(n), itemsize, shape[::-1], strides, box, swizzle=width) for n in "xy"]
    numbers = [np.int32(n).tobytes() for n in (*corner, nbytes, 1)]
    seen = np.uint64(arena.pointer("seen")).tobytes()
    library = build(HERE / "box.cu", ("-DFL_DTYPE=1",), watch=False)
    ran = library.launch("box", (1,), (32,), [*maps, seen, *numbers], arena, sram=nbytes + 8, time_limit=20)
    assert [str(x) for x in ran.findings] == []
    assert np.array_equal(arena.buffers["seen"].data, swizzled(inside.reshape(-1, 16), width))

    expected = memory.copy()
    places = tuple(g[valid] for g in grids)
    for e in range(itemsize):
        expected[(*places[:3], places[3] * itemsize + e)] ^= 0xFF
    assert np.array_equal(copy, expected)

    moved = {(row.op, row.tensor): row.bytes for row in ran.moved if row.op.startswith("tma")}
    stored = int(valid.sum()) * itemsize
    assert moved == {
        ("tma_ld", "x"): nbytes,
        ("tma_ld", "tile"): nbytes,
        ("tma_st", "y"): stored,
        ("tma_st", "tile"): nbytes,
    }


@pytest.mark.parametrize(
    ("rows", "columns", "pitch", "base", "loaded", "stored"),
    [(36, 64, 128, 0, 8192, 4608), (64, 40, 80, 0, 10240, 6144), (64, 64, 144, 16, 9216, 9216)],
)
def test_boxes_take_the_sectors_that_a_gpu_counted(
    rows: int, columns: int, pitch: int, base: int, loaded: int, stored: int
) -> None:
    """A box of 64 x 64 halves over an array of rows x columns. Loaded and stored: what an H200's counters showed, in bytes."""
    arena = Arena()
    for name in "xy":
        arena.put(name, np.zeros(base + 64 * pitch, np.uint8))
    arena.new("seen", 8192)
    maps = [
        tensor_map(arena.pointer(name) + base, 2, (columns, rows, 1, 1), (pitch, 16, 16), (64, 64, 1, 1))
        for name in "xy"
    ]
    numbers = [np.int32(n).tobytes() for n in (0, 0, 0, 0, 8192, 1)]
    library = build(HERE / "box.cu", ("-DFL_DTYPE=1",), watch=False)
    arguments = [*maps, np.uint64(arena.pointer("seen")).tobytes(), *numbers]
    ran = library.launch("box", (1,), (32,), arguments, arena, sram=8200, time_limit=20)
    found = {row.op: 32 * row.sectors for row in ran.moved if row.space == "hbm" and row.op.startswith("tma")}
    assert found == {"tma_ld": loaded, "tma_st": stored}


FENCE, STORE = "  emu_fence_async();\n", "emu_tma_store(&to, base, corner, 4);"
WAIT_READ = "    emu_tma_wait(0, true);\n"


@pytest.mark.alike("proxy fence forgotten", "input written", "tensor map", "out of bounds")
@pytest.mark.parametrize(
    ("changes", "rows", "kind", "said", "at"),
    [
        (((FENCE, ""),), 16, "proxy fence forgotten", "reads what a thread stored", STORE),
        (((WAIT_READ, ""),), 16, "wait forgotten", "ends while its copy still reads SRAM", STORE),
        (((WAIT_READ, "    store_shared(base, 0u);\n" + WAIT_READ),), 16, "race", "writes what another thread read",
         "store_shared(base, 0u)"),
        ((("    emu_tma_commit();\n", ""),), 16, "wait forgotten", "ends while its copy still reads SRAM", STORE),
        (((STORE, "emu_tma_store(&from, base, corner, 4);"),), 16, "input written", "writes an input", "emu_tma_store(&from"),
        (((STORE, "emu_tma_store(&to, base, corner, 3);"),), 16, "tensor map", "3 coordinates of an array of 4",
         "emu_tma_store(&to"),
        ((), 17, "out of bounds", "past the end of x", "tma_load(base, from"),
    ],
)  # fmt: skip
def test_faults_of_boxes(
    tmp_path: Path, changes: Sequence[tuple[str, str]], rows: int, kind: str, said: str, at: str
) -> None:
    """`rows`: as many as the maps say that arrays of 16 have."""
    source = (HERE / "box.cu").read_text(encoding="utf-8")
    for old, new in changes:
        source = patched(source, old, new)
    (tmp_path / "box.cu").write_text(source, encoding="utf-8")
    arena = Arena()
    arena.put("x", np.zeros((16, 64), np.uint16))
    arena.buffers["x"].read_only = True
    arena.new("y", 16 * 128)
    arena.new("seen", 4096)
    maps = [tensor_map(arena.pointer(n), 2, (64, rows, 1, 1), (128, 16, 16), (64, 32, 1, 1)) for n in "xy"]
    numbers = [np.int32(n).tobytes() for n in (0, 0, 0, 0, 4096, 1)]
    library = build(tmp_path / "box.cu", ("-DFL_DTYPE=1",), watch=False)
    arguments = [*maps, np.uint64(arena.pointer("seen")).tobytes(), *numbers]
    ran = library.launch("box", (1,), (32,), arguments, arena, sram=4104, time_limit=20)
    found = [x for x in ran.findings if x.kind == kind and said in x.message and _line(x) == line_of(source, at)]
    assert found, "\n".join(map(str, ran.findings))


@pytest.mark.parametrize(
    ("changed", "said"),
    [
        ({"pointer": 4104}, "pointer"),
        ({"extents": (0, 4)}, "extents"),
        ({"extents": ()}, "extents"),
        ({"strides": (200,)}, "strides"),
        ({"strides": (-256,)}, "strides"),
        ({"strides": ()}, "strides"),
        ({"box": (64, 257)}, "box"),
        ({"box": (32, 8)}, "as wide as the swizzle"),
        ({"box": (60, 8)}, "multiple of 16"),
        ({"swizzle": 16}, "swizzle"),
    ],
)
def test_maps_that_no_gpu_takes_are_refused(changed: dict[str, Any], said: str) -> None:
    given: dict[str, Any] = {
        "pointer": 4096,
        "itemsize": 2,
        "extents": (128, 40),
        "strides": (256,),
        "box": (64, 8),
        "swizzle": 128,
    }
    assert len(tensor_map(**given)) == 128
    with pytest.raises(UsageError, match=said):
        tensor_map(**{**given, **changed})


# Products

TYPES = {1: np.dtype("f2"), 2: numpy_dtype("bfloat16"), 3: np.dtype(ml_dtypes.float8_e4m3fn)}


def tile_bytes(x: Array) -> int:
    """Of panels of 128 bytes a row."""
    return -(-x.shape[1] * x.itemsize // 128) * len(x) * 128


@pytest.mark.alike("1-64-8-0-0-0", "2-16-256-1-1-1", "3-256-64-0-1-1", "2-128-176-0-0-0")
@pytest.mark.parametrize(
    ("element", "depth", "columns", "across", "registers", "keep"),
    [
        (1, 64, 8, 0, 0, 0), (1, 128, 128, 0, 0, 1), (2, 64, 48, 0, 1, 0), (2, 128, 176, 0, 0, 0), (1, 64, 64, 1, 1, 1),
        (2, 48, 128, 1, 1, 0), (1, 32, 192, 1, 0, 0), (2, 16, 256, 1, 1, 1), (3, 128, 80, 0, 0, 0), (3, 256, 64, 0, 1, 1),
    ],
)  # fmt: skip
def test_products_against_numpy(element: int, depth: int, columns: int, across: int, registers: int, keep: int) -> None:
    random = np.random.default_rng(0)
    a = random.standard_normal((64, depth)).astype(TYPES[element])
    b = random.standard_normal((depth, columns) if across else (columns, depth)).astype(TYPES[element])
    arena = Arena()
    for name, x in (("a", a), ("b", b)):
        arena.put(name, x.view(np.uint8))
        arena.buffers[name].read_only = True
    arena.new("c", 64 * columns * 4)
    macros = {
        "FL_DTYPE": 1,
        "EL": element,
        "DEPTH": depth,
        "WIDTH": columns,
        "ACROSS": across,
        "RS": registers,
        "KEEP": keep,
    }
    library = build(HERE / "product.cu", [f"-D{k}={v}" for k, v in macros.items()], watch=False)
    pointers = [np.uint64(arena.pointer(name)).tobytes() for name in "abc"]
    ran = library.launch("product", (1,), (128,), pointers, arena, sram=sum(map(tile_bytes, (a, b))), time_limit=20)
    assert [str(x) for x in ran.findings] == []
    wide = a.astype("f8") @ (b.astype("f8") if across else b.astype("f8").T) + keep
    scale = abs(a.astype("f8")) @ abs(b.astype("f8") if across else b.astype("f8").T)
    got = arena.buffers["c"].data.view("f4").reshape(64, columns)
    if element == 3:
        before = np.full(64 * columns, keep, np.float32)
        assert np.array_equal(got.reshape(-1), EIGHT.added(np.repeat(a, columns, axis=0), np.tile(b, (64, 1)), before))
    else:
        assert np.all(abs(got - wide) <= 2**-22 * (scale + 1))

    steps = depth * a.itemsize // 32
    read = {row.tensor: row.bytes for row in ran.moved if row.op == "gmma"}
    assert read == {**({} if registers else {"a": steps * 64 * 32}), "b": steps * columns * 32}
    assert {row.step for row in ran.moved if row.op == "gmma"} == {"multiply"}
    assert ran.flops == 2 * 64 * columns * depth


# The ring

TILES = 5


@dataclass(frozen=True)
class Ran:
    launched: Launched
    source: str
    right: bool

    @property
    def said(self) -> str:
        return "\n".join(map(str, self.launched.findings)) or "nothing"


def ring(folder: Path, changes: Sequence[tuple[str, str]] = (), *, swizzle: int = 128, watch: bool = False) -> Ran:
    """The ring with each code, which must occur once, replaced."""
    text = (HERE / "ring.cu").read_text(encoding="utf-8")
    for old, new in changes:
        text = patched(text, old, new)
    path = folder / "ring.cu"
    path.write_text(text, encoding="utf-8")
    random = np.random.default_rng(0)
    a, b = (random.standard_normal((n, 64)).astype("f2") for n in (64, 32 * TILES))
    arena = Arena()
    maps: list[bytes] = []
    for name, x, rows in (("a", a, 64), ("b", b, 32)):
        arena.put(name, x)
        arena.buffers[name].read_only = True
        extents, strides = (64, len(x), 1, 1), (128, 16, 16)
        maps.append(tensor_map(arena.pointer(name), 2, extents, strides, (64, rows, 1, 1), swizzle=swizzle))
    arena.new("c", 64 * 32 * TILES * 4)
    arguments = [*maps, np.uint64(arena.pointer("c")).tobytes(), np.int32(TILES).tobytes()]
    library = build(path, ("-DFL_DTYPE=1",), watch=watch)
    launched = library.launch("ring", (1,), (256,), arguments, arena, sram=8192 + 2 * 4096 + 5 * 8, time_limit=20)
    got = arena.buffers["c"].data.view("f4").reshape(64, -1)
    want = a.astype("f8") @ b.astype("f8").T
    return Ran(launched, text, bool(np.allclose(got, want, rtol=0, atol=1e-4)))


def line_of(source: str, text: str) -> int:
    assert source.count(text) == 1, f"{text!r}: {source.count(text)} times"
    return 1 + source.count("\n", 0, source.index(text))


@pytest.mark.parametrize("watch", [False, True])
def test_the_ring_is_sound(tmp_path: Path, watch: bool) -> None:
    ran = ring(tmp_path, watch=watch)
    assert ran.said == "nothing"
    assert ran.right
    assert {key: n for key, n in ran.launched.ledger.items() if key[0] != "store"} == {
        ("load_a", "a", "hbm.read"): 8192,
        ("load_a", "a", "sram.write"): 8192,
        ("load_b", "b", "hbm.read"): 4096 * TILES,
        ("load_b", "b", "sram.write"): 4096 * TILES,
        ("multiply", "a", "sram.read"): 4 * 64 * 32 * TILES,
        ("multiply", "b", "sram.read"): 4 * 32 * 32 * TILES,
    }


@dataclass(frozen=True, kw_only=True)
class Fault:
    """Texts replaced, the kind of finding that must say so, a piece of its message, its line, and the other party's."""

    mechanism: str
    changes: tuple[tuple[str, str], ...]
    kind: str
    says: str = ""
    at: str
    other: str = ""
    right: bool = False
    watch: bool = False


LOAD_B = "tma_load(b(slot).base, b_map, 0, 0, j * KEYS, 0, full(slot), EVICT_LAST);"
WAIT_FULL, WAIT_EMPTY = "mbarrier_wait(full(slot), round % 2);", "mbarrier_wait(empty(slot), round % 2 ^ 1);"
ARRIVE = "if (lane_id() == 0) mbarrier_arrive(empty(slot));"
EXPECT = "mbarrier_arrive_expect(full(slot), BTile::BYTES);"
MULTIPLY = "wgmma_ss(s, rows_operand(a, 0, k), rows_operand(b(slot), 0, k), k > 0);"
COMMIT, WAIT = "    wgmma_commit();\n", "    wgmma_wait<0>();\n"

FAULTS = [
    Fault(mechanism="no wait for the tile", changes=((WAIT_FULL, ";"),), kind="wait forgotten", says="waited for none",
          at=MULTIPLY, other=LOAD_B),
    Fault(mechanism="the wait's parity is wrong", changes=((WAIT_FULL, "mbarrier_wait(full(slot), round % 2 ^ 1);"),),
          kind="wait forgotten", says="ends phase", at="wgmma_ss(", other=LOAD_B),
    Fault(mechanism="the producer's parity is wrong", changes=((WAIT_EMPTY, "mbarrier_wait(empty(slot), round % 2);"),),
          kind="deadlock", says="phase 0 (parity 0) of an mbarrier: phase 0 has had 0 of 4 arrivals",
          at="mbarrier_wait(empty(slot), round % 2);"),
    Fault(mechanism="no bytes expected", changes=((EXPECT, "mbarrier_arrive(full(slot));"),), kind="mbarrier",
          says="bytes", at=LOAD_B),
    Fault(mechanism="too few bytes expected", changes=((EXPECT, "mbarrier_arrive_expect(full(slot), 4000);"),),
          kind="mbarrier", says="more bytes come than it expects", at=WAIT_FULL, right=True),
    Fault(mechanism="too many bytes expected", changes=((EXPECT, "mbarrier_arrive_expect(full(slot), 8192);"),),
          kind="deadlock", says="1 of 1 arrivals and 4096 of 8192 bytes", at=WAIT_FULL),
    Fault(mechanism="another slot is read", changes=((MULTIPLY, MULTIPLY.replace("b(slot)", "b(slot ^ 1)")),),
          kind="wait forgotten", says="copy is still on its way", at="wgmma_ss(", other=LOAD_B),
    Fault(mechanism="a slot is released before it is read",
          changes=((COMMIT + WAIT + "    " + ARRIVE, "    " + ARRIVE + "\n" + COMMIT + WAIT),), kind="race",
          says="writes what another thread read", at=LOAD_B, other=MULTIPLY, right=True),
    Fault(mechanism="the producer doesn't wait for the slot", changes=((WAIT_EMPTY, ""),), kind="mbarrier",
          says="arrives once too often", at=EXPECT),
    Fault(mechanism="no wait for the product", changes=((WAIT, ""),), kind="wait forgotten",
          says="reads an accumulator while its wgmma is still running",
          at="store_global(c + row * tiles * KEYS + column, make_float2(s[n][2 * half], s[n][2 * half + 1]));", other=MULTIPLY,
          watch=True),
    Fault(mechanism="the product isn't committed", changes=((COMMIT, ""),), kind="wait forgotten",
          says="ends while a wgmma", at=MULTIPLY),
    Fault(mechanism="an accumulator is written too early", changes=((COMMIT, "    s[0][0] = 0;\n" + COMMIT),),
          kind="wait forgotten", says="wrote an accumulator while its wgmma was still running", at="wgmma_wait<0>();", right=True),
    Fault(mechanism="no wgmma_fence", changes=(("wgmma_fence();", ""),), kind="fence forgotten", says="without a wgmma_fence",
          at=MULTIPLY, right=True),
    Fault(mechanism="the fence comes before the registers are written",
          changes=(("    wgmma_fence();\n", "    wgmma_fence();\n    for (auto& x : s) x[0] = x[1] = x[2] = x[3] = j;\n"),),
          kind="fence forgotten", says="accumulators it wrote after its last wgmma_fence", at=MULTIPLY, right=True),
    Fault(mechanism="the copy engine isn't shown the mbarriers", changes=(("    mbarrier_publish();\n", ""),),
          kind="proxy fence forgotten", says="wasn't shown", at=LOAD_B, right=True),
    Fault(mechanism="no barrier after the mbarriers are made", changes=(("  barrier();\n", ""),), kind="race",
          says="uses an mbarrier that another thread initialised", at="mbarrier_wait(a_full, 0);",
          other="mbarrier_init(a_full, 1);", right=True),
    Fault(mechanism="an mbarrier is never made", changes=(("    mbarrier_init(a_full, 1);\n", ""),), kind="mbarrier",
          says="nobody initialised", at="mbarrier_wait(a_full, 0);"),
    Fault(mechanism="an mbarrier is made twice", changes=(("mbarrier_init(full(slot), 1);", "mbarrier_init(full(0), 1);"),),
          kind="mbarrier", says="twice", at="mbarrier_init(full(0), 1);"),
    Fault(mechanism="an mbarrier of no arrivals", changes=(("mbarrier_init(empty(slot), 4);", "mbarrier_init(empty(slot), 0);"),),
          kind="mbarrier", says="phases of 0 arrivals", at="mbarrier_init(empty(slot), 0);"),
    Fault(mechanism="every lane arrives", changes=((ARRIVE, "mbarrier_arrive(empty(slot));"),), kind="mbarrier",
          says="may miss it", at=WAIT_EMPTY),
    Fault(mechanism="one warp doesn't arrive",
          changes=((ARRIVE, "if (lane_id() == 0 && warp_id() != 6) mbarrier_arrive(empty(slot));"),),
          kind="deadlock", says="phase 0 has had 3 of 4 arrivals", at=WAIT_EMPTY),
    Fault(mechanism="an arrival too many", changes=((EXPECT, EXPECT + " mbarrier_arrive(full(slot));"),), kind="mbarrier",
          says="arrives once too often", at="mbarrier_arrive(full(slot));", right=True),
    Fault(mechanism="a tile off the swizzle's period",
          changes=((LOAD_B, LOAD_B.replace("b(slot).base", "b(slot).base + 128")),),
          kind="misaligned", says="multiple of 1024", at="tma_load(b(slot).base + 128"),
    Fault(mechanism="a tile past SRAM's end", changes=((LOAD_B, LOAD_B.replace("b(slot).base", "b(slot + 1).base")),),
          kind="out of bounds", says="writes 16 bytes", at="tma_load(b(slot + 1)"),
    Fault(mechanism="a tile over the mbarriers", changes=((LOAD_B, LOAD_B.replace("b(slot).base", "b(slot + STAGES).base")),
                                                          ("STAGES = 2", "STAGES = 1")),
          kind="mbarrier", says="overwrites an mbarrier", at="tma_load(b(slot + STAGES)"),
    Fault(mechanism="an operand off the swizzle's period",
          changes=((MULTIPLY, MULTIPLY.replace("rows_operand(a, 0, k)", "rows_operand(a, 1, k)")),), kind="misaligned",
          says="swizzle's pattern", at="wgmma_ss("),
    Fault(mechanism="a warp leaves the product out",
          changes=(("    wgmma_fence();\n", "    if (warp_id() == 7) return;\n    wgmma_fence();\n"),),
          kind="deadlock", says="the other warps of its warpgroup", at="wgmma_wait<0>();"),
    Fault(mechanism="warps multiply different tiles", changes=((MULTIPLY, MULTIPLY.replace("b(slot)", "b(warp_id() == 6)")),),
          kind="divergent collective", says="issues another wgmma", at="wgmma_ss("),
    Fault(mechanism="a wait that one warp executes and the others don't",
          changes=((WAIT, "    if (warp_id() == 6) wgmma_wait<0>();\n" + WAIT),), kind="divergent collective",
          says="is in wgmma_wait, and another warp of its warpgroup in that of another line", at="if (warp_id() == 6)",
          other="    wgmma_wait<0>();\n    if (lane_id()", right=True),
    Fault(mechanism="a fence that one warp executes and the others don't",
          changes=(("    wgmma_fence();\n", "    if (warp_id() == 6) wgmma_fence();\n    wgmma_fence();\n"),),
          kind="divergent collective", says="is in wgmma_fence", at="if (warp_id() == 6)", right=True),
    Fault(mechanism="warps commit at two places",
          changes=((COMMIT, "    if (warp_id() == 6) wgmma_commit(), warp_barrier();\n    else wgmma_commit();\n"),),
          kind="divergent collective", says="is in wgmma_commit", at="wgmma_commit(), warp_barrier();", right=True),
    Fault(mechanism="warps multiply at two places",
          changes=((MULTIPLY, "if (warp_id() == 6) {\n" + MULTIPLY + " warp_barrier();\n} else {\n" + MULTIPLY + "\n}"),),
          kind="divergent collective", says="is in wgmma, and another warp", at="k > 0); warp_barrier();", right=True),
    Fault(mechanism="a wait for which one warp has left",
          changes=((WAIT, WAIT + "    if (warp_id() == 6 && j == tiles - 1) continue;\n    wgmma_wait<0>();  // again\n"),),
          kind="divergent collective", says="to which warp 2 of its warpgroup never comes", at="wgmma_wait<0>();  // again"),
    Fault(mechanism="a thread stores into an operand without a proxy fence",
          changes=((WAIT_FULL, WAIT_FULL + " store_shared(b(slot).base + 16 * threadIdx.x % 4096, make_uint4(0, 0, 0, 0));"
                               " named_barrier_sync(1, 128);"),),
          kind="proxy fence forgotten", says="reads what a thread stored", at=MULTIPLY, other="store_shared("),
    Fault(mechanism="a thread stores into an operand while it is read",
          changes=((COMMIT, COMMIT + "    store_shared(a.base + 16 * threadIdx.x, make_uint4(0, 0, 0, 0));\n"),),
          kind="race", says="writes what another thread read", at="store_shared(", other=MULTIPLY),
    Fault(mechanism="the mbarrier is written as memory", changes=((WAIT_FULL, WAIT_FULL + " store_shared(full(slot), 0u);"),),
          kind="mbarrier", says="overwrites an mbarrier", at="store_shared(full(slot), 0u);", right=True),
    Fault(mechanism="a named barrier of half a warp", changes=((WAIT_FULL, WAIT_FULL + " named_barrier_sync(1, 112);"),),
          kind="barrier", says="multiple of a warp", at="named_barrier_sync(1, 112);"),
    Fault(mechanism="a named barrier past the last", changes=((WAIT_FULL, WAIT_FULL + " named_barrier_sync(16, 128);"),),
          kind="barrier", says="barrier 16 of", at="named_barrier_sync(16, 128);"),
    Fault(mechanism="a named barrier that the producer doesn't come to",
          changes=((WAIT_FULL, WAIT_FULL + " named_barrier_sync(1, 256);"),), kind="deadlock",
          says="takes 256 threads, as 128 do", at="named_barrier_sync(1, 256);"),
    Fault(mechanism="a shuffle that half of a warp doesn't come to",
          changes=((ARRIVE, "if (lane_id() < 16) s[0][0] = shuffle_xor(s[0][0], 1);\n    warp_barrier();\n    " + ARRIVE),),
          kind="divergent collective", says="waits in", at="s[0][0] = shuffle_xor(s[0][0], 1);"),
    Fault(mechanism="no map", changes=((LOAD_B, "tma_load(b(slot).base, TensorMap{}, 0, 0, 0, 0, full(slot), EVICT_LAST);"),),
          kind="tensor map", says="no tensor map", at="tma_load(b(slot)"),
]  # fmt: skip


@pytest.mark.parametrize("fault", one_of_each(FAULTS, lambda f: f.kind, lambda f: f.mechanism.replace(" ", "-")))
def test_fault_is_found_at_its_line(tmp_path: Path, fault: Fault) -> None:
    if fault.watch and "clang" in compiler()[1]:
        pytest.skip("clang++ doesn't report reads of accumulators: use g++")
    ran = ring(tmp_path, fault.changes, watch=fault.watch)
    at = line_of(ran.source, fault.at)
    found = [x for x in ran.launched.findings if x.kind == fault.kind and fault.says in x.message and _line(x) == at]
    assert found, ran.said
    if fault.other:
        other = line_of(ran.source, fault.other)
        assert any(x.other_line is not None and x.other_line.number == other for x in found), ran.said
    assert ran.right == fault.right, ran.said


def _line(finding: Finding) -> int | None:
    return finding.line and finding.line.number


def test_another_swizzle_is_seen_in_the_numbers(tmp_path: Path) -> None:
    """Nothing is misused: the tensor cores read 128-byte swizzle where none is."""
    text = "\n".join(map(str, ring(tmp_path).launched.findings))
    assert text == ""
    ran = ring(tmp_path, swizzle=0)
    assert ran.said == "nothing"
    assert not ran.right


def test_without_watching_registers_a_missing_wait_still_shows(tmp_path: Path) -> None:
    ran = ring(tmp_path, [(WAIT, "")])
    assert not ran.right
    assert any(x.kind == "wait forgotten" and "ends while a wgmma" in x.message for x in ran.launched.findings)


# Registers and polling


@pytest.mark.alike(4)
@pytest.mark.parametrize(
    ("changes", "kind", "said"),
    [
        ((), "", ""),
        ((("<24>", "<60>"),), "registers", "multiple of 8"),
        ((("<24>", "<16>"),), "registers", "24 to 256"),
        ((("release_registers<24>", "claim_registers<24>"),), "registers", "claims 24 registers"),
        ((("claim_registers<256>", "release_registers<264>"),), "registers", "264"),
        (
            (("release_registers<24>();", "if (warp_id() < 3) release_registers<24>();"),),
            "divergent collective",
            "warp 3 of its",
        ),
        (
            (("release_registers<24>();", "warp_id() < 3 ? release_registers<24>() : release_registers<32>();"),),
            "divergent collective",
            "another operand",
        ),
    ],
)
def test_registers(tmp_path: Path, changes: Sequence[tuple[str, str]], kind: str, said: str) -> None:
    text = (HERE / "registers.cu").read_text(encoding="utf-8")
    for old, new in changes:
        assert text.count(old) == 1
        text = text.replace(old, new)
    (tmp_path / "registers.cu").write_text(text, encoding="utf-8")
    library = build(tmp_path / "registers.cu", ("-DFL_DTYPE=1",), watch=False)
    ran = library.launch("registers", (1,), (256,), [bytes(8)], Arena(), time_limit=20)
    assert {x.kind for x in ran.findings} == ({kind} if kind else set())
    assert all(said in x.message for x in ran.findings)


def test_registers_that_nobody_gives_up(tmp_path: Path) -> None:
    text = (HERE / "registers.cu").read_text(encoding="utf-8").replace("256, 1", "384, 1").replace("<256>", "<240>")
    for given_up, waits in (("<24>", False), ("<32>", True)):
        (tmp_path / "registers.cu").write_text(text.replace("<24>", given_up), encoding="utf-8")
        library = build(tmp_path / "registers.cu", ("-DFL_DTYPE=1",), watch=False)
        ran = library.launch("registers", (1,), (384,), [bytes(8)], Arena(), time_limit=20)
        assert [x.kind for x in ran.findings] == (["deadlock"] if waits else [])


def test_polling_lets_others_run() -> None:
    arena = Arena()
    arena.new("count", 4)
    library = build(HERE / "polling.cu", ("-DFL_DTYPE=1",), watch=False)
    argument = np.uint64(arena.pointer("count")).tobytes()
    ran = library.launch("polling", (1,), (64,), [argument], arena, sram=16, time_limit=20)
    assert [str(x) for x in ran.findings] == []
    assert arena.buffers["count"].data.view("i4")[0] == 1
