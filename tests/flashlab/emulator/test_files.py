"""`fl.emulate_file`: anybody's kernel, its arguments by name, its mistakes in a line each."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

import flashlab as fl
from flashlab.emulator import BuildError
from flashlab.emulator.files import parameters_of

pytestmark = pytest.mark.compiler

SCALE = """
__global__ void scale(const float* __restrict__ x, float* __restrict__ y, float factor, int n) {
  const int i = blockIdx.x * blockDim.x + threadIdx.x;
  if (i < n) y[i] = factor * x[i];
}
"""

NUMBERS = """
template <class T> __device__ void put(char*& at, T x) { memcpy(at, &x, sizeof x), at += sizeof x; }
__global__ void numbers(char* out, bool b, signed char i1, unsigned char u1, short i2, unsigned short u2, int i4,
                        unsigned u4, long long i8, unsigned long long u8, float f4, double f8) {
  put(out, b), put(out, i1), put(out, u1), put(out, i2), put(out, u2), put(out, i4);
  put(out, u4), put(out, i8), put(out, u8), put(out, f4), put(out, f8);
}
"""
KINDS = {
    "b": "u1", "i1": "i1", "u1": "u1", "i2": "i2", "u2": "u2", "i4": "i4", "u4": "u4", "i8": "i8", "u8": "u8",
    "f4": "f4", "f8": "f8",
}  # fmt: skip

X = np.arange(1000, dtype=np.float32)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("sources")


def written(folder: Path, name: str, text: str) -> Path:
    path = folder / f"{name}.cu"
    path.write_text(text, encoding="utf-8")
    return path


@pytest.fixture(scope="module")
def scale(folder: Path) -> Path:
    return written(folder, "scale", SCALE)


def test_a_name_may_have_any_letters(folder: Path) -> None:
    """Preprocessors write them as escapes, and tools cut long names within a letter."""
    path = written(folder, "letters", "__global__ void größe(float* x) { x[threadIdx.x] = 1; }")
    done = fl.emulate_file(path, {"x": fl.Empty((4,))}, grid=1, block=4)
    assert done.passed and done.arrays["x"].tolist() == [1, 1, 1, 1]


def run(path: Path, arguments: dict[str, Any] | None = None, **options: Any) -> Any:
    given = {"x": X, "y": fl.Empty((1000,)), "factor": 2, "n": 1000} if arguments is None else arguments
    return fl.emulate_file(path, given, **{"grid": 8, "block": 128, **options})


def refused(path: Path, arguments: dict[str, Any] | None = None, **options: Any) -> str:
    with pytest.raises(fl.UsageError) as error:
        run(path, arguments, **options)
    assert "\n" not in str(error.value)
    return str(error.value)


# What comes back


def test_numbers_bytes_and_verdict(scale: Path) -> None:
    x = X.copy()
    done = run(scale, {"x": x, "y": fl.Empty((1000,)), "factor": 2, "n": 1000})
    assert done.passed and done.complaints() == [] and done.unwritten == {}
    assert np.array_equal(done.arrays["y"], 2 * X) and np.array_equal(x, X)
    assert done.launched.total("hbm.read") == done.launched.total("hbm.write") == 4000
    assert done.launched.total("hbm.read", "sectors") == 125
    assert done.launched.plain == 2000  # a load and a store of each thread
    document = done.to_dict()
    assert document["passed"] and document["launch"]["kernel"] == "scale" and document["unwritten"] == {}


@pytest.mark.parametrize("path", [str, Path])
def test_order_of_arguments_and_kinds_of_paths(scale: Path, path: Any) -> None:
    done = run(path(scale), {"n": 10, "factor": np.float32(3), "y": fl.Empty((10,)), "x": X[:20:2]})
    assert np.array_equal(done.arrays["y"], 3 * X[:20:2])


def test_arrays_that_kernels_change_are_copies(folder: Path) -> None:
    path = written(folder, "add", "__global__ void add(int* x) { x[threadIdx.x] += 1; }")
    x = np.zeros((2, 4), np.int32)
    done = run(path, {"x": x}, grid=1, block=8)
    assert not x.any() and np.array_equal(done.arrays["x"], np.ones((2, 4))) and done.arrays["x"].dtype == np.int32


def test_unwritten_outputs_are_told(scale: Path) -> None:
    done = run(scale, grid=7)
    assert not done.passed and done.unwritten == {"y": 4 * (1000 - 7 * 128)}
    assert done.complaints() == ["y: 416 bytes were never written"]
    assert np.isnan(done.arrays["y"][896:]).all()  # and hold nothing that could be taken for a result
    assert run(scale, grid=7, sanitize=False).passed  # nobody looked


def test_inputs_behind_const_may_not_be_written(folder: Path) -> None:
    text = "__global__ void sneaky(const float* x) { const_cast<float*>(x)[threadIdx.x] = 0; }"
    (finding,) = run(written(folder, "sneaky", text), {"x": X}, grid=1, block=1).launched.findings
    assert finding.kind == "input written" and finding.tensor == "x" and str(finding.line) == "sneaky.cu:1"


def test_the_element_is_named(folder: Path) -> None:
    path = written(folder, "past", "__global__ void past(float* x, int i) {\n  x[i] = 1;\n}")
    x = np.zeros((4, 10), np.float32)
    for i, element in ((40, "x[4, 0]"), (45, "x[4, 5]"), (-1, "x, byte -4")):
        (text,) = run(path, {"x": x, "i": i}, grid=1, block=1).complaints()
        assert text.startswith("past.cu:2: out of bounds: thread 0 of block 0 writes 4 bytes") and element in text


def test_a_null_pointer(folder: Path) -> None:
    text = "__global__ void maybe(const float* x, float* y) { *y = x ? *x : 7; }"
    done = run(written(folder, "maybe", text), {"x": None, "y": fl.Empty((1,))}, grid=1, block=1)
    assert done.passed and done.arrays["y"] == [7] and set(done.arrays) == {"y"}
    (finding,) = run(folder / "maybe.cu", {"x": X, "y": None}, grid=1, block=1).launched.findings
    assert finding.kind == "out of bounds" and "no array lies there" in finding.message


def test_dtypes_of_arrays(folder: Path) -> None:
    text = "#include <cuda_bf16.h>\n__global__ void one(__nv_bfloat16* x) { x[threadIdx.x] = __float2bfloat16(1.f); }"
    done = run(written(folder, "one", text), {"x": fl.Empty((8,), "bfloat16")}, grid=1, block=8)
    assert done.passed and done.arrays["x"].dtype.name == "bfloat16" and np.all(done.arrays["x"].astype("f4") == 1)


def test_structs_by_value_and_behind_pointers(folder: Path) -> None:
    text = """
    struct Point { float x; int n; };
    __global__ void move(Point by, Point* points) {
      points[threadIdx.x].x += by.x;
      points[threadIdx.x].n = by.n;
    }
    """
    point = np.dtype([("x", "f4"), ("n", "i4")])
    path, points = written(folder, "move", text), np.zeros(3, point)
    done = run(path, {"by": np.array((1.5, 7), point), "points": points}, grid=1, block=3)
    assert done.passed and done.arrays["points"].dtype == point
    assert np.all(done.arrays["points"]["x"] == 1.5) and np.all(done.arrays["points"]["n"] == 7)
    raw = np.array((1.5, 7), point).tobytes()
    assert run(path, {"by": raw, "points": points}, grid=1, block=3).arrays["points"]["n"].tolist() == [7] * 3
    assert "by = '4 bytes': expected 8" in refused(path, {"by": b"1234", "points": points}, grid=1, block=3)
    assert "by = 3: expected a struct's 8 bytes" in refused(path, {"by": 3, "points": points}, grid=1, block=3)


def test_templates_and_several_kernels(folder: Path) -> None:
    text = """
    template <class T, int N>
    __global__ void fill(T* x, T value) { for (int i = 0; i < N; ++i) x[i] = value; }
    __global__ void first(int* x) { *x = 1; }
    __global__ void __launch_bounds__(32) second(int* x) { *x = 2; }
    """
    path = written(folder, "several", text)
    one = {"grid": 1, "block": 1}
    assert (
        run(path, {"x": fl.Empty((4,)), "value": 3.5}, kernel="fill<float, 4>", **one).arrays["x"].tolist() == [3.5] * 4
    )
    small = run(path, {"x": fl.Empty((4,), "int16"), "value": -2}, kernel="fill<short, 2>", **one)
    assert small.arrays["x"][:2].tolist() == [-2, -2] and small.unwritten == {"x": 4}
    assert run(path, {"x": fl.Empty((1,), "int32")}, kernel="second", **one).arrays["x"] == [2]
    line = refused(path, {"x": X}, **one)
    assert "kernel = None" in line and line.endswith("first, second, fill<…>")
    assert "did you mean first?" in refused(path, {"x": X}, kernel="frist", **one)


def test_macros(folder: Path) -> None:
    text = "__global__ void put(int* x) { *x = VALUE; }"
    path = written(folder, "put", text)
    for value, expected in ((3, 3), ("1 + 1", 2), (True, 1)):
        done = run(path, {"x": fl.Empty((1,), "int32")}, grid=1, block=1, macros={"VALUE": value})
        assert done.arrays["x"] == [expected]
    assert "macros = '1X'" in refused(path, {"x": X}, grid=1, block=1, macros={"1X": 1})


def test_a_header_beside_the_file(folder: Path) -> None:
    (folder / "value.cuh").write_text("#define VALUE 1\n")
    path = written(folder, "with_header", '#include "value.cuh"\n__global__ void put(int* x) { *x = VALUE; }')
    assert run(path, {"x": fl.Empty((1,), "int32")}, grid=1, block=1).arrays["x"] == [1]
    (folder / "value.cuh").write_text("#define VALUE 2\n")
    assert run(path, {"x": fl.Empty((1,), "int32")}, grid=1, block=1).arrays["x"] == [2]


def test_dynamic_sram_is_as_large_as_asked_for(folder: Path) -> None:
    text = "__global__ void last(float* x) { extern __shared__ float s[]; s[threadIdx.x] = 1; x[threadIdx.x] = s[threadIdx.x]; }"
    path = written(folder, "last", text)
    x = fl.Empty((64,))
    assert run(path, {"x": x}, grid=1, block=64, sram=256).passed
    (finding, *_) = run(path, {"x": x}, grid=1, block=64, sram=252).launched.findings
    assert finding.kind == "out of bounds" and finding.space == "sram" and finding.thread == (63, 0, 0)
    assert "sram = 49153: expected" not in refused(path, {"x": x}, sram=300_000)
    assert "at most 166,912, which is what a100-40 has per block" in refused(
        path, {"x": x}, sram=200_000, device="a100"
    )
    for bad in (-1, 1.5, "48k"):
        assert f"sram = {bad!r}: expected a number of bytes" in refused(path, {"x": x}, sram=bad)


def test_the_device_is_what_the_source_sees(folder: Path) -> None:
    path = written(folder, "arch", "__global__ void arch(int* x) { *x = __CUDA_ARCH__; }")
    for device, arch in (("t4", 750), ("a100", 800), ("h100", 900), ("5090", 1200)):
        done = run(path, {"x": fl.Empty((1,), "int32")}, grid=1, block=1, device=device)
        assert done.arrays["x"] == [arch]


def test_extents_reach_the_kernel(folder: Path) -> None:
    text = """
    __global__ void where(int* x) {
      const int block = blockIdx.x + gridDim.x * (blockIdx.y + gridDim.y * blockIdx.z);
      const int thread = threadIdx.x + blockDim.x * (threadIdx.y + blockDim.y * threadIdx.z);
      x[block * blockDim.x * blockDim.y * blockDim.z + thread] = 100 * block + thread;
    }
    """
    done = run(written(folder, "where", text), {"x": fl.Empty((24, 30), "int32")}, grid=(2, 3, 4), block=[5, 3, 2])
    assert done.passed
    assert np.array_equal(done.arrays["x"], 100 * np.arange(24)[:, None] + np.arange(30))


def test_elements_are_what_the_kernel_reads(folder: Path) -> None:
    """Vectors and halves are made of an array's elements, chars and void of anything."""
    text = """
    #include <cuda_fp16.h>
    __global__ void take(float4* a, half2* b, unsigned char* c, void* d, unsigned* e, bool* f) {
      a[0].y = 1, b[0].x = __float2half(1), c[7] = 1, static_cast<int*>(d)[0] = 1, e[0] = 1, f[0] = true;
    }
    """
    kinds = {"a": "f4", "b": "f2", "c": "f8", "d": "i4", "e": "i4", "f": "?"}
    path, arrays = written(folder, "take", text), {name: np.zeros(4, kind) for name, kind in kinds.items()}
    assert run(path, arrays, grid=1, block=1).passed
    assert "b = 'array of float64'" in refused(path, arrays | {"b": np.zeros(4)}, grid=1, block=1)
    assert "e = 'array of int64': expected uint32" in refused(path, arrays | {"e": np.zeros(4, int)}, grid=1, block=1)


