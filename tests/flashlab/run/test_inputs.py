"""The packaged sample is what its note says, and no file, however malformed, does more than one clear line."""

from __future__ import annotations

import json
import os
import zipfile
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import pytest
from hypothesis import HealthCheck, given
from hypothesis import strategies as st
from safetensors.numpy import save_file

import flashlab as fl
from flashlab.run.inputs import InputError, Inputs, load_inputs, sample
from simulator import memory
from tests.tiers import examples

ROOT = Path(__file__).resolve().parents[3]
FILE = ROOT / "flashlab" / "data" / "sample.npz"


def normal(*shape: int, dtype: Any = np.float32) -> np.ndarray[Any, Any]:
    return np.random.default_rng(0).standard_normal(shape).astype(dtype)


def refused(path: Path) -> str:
    """The one line with which a file is refused."""
    with pytest.raises(InputError) as caught:
        load_inputs(path)
    line = str(caught.value)
    assert isinstance(caught.value, ValueError) and "\n" not in line and ": expected " in line
    return line


# ----------------------------------------------------------------------------- the sample


@pytest.fixture(scope="module")
def data() -> Inputs:
    return sample()


@pytest.fixture(scope="module")
def maps(data: Inputs) -> np.ndarray[Any, Any]:
    """The four heads' attention, (4, length, length)."""
    q, k = (x[0].astype(np.float64) for x in (data.q, data.k))
    scores = q @ np.repeat(k, 2, axis=0).swapaxes(-1, -2) * data.note["scale"]
    scores[:, np.triu(np.ones((1024, 1024), bool), 1)] = -np.inf
    p = np.exp(scores - scores.max(-1, keepdims=True))
    return p / p.sum(-1, keepdims=True)


def test_the_sample_has_the_shapes_and_size_it_promises(data: Inputs):
    assert [x.shape for x in data] == [(1, 4, 1024, 64), (1, 2, 1024, 64), (1, 2, 1024, 64)]
    assert all(x.dtype == np.float16 and np.isfinite(x).all() and np.ptp(x) > 1 for x in data)
    assert FILE.stat().st_size <= 1_500_000
    assert data.causal is True and data.note["scale"] == 64**-0.5
    assert data.note["error_against_model"] < 1e-3  # what rounding q, k and v to float16 changes


def test_the_sample_stands_on_the_text_it_names(data: Inputs):
    assert data.tokens is not None and data.tokens.shape == (1024,) and len(data.pieces) == 1024
    assert data.text.startswith("def _nextmonth(year, month):\n    if month == 12:\n")
    of_token = dict(zip(data.tokens.tolist(), data.pieces, strict=True))
    assert [of_token[token] for token in data.tokens.tolist()] == list(data.pieces)
    compile(data.text[: data.text.index("\nclass ")], "sample", "exec")  # whole functions, whole lines
    assert "PSF" in data.note["licence"]
    assert "Copyright (c) 2001-2023 Python Software Foundation" in FILE.with_name("LICENSE-PSF.txt").read_text("utf-8")


def test_the_sample_was_trained_as_the_log_says(data: Inputs):
    log = json.loads(FILE.with_name("sample_training.json").read_text("utf-8"))
    note = data.note
    assert (note["seed"], note["text_sha256"], note["unit"]) == (log["seed"], log["sha256"], log["unit"])
    assert (note["train_loss"], note["held_out_loss"]) == (log["train_loss"], log["held_out_loss"])
    curve = log["curve"]
    assert curve[-1]["step"] == log["steps"] and abs(curve[-1]["held_out"] - log["held_out_loss"]) < 0.01
    assert log["held_out_loss"] < 1.9 < 3 < curve[0]["held_out"] < np.log(1024)  # where it began
    assert note["sample_loss"] < 1.9


