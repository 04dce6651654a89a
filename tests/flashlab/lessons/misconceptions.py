# ruff: noqa: E501  (a table)
"""What learners get wrong: each solution with one thought in it changed, and what the check has to say about it.

A row is an exercise, a name, what the line was, what it becomes, the kind of verdict, what its message must match, and the
reason that has to be named, by the message or by the tutor.
The first of each exercise runs in each `make test`: the one that is the hardest to catch.
"""

from __future__ import annotations

import re
from typing import NamedTuple


class Misconception(NamedTuple):
    exercise: str
    name: str
    was: str
    becomes: str
    kind: str
    says: str
    at: str = ""
    """Of a kernel: the step that the mistake is in, or the line of the changed file. Of a program: the step in which it shows, where
    that isn't the changed line's."""
    why: str = ""
    """What message and tutor have to say of the reason. Where a verdict is explained, and no more can be known, it is what is
    wrong."""


def steps_of(marked: str, was: str) -> set[str]:
    """The steps in which a change of a program may first show: that of the changed line, in a program's text.

    A line before the first step shows in the launch or in the first step, and the head of a loop in the loop's first step.
    """
    start = marked.index('"""', marked.index('"""') + 3)  # behind the docstring
    at = marked.index(was, start)
    at += len(was) - len(was.lstrip())
    before, after = (re.findall(r'block\.step\("(\w+)"\)', text) for text in (marked[:at], marked[at:]))
    if not before:
        return {"launch", after[0]}
    line = marked[marked.rindex("\n", 0, at) + 1 :].lstrip()
    return {before[-1], after[0]} if line.startswith("for ") else {before[-1]}


def _row(
    exercise: str, name: str, was: str, becomes: str, kind: str, says: str, why: str = "", at: str = ""
) -> Misconception:
    return Misconception(exercise, name, was, becomes, kind, says, at, why)