# Numbers of every type


@st.composite
def values(draw: st.DrawFn) -> dict[str, Any]:
    drawn: dict[str, Any] = {}
    for name, kind in KINDS.items():
        if name == "b":
            drawn[name] = draw(st.booleans())
        elif kind[0] == "f":
            drawn[name] = draw(st.floats(width=8 * int(kind[1])))  # type: ignore
        else:
            limits = np.iinfo(kind)
            plain = draw(st.sampled_from([limits.min, limits.max]) | st.integers(int(limits.min), int(limits.max)))
            drawn[name] = np.dtype(kind).type(plain) if draw(st.booleans()) else plain
    return drawn


@given(drawn=values())
def test_numbers_arrive_as_they_are(folder: Path, drawn: dict[str, Any]) -> None:
    path = folder / "numbers.cu"
    if not path.exists():
        written(folder, "numbers", NUMBERS)
    done = run(path, {"out": fl.Empty((43,), "uint8"), **drawn}, grid=1, block=1)
    assert done.complaints() == []
    assert done.arrays["out"].tobytes() == b"".join(
        np.array(drawn[name], kind).tobytes() for name, kind in KINDS.items()
    )


@pytest.mark.parametrize(
    ("name", "value", "line"),
    [
        ("n", 1 << 31, "n = '2147483648': expected a number that a parameter of 4 bytes can hold"),
        ("n", -(1 << 31) - 1, "n = '-2147483649': expected a number that"),
        ("n", 10**400, "can hold"),
        ("n", 1.5, "n = '1.5': expected a whole number"),
        ("n", float("nan"), "n = 'nan': expected a whole number"),
        ("n", float("inf"), "n = 'inf': expected a whole number"),
        ("n", "7", "n = '7': expected a number"),
        ("n", None, "n = None: expected a number"),
        ("n", 1j, "n = 1j: expected a number"),
        ("n", np.zeros(3), "expected a number"),
        ("n", fl.Empty((1,)), "expected a number"),
        ("factor", 1e39, "factor = '1e+39': expected a number that a parameter of 4 bytes can hold"),
        ("factor", 10**400, "can hold"),
        ("x", 3, "x = 3: expected an array: the parameter is a pointer"),
        ("x", [1.0], "x = [1.0]: expected an array"),
        ("x", fl.Empty((1000,)), "expected an array with values: the kernel only reads it"),
        ("x", np.array([object()]), "x = 'array of object'"),
        ("x", X.astype(">f4"), "in this machine's byte order"),
        ("x", X.astype("f8"), "x = 'array of float64': expected float32, as the kernel has it"),
        ("x", X.astype("i4"), "x = 'array of int32': expected float32"),
        ("x", X.astype("f2"), "x = 'array of float16': expected float32"),
        ("y", fl.Empty((1000,), "float64"), "y = 'array of float64': expected float32"),
    ],
)
def test_values_that_a_parameter_cannot_hold(scale: Path, name: str, value: Any, line: str) -> None:
    arguments: dict[str, Any] = {"x": X, "y": fl.Empty((1000,)), "factor": 2, "n": 1000}
    assert line in refused(scale, arguments | {name: value})


