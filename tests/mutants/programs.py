"""Seeded bugs in tile programs, and in the machine that runs them."""

from __future__ import annotations

from tests.mutants.zoo import Mutant

FLASH1, FLASH2, STANDARD, ONLINE = (f"simulator/programs/{name}.py" for name in ("flash1", "flash2", "standard", "online_softmax"))
MACHINE = "simulator/machine.py"

PROGRAMS = [
    Mutant(
        mechanism="mask not applied", algorithm="flash2", file=FLASH2, check="prefix", blind=True,
        find="s = block.mask(s, i, j)", put="pass",
    ),
    Mutant(
        mechanism="causal bound one key too far", algorithm="flash2", file=MACHINE, check="key_sets", blind=True,
        find="hidden = hidden | (key > row + p.right)", put="hidden = hidden | (key > row + p.right + 1)",
    ),
    Mutant(
        mechanism="causal mask aligned top-left", algorithm="standard", file=MACHINE, check="key_sets", blind=True,
        find="starts = np.asarray(i).reshape(-1, 1, 1) * s.rows + p.offset", put="starts = np.asarray(i).reshape(-1, 1, 1) * s.rows",
    ),
    Mutant(
        mechanism="one zero-padded key leaks at the ragged end", algorithm="flash1", file=MACHINE, check="key_sets", blind=True,
        find="hidden = np.broadcast_to(key >= p.kv_length, (len(starts), s.rows, s.cols))",
        put="hidden = np.broadcast_to(key > p.kv_length, (len(starts), s.rows, s.cols))",
    ),
    Mutant(
        mechanism="finite sentinel for masked scores", algorithm="flash2", file=MACHINE, check="rule", blind=True,
        find="np.copyto(masked, -np.inf, where=hidden)", put="np.copyto(masked, np.float32(-1e4), where=hidden)",
    ),
    Mutant(
        mechanism="mask added to the score instead of put in its place", algorithm="flash2", file=MACHINE, check="hidden_keys", blind=True,
        find="np.copyto(masked, -np.inf, where=hidden)", put="np.subtract(masked, np.float32(3e3), out=masked, where=hidden)",
    ),
    Mutant(
        mechanism="key tiles chosen by the block's first row alone", algorithm="flash2", file=FLASH2, check="key_sets", blind=True,
        find="visible = partial(problem.tiles_of_row, tile=tile)",
        put="visible = lambda i: range(-(-problem.visible_keys(i * tile.rows).stop // tile.cols))",
    ),
    Mutant(
        mechanism="maximum of the tile taken for the running one", algorithm="flash2", file=FLASH2, check="rule", blind=True,
        find="m_new = block.maximum(m_i, s.max())", put="m_new = s.max()",
    ),
    Mutant(
        mechanism="softmax without subtracting the maximum", algorithm="flash2", file=FLASH2, check="rule", blind=True, dtype="float32",
        find="m_new = block.maximum(m_i, s.max())", put="m_new = block.full(tile.rows, 1, 0.0)",
    ),
    Mutant(
        mechanism="accumulator not rescaled when the maximum rises", algorithm="flash2", file=FLASH2, check="rule", blind=False,
        find="acc = acc * alpha", put="pass",
    ),
    Mutant(
        mechanism="sum not rescaled when the maximum rises", algorithm="online_softmax", file=ONLINE, check="rule", blind=True,
        find="row_sum = row_sum * block.exp(row_max - new_max.finite()) + block.exp(x - new_max.finite()).sum()",
        put="row_sum = row_sum + block.exp(x - new_max.finite()).sum()",
    ),
    Mutant(
        mechanism="scale off by a thousandth", algorithm="flash2", file=FLASH2, check="rule", blind=True,
        find="scale=problem.softmax_scale", put="scale=problem.softmax_scale * 1.001",
    ),
    Mutant(
        mechanism="LSE to the base 2", algorithm="flash2", file=FLASH2, check="key_sets", blind=True,
        find="logsumexp = m_i + block.log(l_i)", put="logsumexp = (m_i + block.log(l_i)) * 1.4426950408889634",
    ),
    Mutant(
        mechanism="LSE stored before the last key tile", algorithm="flash1", file=FLASH1, check="split", blind=True,
        find="if lse and j == last:", put="if lse and j == 0:",
    ),
    Mutant(
        mechanism="P rounded to fewer bits than the storage dtype has", algorithm="flash2", file=FLASH2, check="rule", blind=True,
        find="p.round(problem.dtype)", put="p.round('bfloat16')",
    ),
    Mutant(
        mechanism="scores kept in 16 bits", algorithm="standard", file=STANDARD, check="rule", blind=True,
        find='s = m.workspace("s", problem.kv_length)', put='s = m.workspace("s", problem.kv_length, problem.dtype)',
    ),
    Mutant(
        mechanism="sum kept in 16 bits", algorithm="flash2", file=FLASH2, check="rule", blind=True,
        find="l_i = l_i * alpha + p.sum()", put="l_i = (l_i * alpha + p.sum()).round(problem.dtype)",
    ),
    Mutant(
        mechanism="division by the sum of an empty row", algorithm="flash2", file=FLASH2, check="rule", blind=True,
        find="acc = acc / l_i.nonzero()", put="acc = acc / l_i",
    ),
    Mutant(
        mechanism="minus infinity from minus infinity", algorithm="flash1", file=FLASH1, check="rule", blind=True,
        find="p = block.exp(s - m_tile.finite())", put="p = block.exp(s - m_tile)",
    ),
    Mutant(
        mechanism="nothing written when there are no keys", algorithm="flash1", file=FLASH1, check="rule", blind=True,
        find="last = max(1, problem.key_tiles(tile)) - 1", put="last = problem.key_tiles(tile) - 1",
    ),
    Mutant(
        mechanism="workspace not initialised", algorithm="flash1", file=FLASH1, check="rule", blind=False,
        find="block.store(o, block.full(tile.rows, v.cols, 0.0), i, tile.rows)", put="pass",
    ),
    Mutant(
        mechanism="columns past the last whole chunk left out", algorithm="flash1", file=FLASH1, check="rule", blind=True,
        find="chunks = -(-padded(v.cols) // CHUNK)", put="chunks = max(1, v.cols // CHUNK)",
    ),
    Mutant(
        mechanism="ragged tail of the keys left out of P V", algorithm="standard", file=STANDARD, check="key_sets", blind=True,
        find="acc = block.full(tile.rows, v.cols, 0.0)",
        put="acc = block.full(tile.rows, v.cols, 0.0); problem = problem.replace(len_kv=problem.kv_length // tile.cols * tile.cols)",
    ),
    Mutant(
        mechanism="maximum taken over hidden keys too", algorithm="flash2", file=FLASH2, check="rule", blind=True,
        find="m_new = block.maximum(m_i, s.max())",
        put='m_new = block.maximum(m_i, block.matmul(q_i, k_j.T, split=("rows", "none"), scale=problem.softmax_scale).max())',
    ),
    Mutant(
        mechanism="V lags one tile behind", algorithm="flash2", file=FLASH2, check="permutation", blind=False,
        find="v_j = block.load(v, j, tile.cols, stages=c.stages)", put="v_j = block.load(v, max(j - 1, 0), tile.cols, stages=c.stages)",
    ),
    Mutant(
        mechanism="query heads dealt out to KV heads in turn", algorithm="flash2", file=MACHINE, check="gqa", blind=True,
        find="return x.reshape(p.batch, p.num_kv_heads, x.shape[1] // p.num_kv_heads, *x.shape[2:])", put="return x.reshape(p.batch, x.shape[1] // p.num_kv_heads, p.num_kv_heads, *x.shape[2:]).swapaxes(1, 2)",
    ),
    Mutant(
        mechanism="batch stride forgotten", algorithm="flash2", file=MACHINE, check="batch", blind=True,
        find="return x.reshape(p.batch,", put="return np.broadcast_to(x[:1], x.shape).reshape(p.batch,",
    ),
]  # fmt: skip
"""Wrong numbers."""

