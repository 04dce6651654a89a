"""Attention and its gradients by loops in float64, and random problems of each operation to hold against them.

No formula, judge or mask of the project is used here. `problem` draws a problem of an operation with its arrays, `truth` says what
must come out.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from itertools import product
from random import Random
from typing import Any, NamedTuple

import numpy as np

import flashlab as fl

Array = np.ndarray[Any, Any]


class Weights(NamedTuple):
    """Of each query: what each key weighs, what the sink weighs, and by how much a score changes with its product."""

    keys: Array
    sink: Array
    slope: Array


def weights(q: Array, k: Array, given: Mapping[str, Any]) -> Weights | None:
    """softmax(scale q k + bias) by loops over heads, queries and keys. None where scores are beyond float32."""
    (batch, heads, rows, dim), kv, keys = q.shape, k.shape[1], k.shape[2]
    p, slope, sink_weight = (
        np.zeros((batch, heads, rows, keys)),
        np.zeros((batch, heads, rows, keys)),
        np.zeros((batch, heads, rows)),
    )
    scale = given.get("scale")
    scale = dim**-0.5 if scale is None else float(scale)
    cap = float(given.get("soft_cap") or 0.0)
    window, causal = given.get("window") or (None, None), given.get("causal") or False
    sequences, at = [(0, rows, 0, keys)], (0, 0)
    if given.get("lengths") is not None:
        sequences = []
        for each in given["lengths"]:
            n, m = each if isinstance(each, tuple) else (each, each)
            sequences.append((at[0], at[0] + n, at[1], at[1] + m))
            at = at[0] + n, at[1] + m
    for b, h in np.ndindex(batch, heads):
        alibi = float(given["alibi_slopes"][h]) if given.get("alibi_slopes") is not None else 0.0
        sink = float(given["sinks"][h]) if given.get("sinks") is not None else -math.inf
        for first, last, low, high in sequences:
            for i in range(first, last):
                here = i - first + (high - low) - (last - first)  # the key that it is aligned with
                scores: dict[int, float] = {}
                for j in range(high - low):
                    if (causal and j > here) or (window[0] is not None and here - j > window[0]):
                        continue
                    if window[1] is not None and j - here > window[1]:
                        continue
                    if not (_shown(given.get("mask"), sequences, i, low + j) and _in_a_block(given, i, low + j)):
                        continue
                    s = scale * float(sum(q[b, h, i] * k[b, h * kv // heads, low + j]))
                    slope[b, h, i, low + j] = scale * (1 - math.tanh(s / cap) ** 2 if cap else 1.0)
                    s = cap * math.tanh(s / cap) if cap else s
                    scores[low + j] = s - alibi * abs(here - j)
                top = max([*scores.values(), sink], default=-math.inf)
                if scores and abs(top) > 1e30:
                    return None
                if top == -math.inf:
                    continue
                found = {j: math.exp(s - top) for j, s in scores.items()}
                of_sink = math.exp(sink - top) if sink > -math.inf else 0.0
                total = sum(found.values()) + of_sink
                for j, w in found.items():
                    p[b, h, i, j] = w / total
                sink_weight[b, h, i] = of_sink / total
    return Weights(p, sink_weight, slope)


def oracle(q: Array, k: Array, v: Array, given: Mapping[str, Any]) -> Array | None:
    """Attention: each query's weights times the values. None where scores are beyond float32."""
    found = weights(q, k, given)
    return None if found is None else found.keys @ _for_heads(v, q)


def gradients(
    q: Array, k: Array, v: Array, out: Array, dout: Array, given: Mapping[str, Any]
) -> dict[str, Array] | None:
    """dQ, dK, dV, and those of the sinks in each batch, of `out` as it was stored. None where scores are beyond float32."""
    found = weights(q, k, given)
    if found is None:
        return None
    delta = (dout * out).sum(-1)
    if given.get("dlse") is not None:
        delta = delta - np.asarray(given["dlse"], float)
    ds = found.keys * (dout @ _for_heads(v, q).swapaxes(2, 3) - delta[..., None]) * found.slope
    each = {
        "dq": ds @ _for_heads(k, q),
        "dk": _of_groups(ds.swapaxes(2, 3) @ q, k),
        "dv": _of_groups(found.keys.swapaxes(2, 3) @ dout, v),
    }
    if given.get("sinks") is not None:
        each["dsinks"] = -(found.sink * delta).sum(-1)
    return each


