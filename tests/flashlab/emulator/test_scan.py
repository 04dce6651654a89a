"""Splitting a source into declarations, what kernels reach, what launches say: text in, text out, without a compiler."""

from __future__ import annotations

from pathlib import Path

import pytest

from flashlab.emulator import reach, scan
from flashlab.emulator.launches import Launch, launches_of
from flashlab.emulator.scan import Lines, Piece, Tokens


def split(text: str) -> tuple[Tokens, list[Piece]]:
    tokens = Tokens.of(text)
    return tokens, scan.pieces_of(tokens)


DECLARATIONS = [
    ("__device__ float f(float x) { return x; }", "function", "f"),
    ("template <int N, class T = Pair<int, float>> __global__ void k(T* x) {}", "function", "k"),
    ("template <> __device__ float f<float>(float x) { return {x}; }", "function", "f"),
    ("static inline std::enable_if_t<(N > 2), int> g(int (&sizes)[4]) noexcept(true) { return 1; }", "function", "g"),
    ("auto h(int x) -> decltype(x + 1) { return x; }", "function", "h"),
    ("template <class T> __device__ Ring<T>::Ring(int n) : size{n}, data(nullptr) { run(); }", "function", "Ring"),
    ("template <class T> __device__ void Ring<T>::push(T x) { data[0] = x; }", "function", "Ring"),
    ("__device__ half4 operator+(half4 a, half4 b) { return a; }", "function", "operator+"),
    ("struct Functor { __device__ void operator()(int x) const {} };", "class", "Functor"),
    ("Type make(int n);", "function", "make"),
    ('extern "C" __global__ void c(float* x) { x[0] = 1; }', "function", "c"),
    ("struct alignas(16) Vec : Base<(3 > 2)> { float x[4]; int f() { return 1; } } instance;", "class", "Vec"),
    ("enum class Side : int { left, right };", "class", "Side"),
    ("struct Later;", "class", "Later"),
    ("struct Point origin = {0, 1};", "variable", "origin"),
    ("__constant__ float table[4][4] = {{1, 2}, {3}}, other[2];", "variable", "table"),
    ("constexpr int N = sizeof(int) > 2 ? f<3>(1) : 5;", "variable", "N"),
    ("float (*pointer)(float, int) = nullptr;", "variable", "pointer"),
    ("auto lambda = [](int x) { return x; };", "variable", "lambda"),
    ("dim3 grid(1, 2), block{3};", "function", "grid"),
    ("typedef struct { float x; int y; } Pair;", "alias", "Pair"),
    ("typedef float (*reduction)(float x);", "alias", "reduction"),
    ("using Row = std::array<float, 4>;", "alias", "Row"),
    ("namespace cg = cooperative_groups;", "alias", "cg"),
    ("template __global__ void k<float>(float*);", "instantiation", ""),
    ('static_assert(N > 3, "{(");', "assertion", ""),
    ("MACRO(of, a, missing.header)\nstatic int x;", "other", "MACRO"),
    ("extern __shared__ float tile[];", "variable", "tile"),
]


@pytest.mark.parametrize(("text", "kind", "name"), DECLARATIONS)
def test_a_declaration_between_two_others(text: str, kind: str, name: str) -> None:
    tokens, pieces = split(f"int before;\n{text}\nint after() {{ return 1; }}")
    first, piece, last = pieces[0], pieces[1], pieces[-1]
    assert first.names == ("before",) and last.names == ("after",)
    assert piece.kind == kind and (piece.names[:1] or ("",))[0] == name
    shown = tokens.text[tokens.starts[piece.start] : tokens.end(piece.end - 1)]
    assert text.startswith(shown) and (kind == "other" or shown == text)


def test_all_declarations_together() -> None:
    tokens, pieces = split("\n".join(f"namespace n{i} {{ {text} }}" for i, (text, *_) in enumerate(DECLARATIONS)))
    assert [piece.path for piece in pieces if piece.names != ("x",)] == [(f"n{i}",) for i in range(len(DECLARATIONS))]
    assert len(tokens.partner) == sum(word in "()[]{}" for word in tokens.words)