def test_infinity_and_whole_floats_are_numbers(scale: Path) -> None:
    done = run(scale, {"x": X[1:], "y": fl.Empty((999,)), "factor": float("inf"), "n": 999.0})
    assert done.passed and np.all(done.arrays["y"] == np.inf)


# Bad input


def test_arguments_by_their_names(scale: Path) -> None:
    arguments: dict[str, Any] = {"x": X, "y": fl.Empty((1000,)), "factor": 2}
    assert "arguments = 'x, y, factor': expected also n, as scale has" in refused(scale, arguments)
    assert "argument = 'facto': expected one of x, y, factor, n (did you mean factor?)" in refused(scale, {"facto": 2})
    assert "arguments = 'none': expected also x, y, factor, n" in refused(scale, {})


@pytest.mark.parametrize(
    ("options", "line"),
    [
        ({"grid": 0}, "grid = 0: expected one to three whole numbers of at least 1"),
        ({"grid": (1, 2, 3, 4)}, "grid = (1, 2, 3, 4)"),
        ({"grid": ()}, "grid = ()"),
        ({"grid": 1.0}, "grid = 1.0: expected one to three whole numbers"),
        ({"grid": (1, 65536)}, "at most 2,147,483,647 × 65,535 × 65,535"),
        ({"block": -1}, "block = -1"),
        ({"block": (1024, 2)}, "block = (1024, 2): expected at most 1,024 threads, these are 2,048"),
        ({"block": (1, 1, 65)}, "at most 1,024 × 1,024 × 64"),
        ({"device": "h10"}, "device = 'h10'"),
        ({"time_limit": -1}, "time_limit = -1"),
        ({"time_limit": float("nan")}, "time_limit = nan"),
        ({"kernel": "scal"}, "did you mean scale?"),
    ],
)
def test_bad_options_get_one_line(scale: Path, options: dict[str, Any], line: str) -> None:
    assert line in refused(scale, **options)


