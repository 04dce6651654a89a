"""Seeded bugs in dropout, in the kernels of both passes. The emulator runs them, so that no GPU is needed."""

from __future__ import annotations

from tests.mutants.backward import HOPPER, HOPPER_TILES, PHILOX, TILES, KernelMutant
from tests.mutants.scores import FLASH2, FLASH3, VARIANT, ScoreMutant

WHICH, ROWS, GQA = "which are kept", "which are kept, one in 256", "which are kept, causal, GQA, batch 2"
KEYS = "which are kept, several tiles of keys"
BACKWARD, SEVERAL = "dropout, causal, GQA, batch 2", "dropout, several tiles"
STANDARD = "kernels_cu/standard.cu"
DROPS = {"dropout": 0.25}


def forward(mechanism: str, file: str, old: str, new: str, case: str = WHICH, algorithm: str = "flash2") -> ScoreMutant:
    return ScoreMutant(
        mechanism=mechanism, file=file, edits=((old, new),), check="dropout", case=case, aligned=DROPS, algorithm=algorithm
    )  # fmt: skip


def hopper(mechanism: str, old: str, new: str, case: str = WHICH, file: str = FLASH3) -> ScoreMutant:
    return forward(mechanism, file, old, new, case, "flash3")


def backward(
    mechanism: str,
    old: str,
    new: str,
    check: str,
    file: str = TILES,
    algorithm: str = "flash2_backward",
    case: str = BACKWARD,
) -> KernelMutant:
    return KernelMutant(
        mechanism=mechanism, file=file, old=old, new=new, check=check, case=case, algorithm=algorithm
    )  # fmt: skip


def hopper_backward(
    mechanism: str, old: str, new: str, check: str, file: str = HOPPER, case: str = BACKWARD
) -> KernelMutant:
    return backward(mechanism, old, new, check, file, "flash3_backward", case)


def by_squares(mechanism: str, old: str, new: str, check: str) -> KernelMutant:
    return backward(mechanism, old, new, check, "kernels_cu/standard_backward.cu", "standard_backward")