MISCONCEPTIONS = [
    _row("00.1", "adds-the-first-operand-to-itself", "x + y", "x + x", "numbers", r"out, row tile 0 \(rows 0 to 63\)", "what is stored to out is x times 2"),
    _row("00.1", "never-loads-k", "y = block.fetch(k, block.i, tile.rows)", "y = x", "numbers", "row tile 0", "the solution loads .* of k; yours does not"),
    _row("00.1", "stores-every-tile-to-the-first", "x + y, block.i", "x + y, 0", "numbers", "row tile 0 .*worst element", "the solution stores .* of out; yours stores .*"),
    _row("00.1", "tile-counted-from-one", "fetch(k, block.i,", "fetch(k, block.i + 1,", "out of bounds", r"k: row tile 4 \(of 64 rows each\) is read", "the solution loads .* of k; yours loads .*"),
    _row("00.1", "fetches-an-operand-twice", "y = block.fetch(k, block.i, tile.rows)",
         "y = block.fetch(k, block.i, tile.rows); y = block.fetch(k, block.i, tile.rows)", "bytes", "k read.*2 times the budget", "yours loads .* of k, twice in all, and the solution once"),
    _row("00.1", "subtracts", "x + y", "x - y", "numbers", "row tile 0", "what is stored to out is x - y"),
    _row("00.1", "stores-one-operand", "store(out, x + y,", "store(out, x,", "numbers", "row tile 0", "what is stored to out lacks y, which was not added"),
    _row("00.2", "no-epsilon", "variance + 1e-5", "variance + 0.0", "numbers", "row tile 0", "y is .* and should be"),
    _row("00.2", "variance-without-the-mean", "(centred * centred).sum()", "(x * x).sum()", "numbers", "row tile 0", "variance is .* and should be"),
    _row("00.2", "divides-by-the-variance", "block.elementwise(np.sqrt, variance + 1e-5)", "(variance + 1e-5)", "numbers", "row tile 0", "y is centred / variance"),
    _row("00.2", "divides-by-the-tile's-width", "x.sum() / q.cols", "x.sum() / tile.cols", "numbers", "worst element", "mean is .* times what it should be, throughout"),
    _row("00.2", "reads-the-row-for-every-statistic", "variance = (",
         "centred = block.fetch(q, block.i, tile.rows) - mean; variance = (", "bytes", "q read.*too many, 2 times the budget", "yours loads .* of q, twice in all, and the solution once"),
    _row("00.2", "divides-by-one-less", "centred).sum() / q.cols", "centred).sum() / (q.cols - 1)", "numbers", "row tile 0", "variance is .* times what it should be, throughout"),
    _row("00.2", "forgets-the-mean", "y = centred /", "y = x /", "numbers", "row tile 0", "y is .* and should be"),
    _row("00.3", "no-sum", " + block.fetch(k, block.i, tile.rows)", "", "numbers", "row tile 0", "the solution loads .* of k; yours does not"),
    _row("00.3", "keeps-the-sum-in-memory", 'block.step("normalize")',
         'block.store(out, x, block.i, tile.rows); x = block.fetch(out, block.i, tile.rows); block.step("normalize")',
         "bytes", "out read.*the budget is 0", "yours loads .* of out, and the solution does not"),
    _row("00.3", "gelu-with-the-wrong-sign", "-1.702", "1.702", "numbers", "row tile 0", "y is .* and should be"),
    _row("00.3", "exp-by-numpy", "block.exp(normal * -1.702)", "block.elementwise(np.exp, normal * -1.702)", "arithmetic", "block.exp computed 0"),
    _row("00.3", "gelu-of-the-sum", "(block.exp(normal * -1.702) + 1.0)", "(block.exp(normal * -1.0) + 1.0)", "numbers", "row tile 0", "y is .* and should be"),
    _row("00.3", "sigmoid-only", "y = normal / (block.exp", "y = 1.0 / (block.exp", "numbers", "row tile 0", "y was not multiplied by normal"),
    _row("00.4", "splits-the-columns-of-b", 'split=("rows", "none")', 'split=("none", "rows")', "asked", r"line \d+: split=\('none', 'rows'\)"),
    _row("00.4", "keeps-the-last-step-only", ", acc=acc)", ")", "numbers", "row tile 0, column tile 0", "what acc had before is lost"),
    _row("00.4", "stores-at-every-step", "acc=acc)  # solution\n        block.step(\"store\")\n        block",
         "acc=acc)\n            block", "bytes", "out written.*4 times the budget", "yours stores .* of out once more than the solution"),
    _row("00.4", "walks-along-the-wrong-axis", "block.load(v, step, 32, block.j, tile.cols)",
         "block.load(v, block.j, 32, step, tile.cols)", "out of bounds", r"v: column tile 2 \(of 64 columns each\) is read", "the solution loads .* of v; yours loads .*"),
    _row("00.4", "every-block-the-first-column", "block.load(v, step, 32, block.j, tile.cols)",
         "block.load(v, step, 32, 0, tile.cols)", "numbers", "row tile 0, column tile 1", "the solution loads .* of v; yours loads .*"),
    _row("00.4", "q-at-the-first-step-only", "block.load(q, block.i, tile.rows, step, 32)", "block.load(q, block.i, tile.rows, 0, 32)", "numbers", "row tile 0, column tile 0", "the solution loads .* of q; yours loads .*"),
    _row("00.4", "steps-rounded-down", "range(-(-q.cols // 32))", "range(q.cols // 32)", "numbers", "row tile 0, column tile 0", r"the solution is here, and your program is at step `store`, row tile 0, step = \S+"),
    _row("01.1", "forgets-the-transpose", "k_j.T", "k_j", "crash", r"is a \.T missing\?.*in line", "your program stops here"),
    _row("01.1", "forgets-the-scale", ", scale=problem.scale", "", "numbers", "the whole tile is 8 times what it should be", "s is .* times what it should be, throughout"),
    _row("01.1", "every-block-the-first-keys", "block.load(k, block.j,", "block.load(k, 0,", "numbers", "column tile 1", "the solution loads .* of k; yours loads .*"),
    _row("01.1", "row-and-column-tile-mixed-up", "block.load(k, block.j,", "block.load(k, block.i,", "numbers", "column tile 1", "the solution loads .* of k; yours loads .*"),
    _row("01.1", "scale-squared", "scale=problem.scale", "scale=problem.scale**2", "numbers", "the whole tile is 0.125 times", "s is .* times what it should be, throughout"),
    _row("01.1", "stores-at-the-mirrored-place", "s, block.i, tile.rows, block.j, tile.cols", "s, block.j, tile.rows, block.i, tile.cols", "crash", "column tile = .*block.j tiles of columns, in line", "your program stops here"),
    _row("01.2", "no-maximum", "x - x.max().finite()", "x", "numbers", "row tile 0", r"e is exp\(x\) itself: no maximum was subtracted, or one that is never below 0"),
    _row("01.2", "divides-by-the-number-of-rows", "e / e.sum().nonzero()", "e / (e.sum().nonzero() * 0 + float(tile.rows))", "numbers", "row tile 0", "what is stored to p is .* times 0.01562"),
    _row("01.2", "reads-s-for-each-pass", "e = block.exp(x", 'x = block.fetch(s, block.i, tile.rows, fill=float("-inf")); e = block.exp(x',
         "bytes", "s read.*2 times the budget", "yours loads .* of s, twice in all, and the solution once"),
    _row("01.2", "v-of-the-row-tile", "block.load(v, j, tile.cols)", "block.load(v, 0, tile.cols)", "numbers", "row tile 0", "the solution loads .* of v; yours loads .*"),
    _row("01.2", "no-softmax-at-all", "block.store(p, e / e.sum().nonzero(),", "block.store(p, e,", "numbers", "row tile 0", r"what is stored to p was not divided by e.sum\(\) = \S+"),
    _row("01.2", "maximum-of-at-least-0", "x.max().finite()", "block.maximum(x.max(), 0.0)", "numbers", "row tile 0", r"e is exp\(x\) itself: no maximum was subtracted, or one that is never below 0"),
    _row("01.2", "an-empty-row-is-nan", "x.max().finite()", "x.max()", "numbers", "row tile 0", r"e is no number \(NaN\): -inf less -inf, a division by 0, or 0 times infinity \(is an exponent's sign right\?\)"),
    _row("01.3", "p-is-not-rounded", "(e / e.sum().nonzero()).round(problem.dtype)", "e / e.sum().nonzero()", "unrounded", 'step "output".*round'),
    _row("01.3", "strip-of-one-tile-only", "block.load(k, 0, keys)", "block.load(k, 0, tile.cols)", "crash", "in line", "the solution loads .* of k; yours loads .*"),
    _row("01.3", "forgets-the-mask", "        s = block.mask(s, block.i, 0)  # solution\n", "", "numbers", "row tile 0.*causal", "s has values where the mask hides the key, and -inf belongs there"),
    _row("01.3", "forgets-to-divide", "(e / e.sum().nonzero())", "e", "numbers", "row tile 0", r"p was not divided by e.sum\(\) = \S+"),
    _row("01.3", "s-by-way-of-memory", 'block.step("softmax")',
         'w = m.workspace("s", keys); block.store(w, s, block.i, tile.rows); s = block.fetch(w, block.i, tile.rows, fill=float("-inf"))',
         "bytes", "s read.*the budget is 0", "yours loads .* of s, and the solution does not"),
    _row("01.3", "no-maximum", "s - s.max().finite()", "s", "numbers", "row tile 0", r"e is exp\(s\) itself: no maximum was subtracted, or one that is never below 0"),
    _row("01.3", "maximum-of-at-least-0", "s.max().finite()", "block.maximum(s.max(), 0.0)", "numbers", "row tile 0", r"e is exp\(s\) itself: no maximum was subtracted, or one that is never below 0"),
    _row("01.3", "maximum-of-the-whole-tile", "s.max()", "s.max().T.max()", "numbers", "row tile", r"e is exp\(s - the maximum of the whole tile\)"),
    _row("01.3", "every-warp-does-all", 'v_all, split=("rows", "none")', 'v_all, split=("none", "none")', "repeated", 'step "output".*each of the 4 warps'),
    _row("02.1", "maximum-starts-at-0", 'block.full(tile.rows, 1, float("-inf"))', "block.full(tile.rows, 1, 0.0)", "numbers", "row tile 0", "top is never below 0, as if the maximum had started at 0 and not at -inf"),
    _row("02.1", "no-maximum", "top = block.maximum(top, x.max())", "top = top.finite()", "numbers", "row tile 0", "top is .* throughout"),
    _row("02.1", "maximum-of-the-last-tile", "block.maximum(top, x.max())", "x.max()", "numbers", "row tile", "top is the maximum of x alone: the tiles before are forgotten"),
    _row("02.1", "maximum-of-the-whole-tile", "x.max())", "x.max().T.max())", "numbers", "row tile", "top is the largest of all rows"),
    _row("02.1", "sum-of-the-last-tile", "total + block.exp(x - top).sum()", "block.exp(x - top).sum()", "numbers", "row tile 0, column tile", r"total is the sum of exp\(x - top\) alone: the tiles before are forgotten"),
    _row("02.1", "every-tile-of-out-the-first", "block.i, tile.rows, c, tile.cols)  # solution", "block.i, tile.rows, 0, tile.cols)",
         "numbers", "row tile 0, column tile", "the solution stores .* of out; yours does not"),
    _row("02.1", "never-divides", "block.exp(x - top) / total", "block.exp(x - top)", "numbers", "row tile 0", r"what is stored to out was not divided by total = \S+"),
    _row("02.2", "keeps-the-whole-row", """            new_top = block.maximum(top, x.max())  # solution
            total = total * block.exp(top - new_top) + block.exp(x - new_top).sum()  # solution
            top = new_top  # solution
""", """            row = [x] if c == 0 else [*row, x]
            top = block.maximum(top, x.max())
        for x in row:
            total = total + block.exp(x - top).sum()
""", "registers", r"registers: a block holds \d+ KB .* of 256 KB"),
    _row("02.2", "maximum-starts-at-0", 'block.full(tile.rows, 1, float("-inf"))', "block.full(tile.rows, 1, 0.0)", "numbers", "row tile 0", "top is never below 0, as if the maximum had started at 0 and not at -inf"),
    _row("02.2", "forgets-to-rescale", "total * block.exp(top - new_top)", "total", "numbers", "row tile 0", "total is .* and should be"),
    _row("02.2", "rescales-upside-down", "block.exp(top - new_top)", "block.exp(new_top - top)", "numbers", "row tile 0", r"total is no number \(NaN\): -inf less -inf, a division by 0, or 0 times infinity \(is an exponent's sign right\?\)"),
    _row("02.2", "remembers-no-maximum", "            top = new_top  # solution\n", "", "numbers", "row tile 0", "top is -inf throughout"),
    _row("02.2", "three-passes-after-all", "total = total", "x = block.fetch(q, block.i, tile.rows, c, tile.cols); total = total",
         "bytes", "q read.*1.5 times the budget", "yours loads .* of q, 3 times in all, and the solution twice"),
    _row("02.2", "rescales-the-new-part-too", "total * block.exp(top - new_top) + block.exp(x - new_top).sum()",
         "(total + block.exp(x - new_top).sum()) * block.exp(top - new_top)", "numbers", "row tile 0", "total is .* and should be"),
    _row("02.2", "new-part-under-the-old-maximum", "block.exp(x - new_top).sum()", "block.exp(x - top).sum()", "numbers", "row tile 0", "total is inf throughout"),
    _row("02.3", "keeps-the-whole-row", """            new_top = block.maximum(top, s.max())  # solution
            e = block.exp(s - new_top)  # solution
            block.step("rescale")
            # total and acc were summed up under the old maximum: rescale both to the new one
            alpha = block.exp(top - new_top)  # solution
            total = total * alpha + e.sum()  # solution
            acc = acc * alpha  # solution
            top = new_top  # solution
            block.step("output")
            # add e @ v_j to acc; e has to be rounded: e.round(problem.dtype)
""", """            top = block.maximum(top, s.max())
            row = [(s, v_j)] if j == 0 else [*row, (s, v_j)]
        for s, v_j in row:
            e = block.exp(s - top)
            total = total + e.sum()
""", "overwritten", r'block.matmul in step "softmax", line \d+: v was loaded (once|\d+ times) more after this tile'),
    _row("02.3", "rescales-the-sum-only", "            acc = acc * alpha  # solution\n", "", "numbers", "row tile 0", r"acc was not multiplied by alpha = \S+"),
    _row("02.3", "rescales-the-output-only", "total * alpha + e.sum()", "total + e.sum()", "numbers", "row tile 0", r"what total had before was not multiplied by alpha = \S+"),
    _row("02.3", "divides-at-every-tile", "            # add e @ v_j to acc", "            e = e / total\n            # add", "numbers", "row tile 0", r"acc was divided by total = \S+ here, and the solution does that elsewhere"),
    _row("02.3", "alpha-twice", "acc * alpha", "acc * alpha * alpha", "numbers", "row tile 0", r"acc was multiplied by alpha = \S+ once too often"),
    _row("02.3", "maximum-of-the-whole-tile", "s.max())", "s.max().T.max())", "numbers", "row tile", "new_top is the largest of all rows"),
    _row("02.3", "never-divides", "acc / total", "acc", "numbers", "row tile 0", r"what is stored to out was not divided by total = \S+"),
    _row("02.3", "maximum-starts-at-0", 'block.full(tile.rows, 1, float("-inf"))', "block.full(tile.rows, 1, 0.0)", "numbers", "row tile 0", "top starts at 0 and not at -inf"),
    _row("02.3", "rescales-upside-down", "block.exp(top - new_top)", "block.exp(new_top - top)", "numbers", "row tile 0", r"alpha is one over what it should be \(is an exponent's sign right\?\)"),
    _row("02.3", "e-is-not-rounded", "e.round(problem.dtype)", "e", "unrounded", 'step "output".*round'),
    _row("02.3", "loses-what-was-summed", "v_j, split=(\"rows\", \"none\"), acc=acc)", "v_j, split=(\"rows\", \"none\"))", "numbers", "row tile 0", "what acc had before is lost"),
    _row("02.3", "divides-in-each-round", 'v_j, split=("rows", "none"), acc=acc)', 'v_j, split=("rows", "none"), acc=acc) / total * total', "asked", 'a division in step "output", line'),
    _row("03.1", "p-is-not-rounded", "                p = p.round(problem.dtype)  # solution\n", "", "unrounded", 'step "update".*round'),
    _row("03.1", "o-taken-as-undivided", "o_i * (l_i * alpha)", "o_i * alpha", "numbers", "row tile 0", "o_i is .* and should be"),
    _row("03.1", "keeps-the-old-sum", "l_i * alpha + p.sum()", "l_i + p.sum()", "numbers", "row tile 0", r"l_i in it was not multiplied by alpha = \S+"),
    _row("03.1", "forgets-to-divide-again", "o_i / l_new.nonzero()", "o_i * 1.0", "numbers", "row tile 0", r"o_i was not divided by l_new = \S+"),
    _row("03.1", "maximum-of-this-tile-only", "block.maximum(m_i, s.max())", "s.max()", "numbers", "row tile 0", "m_new is the maximum of s alone: the tiles before are forgotten"),
    _row("03.1", "rescales-upside-down", "block.exp(m_i - m_new.finite())", "block.exp(m_new.finite() - m_i)", "numbers", "row tile 0", r"alpha is one over what it should be \(is an exponent's sign right\?\)"),
    _row("03.1", "an-empty-row-is-nan", "block.exp(s - m_new.finite())", "block.exp(s - m_new)", "numbers", "row tile 0", r"p is no number \(NaN\): -inf less -inf, a division by 0, or 0 times infinity \(is an exponent's sign right\?\)"),
    _row("03.1", "divides-an-empty-row-by-0", "l_new.nonzero()", "l_new", "numbers", "row tile 0", r"o_i is no number \(NaN\): -inf less -inf, a division by 0, or 0 times infinity \(is an exponent's sign right\?\)"),
    _row("03.2", "maximum-starts-at-0", 'block.full(tile.rows, 1, float("-inf"))', "block.full(tile.rows, 1, 0.0)", "numbers", "row tile 0", "what is stored to m starts at 0 and not at -inf"),
    _row("03.2", "k-and-v-inside", "# line 8: Q", "k_j, v_j = block.load(k, j, tile.cols), block.load(v, j, tile.cols)  # line 8: Q",
         "bytes", "k read.*too many, 3 times the budget", "yours loads .* of k, 3 times in all, and the solution once"),
    _row("03.2", "nothing-initialised", "            block.store(o, block.full(tile.rows, v.cols, 0.0), i, tile.rows)  # solution\n", "",
         "crash", "o = a workspace that is read before it is written", "the solution stores .* of o; yours does not"),
    _row("03.2", "out-at-every-round", "block.store(out if j == last else o,", "block.store(out,", "numbers", "row tile 0", "the solution stores .* of o; yours stores them to out"),
    _row("03.2", "forgets-to-store-m", "                block.store(top, m_new, i, tile.rows)  # solution\n", "", "numbers", "row tile 0", "the solution stores .* of m; yours does not"),
    _row("03.2", "p-is-not-rounded", "                p = p.round(problem.dtype)  # solution\n", "", "unrounded", 'step "update".*round'),
    _row("03.2", "forgets-to-store-l", "                block.store(l, l_new, i, tile.rows)  # solution\n", "", "numbers", "row tile 0", "the solution stores .* of l; yours does not"),
    _row("03.2", "forgets-the-mask", "                s = block.mask(s, i, j)  # solution\n", "", "numbers", "row tile", "s has values where the mask hides the key, and -inf belongs there"),
    _row("03.1", "under-the-old-maximum", "block.exp(s - m_new.finite())", "block.exp(s - m_i.finite())", "numbers", "row tile 0", r"p is exp\(s - m_i\): another maximum belongs there"),
    _row("03.2", "maximum-of-the-whole-tile", "s.max())", "s.max().T.max())", "numbers", "row tile", "m_new is the largest of all rows"),
    _row("03.3", "three-tiles", "(4 * problem.head_dim)", "(3 * problem.head_dim)", "asked", "tile .*: Bc is not the right one", "four tiles must fit, and not three"),
    _row("03.3", "rows-are-not-rounded", "min(cols, problem.head_dim) // 16 * 16", "min(cols, problem.head_dim)", "asked", r"tile 40x\d+ on .*: Br is not the right one", "Br is not the right one"),
    _row("03.3", "m-in-bytes", "device.sram_per_block // problem.itemsize", "device.sram_per_block", "sram", "bytes of SRAM per block", "Bc is not the right one: M is counted in elements, not in bytes"),
    _row("03.3", "one-tile-instead-of-four", "(4 * problem.head_dim)", "problem.head_dim", "sram", "bytes of SRAM per block", "four tiles must fit, and not one"),
    _row("03.3", "twice-as-careful", "(4 * problem.head_dim)", "(8 * problem.head_dim)", "asked", "tile .*: Bc is not the right one", r"Bc is not the right one: an element is problem.itemsize bytes, and not always 4 \(or: four tiles must fit, and not eight\)"),
    _row("03.3", "rows-and-columns-mixed-up", "fl.Tile(rows, cols)", "fl.Tile(cols, rows)", "asked", "tile .*: Br is not the right one", "Br is not the right one: rows and columns are mixed up"),
    _row("03.3", "m-in-float32-always", "// problem.itemsize", "// 4", "asked", "tile .*: Bc is not the right one", r"Bc is not the right one: an element is problem.itemsize bytes, and not always 4 \(or: four tiles must fit, and not eight\)"),
    _row("03.3", "rows-are-not-capped", "min(cols, problem.head_dim) // 16 * 16", "cols", "asked", "tile 320x320 on .*: Br is not the right one", "Br is not the right one: Br is at most d"),
    _row("04.1", "keeps-a-strip-of-s", """            m_new = block.maximum(m_i, s.max())  # solution
            p = block.exp(s - m_new.finite())  # solution
            alpha = block.exp(m_i - m_new.finite())  # solution
            l_i = l_i * alpha + p.sum()  # solution
            acc = acc * alpha  # solution
            m_i = m_new  # solution
            block.step("output")
            v_j = block.load(v, j, tile.cols)  # solution
""", """            m_i = block.maximum(m_i, s.max())
            strip = [s] if j == 0 else [*strip, s]
        for j, s in enumerate(strip):
            p = block.exp(s - m_i.finite())
            l_i = l_i + p.sum()
            v_j = block.load(v, j, tile.cols)
""", "registers", r"registers: a block holds \d+ KB .* of 256 KB"),
    _row("04.1", "keeps-all-tiles-of-k-in-a-list", """        for j in range(problem.key_tiles(tile)):
            block.step("scores")
            k_j = block.load(k, j, tile.cols)  # solution
""", """        block.step("scores")
        tiles_of_k = [block.load(k, j, tile.cols) for j in range(problem.key_tiles(tile))]
        for j in range(problem.key_tiles(tile)):
            block.step("scores")
            k_j = tiles_of_k[j]
""", "overwritten", r'block.matmul in step "scores", line \d+: k was loaded (once|\d+ times) more after this tile, and there is one place'),
    _row("04.1", "maximum-starts-at-0", 'm_i, l_i = block.full(tile.rows, 1, float("-inf"))', "m_i, l_i = block.full(tile.rows, 1, 0.0)", "numbers", "row tile 0", "m_i starts at 0 and not at -inf"),
    _row("04.1", "q-at-every-tile", "k_j = block.load(k,", "q_i = block.load(q, block.i, tile.rows); k_j = block.load(k,",
         "bytes", "q read.*too many, 3 times the budget", "yours loads .* of q, 3 times in all, and the solution once"),
    _row("04.1", "divides-at-every-tile", "acc = acc * alpha", "acc = acc * alpha / l_i.nonzero()", "numbers", "row tile 0", r"acc was divided by l_i = \S+ here, and the solution does that elsewhere"),
    _row("04.1", "lse-forgotten", "        block.store(lse, m_i + block.log(l_i), block.i, tile.rows)  # solution\n", "",
         "numbers", "lse, row tile 0.*row 0 is nan", "the solution stores .* of lse; yours does not"),
    _row("04.1", "lse-without-its-maximum", "m_i + block.log(l_i)", "block.log(l_i)", "numbers", "lse, row tile 0", r"what is stored to lse lacks m_i = \S+, which was not added"),
    _row("04.1", "o-by-way-of-memory", "block.store(out, acc / l_i.nonzero(), block.i, tile.rows)",
         "block.store(out, acc, block.i, tile.rows); x = block.fetch(out, block.i, tile.rows); block.store(out, acc / l_i.nonzero(), block.i, tile.rows)",
         "bytes", "out read.*the budget is 0", "yours loads .* of out, and the solution does not"),
    _row("04.1", "p-is-not-rounded", "p.round(problem.dtype)", "p", "unrounded", 'step "output".*round'),
    _row("04.1", "rescales-the-sum-only", "            acc = acc * alpha  # solution\n", "", "numbers", "row tile 0", r"acc was not multiplied by alpha = \S+"),
    _row("04.1", "rescales-the-output-only", "l_i * alpha + p.sum()", "l_i + p.sum()", "numbers", "row tile 0", r"what l_i had before was not multiplied by alpha = \S+"),
    _row("04.1", "lse-to-base-2", "m_i + block.log(l_i)", "m_i + block.log(l_i) / float(np.log(2))", "numbers", "lse, row tile 0", r"what is stored to lse has a logarithm to base 2 beside m_i = \S+, and a natural one belongs there"),
    _row("04.1", "maximum-of-this-tile-only", "block.maximum(m_i, s.max())", "s.max()", "numbers", "row tile 0", "m_new is the maximum of s alone: the tiles before are forgotten"),
    _row("04.1", "divides-in-each-round", "v_j, split=split, acc=acc)", "v_j, split=split, acc=acc) / l_i.nonzero() * l_i.nonzero()",
         "asked", 'a division in step "output", line'),
    _row("04.1", "divides-by-a-reciprocal", "v_j, split=split, acc=acc)", "v_j, split=split, acc=acc) * (1.0 / l_i.nonzero()) * l_i.nonzero()",
         "asked", 'a division in step "output", line'),
    _row("04.1", "alpha-twice", "acc * alpha", "acc * alpha * alpha", "numbers", "row tile 0", r"acc was multiplied by alpha = \S+ once too often"),
    _row("04.1", "adds-up-what-was-rounded", "p.sum()", "p.round(problem.dtype).sum()", "numbers", r"is 5\.14447 and should be 5\.14449, give or take 2e-05", "l_i adds up p after it was rounded to float16"),
    _row("04.1", "maximum-of-the-whole-tile", "s.max())", "s.max().T.max())", "numbers", "row tile", "m_new is the largest of all rows"),
    _row("04.1", "rescales-after-the-product", """            acc = acc * alpha  # solution
            m_i = m_new  # solution
            block.step("output")
            v_j = block.load(v, j, tile.cols)  # solution
            acc = block.matmul(p.round(problem.dtype), v_j, split=split, acc=acc)  # solution
""", """            m_i = m_new
            block.step("output")
            v_j = block.load(v, j, tile.cols)
            acc = block.matmul(p.round(problem.dtype), v_j, split=split, acc=acc) * alpha
""", "numbers", "row tile 0", "acc is 0, as if it were multiplied by alpha", "output"),
    _row("04.2", "queries-without-an-end", "min((i + 1) * tile.rows, problem.len_q) - 1", "(i + 1) * tile.rows - 1", "out of bounds", "k: row tile", "yours walks over the tiles 0 to 13, the solution over the tiles 0 to 9"),
    _row("04.2", "skips-nothing", "range(max(0, last_key // tile.cols + 1))", "range(problem.key_tiles(tile))", "bytes", "k read.*too many", "yours walks over the tiles 0 to 3, the solution over tile 0 alone"),
    _row("04.2", "skips-the-diagonal", "last_key // tile.cols + 1", "last_key // tile.cols", "numbers", "row tile 0", "yours walks over no tile, the solution over tile 0 alone"),
    _row("04.2", "top-left", "last_query + problem.len_kv - problem.len_q", "last_query", "numbers", "row tile", "yours walks over the tiles 0 to 3, the solution over the tiles 0 to 5"),
    _row("04.2", "counts-from-the-first-query", "min((i + 1) * tile.rows, problem.len_q) - 1", "i * tile.rows", "numbers", "row tile", "yours walks over the tiles 0 to 1, the solution over the tiles 0 to 5"),
    _row("04.2", "a-tile-too-many", "last_key // tile.cols + 1", "last_key // tile.cols + 2", "out of bounds", r"k: row tile 4 \(of 64 rows each\) is read", "yours walks over the tiles 0 to 1, the solution over tile 0 alone"),
    _row("04.2", "keys-for-queries", "last_key // tile.cols + 1", "last_key // tile.rows + 1", "numbers", "row tile", "yours walks over the tiles 0 to 1, the solution over the tiles 0 to 5"),
    _row("04.3", "every-warp-does-all", 'split=("rows", "none"), scale', 'split=("none", "none"), scale', "repeated", 'step "scores".*each of the 4 warps'),
    _row("04.3", "q-stays-in-sram", "block.to_registers(block.load(q, block.i, tile.rows))", "block.load(q, block.i, tile.rows)",
         "bytes", r"q read \(SRAM\).*2 times the budget", "yours reads .* bytes of q from SRAM, the solution"),
    _row("04.3", "split-k", 'split=("rows", "none"), scale', 'split=("none", "rows"), scale', "bytes", r"k read \(SRAM\).*fewer than the budget, though", "yours reads .* bytes of k from SRAM, the solution"),
    _row("04.3", "registers-at-every-use", "k_j = block.load(k, j, tile.cols)",
         "k_j = block.load(k, j, tile.cols); q_i = block.to_registers(block.load(q, block.i, tile.rows))", "bytes", "q read: .*too many", "yours loads .* of q, 3 times in all, and the solution once"),
    _row("04.3", "every-warp-does-all-of-p-v", 'v_j, split=("rows", "none")', 'v_j, split=("none", "none")', "repeated", 'step "output".*each of the 4 warps'),
    _row("04.3", "split-k-for-p-v", 'v_j, split=("rows", "none")', 'v_j, split=("cols", "rows")', "bytes", r"v read \(SRAM\).*fewer than the budget, though", "yours reads .* bytes of v from SRAM, the solution"),
    _row("08.1", "rows-inside-only", "q, block.i, tile.rows, panel=64", "q, block.i, tile.rows", "bytes", "q read.*fewer than the budget, though", "yours reads .* bytes of q from HBM, the solution"),
    _row("08.1", "boxes-of-128-columns", "k, j, tile.cols, panel=64", "k, j, tile.cols, panel=128", "bytes", "k read.*too many, 2 times the budget", "yours reads .* bytes of k from HBM, the solution"),
    _row("08.1", "each-warp-reads-all", "tile.rows // 64", "tile.rows // 16", "bytes", r"k read \(SRAM\).*too many, 4 times the budget", "yours has .* warps, which read an operand that they share .* times, the solution 8 warps, which read an operand that they share twice"),
    _row("08.1", "one-warpgroup-for-all-rows", "warpgroups = tile.rows // 64", "warpgroups = 1", "bytes", r"k read \(SRAM\).*fewer than the budget, though", "yours has .* warps, which read an operand that they share once, the solution 8 warps, which read an operand that they share twice"),
    _row("08.1", "q-at-every-tile", "k_j = block.load(k,", "q_i = block.load(q, block.i, tile.rows, panel=64); k_j = block.load(k,",
         "bytes", "q read.*too many, 5 times the budget", "yours loads .* of q, 5 times in all, and the solution once"),
    _row("08.1", "v-rows-inside-only", "v, j, tile.cols, panel=64", "v, j, tile.cols", "bytes", "v read.*fewer than the budget, though", "yours reads .* bytes of v from HBM, the solution"),
    _row("08.1", "forgets-the-mask", "            s = block.mask(s, block.i, j)  # solution\n", "", "numbers", "row tile 0", "s has values where the mask hides the key, and -inf belongs there"),
    _row("08.1", "loses-what-was-summed", "v_j, split=split, acc=acc)", "v_j, split=split)", "numbers", "row tile 0", "what acc had before is lost"),
    _row("08.2", "no-room-for-mbarriers", "device.sram_per_block - 128 -", "device.sram_per_block -", "sram", "bytes of SRAM per block", "the mbarriers take 128 bytes"),
    _row("08.2", "one-stage", "(stages * 2 * row_bytes)", "(2 * row_bytes)", "sram", "bytes of SRAM per block", "there are two stages, and K and V in each"),
    _row("08.2", "k-without-v", "(stages * 2 * row_bytes)", "(stages * row_bytes)", "sram", "bytes of SRAM per block", "there are two stages, and K and V in each"),
    _row("08.2", "q-takes-no-room", " - rows * row_bytes", "", "sram", "bytes of SRAM per block", "Q takes room, too"),
    _row("08.2", "elements-for-bytes", " * problem.itemsize", "", "sram", "bytes of SRAM per block", "SRAM is counted in bytes"),
    _row("08.2", "columns-as-they-are", "-(-problem.head_dim // 64) * 64", "problem.head_dim", "sram", "bytes of SRAM per block", "a box has 64 columns"),
    _row("08.2", "a-stage-too-many", "(stages * 2 * row_bytes)", "(3 * 2 * row_bytes)", "asked", "tile .*: Bc is not the right one", r"Bc is not the right one: there are two stages, and not three \(or: a box may have 256 rows\)"),
    _row("08.2", "a-box-of-any-height", "min(left // (stages * 2 * row_bytes) // 16 * 16, 256)", "left // (stages * 2 * row_bytes) // 16 * 16", "asked", "tile .*: Bc is not the right one", "Bc is not the right one: a box has 256 rows at most"),
    _row("08.3", "nothing-lags", "            m_i, p = m_new, p.round(problem.dtype)  # solution\n",
         "            v_j = block.load(v, j, tile.cols, stages=2, panel=64)\n            acc = block.matmul(p.round(problem.dtype), v_j, split=split, acc=acc)\n            m_i, p = m_new, None\n",
         "asked", "line .*V is to lag K by one"),
    _row("08.3", "drops-the-last-product", "        if p is not None:  # solution\n            v_j = block.load(v, block.walk[0]",
         "        if False:\n            v_j = block.load(v, block.walk[0]", "numbers", "row tile 0", "the solution loads .* of v; yours does not"),
    _row("08.3", "v-of-this-tile", "block.load(v, j + 1,", "block.load(v, j,", "numbers", "row tile 0", "the solution loads .* of v; yours loads .*"),
    _row("08.3", "never-rescales", "            acc = acc * alpha  # solution\n", "", "numbers", "row tile 0", r"acc was not multiplied by alpha = \S+"),
    _row("08.3", "v-with-k-as-well", "k_j = block.load(k,", "v_j = block.load(v, j, tile.cols, panel=64); k_j = block.load(k,",
         "bytes", "v read.*times the budget", "yours loads .* of v, twice in all, and the solution once"),
    _row("08.3", "walks-forwards-all-the-same", "reversed(block.walk)", "block.walk", "out of bounds", "v: row tile", "s is .* and should be"),
    _row("08.3", "p-is-not-rounded", "p.round(problem.dtype)", "p", "unrounded", "round"),
    _row("08.3", "maximum-of-this-tile-only", "block.maximum(m_i, s.max())", "s.max()", "numbers", "row tile", "m_new is the maximum of s alone: the tiles before are forgotten"),
    _row("08.3", "rescales-the-output-only", "l_i * alpha + p.sum()", "l_i + p.sum()", "numbers", "row tile 0", r"what l_i had before was not multiplied by alpha = \S+"),
    _row("08.3", "s-after-the-product-with-v", "            s = block.matmul(q_i, k_j.T, split=split, scale=problem.scale)\n",
         """            if p is not None:
                acc = block.matmul(p, block.load(v, j + 1, tile.cols, stages=2, panel=64), split=split, acc=acc)
                p = None
            s = block.matmul(q_i, k_j.T, split=split, scale=problem.scale)
""", "asked", "line .*issued before S of the next tile"),
    _row("08.3", "v-before-k", "            k_j = block.load(k, j, tile.cols, stages=2, panel=64)\n            s = block.matmul(q_i, k_j.T, split=split, scale=problem.scale)\n            block.step(\"output\")\n            # O += P V of the tile before, if there is one\n            if p is not None:  # solution\n                v_j = block.load(v, j + 1, tile.cols, stages=2, panel=64)  # solution\n",
         """            if p is not None:
                v_j = block.load(v, j + 1, tile.cols, stages=2, panel=64)
            k_j = block.load(k, j, tile.cols, stages=2, panel=64)
            s = block.matmul(q_i, k_j.T, split=split, scale=problem.scale)
            if p is not None:
""", "asked", "line .*loaded before K of the next tile"),
    _row("08.3", "no-tile-is-forgotten", "        # one P V is left\n        if p is not None:  # solution\n", "        # one P V is left\n        if True:\n", "crash", "IndexError.*in line", "your program stops here"),
    _row("09.1", "largest-by-sign", "block.elementwise(np.abs, x).max()", "x.max()", "numbers", "row tile 0", "scale comes from the maximum of x, and should come from that of its absolute values"),
    _row("09.1", "no-scale", "block.elementwise(np.abs, x).max().nonzero() / 448.0", "1.0", "numbers", "row tile 0", "eight is .* and should be"),
    _row("09.1", "divides-zero-by-zero", ".nonzero()", "", "numbers", "row tile 0.*NaN", r"row 0 of x is all zeros, and so is scale: .nonzero\(\) has 1 in place of 0"),
    _row("09.1", "never-multiplies-back", "eight * scale", "eight", "numbers", "row tile 0", r"what is stored to out was not multiplied by scale = \S+"),
    _row("09.1", "rounds-to-bfloat16", 'round("float8_e4m3fn")', 'round("bfloat16")', "numbers", "row tile 0", "eight is .* and should be"),
    _row("09.1", "does-not-round", '.round("float8_e4m3fn")', "", "numbers", "row tile 0", "eight was not rounded to e4m3"),
    _row("09.1", "largest-becomes-1", " / 448.0", "", "numbers", "row tile 0", "scale is .* times what it should be, throughout"),
    _row("09.1", "reads-the-row-twice", "np.abs, x)", "np.abs, block.fetch(q, block.i, tile.rows))", "bytes", "q read.*2 times the budget", "yours loads .* of q, twice in all, and the solution once"),
    _row("09.2", "keys-stay-in-registers", "block.matmul(q8, keys.T", "block.matmul(q8, k8.T", "crash", "block.matmul's second operand = registers: expected a tile in SRAM.*in line", "your program stops here"),
    _row("09.2", "keys-are-not-rounded", "(k_j / of_k).round(e4m3)", "k_j / of_k", "numbers", "row tile 0", "k8 was not rounded to e4m3"),
    _row("09.2", "one-scale-forgotten", "s * of_q * of_k.T", "s * of_q", "numbers", "row tile 0", "s was not multiplied by of_k.T"),
    _row("09.2", "scales-of-keys-by-row", "of_k.T", "of_k", "crash", r"is a \.T missing\?", "your program stops here"),
    _row("09.2", "multiplies-before-rounding", "q_i / of_q", "q_i * of_q", "numbers", "row tile 0", "q8 is .* and should be"),
    _row("09.2", "queries-are-not-rounded", "(q_i / of_q).round(e4m3)", "q_i / of_q", "numbers", "row tile 0", "q8 was not rounded to e4m3"),
    _row("09.2", "forgets-the-problem's-scale", ", scale=problem.scale", "", "numbers", "row tile 0", "s is .* times what it should be, throughout"),
    _row("09.2", "keys-are-not-transposed", "keys.T", "keys", "crash", "matmul", "your program stops here"),
    _row("09.3", "one-accumulator-with-scales", """            products = block.matmul(p, values, split=("rows", "none"))  # solution
            acc = acc * alpha + products * of_v  # solution
""", """            acc = block.matmul(p, values, split=("rows", "none"), acc=acc * alpha / of_v) * of_v
""", "asked", 'block.matmul in step "output", line .*acc='),
    _row("09.3", "adds-up-before-rounding", "(block.exp(s - m_new) * 32.0).round(e4m3)  # solution\n            l_i = l_i * alpha + p.sum()",
         "block.exp(s - m_new) * 32.0\n            l_i = l_i * alpha + p.sum(); p = p.round(e4m3)", "numbers", "row tile 0", "l_i is .* and should be"),
    _row("09.3", "one-accumulator", "acc * alpha + products * of_v", "(acc * alpha + products) * of_v", "numbers", "row tile 0", "acc is .* and should be"),
    _row("09.3", "p-below-1", "* 32.0", "* 1.0", "numbers", "row tile 0", "p is .* and should be"),
    _row("09.3", "a-scale-for-each-row-of-v", ".max().T.max()", ".max()", "numbers", "row tile 0", r"of_v is \(64, 1\), and should be \(1, 1\)"),
    _row("09.3", "never-rescales", "acc * alpha + products", "acc + products", "numbers", "row tile 0", r"what acc had before was not multiplied by alpha = \S+"),
    _row("09.3", "p-is-not-rounded", "(block.exp(s - m_new) * 32.0).round(e4m3)", "(block.exp(s - m_new) * 32.0)", "numbers", "row tile 0", "p was not rounded to e4m3"),
    _row("09.3", "v-is-not-rounded", "(v_j / of_v).round(e4m3)", "v_j / of_v", "numbers", "row tile 0", "v8 was not rounded to e4m3"),
    _row("09.3", "the-scale-is-left-out", "products * of_v", "products", "numbers", "row tile 0", "acc is .* times what it should be, throughout"),
    _row("09.3", "rescales-the-output-only", "l_i * alpha + p.sum()", "l_i + p.sum()", "numbers", "row tile 0", r"what l_i had before was not multiplied by alpha = \S+"),
    _row("09.3", "fetches-v-twice", "np.abs, v_j)", "np.abs, block.fetch(v, j, tile.cols))", "bytes", "v read.*2 times the budget", "yours loads .* of v, twice in all, and the solution once"),
    _row("11.1", "lse-in-base-2", "block.exp(s - lse_i.finite())", "block.elementwise(np.exp2, s - lse_i.finite())", "numbers", "dv, row tile 0", "p is 2 to the power of s - lse_i, and e belongs there"),
    _row("11.1", "divides-by-a-sum-once-more", "p = block.exp(s - lse_i.finite())", "p = block.exp(s - lse_i.finite()); p = p / p.sum().nonzero()", "numbers", "dv, row tile 0", "p is .* and should be"),
    _row("11.1", "the-maximum-in-place-of-the-lse", "s - lse_i.finite()", "s - s.max().finite()", "numbers", "dv, row tile 0", r"p is exp\(s - the maximum of its row\), and lse_i belongs there"),
    _row("11.1", "no-lse", "block.exp(s - lse_i.finite())", "block.exp(s)", "numbers", "dv, row tile 0", r"p is exp\(s\) itself: lse_i was not subtracted"),
    _row("11.1", "lse-along-the-keys", "block.fetch(lse, i, tile.rows).T", "block.fetch(lse, i, tile.rows)", "numbers", "dv, row tile 0", r"lse_i is \(64, 1\), and should be \(1, 64\)"),
    _row("11.1", "a-row-without-keys-is-nan", "lse_i.finite()", "lse_i", "numbers", "NaN", r"p is no number \(NaN\)"),
    _row("11.1", "exp-over-exp", "block.exp(s - lse_i.finite())", "block.exp(s) / block.exp(lse_i.finite())", "numbers", "dv, row tile 0", r"p is no number \(NaN\)"),
    _row("11.1", "p-is-not-rounded", "p.round(problem.dtype)", "p", "unrounded", 'step "dv".*round'),
    _row("11.1", "forgets-the-scale", ", scale=problem.scale", "", "numbers", "dv, row tile 0", "s is 8 times what it should be, throughout"),
    _row("11.1", "the-first-tile-of-do-always", "block.load(dout, i, tile.rows)", "block.load(dout, 0, tile.rows)", "numbers", "dv, row tile 0", "the solution loads .* of dout; yours loads .*"),
    _row("11.1", "keeps-the-last-tile-only", ", acc=dv_j)", ")", "numbers", "dv, row tile 0", "what dv_j had before is lost"),
    _row("11.1", "out-in-place-of-dout", "block.load(dout, i,", "block.load(out, i,", "numbers", "dv, row tile 0", "the solution loads .* of dout; yours does not"),
    _row("11.1", "forgets-the-mask", "            s = block.mask(s.T, i, j).T\n", "", "numbers", "dv, row tile", "s has values where the mask hides the key, and -inf belongs there"),
    _row("11.1", "stores-at-each-step", "do_i, split=split, acc=dv_j)  # solution\n", "do_i, split=split, acc=dv_j); block.store(dv, dv_j, j, tile.cols)\n", "bytes", "dv written.*3 times the budget", "yours stores .* of dv once more than the solution"),
    _row("11.2", "no-d", "p * (dp - d_i)", "p * dp", "numbers", "dq, row tile 0", r"ds is p \* dp"),
    _row("11.2", "d-of-this-tile-alone", "p * (dp - d_i)", "p * (dp - (p * dp).sum())", "numbers", "dq, row tile 0", "ds is .* and should be"),
    _row("11.2", "d-by-a-second-pass", """        d_i = (block.to_registers(do_i) * block.fetch(out, i, tile.rows)).sum()  # solution
""", """        d_i = block.full(tile.rows, 1, 0.0)
        for j in range(problem.key_tiles(tile)):
            s = block.matmul(q_i, block.load(k, j, tile.cols).T, split=split, scale=problem.scale)
            p = block.exp(block.mask(s, i, j) - lse_i.finite())
            d_i = d_i + (p * block.matmul(do_i, block.load(v, j, tile.cols).T, split=split)).sum()
""", "bytes", "k read.*2 times the budget", "the solution loads .* of out; yours does not"),
    _row("11.2", "d-is-added", "(dp - d_i)", "(dp + d_i)", "numbers", "dq, row tile 0", "p in it, times d_i = .*, has the wrong sign"),
    _row("11.2", "no-scale", "dq_i * problem.scale", "dq_i", "numbers", "dq, row tile 0", "what is stored to dq is 8 times what it should be, throughout"),
    _row("11.2", "the-scale-twice", "ds = p * (dp - d_i)", "ds = p * (dp - d_i) * problem.scale", "numbers", "dq, row tile 0", "ds is 0.125 times what it should be, throughout"),
    _row("11.2", "ds-is-not-rounded", "ds.round(problem.dtype)", "ds", "unrounded", 'step "dq".*round'),
    _row("11.2", "ds-without-p", "p * (dp - d_i)", "dp - d_i", "numbers", "dq, row tile 0", "ds was not multiplied by p"),
    _row("11.2", "d-from-do-alone", "block.fetch(out, i, tile.rows)", "block.to_registers(do_i)", "numbers", "dq, row tile 0", "the solution loads .* of out; yours does not"),
    _row("11.2", "dp-from-k", "dp = block.matmul(do_i, v_j.T", "dp = block.matmul(do_i, k_j.T", "numbers", "dq, row tile 0", "dp is .* and should be"),
    _row("11.2", "dq-from-v", "ds.round(problem.dtype), k_j", "ds.round(problem.dtype), v_j", "numbers", "dq, row tile 0", "dq_i is .* and should be"),
    _row("11.2", "keeps-the-last-tile-only", ", acc=dq_i)", ")", "numbers", "dq, row tile 0", "what dq_i had before is lost"),
    _row("11.2", "the-largest-product", "tile.rows)).sum()", "tile.rows)).max()", "numbers", "dq, row tile 0", "d_i is .* and should be"),
    _row("11.2", "o-for-each-tile", "ds = p * (dp - d_i)", "d_i = (block.to_registers(do_i) * block.fetch(out, i, tile.rows)).sum(); ds = p * (dp - d_i)", "bytes", "out read.*3 times the budget", "yours loads .* of out, 3 times in all, and the solution once"),
    _row("11.3", "top-left", "j * tile.cols - (problem.len_kv - problem.len_q)", "j * tile.cols", "numbers", "row tile", "yours walks over .*, the solution over", "launch"),
    _row("11.3", "the-group-s-sum-left-out", "for g in range(problem.queries_per_kv)", "for g in range(1)", "numbers", "dv, row tile 0", "the solution is here, and your program is at step `store_dkv`"),
    _row("11.3", "dk-without-the-scale", "dk_j * problem.scale", "dk_j", "numbers", "dk, row tile 0", "what is stored to dk is 8 times what it should be, throughout"),
    _row("11.3", "dq-without-the-scale", "block.fetch(dq_sum, block.i, tile.rows) * problem.scale", "block.fetch(dq_sum, block.i, tile.rows)", "numbers", "dq, row tile 0", "what is stored to dq is 8 times what it should be, throughout"),
    _row("11.3", "dv-with-the-scale", "store(dv, dv_j,", "store(dv, dv_j * problem.scale,", "numbers", "dv, row tile 0", "what is stored to dv is 0.125 times what it should be, throughout"),
    _row("11.3", "stores-its-part", "block.atomic_add(dq_sum.head(g), part", "block.store(dq_sum.head(g), part", "numbers", "dq, row tile", "the solution adds to .* of dq_sum, and yours stores there"),
    _row("11.3", "reads-adds-and-stores", "block.atomic_add(dq_sum.head(g), part, i, tile.rows)", "block.store(dq_sum.head(g), part + block.fetch(dq_sum.head(g), i, tile.rows), i, tile.rows)", "bytes", "dq_sum read.*the budget is", "yours loads .* of dq_sum"),
    _row("11.3", "d-along-the-keys", "block.fetch(delta.head(g), i, tile.rows).T", "block.fetch(delta.head(g), i, tile.rows)", "numbers", "dk, row tile 0", r"d_i is \(64, 1\), and should be \(1, 64\)"),
    _row("11.3", "dq-from-ds-as-it-lies", "block.matmul(ds_shared.T, k_j", "block.matmul(ds_shared, k_j", "numbers", "dq, row tile 0", "part is .* and should be"),
    _row("11.3", "ds-is-not-rounded", "(p * (dp - d_i)).round(problem.dtype)", "p * (dp - d_i)", "unrounded", 'step "dkv".*round'),
    _row("11.3", "dk-from-k", "block.matmul(ds, q_i,", "block.matmul(ds, k_j,", "numbers", "dk, row tile 0", "dk_j is .* and should be"),
    _row("11.3", "visits-what-the-mask-hides", "range(first // tile.rows, problem.row_tiles(tile))", "range(problem.row_tiles(tile))", "bytes", "q read.*too many", "yours walks over the tiles 0 to 1, the solution over tile 1 alone", "launch"),
    _row("11.3", "one-tile-too-few", "range(first // tile.rows, ", "range(-(-first // tile.rows), ", "numbers", "row tile", "yours walks over .*, the solution over", "launch"),
    _row("11.3", "forgets-the-mask", "                s = block.mask(s.T, i, j).T  # solution\n", "", "numbers", "dv, row tile 0", "s has values where the mask hides the key, and -inf belongs there"),
    _row("11.3", "dv-from-ds", "block.matmul(p.round(problem.dtype), do_i", "block.matmul(ds, do_i", "numbers", "dv, row tile 0", "dv_j is .* and should be"),
    _row("11.3", "the-same-head-for-all", "block.load(q.head(g), i", "block.load(q.head(0), i", "numbers", "dv, row tile 0", "g = 1, .* s is .* and should be", "weights"),
    _row("11.3", "dk-for-each-head", "part, i, tile.rows)  # solution\n", "part, i, tile.rows)\n            block.store(dk, dk_j * problem.scale, j, tile.cols)\n", "bytes", "dk written.*3 times the budget", "yours stores .* of dk once more than the solution"),
    _row("11.3", "k-for-each-tile-of-queries", "q_i, do_i = block.load(q.head(g)", "k_j = block.load(k, j, tile.cols); q_i, do_i = block.load(q.head(g)", "bytes", "k read.*times the budget", "yours loads .* of k, .* in all, and the solution once"),
    _row("12.1", "rows-for-sixteen-heads-only", "rows=tiles, warps=1, of=q", "rows=1, warps=1, of=q", "numbers", r"out, row tile 0 .*head 16", "step `load_q`, row tile 1.*: the solution goes on, and your program has ended"),
    _row("12.1", "a-block-for-each-query-head", "q, rows = m.packed(q), m.packed(out)  # solution\n", "rows = out\n", "bytes", "k read.*too many, 4 times the budget", "the solution loads rows 0 to 3 .* of q; yours loads rows 0 to 0"),
    _row("12.1", "a-group-s-tiles-rounded-down", "tiles = -(-problem.queries_per_kv // tile.rows)", "tiles = problem.queries_per_kv // tile.rows", "numbers", "it was never stored", "the solution goes on, and your program has ended"),
    _row("12.1", "tiles-of-queries-not-of-heads", "tiles = -(-problem.queries_per_kv // tile.rows)", "tiles = problem.row_tiles(tile)", "numbers", r"out, row tile 0 .*head 16", "the solution goes on, and your program has ended"),
    _row("12.1", "the-first-heads-always", "block.load(q, block.i, tile.rows)", "block.load(q, 0, tile.rows)", "crash", "in line", "the solution loads rows 16 to .* of q; yours loads rows 0 to 15"),
    _row("12.1", "one-maximum-for-all-heads", "s.max())", "s.max().T.max())", "numbers", "row tile 0", "m_new is the largest of all rows: a maximum is that of its row"),
    _row("12.1", "one-sum-for-all-heads", "l_i * alpha + p.sum()", "l_i * alpha + p.sum().T.sum()", "numbers", "row tile 0", "l_i is .* throughout"),
    _row("12.1", "rescales-the-sum-only", "            acc = acc * alpha  # solution\n", "", "numbers", "row tile 0", "acc was not multiplied by alpha"),
    _row("12.1", "remembers-no-maximum", "            m_i = m_new  # solution\n", "", "numbers", "row tile 0", "m_i was left as it was"),
    _row("12.1", "forgets-the-scale", ", scale=problem.scale", "", "numbers", "row tile 0", "s is 8 times what it should be, throughout"),
    _row("12.1", "never-divides", "acc / l_i.nonzero()", "acc", "numbers", "row tile 0", "what is stored to out was not divided by l_i"),
    _row("12.1", "all-heads-to-the-first-rows", "acc / l_i.nonzero(), block.i,", "acc / l_i.nonzero(), 0,", "numbers", "row tile 0", "the solution stores rows 16 to .* of out; yours stores rows 0 to 15"),
    _row("12.1", "stores-to-what-is-not-packed", "block.store(rows, acc", "block.store(out, acc", "numbers", r"out, row tile 0 .*head 1", "the solution stores rows 0 to 3 .* of out; yours stores rows 0 to 0"),
    _row("12.1", "every-tile-of-v-the-first", "block.load(v, j, tile.cols)", "block.load(v, 0, tile.cols)", "numbers", "row tile 0", "the solution loads .* of v; yours loads .*"),
    _row("12.1", "loads-k-for-each-head", "            k_j = block.load(k, j, tile.cols)  # solution\n", "            for _ in range(problem.queries_per_kv): k_j = block.load(k, j, tile.cols)\n", "bytes", "k read.*too many, 4 times the budget", "yours loads .* of k, 4 times in all, and the solution once"),
    _row("12.1", "p-is-not-rounded", "p.round(problem.dtype)", "p", "unrounded", 'step "output".*round'),
    _row("12.2", "two-empty-halves-are-nan", "block.maximum(lse_a, lse_b).finite()", "block.maximum(lse_a, lse_b)", "numbers", "NaN throughout", "top is -inf where a row has seen no key"),
    _row("12.2", "divides-by-nothing", "total.nonzero()", "total", "numbers", "NaN throughout", "what is stored to out is no number .*a division by 0"),
    _row("12.2", "lse-in-base-2", "a, b = block.exp(lse_a - top), block.exp(lse_b - top)", "a, b = block.elementwise(np.exp2, lse_a - top), block.elementwise(np.exp2, lse_b - top)", "numbers", "row tile 0", "a is 2 to the power of lse_a - top, and e belongs there"),
    _row("12.2", "the-log-in-base-2", "block.log(total)", "block.elementwise(np.log2, total)", "numbers", "lse, row tile 0", "what is stored to lse has a logarithm to base 2 beside top"),
    _row("12.2", "never-divides", "(o_a * a + o_b * b) / total.nonzero()", "o_a * a + o_b * b", "numbers", "row tile 0", "what is stored to out was not divided by total"),
    _row("12.2", "divides-twice", "/ total.nonzero()", "/ total.nonzero() / total.nonzero()", "numbers", "row tile 0", "what is stored to out was divided by total = .* once too often"),
    _row("12.2", "the-plain-mean", "(o_a * a + o_b * b) / total.nonzero()", "(o_a + o_b) * 0.5", "numbers", "row tile 0", "what is stored to out is the plain mean of o_a and o_b"),
    _row("12.2", "weights-exchanged", "o_a * a + o_b * b", "o_a * b + o_b * a", "numbers", "row tile 0", "what is stored to out is .* and should be"),
    _row("12.2", "lse-without-its-maximum", "top + block.log(total)", "block.log(total)", "numbers", "lse, row tile 0", "what is stored to lse lacks top"),
    _row("12.2", "the-larger-lse", "top + block.log(total)", "block.maximum(lse_a, lse_b)", "numbers", "lse, row tile 0", "what is stored to lse is top itself"),
    _row("12.2", "adds-the-lses", "top + block.log(total)", "lse_a + lse_b", "numbers", "lse, row tile 0", r"what is stored to lse is lse_a \+ lse_b"),
    _row("12.2", "no-maximum", "block.maximum(lse_a, lse_b).finite()", "0.0", "numbers", "row tile 0", r"b is exp\(lse_b\) itself: top was not subtracted"),
    _row("12.2", "the-first-half-s-maximum", "block.maximum(lse_a, lse_b).finite()", "lse_a.finite()", "numbers", "row tile 0", "top is lse_a itself, and the larger of both belongs there"),
    _row("12.2", "an-empty-half-weighs", "block.exp(lse_a - top), block.exp(lse_b - top)", "block.exp(lse_a.finite() - top), block.exp(lse_b.finite() - top)", "numbers", "row tile 0", "b takes lse_b as 0 where it is -inf: what is empty weighs nothing"),
    _row("12.2", "the-first-half-twice", "block.fetch(lse_of.at(half=n)", "block.fetch(lse_of.at(half=0)", "numbers", "row tile 0", "lse_b is lse_a itself"),
    _row("12.2", "the-first-rows-always", "block.fetch(o_of.at(half=n), block.i,", "block.fetch(o_of.at(half=n), 0,", "numbers", "row tile 1", "the solution loads .* of partial; yours loads .*"),
    _row("12.2", "reads-an-lse-for-each-use", "top = block.maximum(lse_a, lse_b)", "lse_a, lse_b = (block.fetch(lse_of.at(half=n), block.i, tile.rows) for n in range(2)); top = block.maximum(lse_a, lse_b)", "bytes", "partial_lse read.*2 times the budget", "yours loads .* of partial_lse, 4 times in all, and the solution twice"),
    _row("12.3", "blocks-of-one-sequence", "problem.batch * problem.kv_heads *", "problem.kv_heads *", "bytes", "q read.*too many", "yours walks over .*, the solution over", "launch"),
    _row("12.3", "a-block-for-each-query-head", "problem.batch * problem.kv_heads *", "problem.batch * problem.heads *", "bytes", "q read.*fewer than the budget", "yours walks over .*, the solution over", "launch"),
    _row("12.3", "one-chunk-less", "keys // -(-SMS // blocks)", "-(-keys // -(-SMS // blocks))", "bytes", "q read.*fewer than the budget", "yours walks over .*, the solution over", "launch"),
    _row("12.3", "fewer-blocks-than-sms", "keys // -(-SMS // blocks)", "keys // max(1, SMS // blocks)", "bytes", "q read.*fewer than the budget", "yours walks over .*, the solution over", "launch"),
    _row("12.3", "bytes-forgotten", "return max(least, most)", "return max(1, most)", "bytes", "q read.*too many", "yours walks over tile 0 alone, the solution over", "launch"),
    _row("12.3", "blocks-forgotten", "return max(least, most)", "return least", "bytes", "q read.*too many", "yours walks over .*, the solution over", "launch"),
    _row("12.3", "keys-for-tiles", "-(-32 * group // tile.cols)", "32 * group", "bytes", "q read.*fewer than the budget", "yours walks over .*, the solution over", "launch"),
    _row("12.3", "thirty-two-keys-whatever-the-group", "-(-32 * group // tile.cols)", "-(-32 // tile.cols)", "bytes", "q read.*too many", "yours walks over tile 0 alone, the solution over", "launch"),
    _row("12.3", "no-keys-no-output", "max(1, -(-keys // size))", "-(-keys // size)", "bytes", "q read: 0 bytes", "the solution is here, and your program is at step `store`", "load_q"),
    _row("12.3", "the-last-chunk-is-lost", "max(1, -(-keys // size))", "max(1, keys // size)", "numbers", "row tile 0", "the solution is here, and your program is at step `load_partial`", "load_q"),
    _row("12.3", "past-the-last-key", "min((chunk + 1) * size, keys)", "(chunk + 1) * size", "out of bounds", "k: row tile", "yours walks over .*, the solution over", "launch"),
    _row("12.3", "divides-in-each-chunk", "((o_of, acc),", "((o_of, acc / l_i.nonzero()),", "numbers", "row tile 0", "what is stored to partial was divided by l_i = .* here, and the solution does that elsewhere", "store_partial"),
    _row("12.3", "every-chunk-to-the-first-place", "m.packed(tensor).at(chunk=block.j)", "m.packed(tensor).at(chunk=0)", "numbers", "row tile 0", "o_c is .* and should be", "load_partial"),
    _row("12.3", "sums-as-they-are", "l_i = l_i * alpha + l_c * beta", "l_i = l_i + l_c", "numbers", "row tile 0", "what l_i had before was not multiplied by alpha"),
    _row("12.3", "what-comes-is-not-rescaled", "l_i * alpha + l_c * beta", "l_i * alpha + l_c", "numbers", "row tile 0", "l_c in it was not multiplied by beta"),
    _row("12.3", "outputs-of-chunks-as-they-are", "acc * alpha + o_c * beta", "acc * alpha + o_c", "numbers", "row tile 0", "o_c in it was not multiplied by beta"),
    _row("12.3", "what-was-there-is-not-rescaled", "acc * alpha + o_c * beta", "acc + o_c * beta", "numbers", "row tile 0", "what acc had before was not multiplied by alpha"),
    _row("12.3", "remembers-no-maximum", "            m_i = m_new  # solution\n", "", "numbers", "row tile 0", "m_i was left as it was"),
    _row("12.3", "the-newest-maximum", "block.maximum(m_i, m_c)", "m_c", "numbers", "row tile 0", "m_new is m_c itself, and the larger of both belongs there"),
    _row("12.3", "no-keys-are-nan", "block.exp(m_i - m_new.finite()), block.exp(m_c - m_new.finite())", "block.exp(m_i - m_new), block.exp(m_c - m_new)", "numbers", "NaN throughout", r"alpha is no number \(NaN\)"),
    _row("12.3", "rescales-upside-down", "block.exp(m_i - m_new.finite()), block.exp(m_c - m_new.finite())", "block.exp(m_new.finite() - m_i), block.exp(m_new.finite() - m_c)", "numbers", "NaN throughout", "alpha is one over what it should be"),
    _row("12.3", "never-divides", "acc / l_i.nonzero(), block.i, 1", "acc, block.i, 1", "numbers", "row tile 0", "what is stored to out was not divided by l_i"),
    _row("12.3", "divides-at-each-merge", "acc * alpha + o_c * beta", "(acc * alpha + o_c * beta) / l_i.nonzero()", "numbers", "row tile 0", "acc was divided by l_i = .* here, and the solution does that elsewhere"),
    _row("12.3", "the-first-chunk-always", "block.fetch(x.at(chunk=c)", "block.fetch(x.at(chunk=0)", "numbers", "row tile 0", "o_c was left as it was"),
    _row("13.1", "row-and-page-swapped", "n // problem.page_size, n % problem.page_size", "n % problem.page_size, n // problem.page_size", "crash", "place", r"place\(6\) = \(6, 0\): expected an entry of the block table, 0 to 5", "scores"),
    _row("13.1", "the-first-page-always", "n // problem.page_size, n %", "n * 0, n %", "numbers", "out, row tile 0", r"the solution takes key 16 of k from row 0 of page \d+; yours takes it from row 0 of page", "scores"),
    _row("13.1", "rows-count-on", "problem.page_size, n % problem.page_size", "problem.page_size, n", "crash", "place", r"place\(16\) = \(1, 16\): expected .* a row of its page, 0 to 15", "scores"),
    _row("13.1", "pages-counted-from-one", "return n // problem.page_size,", "return n // problem.page_size + 1,", "crash", "place", r"the solution takes key 0 of k from row 0 of page \d+; yours takes it from row 0 of page", "scores"),
    _row("13.1", "pages-of-sixteen", "n // problem.page_size, n % problem.page_size", "n // 16, n % 16", "crash", "place", r"place\(8\) = \(0, 8\): expected .* a row of its page, 0 to 7", "scores"),
    _row("13.1", "a-tile-is-a-page", "n // problem.page_size, n % problem.page_size", "n // tile.cols, n % tile.cols", "crash", "place", r"place\(16\) = \(0, 16\): expected .* a row of its page, 0 to 15", "scores"),
    _row("13.1", "divides-with-a-slash", "return n // problem.page_size", "return n / problem.page_size", "crash", "place", r"place\(0\) = \(0.0, 0\): expected an entry", "scores"),
    _row("13.1", "rows-from-the-end", "n % problem.page_size", "problem.page_size - 1 - n % problem.page_size", "numbers", "out, row tile 0", r"the solution takes key 0 of k from row 0 of page \d+; yours takes it from row \d+ of page", "scores"),
    _row("13.1", "without-the-table", "k, v = (m.paged(pool, block_table, place) for pool in (k, v))", "pass", "numbers", "out, row tile 0", "the solution reads|yours reads 0 bytes of block_table", "look_up"),
    _row("13.1", "values-without-the-table", "k, v = (m.paged(pool, block_table, place) for pool in (k, v))", "k = m.paged(k, block_table, place)", "numbers", "out, row tile 0", "the solution takes key 0 of v from .*; yours takes it as if v had no pages", "output"),
    _row("13.1", "nobody-looks-up", "            block.look_up(k, j, tile.cols)  # solution\n", "", "bytes", "block_table read: 0 bytes", "yours reads 0 bytes of block_table from HBM, the solution 8"),
    _row("13.1", "looks-up-for-v-too", "            v_j = block.load(v, j, tile.cols)", "            block.look_up(v, j, tile.cols); v_j = block.load(v, j, tile.cols)", "bytes", "block_table read.*2 times the budget", "bytes of block_table from HBM, the solution 0", "output"),
    _row("13.1", "looks-up-half-a-tile", "block.look_up(k, j, tile.cols)", "block.look_up(k, j, tile.rows)", "bytes", "block_table read", "yours reads .* bytes of block_table from HBM, the solution"),
    _row("13.1", "looks-up-one-tile-for-all", "block.look_up(k, j, tile.cols)", "block.look_up(k, 0, tile.cols)", "bytes", "block_table read", "yours reads .* bytes of block_table from HBM, the solution"),
    _row("13.1", "looks-up-each-key", "block.look_up(k, j, tile.cols)", "block.look_up(k, j, tile.cols, tile.cols)", "bytes", "block_table read.*too many", "yours reads .* bytes of block_table from HBM, the solution"),
    _row("13.1", "nothing-is-hidden", "            s = block.mask(s, block.i, j, group=group)  # solution\n", "", "numbers", "out, row tile 0", "s has values where the mask hides the key, and -inf belongs there"),
    _row("13.1", "forgets-the-scale", ", scale=problem.scale", "", "numbers", "out, row tile 0", "s is 8 times what it should be, throughout"),
    _row("13.1", "keys-for-values", "v_j = block.load(v, j, tile.cols)", "v_j = k_j", "numbers", "out, row tile 0", "the solution loads .* of v; yours does not"),
    _row("13.1", "the-first-tile-of-keys-always", "block.load(k, j, tile.cols)", "block.load(k, 0, tile.cols)", "numbers", "out, row tile 0", "the solution loads .* of k; yours loads .*"),
    _row("15.2", "rows-are-queries", ", group=group)", ")", "numbers", "row tile 0.*causal", "s is .* and should be"),
    _row("15.2", "loads-the-tile-again", "v_j = k_j.columns(0, problem.head_dim_v)", "v_j = block.load(latent, j, tile.cols).columns(0, problem.head_dim_v)", "bytes", "latent read.*2 times the budget", "yours loads .* of latent, twice in all, and the solution once"),
    _row("15.2", "loads-v-by-itself", "v_j = k_j.columns(0, problem.head_dim_v)", "v_j = block.load(latent, j, tile.cols, 0, problem.head_dim_v)", "bytes", "latent read.*1.89 times the budget", "yours loads rows .* and columns 0 to 511 of latent, and the solution does not"),
    _row("15.2", "loads-for-each-head", "            k_j = block.load(latent, j, tile.cols)  # solution\n", "            for _ in range(group): k_j = block.load(latent, j, tile.cols)\n", "bytes", "latent read.*16 times the budget", "yours loads .* of latent, 16 times in all, and the solution once"),
    _row("15.2", "a-block-for-each-head", "q, rows = m.packed(q), m.packed(out)", "rows = out", "bytes", "latent read.*16 times the budget", "the solution loads rows 0 to 15 .* of q; yours loads rows 0 to 0", "load_q"),
    _row("15.2", "one-tile-whatever-the-heads", "tiles = -(-q.rows // tile.rows)", "tiles = 1", "numbers", "head 16, .*NaN throughout", "row tile 1, .*the solution goes on, and your program has ended", "load_q"),
    _row("15.2", "heads-rounded-down", "-(-q.rows // tile.rows)", "max(1, q.rows // tile.rows)", "numbers", "head 16, .*NaN throughout", "row tile 1, .*the solution goes on, and your program has ended", "load_q"),
    _row("15.2", "heads-of-one-query", "-(-q.rows // tile.rows)", "-(-group // tile.rows)", "numbers", "row tile 0.*causal", "row tile 1, .*the solution goes on, and your program has ended", "load_q"),
    _row("15.2", "scores-without-position", "block.matmul(q_i, k_j.T,", "block.matmul(q_i.columns(0, 512), k_j.columns(0, 512).T,", "numbers", "row tile 0", "s is .* and should be"),
    _row("15.2", "values-with-position", "k_j.columns(0, problem.head_dim_v)", "k_j", "crash", r"line \d+", r"acc = \(16, 512\): expected \(16, 576\), as the product has"),
    _row("15.2", "values-behind-the-first-512", "k_j.columns(0, problem.head_dim_v)", "k_j.columns(1, problem.head_dim_v)", "crash", r"line \d+", r"acc = \(16, 512\): expected \(16, 64\), as the product has"),
    _row("15.2", "the-root-of-a-row", "scale=problem.scale", "scale=q.cols**-0.5", "numbers", "row tile 0", "s is 0.5774 times what it should be, throughout"),
    _row("15.2", "no-scale", ", scale=problem.scale)", ")", "numbers", "row tile 0", "s is 13.86 times what it should be, throughout"),
    _row("15.2", "every-tile-the-first", "block.load(latent, j, tile.cols)", "block.load(latent, 0, tile.cols)", "numbers", "row tile 0", "the solution loads .* of latent; yours loads .*"),
    _row("15.2", "no-mask", "            s = block.mask(s, block.i, j, group=group)  # solution\n", "", "numbers", "row tile 0", "s has values where the mask hides the key"),
    _row("15.2", "a-product-of-its-own", ", acc=acc)", ")", "numbers", "row tile 0", "what acc had before is lost"),
    _row("15.2", "p-is-not-rounded", "p.round(problem.dtype)", "p", "unrounded", 'step "output".*round'),
    _row("15.2", "never-divides", "acc / l_i.nonzero()", "acc", "numbers", "row tile 0", "what is stored to out was not divided by l_i"),
    _row("15.2", "divides-by-nothing", "l_i.nonzero()", "l_i", "numbers", "NaN throughout", "what is stored to out is no number .*a division by 0"),
    _row("15.2", "stores-to-what-is-not-packed", "block.store(rows,", "block.store(out,", "numbers", r"out, row tile 0 .*head 1", "the solution stores rows 0 to 15 .* of out; yours stores rows 0 to 0"),
    _row("15.2", "all-heads-to-the-first-rows", "l_i.nonzero(), block.i,", "l_i.nonzero(), 0,", "numbers", "row tile 0", "the solution stores rows 16 to .* of out; yours stores rows 0 to 15"),
]  # fmt: skip