def test_the_heads_of_the_sample_look_where_the_note_says(data: Inputs, maps: np.ndarray[Any, Any]):
    assert data.tokens is not None
    t = data.tokens.tolist()
    follow = np.zeros((1024, 1024), bool)
    seen: dict[tuple[int, int], list[int]] = {}
    for i in range(1, 1024):
        follow[i, seen.setdefault((t[i - 1], t[i]), [])] = True
        seen[t[i - 1], t[i]].append(i + 1)
    # a pair met two tokens ago is followed by the query's own token: that one is visible too
    asked = follow.any(-1)
    starts = np.array([piece.startswith("\n") for piece in data.pieces])
    inside = [(i, brackets[-1]) for i, brackets in enumerate(still_open(data.pieces)) if brackets]
    assert len(inside) > 200
    index = np.arange(1, 1024)
    uniform = np.tri(1024) / np.arange(1, 1025)[:, None]
    for p, scores in zip([*maps, uniform], [*data.note["scores"], data.note["uniform"]], strict=True):
        found = {
            "induction": (p * follow).sum(-1)[asked].mean(),
            "open_bracket": np.mean([p[place] for place in inside]),
            "previous": p[index, index - 1].mean(),
            "line_start": (p * starts).sum(-1).mean(),
            "first": p[1:, 0].mean(),
            "entropy": -(p * np.log(np.maximum(p, 1e-300))).sum(-1).mean(),
        }
        assert found == pytest.approx(scores, abs=2e-4)
    heads, flat = data.note["scores"], data.note["uniform"]
    assert heads[0]["open_bracket"] > 0.5 > 50 * flat["open_bracket"]
    assert heads[0]["line_start"] > 0.25 > 3 * flat["line_start"]
    assert heads[1]["previous"] > 0.2 > 20 * flat["previous"]
    assert heads[3]["induction"] > 0.6 > 40 * flat["induction"]
    assert all(head["entropy"] < 0.7 * flat["entropy"] for head in heads)


def still_open(pieces: tuple[str, ...]) -> list[list[int]]:
    """By token, the places of the brackets that are open after it."""
    brackets: list[int] = []
    after: list[list[int]] = []
    for i, piece in enumerate(pieces):
        for sign in piece:
            if sign in "([{":
                brackets.append(i)
            elif sign in ")]}" and brackets:
                brackets.pop()
        after.append(list(brackets))
    return after


def test_every_call_gives_arrays_of_its_own():
    first = sample()
    first.q[:] = 0
    assert sample().q.any()


# ----------------------------------------------------------------------------- files that are fine

STORED = [np.float16, ml_dtypes.bfloat16, np.float32]


@pytest.mark.parametrize("suffix", [".npz", ".safetensors"])
@pytest.mark.parametrize("dtype", STORED)
def test_what_was_saved_is_what_is_loaded(tmp_path: Path, suffix: str, dtype: Any):
    arrays = {
        "q": normal(2, 4, 5, 8, dtype=dtype),
        "k": normal(2, 2, 7, 8, dtype=dtype),
        "v": normal(2, 2, 7, 6, dtype=dtype),
    }
    path = tmp_path / f"mine{suffix}"
    (np.savez(path, **arrays) if suffix == ".npz" else save_file(arrays, path))
    data = load_inputs(str(path))
    for name, x in zip("qkv", data, strict=True):
        assert x.dtype == dtype and x.flags.c_contiguous
        np.testing.assert_array_equal(x.astype(np.float32), arrays[name].astype(np.float32))
    assert data.note == {} and data.causal is None and data.text == ""


def test_three_axes_are_a_batch_of_one(tmp_path: Path):
    np.savez(tmp_path / "a.npz", q=normal(4, 5, 8), k=normal(2, 7, 8), v=normal(1, 2, 7, 8))
    assert [x.shape for x in load_inputs(tmp_path / "a.npz")] == [(1, 4, 5, 8), (1, 2, 7, 8), (1, 2, 7, 8)]


