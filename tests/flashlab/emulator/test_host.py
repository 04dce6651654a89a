"""What of a program's text changes before a host compiler takes it: launches, allocations, results that nobody takes."""

from __future__ import annotations

import pytest

from flashlab.emulator import scan
from flashlab.emulator.host import host_edits
from flashlab.emulator.reach import rendered

KERNELS = (
    "__global__ void k(int* x); template <int N> __global__ void t(int* x); namespace deep { __global__ void k2(); }\n"
)


def changed(statement: str) -> str:
    """A statement of the host's as the compiler gets it."""
    text = f"{KERNELS}void host() {{ {statement} }}"
    tokens = scan.Tokens.of(text)
    made = rendered(tokens, [], set(), host_edits(tokens, scan.pieces_of(tokens)))
    return made[made.index("void host() { ") + 14 : -2]


@pytest.mark.parametrize(
    ("statement", "wanted"),
    [
        ("k<<<8, 128>>>(x);", '::emulator::launcher("k", k, ::emulator::Configuration(8, 128))(x);'),
        (
            "t<64><<<a >> 2, b, 0, s>>>(x, NULL);",
            '::emulator::launcher("t<64>", [&](auto&... emu_given) { t<64>(emu_given...); }, '
            "::emulator::Configuration(a >> 2, b, 0, s))(x, (decltype(nullptr))NULL);",
        ),
        ("deep::k2<<<1, 1>>>();", '::emulator::launcher("deep::k2", deep::k2, ::emulator::Configuration(1, 1))();'),
        ("table[2]<<<1, 1>>>(x);", '::emulator::launcher("table[2]", table[2], ::emulator::Configuration(1, 1))(x);'),
        ("e = cudaMalloc((void**)&p->x, 4);", 'e = (::emulator::named("x"), cudaMalloc((void**)&p->x, 4));'),
        ("cudaMalloc(&d[0], f(4));", '::emulator::unchecked((::emulator::named("d"), cudaMalloc(&d[0], f(4))));'),
        ("if (x) cudaFree(x);", "if (x) ::emulator::unchecked(cudaFree(x));"),
        ("check(cudaFree(x));", "check(cudaFree(x));"),
        ("cudaGetLastError();", "cudaGetLastError();"),
        ("launch((const void*)t<3>, &k);", "launch((const void*)::emulator::known(t<3>), &k);"),
        ("launch(reinterpret_cast<void*>(&deep::k2));", "launch(reinterpret_cast<void*>(::emulator::known(&deep::k2)));"),
    ],
)  # fmt: skip
def test_a_statement_of_the_host(statement: str, wanted: str) -> None:
    assert changed(statement) == wanted


def test_shifts_and_comparisons_stay() -> None:
    for statement in ("x = a << 3 >> 2;", "if (a < b && c > d) f();", "cudaError_t e;", "std::cout << x << std::endl;"):
        assert changed(statement) == statement