def test_names_that_one_declaration_has() -> None:
    for text, names in (
        ("__device__ int a, b[3] = {1, 2}, *c = nullptr;", ("a", "b", "c")),
        ("enum Kind { RED, GREEN = 3, BLUE };", ("Kind", "RED", "GREEN", "BLUE")),
        ("struct One { int n; } x, *y;", ("One", "x", "y")),
        ("typedef struct Two { int n; } Two_t, *Pointer;", ("Two_t", "Pointer")),
        ("using std::max, std::min;", ("max", "min")),
    ):
        assert split(text)[1][0].names == names


def test_parameters() -> None:
    text = "__global__ void k(float* __restrict__ x, const P<int, 3> p, int (&s)[2], void (*f)(int a), int, int n = g<1, 2>(3)) {}"
    tokens, (piece,) = split(text)
    assert piece.kernel and scan.parameters(tokens, piece) == ["x", "p", "s", "f", "", "n"]
    text = "__global__ void k(float* half, float const* x, half* __restrict__, const unsigned short, int const y) {}"
    tokens, (piece,) = split(text)
    assert scan.parameters(tokens, piece) == ["half", "x", "", "", "y"]
    for none in ("", "void"):
        tokens, (piece,) = split(f"__global__ void k({none}) {{}}")
        assert scan.parameters(tokens, piece) == []


# Reaching

SOURCE = """
#define unused
const int SIZE = 4;
static int counter = 0;
struct Params { int n; Params(Tensor t) { n = t.size(); } __device__ int twice() const { return SIZE * n; } };
struct Unused { Tensor t; };
__device__ float helper(float x) { return x; }
float helper(Tensor t) { return launch<<<1, 2>>>(t); }
__device__ float never(float x) { return x; }
namespace a { namespace {
template <class T> __device__ T deep(T x) { return helper(x); }
__global__ void k(Params p) { deep(p.twice() + p.never); }
} }
__device__ Params operator+(Params a, Params b) { return a; }
__device__ Unused operator+(Unused a, Unused b) { return a; }
static_assert(SIZE == 4);
static_assert(LATER == 4);
const int LATER = 4;
__global__ void other() { never(1); }
int main() { a::k<<<1, 1>>>(Params(counter)); }
"""


def kept(*roots: str) -> str:
    tokens, pieces = split(SOURCE)
    found = reach.reached(tokens, pieces, [piece for piece in pieces if piece.kernel and piece.names[0] in roots])
    return reach.rendered(tokens, pieces, found)


def test_what_a_kernel_reaches() -> None:
    text = kept("k")
    for there in (
        "SIZE = 4",
        "struct Params",
        "twice()",
        "float helper(float",
        "T deep(",
        "Params operator+",
        "SIZE == 4",
    ):
        assert there in text
    for gone in ("counter", "Tensor", "Unused", "never(float", "<<<", "main", "LATER", "void other"):
        assert gone not in text
    assert "never(float" in kept("other") and "Params" not in kept("other")


def test_lines_keep_their_numbers() -> None:
    lines = SOURCE.splitlines()
    for number, line in enumerate(kept("k").splitlines()):
        assert line.strip() == "" or line in lines[number] or "Params" in line
    assert kept("k").count("\n") == SOURCE.count("\n")


def test_operators_of_classes_in_use_are_used() -> None:
    assert kept("other").count("operator+") == 0 and kept("k").count("operator+") == 1


# Places


def test_places_by_the_preprocessors_marks() -> None:
    text = '# 1 "a.cu"\nint a;\n# 1 "/usr/h" 1 3\nint h;\n# 7 "a.cu" 2\nint b;\n# 8 "a.cu" 3 4\nint c;\n'
    lines = Lines(text)
    assert [lines.at(text.index(f"int {name}")) for name in "ahbc"] == [
        ("a.cu", 1),
        ("/usr/h", 1),
        ("a.cu", 7),
        ("a.cu", 8),
    ]
    assert lines.systems() == {"/usr/h"}  # c stands for a macro of the system's, in a line of a.cu