@pytest.mark.parametrize("suffix", [".npz", ".safetensors"])
def test_float64_is_rounded_to_float32_and_said(tmp_path: Path, suffix: str):
    x, path = normal(1, 2, 3, 4, dtype=np.float64), tmp_path / f"a{suffix}"
    arrays = {"q": x.astype(np.float32), "k": x, "v": x}
    (np.savez(path, **arrays) if suffix == ".npz" else save_file(arrays, path))
    data = load_inputs(path)
    assert {str(y.dtype) for y in data} == {"float32"}
    assert data.note["converted"] == "k, v: float64 to float32"


def test_other_byte_and_axis_orders_are_read_right(tmp_path: Path):
    x = normal(1, 2, 3, 4)
    np.savez(tmp_path / "a.npz", q=x.astype(">f4"), k=np.asfortranarray(x), v=x)
    data = load_inputs(tmp_path / "a.npz")
    for y in data:
        np.testing.assert_array_equal(y, x)
        assert y.dtype.isnative and y.flags.c_contiguous
    assert data.note == {}


def test_the_metadata_of_safetensors_is_the_note(tmp_path: Path):
    x = normal(1, 2, 3, 4)
    save_file({"q": x, "k": x, "v": x}, tmp_path / "a.safetensors", metadata={"causal": "true", "layer": "3"})
    data = load_inputs(tmp_path / "a.safetensors")
    assert data.causal is True and data.note == {"causal": "true", "layer": "3"}


@pytest.mark.parametrize("name", ["q", "k"])
def test_a_strangers_words_are_not_printed_as_ours(
    tmp_path: Path, name: str, capsys: pytest.CaptureFixture[str]
) -> None:
    """Metadata may hold what a terminal obeys. `converted` is what flashlab says itself, of this very file."""
    from tests.flashlab.cli.typed import run

    x, path = normal(1, 2, 3, 4), tmp_path / "a.safetensors"
    arrays = {"q": x, "k": x, "v": x} | {name: x.astype(np.float64)}
    save_file(arrays, path, metadata={"converted": "\x1b[31mtrust me", "layer": "\x1b[2J"})
    assert load_inputs(path).note["converted"] == f"{name}: float64 to float32"
    done = run("simulate", "flash2", "--input", path)
    assert "\x1b" not in done.stdout + done.stderr and "trust me" not in done.stdout + done.stderr
    assert f"{name}: float64 to float32" in done.stderr


def test_loaded_arrays_go_where_arrays_go(tmp_path: Path):
    np.savez(tmp_path / "a.npz", q=normal(4, 33, 8), k=normal(2, 33, 8), v=normal(2, 33, 8))
    q, k, v = load_inputs(tmp_path / "a.npz")
    np.testing.assert_allclose(
        fl.simulate("flash2", q, k, v, causal=True).out, fl.naive(q, k, v, causal=True).out, atol=1e-5
    )


# ----------------------------------------------------------------------------- files that are not