@pytest.mark.parametrize("bad", [5, [5], (5.0,), (-1,), (True,)])
def test_shapes_of_empty_arrays(bad: Any) -> None:
    with pytest.raises(fl.UsageError, match="a tuple of sizes"):
        fl.Empty(bad)
    with pytest.raises(fl.UsageError, match="dtype = 'fp16'"):
        fl.Empty((5,), "fp16")


def test_files_that_are_no_source(folder: Path) -> None:
    assert "No such file" in refused(folder / "nothing.cu")
    assert "Is a directory" in refused(folder)
    (folder / "picture.cu").write_bytes(b"\x89PNG\xff\xfe")
    assert "isn't UTF-8 text" in refused(folder / "picture.cu")
    assert "no __global__ function" in refused(written(folder, "host", "int f() { return 1; }"))


def test_what_does_not_compile_says_where(folder: Path) -> None:
    path = written(folder, "typo", "__global__ void typo(float* x) {\n  x[threadIdx.x] = undefined_name;\n}")
    with pytest.raises(BuildError) as error:
        run(path, {"x": X}, grid=1, block=1)
    text = str(error.value)
    assert (
        text.startswith("typo.cu doesn't compile at typo.cu:2, in typo:\n")
        and "typo.cu:2:" in text
        and "undefined_name" in text
    )
    assert str(folder) not in text