# Launches

LAUNCHES = """
constexpr int WARP = 32;
enum { SIDE = 16 };
static inline int ceil_div(int a, int b) { return (a + b - 1) / b; }
template <int N, class T> __global__ void k(T* x) {}
__global__ void plain(float* x) {}
template <int D> void run(float* x) {
  const int threads = D * 2, bytes = D * sizeof(float);
  k<D, float><<<ceil_div(1000, D), threads, bytes>>>(x);
}
template void run<8>(float*);
template __global__ void k<5, half>(half*);
int main(int argc, char** argv) {
  int n = atoi(argv[1]);
  dim3 grid(2, SIDE / 4), block(WARP, min(4, 8));
  plain<<<grid, block>>>(x);
  ns::plain<<<n, 1 << 5, n * 4>>>(x);
  plain<<<n > 3 ? 1 : 2, dim3(4)>>>(x);
  plain<<<(unsigned)ceil(1000.0 / 256), static_cast<int>(7.5), 0, stream>>>(x);
  auto kernel = &k<WARP + 1, float>;
  kernel<<<1, -1 + 2>>>(x);
  run<64>(x);
  dim3 threads, blocks(3, 2);
  threads.x = WARP, threads.y = 2;
  blocks.y = 5;
  plain<<<blocks, threads>>>(x);
  threads.y = 4;
  plain<<<blocks, threads>>>(x);
  return a << b < c;
}
"""


def test_launches() -> None:
    tokens, pieces = split(LAUNCHES)
    found = [launch for _, launch in launches_of(tokens, pieces)]
    assert found == [
        Launch("k", "<8, float>", (125, 1, 1), (16, 1, 1), 32),
        Launch("k", "<64, float>", (16, 1, 1), (128, 1, 1), 256),
        Launch("k", "<5, half>", None, None, None),
        Launch("plain", "", (2, 4, 1), (32, 4, 1), 0),
        Launch("plain", "", None, (32, 1, 1), None),
        Launch("plain", "", None, (4, 1, 1), 0),
        Launch("plain", "", (4, 1, 1), (7, 1, 1), 0),
        Launch("k", "<33, float>", (1, 1, 1), (1, 1, 1), 0),
        Launch("plain", "", (3, 5, 1), (32, 2, 1), 0),
        Launch("plain", "", (3, 5, 1), None, 0),
        Launch("k", "<33, float>", None, None, None),
    ]


DEDUCED = """
template <class T, int N = 4, class Out = float> __global__ void k(const T* __restrict__ x, Out* y, int n) {}
template <class T> void run(const T* x, float* y) { k<<<1, 32>>>(x, y, 3); }
template <class Out> void written(Out* y) { k<half, 8><<<1, 64>>>(static_cast<const half*>(p), y, 3); }
void main(void* raw, Unknown other) {
  float *x = make(), y[4];
  run(x, y);
  run((const int*)raw, y);
  written(reinterpret_cast<double*>(raw));
  k<<<1, 8>>>(t.data_ptr<short>(), u.data_ptr<char>(), 3);
  k<<<1, 8>>>(other, y, 3);
}
"""


def test_arguments_of_templates_that_a_call_tells() -> None:
    tokens, pieces = split(DEDUCED)
    assert [launch.instance for _, launch in launches_of(tokens, pieces)] == [
        "k<float>", "k<int>", "k<half, 8, double>", "k<short, 4, char>"
    ]  # fmt: skip


def test_a_file_is_read_whole() -> None:
    """Our own kernels, unpreprocessed: every function is found, and nothing is left over."""
    import kernels_cu

    for path in sorted(Path(kernels_cu.include_dir()).glob("*.cuh")):
        tokens, pieces = split(path.read_text(encoding="utf-8"))
        covered = sum(piece.end - piece.start for piece in pieces)
        assert covered >= len(tokens.words) - 3 * tokens.words.count("namespace"), path.name
        assert all(
            piece.names or piece.kind in ("assertion", "directive", "instantiation", "class") for piece in pieces
        )