def _for_heads(x: Array, q: Array) -> Array:
    """A KV head's rows for each query head of its group."""
    return np.repeat(x, q.shape[1] // x.shape[1], axis=1)


def _of_groups(x: Array, kv: Array) -> Array:
    """The sum over the query heads of each group."""
    return x.reshape(x.shape[0], kv.shape[1], x.shape[1] // kv.shape[1], *x.shape[2:]).sum(2)


def _shown(mask: Any, sequences: list[tuple[int, int, int, int]], i: int, j: int) -> bool:
    """Does a mask of any form show key j to query i of the same sequence?"""
    if mask is None or mask.ndim == 2:
        return mask is None or bool(mask[i, j])
    start = 0
    for first, last, low, high in sequences:
        if first <= i < last:
            bit = (i - first) * (high - low) + j - low
            return bool(mask[start + bit // 8] >> bit % 8 & 1)
        start += ((last - first) * (high - low) + 7) // 8
    raise AssertionError((i, j))


def _in_a_block(given: Mapping[str, Any], i: int, j: int) -> bool:
    """Is the pair in a block that lists of blocks have, if there are any?"""
    if given.get("block_mask") is None:
        return True
    rows, cols = given.get("block_size", (128, 128))
    number, *blocks = given["block_mask"][i // rows]
    return j // cols in blocks[:number]


# -- problems -------------------------------------------------------------------------------------------------------

OPERATIONS = ("attention", "backward", "paged", "mla", "cascade")


class Posed(NamedTuple):
    """A call of `fl.simulate`: the algorithm, its arrays, and what the arrays don't say."""

    algorithm: str
    arrays: dict[str, Any]
    masks: dict[str, Any]


def problem(operation: str, random: Random) -> Posed:
    """A random problem of an operation, with arrays."""
    r, draw = random, np.random.default_rng(random.randrange(2**32))
    dtype = r.choice(["float32", "float16"])
    kv, group, dim = r.choice([1, 2]), r.choice([1, 2, 3]), r.choice([8, 16, 40])
    batch, rows, keys = r.choice([1, 2]), r.randrange(1, 30), r.randrange(0, 60)
    masks: dict[str, Any] = r.choice([{}, {"causal": True}, {"window": (r.randrange(20), r.choice([None, 0, 5]))}])
    masks = {**masks, **r.choice([{}, {"scale": r.choice([0.3, -0.5, 1.0])}])}

    def some(*shape: int) -> Array:
        return draw.standard_normal(shape).astype(dtype)

    sinks: dict[str, Any] = r.choice([{}, {"sinks": draw.standard_normal(kv * group).astype(np.float32)}])
    if operation == "attention":
        if r.random() < 0.3:  # sequences that lie one behind the other
            masks["lengths"] = [(r.randrange(12), r.randrange(20)) for _ in range(r.randrange(1, 5))]
            batch, rows, keys = 1, *(sum(pair[side] for pair in masks["lengths"]) for side in (0, 1))
        more = r.choice([{}, sinks, {"soft_cap": 3.0}, {"alibi_slopes": draw.random(kv * group).astype(np.float32)}])
        if "lengths" not in masks and r.random() < 0.3:
            more = {"mask": draw.random((rows, keys)) < 0.6}
        arrays = {"q": some(batch, kv * group, rows, dim), **{x: some(batch, kv, keys, dim) for x in "kv"}}
        both = {**masks, **more}
        of_masks = {x: both.pop(x) for x in ("causal", "window", "scale", "lengths", "soft_cap") if x in both}
        return Posed(r.choice(["flash2", "flash3"]), {**arrays, **both}, of_masks)
    if operation == "backward":
        arrays = {"q": some(batch, kv * group, rows, dim), **{x: some(batch, kv, keys, dim) for x in "kv"}, **sinks}
        run = fl.simulate("flash2", **arrays, **masks, lse=True)
        dlse = {"dlse": draw.standard_normal(run.lse.shape).astype(np.float32)} if r.random() < 0.3 else {}
        algorithm = r.choice(["flash2_backward", "flash2_backward_deterministic", "flash3_backward"])
        return Posed(algorithm, {**arrays, "out": run.out, "lse": run.lse, "dout": some(*run.out.shape), **dlse}, masks)
    if operation == "paged":
        size, lens = r.choice([1, 3, 16]), [r.randrange(60) for _ in range(batch)]
        wanted = [-(-n // size) for n in lens]
        pages = [*range(sum(wanted) + 2)]
        r.shuffle(pages)
        table, at = np.zeros((batch, max([1, *wanted])), np.int32), 0
        for b, n in enumerate(wanted):
            table[b, :n], at = pages[at : at + n], at + n
        pools = {x: some(len(pages), kv, size, dim) for x in "kv"}
        for x in pools.values():
            x[pages[at:]] = np.nan  # pages that no request has
        q = some(batch, kv * group, r.randrange(1, 5), dim)
        return Posed(
            "paged", {"q": q, **pools, "block_table": table, "seq_lens": np.array(lens, np.int32), **sinks}, masks
        )
    if operation == "mla":
        heads, sinks = r.choice([1, 4, 16]), {}
        q, latent = some(batch, heads, r.randrange(1, 4), 576), some(batch, 1, keys, 576)
        return Posed("mla", {"q": q / 8, "latent": latent}, {**masks, "scale": 0.07})
    assert operation == "cascade", operation
    rows = r.randrange(1, 5)
    keys += rows  # with fewer of its own than queries, it isn't attention over both
    prefix = {f"{x}_prefix": some(1, kv, r.randrange(50) if x == "k" else 0, dim) for x in "kv"}
    prefix["v_prefix"] = some(1, kv, prefix["k_prefix"].shape[2], dim)
    arrays = {"q": some(batch, kv * group, rows, dim), **{x: some(batch, kv, keys, dim) for x in "kv"}}
    return Posed("cascade", {**arrays, **prefix, **sinks}, masks)


def truth(posed: Posed) -> dict[str, Array] | None:
    """What a problem's outputs must be."""
    arrays = {name: np.asarray(x, float) if x.dtype.kind in "fV" else x for name, x in posed.arrays.items()}
    given = {**posed.masks, **{x: arrays[x] for x in ("sinks", "alibi_slopes", "mask", "dlse") if x in arrays}}
    q = arrays["q"]
    if "dout" in arrays:
        return gradients(q, arrays["k"], arrays["v"], arrays["out"], arrays["dout"], given)
    if "latent" in arrays:
        k, v = arrays["latent"], arrays["latent"][..., :512]
    elif "k_prefix" in arrays:
        k, v = (np.concatenate([np.repeat(arrays[f"{x}_prefix"], len(q), axis=0), arrays[x]], axis=2) for x in "kv")
    elif "block_table" in arrays:
        outs = [oracle(q[b : b + 1], *_gathered(arrays, b), given) for b in range(len(q))]
        return (
            None
            if any(out is None for out in outs)
            else {"out": np.concatenate([out for out in outs if out is not None])}
        )
    else:
        k, v = arrays["k"], arrays["v"]
    out = oracle(q, k, v, given)
    return None if out is None else {"out": out}


def _gathered(arrays: Mapping[str, Any], b: int) -> list[Array]:
    """K and V of a request in pages, key by key."""
    n, size = int(arrays["seq_lens"][b]), arrays["k"].shape[2]
    found: list[Array] = []
    for name in "kv":
        pool = arrays[name]
        own = np.zeros((1, pool.shape[1], n, pool.shape[3]))
        for j, head in product(range(n), range(pool.shape[1])):
            own[0, head, j] = pool[arrays["block_table"][b, j // size], head, j % size]
        found.append(own)
    return found


def held(posed: Posed) -> int:
    """Simulate a problem, and hold each output to the truth. Returns how many outputs were held."""
    exact = truth(posed)
    run = fl.simulate(posed.algorithm, **posed.arrays, **posed.masks)
    if exact is None:
        return 0
    close = 4e-3 if posed.arrays["q"].dtype == np.float16 else 2e-4
    for name, wanted in exact.items():
        size = max(1.0, float(abs(wanted).max(initial=0)))
        found = np.asarray(run.outputs[name], float)
        np.testing.assert_allclose(found, wanted, atol=close * size, rtol=close, err_msg=f"{posed.algorithm}: {name}")
    return len(exact)
