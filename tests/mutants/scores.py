"""Seeded bugs in what the kernels do to scores: soft cap, sinks, ALiBi. The emulator runs them, so that no GPU is needed."""

from __future__ import annotations

import shutil
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from tests.mutants.zoo import ROOT
from tests.patches import patched

SCORES, MASK, SOFTMAX = (f"kernels_cu/include/{name}.cuh" for name in ("scores", "mask", "softmax"))
FLASH2, FLASH3 = (f"kernels_cu/{name}.cu" for name in ("flash2", "flash3"))
VARIANT = "kernels_cu/include/variant.cuh"


@dataclass(frozen=True, kw_only=True)
class ScoreMutant:
    """Each of `edits` puts code for code that occurs once in `file`, as tests/patches.py looks for it.

    The trial `case` of `check` must fail then. `aligned` is what the usual test's aligned problem has of scores, and `blind` says
    that this test doesn't see the bug.
    """

    mechanism: str
    file: str
    edits: tuple[tuple[str, str], ...]
    check: str
    case: str
    aligned: Mapping[str, Any] = field(default_factory=dict[str, Any])
    blind: bool = True
    algorithm: str = "flash2"
    step: str | None = None

    @property
    def name(self) -> str:
        return self.mechanism.replace(" ", "-").replace(",", "").replace("'", "")

    def written(self, folder: Path) -> Path:
        """A copy of the kernels' folder with the bug in it."""
        shutil.copytree(ROOT / "kernels_cu", folder / "kernels_cu", ignore=shutil.ignore_patterns("emulator"))
        path = folder / self.file
        text = path.read_text(encoding="utf-8")
        for old, new in self.edits:
            text = patched(text, old, new, step=self.step)
        path.write_text(text, encoding="utf-8")
        return folder / "kernels_cu"


CAP, SINKS, ALIBI = {"soft_cap": 30.0}, {"sinks": True}, {"alibi": True}
BEND = "if constexpr (SOFT_CAP) Tanh::apply(s, shape.scale / shape.soft_cap);"
FALL = "slope * sign * LOG2E / c"
DISTANCE = "fabsf(diagonal - (8 * n + e))"
EVERY_SCORE = "for (int n = 0; n < N; ++n) for (int e = 0; e < 4; ++e) s[n][e]"
SINK_OF_2 = "of_head<SINKS>(sinks, place.head % shape.heads, -INF)"
SINK_OF_3 = "of_head<SINKS>(sinks, work.head, -INF)"
TOP = "const float top = fmaxf(m, sink * LOG2E), alpha = exp2_approx(m - top);"