GOOD = {"q": normal(1, 4, 5, 8), "k": normal(1, 2, 7, 8), "v": normal(1, 2, 7, 8)}
BAD: dict[str, tuple[dict[str, Any], str]] = {
    "missing": ({"k": None}, "k missing among: 'q', 'v'"),
    "two axes": ({"q": normal(5, 8)}, "bad.npz: q.shape = (5, 8): expected (batch, heads"),
    "five axes": ({"v": normal(1, 1, 2, 7, 8)}, "v.shape = (1, 1, 2, 7, 8)"),
    "no axes": ({"q": np.float32(1)}, "q.shape = ()"),
    "integers": ({"q": np.ones((1, 4, 5, 8), int)}, "q.dtype = 'int64': expected one of float16, bfloat16, float32"),
    "complex": ({"k": normal(1, 2, 7, 8).astype(np.complex64)}, "k.dtype = 'complex64'"),
    "long double": ({"k": normal(1, 2, 7, 8).astype(np.longdouble)}, "k.dtype = "),
    "text": ({"v": np.full((1, 2, 7, 8), "x")}, "v.dtype = '<U1'"),
    "objects": ({"v": np.full((1, 2, 7, 8), None)}, "bad.npz: v = 'unreadable'"),
    "records": ({"q": np.zeros((1, 4, 5, 8), [("a", "f2")])}, "q.dtype = "),
    "empty": ({"k": normal(1, 2, 0, 8), "v": normal(1, 2, 0, 8)}, "k.shape = (1, 2, 0, 8): expected at least one"),
    "heads that don't divide": ({"q": normal(1, 5, 5, 8)}, "kv_heads = 2"),
    "more KV heads than heads": ({"q": normal(1, 1, 5, 8)}, "kv_heads = 2"),
    "another head dim": ({"k": normal(1, 2, 7, 6)}, "bad.npz: k.shape = (1, 2, 7, 6)"),
    "another batch": ({"q": normal(3, 4, 5, 8)}, "k.shape = (1, 2, 7, 8)"),
    "another length of v": ({"v": normal(1, 2, 6, 8)}, "v.shape = (1, 2, 6, 8)"),
    "other heads of v": ({"v": normal(1, 1, 7, 8)}, "v.shape = (1, 1, 7, 8)"),
    "mixed dtypes": ({"k": normal(1, 2, 7, 8, dtype=np.float16)}, "k.dtype = 'float16': expected float32, as q has"),
    "NaN": ({"v": np.full((1, 2, 7, 8), np.nan, np.float16)}, "v[0, 0, 0, 0] = nan: expected finite numbers"),
    "infinity": ({"q": np.where(np.arange(8) == 3, np.inf, GOOD["q"])}, "q[0, 0, 0, 3] = inf"),
    "past float32": (
        {"q": np.full((1, 4, 5, 8), 1e300)},
        "q[0, 0, 0, 0] = 1e+300: expected finite numbers within float32",
    ),
}


@pytest.mark.parametrize("case", BAD)
def test_malformed_arrays_get_one_line(tmp_path: Path, case: str):
    change, says = BAD[case]
    arrays = {name: x for name, x in {**GOOD, **change}.items() if x is not None}
    np.savez(tmp_path / "bad.npz", **arrays)
    assert says in refused(tmp_path / "bad.npz")


@pytest.mark.parametrize("case", ["missing", "two axes", "integers", "empty", "another batch", "NaN", "past float32"])
def test_malformed_tensors_get_one_line(tmp_path: Path, case: str):
    change, says = BAD[case]
    arrays = {name: np.ascontiguousarray(x) for name, x in {**GOOD, **change}.items() if x is not None}
    save_file(arrays, tmp_path / "bad.safetensors")
    says = says.replace("npz", "safetensors").replace("'int64'", "'I64'").split(": expected")[0]
    assert says in refused(tmp_path / "bad.safetensors")


def test_a_dtype_that_attention_does_not_take_is_named(tmp_path: Path):
    """float8, which safetensors' own NumPy reader trips over."""
    header = json.dumps(
        {name: {"dtype": "F8_E4M3", "shape": [1, 1, 1, 1], "data_offsets": [i, i + 1]} for i, name in enumerate("qkv")}
    )
    path = tmp_path / "a.safetensors"
    path.write_bytes(len(header).to_bytes(8, "little") + header.encode() + bytes(3))
    assert "q.dtype = 'F8_E4M3': expected one of F16, BF16, F32, F64" in refused(path)


@pytest.mark.parametrize("name", ["gone.npz", "gone.safetensors", "x.npy", "x.pt", "noend", "", ".npz"])
def test_a_path_that_is_no_such_file_gets_one_line(tmp_path: Path, name: str):
    assert refused(tmp_path / name).startswith("path = ")


def test_a_folder_gets_one_line(tmp_path: Path):
    (tmp_path / "a.npz").mkdir()
    assert "path = " in refused(tmp_path / "a.npz")


@pytest.mark.skipif(os.name == "nt" or getattr(os, "geteuid", int)() == 0, reason="this user may read every file")
def test_a_file_that_may_not_be_read_gets_one_line(tmp_path: Path):
    for path in (tmp_path / "a.npz", tmp_path / "a.safetensors"):
        path.touch(mode=0)
        assert "path = " in refused(path)