FORWARD = [
    forward("a byte that equals the threshold keeps, too", PHILOX, "< threshold;", "<= (threshold | 0xffffff);", ROWS),
    forward("all heads have one mask", PHILOX, "own.start.x += flat_head;", "", GQA),
    forward("heads don't carry into the offset's upper half", PHILOX, "own.start.y += own.start.x < start.x;", "", GQA),
    forward("upper half of the offset lost", PHILOX, "start = load_global<uint2>(state + 1);",
            "start = {load_global<unsigned>(state + 1), 0};"),
    forward("upper half of the seed lost", PHILOX, "seed = load_global<uint2>(state);",
            "seed = {load_global<unsigned>(state), 0};"),
    forward("rows and columns exchanged", PHILOX, ": patch(line, across);", ": patch(across, line);"),
    forward("a round less", PHILOX, "int ROUNDS = 7", "int ROUNDS = 6"),
    forward("second block of columns has the bytes of the first", PHILOX, "(odd ? second : first) * 4", "first * 4"),
    forward("halves exchanged with another lane", PHILOX, "odd_line[e], 4)", "odd_line[e], 8)"),
    forward("halves not exchanged", PHILOX, "words.of[0][e] = odd ? other : own;", "words.of[0][e] = own;"),
    forward("the lower row's bytes for the upper row's", PHILOX, "2 * (e / 2) + n % 2", "2 * (1 - e / 2) + n % 2"),
    forward("every key tile drops what the first does", FLASH2, "key_tile(j, here) * (BC / 16));", "0);", KEYS),
    forward("every row tile drops what the first does", FLASH2, "(first_row + warp_row) / 16", "warp_row / 16", ROWS),
    forward("what is kept not scaled", FLASH2, "of_kept(alpha * reciprocal(sum), batches.kept)", "alpha * reciprocal(sum)"),
    forward("scaled by another rate than it drops", PHILOX, "return factor * (256.f / kept);",
            "return factor * (256.f / (kept + 0.4f));"),
    forward("what is dropped stays whole", VARIANT, "if constexpr (DROPOUT) {", "if constexpr (false) {"),
    ScoreMutant(
        mechanism="sums and LSE of what is kept", file=FLASH2, check="dropout", case=WHICH, aligned=DROPS, blind=False,
        edits=(
            ("l[i][e / 2] += s[i][n][e];", ""),
            ("key_tile(j, here) * (BC / 16));", "key_tile(j, here) * (BC / 16));\n"
             "for (int i = 0; i < ROW_FRAGMENTS; ++i) for (int n = 0; n < S_FRAGMENTS; ++n) for (int e = 0; e < 4; ++e)"
             " l[i][e / 2] += s[i][n][e];"),
        ),
    ),
    forward("odd rows drop what even rows do", PHILOX, "row % 2 ? left.z : left.x", "left.x", WHICH, "standard"),
    forward("half of the columns not looked at", PHILOX, "+ column / 8 % 2;\n    return make_float4",
            ";\n    return make_float4", WHICH, "standard"),
    forward("a row scaled before it is summed", STANDARD, "of_kept(reciprocal(l), shape.kept)", "reciprocal(l)", WHICH, "standard"),
    hopper("every key tile but the last stays whole", "round_p(p, s); if constexpr (DROPOUT) kept.drop(p);",
           "round_p(p, s);", KEYS),
    hopper("the last key tile stays whole", "last, here) * (BC / 16)); kept.drop(p);", "last, here) * (BC / 16));"),
    hopper("every key tile drops what the last does", "kept.draw(dropout, rows_16, key_tile(j, here) * (BC / 16));",
           "kept.draw(dropout, rows_16, key_tile(work.tiles.last, here) * (BC / 16));", KEYS),
    hopper("every row tile of a persistent block drops what the first does", "work.first_row / 16 + warp_id() - 4",
           "warp_id() - 4", ROWS),
    hopper("both warpgroups drop what the first does", "work.first_row / 16 + warp_id() - 4",
           "work.first_row / 16 + warp_id() % 4"),
    hopper("the mask of another batch's head", "of_head(work.batch * shape.heads + work.head);", "of_head(work.head);", GQA),
    hopper("an output not scaled by what is kept", "of_kept(alpha_of_sink * reciprocal(sum), shape.kept)",
           "alpha_of_sink * reciprocal(sum)"),
    hopper("bytes that borrow from the next", "(x | UPPER) - (limits & ~UPPER)", "x - limits", ROWS, PHILOX),
    hopper("only the lower bits of bytes compared", "(~x & limits) | (~(x ^ limits) & ~less)", "~less", WHICH, PHILOX),
    hopper("both neighbours have the first one's byte", "0x4400 + 0x1111", "0x1111", WHICH, PHILOX),
    hopper("rows g and g + 8 exchanged in operands", ": 2 * half + n % 2;", ": 2 * (1 - half) + n % 2;", WHICH, PHILOX),
    hopper("the first block's words for both", "of.of[n / 2 % 2][0]", "of.of[0][0]", WHICH, PHILOX),
]  # fmt: skip
GRADIENTS = [
    backward("D left out where dP is dropped", "if (p[f][m][n][e] < 0) dp[f][m][n][e] = -d[e % 2];",
             "if (p[f][m][n][e] < 0) dp[f][m][n][e] = 0;", "adjoint"),
    backward("dP not dropped", "if (p[f][m][n][e] < 0) dp[f][m][n][e] = -d[e % 2];", "", "adjoint"),
    backward("the sign that says it stays", "p[f][m][n][e] = fabsf(p[f][m][n][e]);", "", "adjoint"),
    backward("dV of what is dropped, too", "fmaxf(s[f][m][n][e], 0)", "fabsf(s[f][m][n][e])", "key_sets"),
    backward("queries of another warp", "first + ACROSS : first", "first + 1 : first", "key_sets"),
    backward("the same bytes for two pairs of fragments", "m % 2 * 2 + n, e)", "n, e)", "key_sets"),
    backward("mask of the tile's first keys", "(first_key + warp.key) / 16 + f, first, second", "first_key / 16 + f, first, second",
             "key_sets"),
    backward("mask not transposed", "TRANSPOSED ? patch(across, line) :", "false ? patch(across, line) :", "key_sets", PHILOX),
    backward("words of a call not transposed", "TRANSPOSED ? made.z : made.y", "made.y", "key_sets", PHILOX),
    backward("bytes of a word not transposed", "TRANSPOSED ? 2 * (n % 2) + e / 2 :",
             "false ? 2 * (n % 2) + e / 2 :", "key_sets", PHILOX),
    backward("D without its part of the scale", "kept_part(delta_ahead[r], shape.kept)", "delta_ahead[r]", "equal_keys",
             "kernels_cu/flash2_backward.cu"),
    backward("mask of the KV head", "batch * shape.heads + here.head);", "batch * shape.heads + kv_head);", "key_sets",
             "kernels_cu/flash2_backward.cu"),
    backward("mask of another batch", "dropout.of_head(batch * shape.heads + here.head)", "dropout.of_head(here.head)", "key_sets",
             "kernels_cu/flash2_backward.cu"),
    backward("dV not scaled", "of_kept(1, shape.kept)", "1", "rule", "kernels_cu/flash2_backward.cu"),
    hopper_backward("P with what is dropped goes into TMA's dV", "if constexpr (DROPOUT) kept.drop(p);", "", "key_sets"),
    hopper_backward("dP with what is dropped goes into TMA's dS", "bits(dp[n][e]) & kept.one(n, e)", "bits(dp[n][e])", "adjoint",
                    HOPPER_TILES),
    hopper_backward("no D where dP is dropped", "float_of(bits(dp[n][e]) & kept.one(n, e)) + (e % 2 ? d.y : d.x)",
                    "float_of(bits(dp[n][e] + (e % 2 ? d.y : d.x)) & kept.one(n, e))", "adjoint", HOPPER_TILES),
    hopper_backward("D in a ring without its part of the scale", "kept_part(-x, shape.kept)", "-x", "equal_keys"),
    hopper_backward("a mask of the other warpgroup", "opaque(lane_key) / 16", "(opaque(lane_key) - 64 * consumer) / 16",
                    "key_sets"),
    hopper_backward("a mask of the first keys", "opaque(lane_key) / 16", "warp_id() - 4", "key_sets", case=SEVERAL),
    hopper_backward("a mask of the first queries", "here.i * (BR / 16)", "0", "key_sets", case=SEVERAL),
    hopper_backward("a mask of the group's first head", "of_head(here.head)",
                    "of_head(work.first(shape).head)", "key_sets"),
    hopper_backward("an operand's bytes not transposed", "TRANSPOSED ? 2 * (n % 2) + half :", "false ? 2 * (n % 2) + half :",
                    "key_sets", PHILOX),
    hopper_backward("an element's byte of the other row", "byte_of(n, e / 2)", "byte_of(n, 1 - e / 2)", "adjoint", PHILOX),
    hopper_backward("dQ from its sums not scaled by what is kept", "sum, half, of_kept(shape.scale, shape.kept)",
                    "sum, half, shape.scale", "rule", "kernels_cu/include/sum_tiles.cuh"),
    by_squares("P with what is dropped goes into dV", "x = dropout.dropped(x, first_row + row, first_key + column);", ";",
               "key_sets"),
    by_squares("P dropped by places in its tile", "first_row + row, first_key + column", "first_row + row, column", "key_sets"),
    by_squares("dP with what is dropped goes into dS", "y = dropout.dropped(y, row, key);", ";", "adjoint"),
    by_squares("D of all that dP would be", "delta = kept_part(delta, shape.kept);", "", "equal_keys"),
    by_squares("mask of the first head of all batches", "of_head(here.batch * shape.heads + head)", "of_head(head)", "key_sets"),
    by_squares("sums not scaled by what is kept", "of_kept(shape.scale, DROPOUT ? opaque(shape.kept) : 256)", "shape.scale",
               "rule"),
]  # fmt: skip