SOFT_CAPS = [
    ScoreMutant(
        mechanism="soft cap bounds products before they are scaled",
        file=SCORES,
        edits=(
            (
                BEND,
                f"if constexpr (SOFT_CAP) {{ Tanh::apply(s, 1.f / shape.soft_cap); {EVERY_SCORE} *= shape.scale; }}",
            ),
        ),
        check="rule",
        case="soft cap",
        aligned=CAP,
        blind=False,
    ),
    ScoreMutant(
        mechanism="tanh not multiplied with the cap",
        file=SCORES,
        edits=(("(SOFT_CAP ? shape.soft_cap :", "(SOFT_CAP ? 1.f :"),),
        check="rule",
        case="soft cap",
        aligned=CAP,
        blind=False,
    ),
    ScoreMutant(
        mechanism="scores scaled once more behind the cap",
        file=SCORES,
        edits=(("(SOFT_CAP ? shape.soft_cap :", "(SOFT_CAP ? shape.soft_cap * shape.scale :"),),
        check="rule",
        case="soft cap, causal, GQA",
        aligned=CAP,
        blind=False,
    ),
    ScoreMutant(
        mechanism="hidden scores get the cap's bottom, as if it came after the mask",
        file=MASK,
        edits=(("int lane_column, Heads heads = 1) { … s[n][2 * half + e] = -INF;", "s[n][2 * half + e] = -1.f;"),),
        check="key_sets",
        case="soft cap",
        aligned=CAP,
    ),
    ScoreMutant(
        mechanism="soft cap left out of tiles that need a mask",
        file=FLASH2,
        edits=(
            (
                "variant.bend(s, scores, shape, lane_row, key_tile(j, here) * BC);",
                "if (j >= full.first && j <= full.last) variant.bend(s, scores, shape, lane_row, key_tile(j, here) * BC);",
            ),
        ),
        check="rule",
        case="soft cap, causal, GQA",
        aligned=CAP,
    ),
    ScoreMutant(
        mechanism="soft cap left out of tiles that need no mask",
        file=FLASH2,
        edits=(
            (
                "variant.bend(s, scores, shape, lane_row, key_tile(j, here) * BC);",
                "if (j < full.first || j > full.last) variant.bend(s, scores, shape, lane_row, key_tile(j, here) * BC);",
            ),
        ),
        check="rule",
        case="soft cap",
        aligned=CAP,
        blind=False,
    ),
    ScoreMutant(
        mechanism="only the first key tile is bounded",
        algorithm="flash3",
        file=FLASH3,
        edits=(("softmax.exponentials(s, own, lane_row, j, full);", "softmax.exponentials(s);"),),
        check="rule",
        case="soft cap below large logits",
        aligned=CAP,
    ),
    ScoreMutant(
        mechanism="weights of hidden keys as tanh leaves them",
        algorithm="flash3",
        file=SOFTMAX,
        edits=(("hide(s, shape, row, j, full, 0);", ""),),
        check="rule",
        case="soft cap, empty rows",
        aligned=CAP,
    ),
    ScoreMutant(
        mechanism="maxima that no cap bounds",
        algorithm="flash3",
        file=SOFTMAX,
        edits=(("logit(quad_max(fmaxf(a, b)))", "c * quad_max(fmaxf(a, b))"),),
        check="rule",
        case="soft cap below large logits",
        aligned=CAP,
        blind=False,
    ),
    ScoreMutant(
        mechanism="tanh's polynomial for a whole tile of large scores",
        algorithm="flash3",
        file=SOFTMAX,
        edits=(("} else if (small(s)) {", "} else if (c > 0) {"),),
        check="rule",
        case="soft cap below large logits",
        aligned=CAP,
    ),
    ScoreMutant(
        mechanism="order of scores turned by a scale below 0",
        algorithm="flash3",
        file=SOFTMAX,
        edits=(("sign = shape.scale < 0 ? -1 : 1;", "sign = 1;"),),
        check="rule",
        case="soft cap, window, scale below 0",
        aligned=CAP,
    ),
    ScoreMutant(
        mechanism="large caps by the formula of small ones",
        algorithm="flash3",
        file=SOFTMAX,
        edits=(("EXACT = 64;", "EXACT = 1e30f;"),),
        check="neutral",
        case="soft cap of 1e5",
        aligned=CAP,
    ),
    ScoreMutant(
        mechanism="tanh by an exponential near 0, too",
        file=SCORES,
        edits=(("SMALL = 0.2f,", "SMALL = 0.f,"),),
        check="neutral",
        case="soft cap of 1e5",
        aligned=CAP,
    ),
    ScoreMutant(
        mechanism="tanh's polynomial beyond its range",
        file=SCORES,
        edits=(("SMALL = 0.2f,", "SMALL = 0.6f,"),),
        check="rule",
        case="soft cap",
        aligned=CAP,
    ),
    ScoreMutant(
        mechanism="tanh of eleven bits, as the hardware's own",
        file=SCORES,
        edits=(("return x * (1 + u *", "return __uint_as_float(0xfffff000u & __float_as_uint(x)) * (1 + u *"),),
        check="rule",
        case="soft cap",
        aligned=CAP,
    ),
    ScoreMutant(
        mechanism="tanh as a quotient of two exponentials that overflow",
        file=SCORES,
        edits=(("copysignf(1 - 2 * reciprocal(e + 1), x)", "copysignf((e - 1) * reciprocal(e + 1), x)"),),
        check="extremes",
        case="soft cap of 1e-3, logits of 1e4",
        aligned=CAP,
    ),
    ScoreMutant(
        mechanism="tanh loses the sign of large scores",
        file=SCORES,
        edits=(("copysignf(1 - 2 * reciprocal(e + 1), x)", "1 - 2 * reciprocal(e + 1)"),),
        check="rule",
        case="soft cap below large logits",
        aligned=CAP,
    ),
]