def test_a_pickle_is_never_opened(tmp_path: Path):
    class Bomb:
        def __reduce__(self):
            return (Path.touch, (tmp_path / "burst",))

    bomb = np.array([Bomb()], object)
    np.savez(tmp_path / "a.npz", q=bomb, k=bomb, v=bomb)
    np.save(tmp_path / "b", bomb)
    (tmp_path / "b.npy").rename(tmp_path / "b.npz")  # no archive, whatever its name says
    assert "without pickle" in refused(tmp_path / "a.npz")
    assert "as numpy.savez writes it" in refused(tmp_path / "b.npz")
    assert not (tmp_path / "burst").exists()


def test_members_that_are_no_arrays_get_one_line(tmp_path: Path):
    with zipfile.ZipFile(tmp_path / "a.npz", "w") as archive:
        for name in "qkv":
            archive.writestr(name, b"hello")
    assert "a.npz: q = 'bytes': expected an array" in refused(tmp_path / "a.npz")


def test_an_array_larger_than_memory_gets_one_line(tmp_path: Path):
    np.savez(tmp_path / "small.npz", **GOOD)
    with zipfile.ZipFile(tmp_path / "small.npz") as small, zipfile.ZipFile(tmp_path / "a.npz", "w") as large:
        for name in small.namelist():
            raw = small.read(name)
            large.writestr(name, raw.replace(b"(1, 4, 5, 8), }" + b" " * 14, b"(1, 4, 5, 8000000000000000), }"[:29]))
    assert "q" in refused(tmp_path / "a.npz")


def test_memory_is_looked_at_before_an_array_is_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """A small archive may hold large arrays."""
    x = np.zeros((1, 1, 1_000_000, 16), np.float16)
    np.savez_compressed(tmp_path / "a.npz", q=x, k=x, v=x)
    assert (tmp_path / "a.npz").stat().st_size < x.nbytes / 100
    monkeypatch.setattr(memory, "free", lambda: 4 * x.nbytes)
    monkeypatch.setattr(np.lib.format, "read_array", lambda *_, **__: pytest.fail("it is read"))
    with pytest.raises(
        fl.UsageError, match=r"^memory = q, k and v of a\.npz, 122 MiB: expected at most the 122 MiB that"
    ):
        load_inputs(tmp_path / "a.npz")


@pytest.mark.parametrize("suffix", [".npz", ".safetensors"])
@examples(60, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(draw=st.data())
def test_a_damaged_file_is_read_or_refused(tmp_path: Path, suffix: str, draw: st.DataObject):
    """Bytes cut off or changed anywhere: the arrays, or one line, never another error."""
    path = tmp_path / f"a{suffix}"
    (np.savez(path, **GOOD) if suffix == ".npz" else save_file(GOOD, path))
    raw = bytearray(path.read_bytes())
    for _ in range(draw.draw(st.integers(0, 3))):
        raw[draw.draw(st.integers(0, len(raw) - 1))] = draw.draw(st.integers(0, 255))
    path.write_bytes(raw[: draw.draw(st.integers(0, len(raw)) | st.just(len(raw)))])
    try:
        assert all(x.ndim == 4 and np.isfinite(x).all() for x in load_inputs(path))
    except InputError as error:
        assert "\n" not in str(error)


@examples(60, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(shapes=st.tuples(*[st.lists(st.integers(0, 3), max_size=5)] * 3))
def test_any_shapes_are_a_problem_or_refused(tmp_path: Path, shapes: tuple[list[int], ...]):
    np.savez(
        tmp_path / "a.npz", **{name: np.zeros(shape, np.float16) for name, shape in zip("qkv", shapes, strict=True)}
    )
    try:
        q, k, v = load_inputs(tmp_path / "a.npz")
    except InputError as error:
        assert "\n" not in str(error)
    else:
        assert fl.naive(q, k, v).out.shape == (*q.shape[:3], v.shape[3])