def test_the_time_limit_ends_a_loop(folder: Path) -> None:
    text = "__global__ void wait(int* flag) {\n  while (atomicAdd(flag, 0) == 0) {\n  }\n}"
    path = written(folder, "wait", text)
    (finding,) = run(path, {"flag": np.zeros(1, "i4")}, grid=1, block=1, time_limit=0.2).launched.findings
    assert finding.kind == "deadlock" and finding.line is not None and finding.line.number == 2
    assert run(path, {"flag": np.ones(1, "i4")}, grid=1, block=1, time_limit=0).passed


def test_the_time_limit_is_of_the_processor(folder: Path) -> None:
    """While a machine does something else a launch makes no progress, and isn't late either."""
    text = "#include <unistd.h>\n__global__ void slow(int* x) {\n  usleep(400000);\n  for (int i = 0; i < 20000; ++i) x[i] = i;\n}"
    path = written(folder, "slow", text)
    assert run(path, {"x": fl.Empty((20_000,), "int32")}, grid=1, block=1, time_limit=0.3).passed


@pytest.mark.alike(1)
@pytest.mark.parametrize("loop", ["for (;;) continue", "while (n) s[0] = 1"])
def test_the_time_limit_ends_a_loop_that_the_compiler_has_emptied(folder: Path, loop: str) -> None:
    """No lane calls the runtime in it: what it stores has been moved out of it."""
    path = written(folder, "spin", f"__global__ void spin(int n) {{\n  extern __shared__ int s[];\n  {loop};\n}}")
    (finding,) = run(path, {"n": 7}, grid=3, block=2, sram=64, time_limit=0.2).launched.findings
    assert (finding.kind, finding.line and finding.line.number) == ("time limit", 3)
    assert "is still running after 0.2 s" in str(finding)