OF_SINKS = [
    ScoreMutant(
        mechanism="sink added once per key tile",
        file=FLASH2,
        step="output",
        edits=(
            (
                "",
                "for (int i = 0; i < ROW_FRAGMENTS; ++i) for (int half = 0; half < 2; ++half)"
                " if (j < tiles.last) l[i][half] += 0.25f * exp2_approx(of_head<SINKS>(sinks, head, -INF) * LOG2E - m[i][half]);\n",
            ),
        ),
        check="rule",
        case="soft cap, sinks, ALiBi, window",
        aligned=SINKS,
    ),
    ScoreMutant(
        mechanism="sink to base 2 without its factor",
        file=FLASH2,
        edits=((SINK_OF_2, f"{SINK_OF_2} * LN2"),),
        check="key_sets",
        case="sinks, empty rows",
        aligned=SINKS,
    ),
    ScoreMutant(
        mechanism="sink scaled like a score",
        file=FLASH2,
        edits=((SINK_OF_2, f"{SINK_OF_2} * shape.scale"),),
        check="rule",
        case="sinks",
        aligned=SINKS,
    ),
    ScoreMutant(
        mechanism="sink left out of the LSE",
        file=FLASH2,
        edits=(
            (
                "const float alpha = join_sink(m[i][half], sum, sink);"
                " const float factor = sum > 0 ? of_kept(alpha * reciprocal(sum), batches.kept) : 0;",
                "float top = m[i][half], all = sum; const float alpha = join_sink(top, all, sink);"
                " const float factor = all > 0 ? alpha * reciprocal(all) : 0;",
            ),
        ),
        check="rule",
        case="sinks",
        aligned=SINKS,
    ),
    ScoreMutant(
        mechanism="sink joined relative to the row's maximum, which it may exceed",
        file=SCORES,
        edits=((TOP, "const float top = m, alpha = 1;"),),
        check="extremes",
        case="sinks of 1e4",
        aligned=SINKS,
    ),
    ScoreMutant(
        mechanism="sink of the KV head",
        file=FLASH2,
        edits=((SINK_OF_2, "of_head<SINKS>(sinks, kv_head(shape, place.head % shape.heads), -INF)"),),
        check="rule",
        case="sinks, causal, GQA, batch 2",
        aligned=SINKS,
    ),
    ScoreMutant(
        mechanism="sink by the number of the sequence",
        file=FLASH2,
        edits=((SINK_OF_2, "of_head<SINKS>(sinks, place.head / shape.heads, -INF)"),),
        check="head_order",
        case="reversed, soft cap, sinks, ALiBi",
        aligned=SINKS,
    ),
    ScoreMutant(
        mechanism="sink of the first head for all row tiles of a block",
        algorithm="flash3",
        file=FLASH3,
        edits=((SINK_OF_3, "of_head<SINKS>(sinks, 0, -INF)"),),
        check="rule",
        case="sinks, causal, GQA, batch 2",
        aligned=SINKS,
    ),
    ScoreMutant(
        mechanism="sink forgotten in empty rows",
        file=SCORES,
        edits=((TOP, f"if (sum == 0) return 1; {TOP}"),),
        check="rule",
        case="sinks, empty rows",
        aligned=SINKS,
    ),
    ScoreMutant(
        mechanism="accumulator not rescaled when the sink is the maximum",
        file=SCORES,
        edits=(("m = top; return alpha;", "m = top; return 1;"),),
        check="extremes",
        case="sinks of 1e4",
        aligned=SINKS,
        blind=False,
    ),
    ScoreMutant(
        mechanism="sum not rescaled when the sink is the maximum",
        algorithm="flash3",
        file=SCORES,
        edits=(("sum = sum * alpha + exp2_approx(", "sum = sum + exp2_approx("),),
        check="extremes",
        case="sinks beside logits of 1e4",
        aligned=SINKS,
        blind=False,
    ),
    ScoreMutant(
        mechanism="sink weighs a value of 1",
        file=FLASH2,
        edits=(
            (
                "const float alpha = join_sink(m[i][half], sum, sink);",
                "const float alpha = join_sink(m[i][half], sum, sink); for (int n = 0; n < O_FRAGMENTS; ++n)"
                " for (int e = 0; e < 2; ++e) o[i][n][2 * half + e] += exp2_approx(sink * LOG2E - m[i][half]) / alpha;",
            ),
        ),
        check="rule",
        case="sinks",
        aligned=SINKS,
        blind=False,
    ),
    ScoreMutant(
        mechanism="sink cut to 16 bits",
        algorithm="flash3",
        file=FLASH3,
        edits=((SINK_OF_3, f"__uint_as_float(__float_as_uint({SINK_OF_3}) & 0xffff0000u)"),),
        check="rule",
        case="sinks",
        aligned=SINKS,
    ),
    ScoreMutant(
        mechanism="sink joins only one of a lane's two rows",
        algorithm="flash3",
        file=FLASH3,
        edits=(("join_sink(softmax.m[half], sum, sink)", "join_sink(softmax.m[half], sum, half ? -INF : sink)"),),
        check="key_sets",
        case="sinks, empty rows",
        aligned=SINKS,
        blind=False,
    ),
]