BYTES = [
    Mutant(
        mechanism="warps share by keys what they should share by rows", algorithm="flash2", file=FLASH2, check="bytes", blind=True,
        find='s = block.matmul(q_i, k_j.T, split=("rows", "none"), scale=problem.softmax_scale)',
        put='s = block.matmul(q_i, k_j.T, split=("none", "rows"), scale=problem.softmax_scale)',
    ),
    Mutant(
        mechanism="a tile loaded twice", algorithm="flash2", file=FLASH2, check="bytes", blind=True,
        find="k_j = block.load(k, j, tile.cols, stages=c.stages)",
        put="k_j = block.load(k, j, tile.cols, stages=c.stages); block.load(k, j, tile.cols, stages=c.stages)",
    ),
    Mutant(
        mechanism="masked tiles not skipped", algorithm="flash2", file=FLASH2, check="bytes", blind=True,
        find="visible = partial(problem.tiles_of_row, tile=tile)", put="visible = lambda i: range(problem.key_tiles(tile))",
    ),
    Mutant(
        mechanism="half of the bytes by a narrow dtype", algorithm="flash1", file=FLASH1, check="bytes", blind=True,
        find='o = m.workspace("o", v.cols)', put='o = m.workspace("o", v.cols, problem.dtype)',
    ),
]  # fmt: skip
"""Right numbers (or nearly), wrong bytes."""