# Parameters' names


@pytest.mark.parametrize(
    ("declared", "names"),
    [
        ("", []),
        ("float* x", ["x"]),
        ("const float *__restrict__ x, float factor", ["x", "factor"]),
        ("Pair<int, float> p, unsigned n = 3", ["p", "n"]),
        ("float x[], int (&sizes)[4]", ["x", "sizes"]),
        ("const __grid_constant__ Params params", ["params"]),
        ("int a /* first, or not */, // a comment, too\n int b", ["a", "b"]),
    ],
)
def test_names_of_parameters(declared: str, names: list[str]) -> None:
    text = f"__global__ void f({declared});\n__global__ void g(int other) {{}}\n__global__ void f({declared}) {{ if (1) {{}} }}"
    assert parameters_of(text, "f") == names
    assert parameters_of(text, "g") == ["other"]


def test_parameters_without_names_are_numbered(folder: Path) -> None:
    path = written(folder, "nameless", "__global__ void nameless(int* x, int, int value) { *x = value; }")
    done = run(path, {"x": fl.Empty((1,), "int32"), "arg1": 1, "value": 5}, grid=1, block=1)
    assert done.arrays["x"] == [5]


ALIASED = """
__global__ void pick(const float* x, float2* y) {
  float2 a = make_float2(x[0], x[1]), b = make_float2(x[2], x[3]);
  float2 c = a.x > b.x ? a : b;
  c.x += 1.f;
  y[threadIdx.x] = c;
}
__global__ void pun(const float* x, float* y) {
  unsigned registers[2] = {0, 0};
  short* halves = (short*)registers;
  for (int i = 0; i < 4; ++i) halves[i] = x[i];
  y[0] = registers[0] & 0xffff, y[1] = registers[1] >> 16;
}
"""


@pytest.mark.parametrize(("kernel", "expected"), [("pick", [6, 2]), ("pun", [5, 1])])
@pytest.mark.parametrize("sanitize", [True, False])
def test_types_may_alias_as_they_may_on_a_gpu(folder: Path, kernel: str, expected: list[float], sanitize: bool) -> None:
    path = written(folder, "aliased", ALIASED)
    given = {"x": np.array([5, 2, -1, 1], np.float32), "y": fl.Empty((2,))}
    found = run(path, given, kernel=kernel, grid=1, block=1, sanitize=sanitize)
    np.testing.assert_array_equal(found.arrays["y"], expected)


def test_a_template_with_shared_memory_in_two_files(folder: Path) -> None:
    """Each library has shared memory of its own, also where both instantiate the same template."""
    total = """
template <int N> __device__ float total(float x) {
  __shared__ float part[N];
  part[threadIdx.x] = x;
  __syncthreads();
  float sum = 0;
  for (int i = 0; i < N; ++i) sum += part[i];
  return sum;
}
__global__ void NAME(const float* x, float* y) { y[threadIdx.x] = total<64>(x[threadIdx.x]) / DIVISOR; }
"""
    for name, divisor in (("sum", 1), ("mean", 64)):
        path = written(folder, name, total.replace("NAME", name).replace("DIVISOR", f"{divisor}.f"))
        found = run(path, {"x": X[:64].copy(), "y": fl.Empty((64,))}, grid=1, block=64)
        assert found.passed, found.complaints()
        np.testing.assert_array_equal(found.arrays["y"], X[:64].sum() / divisor)