OF_ALIBI = [
    ScoreMutant(
        mechanism="distances aligned top-left",
        file=SCORES,
        edits=(("row + 8 * half + shape.len_kv - shape.len_q - key", "row + 8 * half - key"),),
        check="key_sets",
        case="ALiBi, causal, more keys",
        aligned=ALIBI,
    ),
    ScoreMutant(
        mechanism="bias added instead of subtracted",
        file=SCORES,
        edits=((f"-= fall * {DISTANCE}", f"+= fall * {DISTANCE}"),),
        check="key_sets",
        case="ALiBi",
        aligned=ALIBI,
        blind=False,
    ),
    ScoreMutant(
        mechanism="distances to later keys negative",
        file=SCORES,
        edits=((DISTANCE, "(diagonal - (8 * n + e))"),),
        check="key_sets",
        case="ALiBi",
        aligned=ALIBI,
        blind=False,
    ),
    ScoreMutant(
        mechanism="slope of the next head",
        file=VARIANT,
        edits=(("flat_head % batches.heads", "(flat_head + 1) % batches.heads"),),
        check="head_order",
        case="reversed, soft cap, sinks, ALiBi",
        aligned=ALIBI,
    ),
    ScoreMutant(
        mechanism="slope of the KV head",
        algorithm="flash3",
        file=FLASH3,
        edits=(
            (
                "of_head<ALIBI>(alibi_slopes, work.head, 0)",
                "of_head<ALIBI>(alibi_slopes, kv_head(shape, work.head), 0)",
            ),
        ),
        check="rule",
        case="ALiBi, window, GQA",
        aligned=ALIBI,
    ),
    ScoreMutant(
        mechanism="bias to base e where exponentials are to base 2",
        file=SCORES,
        edits=((FALL, "slope * sign / c"),),
        check="key_sets",
        case="ALiBi",
        aligned=ALIBI,
        blind=False,
    ),
    ScoreMutant(
        mechanism="bias scaled like a score",
        file=SCORES,
        edits=((FALL, "slope * sign"),),
        check="key_sets",
        case="ALiBi, window, more queries",
        aligned=ALIBI,
        blind=False,
    ),
    ScoreMutant(
        mechanism="bias inside the cap",
        file=SCORES,
        edits=(
            (BEND, ""),
            (
                f"s[n][2 * half + e] -= fall * {DISTANCE}; }} }}",
                f"s[n][2 * half + e] -= slope / shape.scale * {DISTANCE}; }} }} {BEND}",
            ),
        ),
        check="rule",
        case="soft cap, sinks, ALiBi, window",
        aligned={**CAP, **ALIBI},
    ),
    ScoreMutant(
        mechanism="distances from the tile's first key",
        algorithm="flash3",
        file=FLASH3,
        edits=(
            (
                "softmax.bend(s, own, lane_row, key_tile(j, here) * BC + lane_column, slope);",
                "softmax.bend(s, own, lane_row, lane_column, slope);",
            ),
        ),
        check="rule",
        case="ALiBi, long row of 1025 keys",
        aligned=ALIBI,
    ),
    ScoreMutant(
        mechanism="distances wrap around at 128",
        file=SCORES,
        edits=((DISTANCE, "fabsf(static_cast<signed char>(diagonal - (8 * n + e)))"),),
        check="key_sets",
        case="ALiBi, causal, more keys",
        aligned=ALIBI,
    ),
    ScoreMutant(
        mechanism="distances in 16 bits",
        algorithm="flash3",
        file=SCORES,
        edits=((DISTANCE, f"__uint_as_float(__float_as_uint({DISTANCE}) & 0xffff0000u)"),),
        check="rule",
        case="ALiBi, long row of 1025 keys",
        aligned=ALIBI,
    ),
    ScoreMutant(
        mechanism="distances of a lane's upper row for both of its rows",
        file=SCORES,
        edits=(("row + 8 * half + shape.len_kv", "row + shape.len_kv"),),
        check="key_sets",
        case="ALiBi",
        aligned=ALIBI,
        blind=False,
    ),
    ScoreMutant(
        mechanism="distance of a pair's first key for both of its keys",
        algorithm="flash3",
        file=SCORES,
        edits=(("(8 * n + e));", "(8 * n));"),),
        check="rule",
        case="ALiBi, more queries than keys",
        aligned=ALIBI,
    ),
    ScoreMutant(
        mechanism="bias not flipped with the scores of a negative scale",
        file=SCORES,
        edits=((FALL, "slope * LOG2E / c"),),
        check="rule",
        case="ALiBi, scale below 0",
        aligned=ALIBI,
    ),
    ScoreMutant(
        mechanism="bias lost where the scale is 0",
        file=SCORES,
        edits=(
            ("fabsf(shape.scale) : 0x1p-60f", "fabsf(shape.scale) : 0x1p-120f"),
            (FALL, "fminf(slope * LOG2E / c, 1e9f) * sign"),
        ),
        check="rule",
        case="ALiBi, scale 0",
        aligned=ALIBI,
    ),
]

ZOO = [*SOFT_CAPS, *OF_SINKS, *OF_ALIBI]
