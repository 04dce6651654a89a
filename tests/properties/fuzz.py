"""Calls of the public surface that nobody meant: drawn from its signatures, and from the command line's own definition.

A call begins as one that is fine. Some of its arguments are then replaced: by values that the argument takes, by values that are
nearly so, and by junk. It has to return, or to raise `UsageError` or `Unavailable` with one line. What simulator and judges
return is held to an oracle of loops. Nothing is compiled.

    python -m tests.properties.fuzz --calls 100000 [--seed 1] [--processes 16]

makes that many calls and prints what became of them. A failure is printed with the call and its number: `--first NUMBER --calls 1`
makes it again, with the same seed. With torch installed, its doors are called, too.
"""

from __future__ import annotations

import argparse
import contextlib
import functools
import importlib
import importlib.metadata
import importlib.util
import inspect
import io
import json
import math
import multiprocessing
import os
import platform
import signal
import sys
import tempfile
import time
import warnings
from collections import Counter
from collections.abc import Callable, Generator, Mapping
from itertools import product
from multiprocessing.connection import Connection, wait
from operator import attrgetter
from pathlib import Path
from random import Random
from typing import Any, NamedTuple

import numpy as np

import flashlab as fl
from simulator.operations.attention import ATTENTION
from simulator.operations.paged import PAGED
from simulator.operations.softmax import SOFTMAX
from tests.properties import fuzz_serve
from tests.properties.oracle import OPERATIONS, Posed, held, oracle
from tests.properties.oracle import problem as problem_of

BASE: dict[str, Any] = {"batch": 1, "heads": 2, "len_q": 9, "head_dim": 16, "dtype": "float16"}
PROBLEMS: list[dict[str, Any]] = [
    {}, {"causal": True}, {"kv_heads": 1, "len_kv": 5}, {"len_q": 0}, {"len_kv": 0}, {"window": (3, 0)}, {"dtype": "float32"},
    {"dtype": "bfloat16", "head_dim_v": 24}, {"scale": -0.5}, {"soft_cap": 2.0}, {"sinks": True}, {"alibi": True, "causal": True},
    {"mask": "dense"}, {"mask": "bits"}, {"mask": "blocks", "block_size": (4, 3)},
    {"lengths": [3, (2, 7)], "len_q": None}, {"len_q": 40, "batch": 2}, {"len_prefix": 30},
    {"len_prefix": 30, "batch": 2, "lengths": [(9, 4), (9, 0)], "window": (20, 0)},
    {"dtype": "float8_e4m3fn", "head_dim": 64}, {"page_size": 4}, {"page_size": 3, "batch": 2, "lengths": [(9, 5), (9, 30)]},
    {"page_size": 4, "drafts": True},
]  # fmt: skip
HUGE: list[dict[str, Any]] = [
    {"len_q": 2**40, "causal": True},
    {"heads": 2**31},
    {"len_q": 10**6, "batch": 64},
    {"len_kv": 2**62},
    {"len_kv": 2**62, "page_size": 2**40},
    {"len_kv": 2**62, "page_size": 1},
]

SCHEMES = ["ring", "all_gather", "ulysses", "heads", "dcp"]
ALGORITHMS = [*fl.CATALOGUE, "flash9", ""]
JUNK: list[Callable[[], Any]] = [
    *(lambda x=x: x for x in (None, True, -1, 0, 1, 2**31, 2**63, 10**400, 0.5, -0.0, math.nan, math.inf, 1e39, 1e-320)),
    *(lambda x=x: x for x in ("", "x", "\0", "a" * 5000, "größe", b"x", (), (0,), (1, 2, 3), ("a", "b"), [], [None], {}, {"a": 1})),
    lambda: np.bool_(True), lambda: np.float32(2), lambda: np.int64(-1), lambda: np.zeros(()), lambda: np.zeros((3, 2)), object,
    lambda: np.array(["a"]), lambda: np.array([object()]), lambda: len, lambda: fl.Problem, lambda: Ellipsis, lambda: range(3),
]  # fmt: skip


def problem(random: Random, *, huge: bool = False) -> fl.Problem:
    return fl.Problem(**{**BASE, **random.choice(PROBLEMS + (HUGE if huge else []))})


def mutated(random: Random, x: np.ndarray[Any, Any]) -> Any:
    """An array that is nearly the given one."""
    ways: list[Callable[[], Any]] = [
        lambda: x, lambda: np.asfortranarray(x), lambda: x[..., ::-1], lambda: x[..., :0], lambda: x[0] if len(x) else x,
        lambda: x.T, lambda: x.astype(np.float64), lambda: x.astype(np.int8), lambda: x.tolist(), lambda: np.ma.masked_array(x),
        lambda: np.full_like(x, np.nan), lambda: np.full_like(x, 1e4), lambda: x.astype(">f4"), lambda: x.astype(object),
        lambda: np.broadcast_to(x[..., :1], x.shape), lambda: np.concatenate([x, x], axis=-1), lambda: memoryview(b"abc"),
    ]  # fmt: skip
    with np.errstate(invalid="ignore"):  # NaN has no place among integers
        return random.choice(ways)()


VALUES: Mapping[str, list[Callable[[Random], Any]]] = {
    "algorithm": [lambda r: r.choice(ALGORITHMS)],
    "algorithms": [lambda r: r.sample(ALGORITHMS, 2), lambda r: r.choice(ALGORITHMS)],
    "program": [lambda r: r.choice([*fl.catalogue.of(), "flash9"])],  # the formula of attention isn't for others
    "problem": [problem],
    "tile": [lambda r: r.choice([None, (16, 16), (64, 64), "32x16", (17, 13), (1, 1), (2**20, 2**20), "64x", (16,)])],
    "device": [lambda r: r.choice(["h100", "a100", "t4", "h1000", "", fl.DEVICES["l4"]])],
    "backend": [lambda r: r.choice(["simulator", "emulator", "gpu", "cpu"])],
    "lse": [lambda r: r.choice([True, False])],
    "trace": [lambda r: r.choice([True, (0, 1), (0, 2), (-1, 0)])],
    "causal": [lambda r: r.choice([True, False])],
    "window": [lambda r: r.choice([(0, 0), (3, None), (None, None), (2**62, 1), (-1, 0)])],
    "scale": [lambda r: r.choice([0.0, -2.0, 1e-30, 3e38])],
    "soft_cap": [lambda r: r.choice([0.0, 1.0, 1e-30, 3e38, -1.0])],
    "lengths": [lambda r: r.choice([[9], [4, 5], [(4, 4), (5, 5)], [], [10], [-1, 10]])],
    "block_size": [lambda r: r.choice([(4, 3), (128, 128), (1, 1), (0, 4), (None, 3), 5])],
    "seed": [lambda r: r.choice([0, 1, 2**32])],
    "length": [lambda r: r.choice([1, 100, 2**40])],
    "dtype": [lambda r: r.choice(["float32", "float16", "float17"])],
    "dtypes": [lambda r: r.choice([["float16"], "float16", ["float17"]])],
    "checks": [lambda r: r.choice([["key_set"], "nosuch", []])],
    "examples": [lambda r: r.choice([0, -1])],
    "scheme": [lambda r: r.choice([*SCHEMES, "rings"])],
    "ranks": [lambda r: r.choice([1, 2, 3, 4, 1025])],
    "layout": [lambda r: r.choice(["zigzag", "contiguous", "zag"])],
    "page_size": [lambda r: r.choice([1, 4])],
    "path": [lambda r: r.choice(["nowhere.npz", "/", "x.npy"])],
    "exercise": [lambda r: r.choice(["00.1", "05.1", "0.1"])],
    "name": [lambda r: r.choice(["softmax_safe", "softmax_online", "flash2", "01.1"])],
}
"""Values that an argument of this name takes, or nearly takes. For any other argument there is junk."""

ORACLES = ("simulate", "naive", "naive_loop")
RUNS = ("simulate", "attention", "emulate", "naive", "naive_loop")
"""What takes arrays. The other functions' first valid calls are below."""


PLAIN = [x for x in PROBLEMS if not x.keys() & {"page_size", "len_prefix"} and x.get("dtype") != "float8_e4m3fn"]
"""Problems of attention that have no pages, no prefix and no scales."""


def _arrays(random: Random) -> dict[str, Any]:
    posed = fl.Problem(**{**BASE, **random.choice(PLAIN)})
    return {**ATTENTION.draw(posed, random.randrange(9)), **posed.masks}


def _gradients(random: Random) -> dict[str, Any]:
    """Operands of a backward pass. `out` and `lse` are zeros: nothing computes with them here."""
    arrays = _arrays(random)
    q, zeros = arrays["q"], np.zeros
    return {"dout": q, **arrays, "out": zeros(q.shape, q.dtype), "lse": zeros(q.shape[:3], np.float32)}


def _in_pages(random: Random) -> dict[str, Any]:
    """Two requests in pages, with what they don't own full of NaN."""
    sizes: dict[str, Any] = {
        **BASE, "batch": 2, "page_size": random.choice([1, 4, 64]), "lengths": [(9, random.randrange(40)), (9, 12)],
        "causal": random.choice([True, False]), "window": random.choice([None, (3, 0)]), "drafts": random.choice([True, False]),
    }  # fmt: skip
    posed = fl.Problem(**sizes)
    arrays: dict[str, Any] = dict(PAGED.draw(posed, random.randrange(9)))
    return {"algorithm": "paged", **arrays, "causal": posed.causal, "window": posed.window}


def _plainly(random: Random) -> dict[str, Any]:
    return {"algorithm": random.choice(["flash2", "standard", "flash1", "flash3"]), **_arrays(random)}


def _latent(random: Random) -> dict[str, Any]:
    posed = fl.latent_problem(heads=random.choice([1, 16]), len_kv=random.choice([0, 1, 70]), dtype="float16")
    return {**fl.CATALOGUE["mla"].operation.draw(posed, random.randrange(9)), "causal": random.choice([True, False])}


def _cascade(random: Random) -> dict[str, Any]:
    keys = random.choice([0, 12])
    own = {"len_kv": keys, "lengths": random.choice([None, [(9, random.randint(0, keys))]])}
    sizes: dict[str, Any] = {**BASE, **own, "len_prefix": random.choice([0, 1, 70])}
    posed = fl.Problem(**sizes)
    return {
        **fl.CATALOGUE["cascade"].operation.draw(posed, random.randrange(9)),
        "causal": random.choice([True, False]),
        "window": random.choice([None, (3, 0), (None, 2)]),
    }


def _appended(random: Random) -> dict[str, Any]:
    tokens = random.choice([0, 1, 9])
    sizes: dict[str, Any] = {
        **BASE,
        "len_q": tokens,
        "len_kv": random.randint(0, tokens),
        "page_size": random.choice([1, 4]),
    }
    eight: dict[str, Any] = {
        "kv_dtype": random.choice(["int8", "float8_e4m3fn"]),
        "k_scale": "token",
        "v_scale": "token",
    }
    posed = fl.Problem(**sizes, pages=12, **random.choice([{}, eight]))
    return dict(fl.CATALOGUE["append_kv"].operation.draw(posed, random.randrange(9)))


def _copied(random: Random) -> dict[str, Any]:
    posed = fl.Problem(**{**BASE, "len_q": random.choice([0, 1, 3])}, page_size=random.choice([1, 4]), pages=7)
    return dict(fl.CATALOGUE["copy_pages"].operation.draw(posed, random.randrange(9)))


def _cache(random: Random) -> dict[str, Any]:
    k, v = (np.ones((1, 2, random.choice([0, 5]), 16), np.float16) for _ in "kv")
    return {
        "k": k,
        "v": v,
        "dtype": random.choice(["int8", "float8_e4m3fn"]),
        "k_scale": random.choice(["head", "channel"]),
    }


def _shared(random: Random) -> dict[str, Any]:
    """Attention on two ranks, and back where a scheme goes back."""
    scheme, causal = random.choice(SCHEMES), random.choice([True, False])
    posed = fl.Problem(**{**BASE, "len_q": 1 if scheme == "dcp" else 8, "len_kv": 8, "causal": causal})
    arrays: dict[str, Any] = dict(ATTENTION.draw(posed, random.randrange(9)))
    back = {} if scheme == "dcp" else {"dout": random.choice([None, arrays["q"]])}
    return {
        "scheme": scheme,
        **arrays,
        **back,
        "ranks": 2,
        "causal": causal,
        "layout": random.choice(["zigzag", "contiguous"]),
    }


FIRST: Mapping[str, Callable[[Random], dict[str, Any]]] = {
    "simulate": lambda r: r.choices(
        [_plainly, _in_pages, lambda r: {"algorithm": "mla", **_latent(r)}, lambda r: {"algorithm": "cascade", **_cascade(r)}],
        [0.7, 0.15, 0.05, 0.1],
    )[0](r),
    "emulate": lambda r: _plainly(r),
    "attention": lambda r: {**_arrays(r), "algorithm": "flash2", "backend": "emulator"},
    "attention_backward": lambda r: {**_gradients(r), "backend": "emulator"},
    "mla": lambda r: {**_latent(r), "backend": "emulator"},
    "cascade": lambda r: {**_cascade(r), "backend": "emulator"},
    **dict.fromkeys(("naive", "naive_loop"), _arrays),
    "count": lambda r: {"algorithm": r.choice(list(fl.CATALOGUE)), "problem": problem(r, huge=True)},
    "shape_run": lambda r: {"algorithm": r.choice(["flash2", "standard", "flash3"]), "problem": problem(r)},
    "timeline": lambda r: {"algorithm": r.choice(["flash2", "standard", "flash3"]), "problem": problem(r)},
    "sweep": lambda r: {"algorithms": ["flash2", "standard"], "problem": problem(r, huge=True), "heads": [2, 3]},
    "compare": lambda r: {"what": problem(r), "algorithms": ["flash2", "standard"]},
    "check_formula": lambda r: {"program": "flash2", "formula": fl.CATALOGUE["flash2"].formula, "problem": problem(r)},
    "merge": lambda r: {
        "outs": [np.ones((1, 2, 5, 8), np.float32)] * 3,
        "lses": [np.full((1, 2, 5), -float(r.randrange(3)), np.float32)] * 3,
    },
    "block_mask": lambda r: {"kv_num_blocks": np.array([1, r.randrange(3)]), "kv_indices": np.array([[0, 1], [1, 0]])},
    "block_table": lambda r: {
        "indptr": np.array([0, 1, 2 + r.randrange(2)]), "indices": np.array([1, 0, 2]),
        "last_page_len": np.array([2, r.randrange(1, 4)]), "page_size": 4, "pages": 3,
    },
    "random_inputs": lambda r: {"problem": problem(r)},
    "softmax": lambda r: {"name": "softmax_online", "x": np.arange(r.randrange(1, 40), dtype=np.float32)},
    "plan": lambda r: {"algorithm": "flash2", "problem": problem(r), "backend": r.choice(["simulator", "emulator"])},
    "verify": lambda r: {
        "target": "flash2", "checks": ["nosuch"], **r.choice([{}, {"isolate": True, "time_limit": 1}, {"quick": True}]),
    },
    "load_inputs": lambda r: {"path": "nowhere.npz"},
    "player": lambda r: {"trace": fl.simulate("flash2", *fl.random_inputs(fl.Problem(**BASE)), trace=True).trace},
    "kernel": lambda r: {"file": "nowhere.cu", "name": "k"},
    "emulate_file": lambda r: {
        "path": r.choice(["nowhere.cu", "nowhere.py", "nowhere.py:k"]),
        "arguments": r.choice([{"x": np.zeros(3)}, [np.zeros(3)]]),
        "grid": 1,
        "block": 32,
        "blocks": r.choice([None, 1, 7]),
    },
    "run_program": lambda r: {"path": "nowhere.cu", "arguments": ["3"], "time_limit": r.choice([0, 1.5])},
    "check": lambda r: {"answer": r.choice(["flash2", "nowhere.cu", 5]), "exercise": "00.1"},
    "predict": lambda r: {"name": "01.1", "hbm_peak": r.choice([1, 0.5, ..., 5e-324])},
    "latent_chunk": lambda r: {"batch": r.choice([1, 64]), "heads": r.choice([16, 128]), "len_kv": r.choice([70, 4096])},
    "latent_problem": lambda r: {"heads": r.choice([1, 16]), "len_kv": r.choice([0, 70]), "dtype": "float16"},
    "append_kv": lambda r: {**_appended(r), "backend": "emulator"},
    "copy_pages": lambda r: {**_copied(r), "backend": "emulator"},
    "quantize_cache": _cache,
    "parallel.simulate": lambda r: _shared(r),
    "parallel.count": lambda r: {
        "scheme": r.choice(SCHEMES), "problem": problem(r, huge=True), "ranks": r.choice([1, 2]),
    },
    "parallel.rates": lambda r: {"device": r.choice(["h100", "h200"])},
    "parallel.timeline": lambda r: {
        "counts": fl.parallel.count("ring", fl.Problem(**{**BASE, "len_q": 8}), ranks=r.choice([1, 2])),
        "rates": fl.parallel.rates("h100", per_host=1),
    },
    "testing.assert_attention_close": lambda r: {**_arrays(r), "out": np.ones((1, 2, 5, 8), np.float32)},
    "testing.audit_inputs": lambda r: {
        "problem": fl.Problem(batch=1, heads=1, len_q=2, head_dim=8, dtype="float16"), "rtol": 0.0, "atol": -1.0,
    },
    "testing.audit_test": lambda r: {"test": "nowhere.py", "replace": "nowhere:attention"},
    "testing.wrong_attention": lambda r: {"fault": r.choice(["scale missing", "nothing"])},
    "Problem": lambda r: {**BASE, **r.choice(PROBLEMS)},
    "Device": lambda r: {name: getattr(fl.DEVICES["h100"], name) for name in inspect.signature(fl.Device).parameters},
    "Adapter": lambda r: {"fn": lambda q, k, v, causal=False: q},
    "Domain": lambda r: {"head_dim": [64], "len_q": [1]},
    "Empty": lambda r: {"shape": (3, 4), "dtype": "float16"},
    "Poisoned": lambda r: {"values": np.zeros((3, 4)), "parts": [(r.randrange(12), 12)]},
}  # fmt: skip
"""A call that is fine, by public name."""
ENDLESS = ("shape_run", "check_formula", "plan", "compare", "timeline", "verify")
"""Functions that run a program on its shapes, or look at each block: they get no huge problem."""
NOT_CALLED = {
    "program": "it only keeps what it is given", "progress": "it takes nothing", "sample": "it takes nothing",
    "catalogue": "a module", "__version__": "text",
}  # fmt: skip
"""Public names that are no call, or have no bad one."""


class Call(NamedTuple):
    """A public function's name and its arguments."""

    name: str
    arguments: dict[str, Any]

    def __repr__(self) -> str:
        with np.printoptions(threshold=20):
            return f"fl.{self.name}(" + ", ".join(f"{k}={str(v)[:200]!s}" for k, v in self.arguments.items()) + ")"


def public(name: str) -> Any:
    """A public function by its name, as it stands after `fl.`."""
    return attrgetter(name)(fl)


def a_call(random: Random) -> Call:
    """A call of a public function: a fine one, of which up to three arguments are replaced."""
    name = random.choice([*FIRST, *RUNS])
    arguments = FIRST[name](random)
    known = [
        p.name
        for p in inspect.signature(public(name)).parameters.values()
        if p.kind not in (p.VAR_POSITIONAL, p.VAR_KEYWORD)
    ]
    names = list(dict.fromkeys([*known, *arguments]))
    for each in random.sample(names, min(len(names), random.choice([0, 1, 1, 2, 3]))):
        if isinstance(arguments.get(each), np.ndarray) and random.random() < 0.6:
            arguments[each] = mutated(random, arguments[each])
        elif each in VALUES and random.random() < 0.6:
            arguments[each] = random.choice(VALUES[each])(random)
        else:
            arguments[each] = random.choice(JUNK)()
    arguments.pop("progress", None)  # somebody's own function
    if name == "check_formula" and callable(arguments["formula"]):
        arguments["formula"] = fl.CATALOGUE["flash2"].formula  # what one of somebody's own raises is theirs
    if name == "verify" and (arguments["checks"] is None or isinstance(arguments["checks"], list | tuple)):
        arguments["checks"] = ["nosuch"]  # all of them would run for seconds
    if name == "testing.audit_inputs" and isinstance(arguments["problem"], fl.Problem):
        arguments["problem"] = FIRST[name](random)["problem"]  # it runs all wrong kernels
    if name == "parallel.simulate" and callable(arguments["scheme"]):
        arguments["scheme"] = "ring"
    return Call(name, arguments)


def outcome(call: Call) -> str:
    """What became of a call: "returned", "refused" or "unavailable". Anything else is raised."""
    function = public(call.name)
    named = dict(call.arguments)
    leading = (
        [named.pop("algorithm")] if call.name in ("simulate", "emulate") else []
    )  # positional, as its arrays may be
    with warnings.catch_warnings(), np.errstate(all="ignore"):
        warnings.simplefilter("ignore")
        try:
            result = function(*leading, **named)
        except (fl.UsageError, fl.Unavailable) as error:
            said = str(error)
            assert said and "\n" not in said and len(said) < 2000, f"no line: {said!r}"
            return "unavailable" if isinstance(error, fl.Unavailable) else "refused"
        except AssertionError:
            if call.name != "testing.assert_attention_close":
                raise
            return "refused"  # what it is for
        plain = "latent" not in call.arguments and "k_prefix" not in call.arguments
        if call.name in ORACLES and plain and isinstance(result, fl.Run | fl.Reference):
            for given, out in _requests(call.arguments, result.out):
                _hold(given, out)
    return "returned"


class Planned(NamedTuple):
    """A plan's algorithm and problem, and the arrays that it is to run on."""

    algorithm: str
    problem: fl.Problem
    arrays: dict[str, Any]

    def __repr__(self) -> str:
        with np.printoptions(threshold=20):
            said = ", ".join(f"{name}={str(x)[:200]}" for name, x in self.arrays.items())
            return f"fl.plan({self.algorithm!r}, {self.problem}, backend='simulator').run({said})"


def a_plan(random: Random) -> Planned:
    """A plan of any algorithm, with arrays that it takes: up to two of them, or of its outputs, are replaced or left out."""
    rows = [row for row in fl.CATALOGUE.values() if row.operation is not SOFTMAX]
    while True:
        row, given = random.choice(rows), {**BASE, **random.choice(PROBLEMS)}
        try:
            posed = row.fitted(fl.Problem(**given))
            if row.refuses(posed) is None:
                arrays: dict[str, Any] = dict(row.operation.draw(posed, random.randrange(9)))
                break
        except fl.UsageError:  # in a pool without a page that may be copied to, nothing can be drawn
            continue
    names = [*arrays, *(operand.name for operand in row.operation.outputs), "nobody"]
    for name in random.sample(names, random.choice([0, 1, 1, 2])):
        if isinstance(arrays.get(name), np.ndarray) and random.random() < 0.7:
            arrays[name] = mutated(random, arrays[name])
        elif random.random() < 0.3:
            arrays.pop(name, None)
        else:
            arrays[name] = random.choice(
                [*JUNK, lambda: np.zeros((1, 2, 9, 16), np.float16), lambda: arrays.get("q")]
            )()
    return Planned(row.name, posed, arrays)


def planned(plan: Planned) -> str:
    """What became of a plan's run: "returned" or "refused". Anything else is raised."""
    with warnings.catch_warnings(), np.errstate(all="ignore"):
        warnings.simplefilter("ignore")
        try:
            fl.plan(plan.algorithm, plan.problem, backend="simulator").run(**plan.arrays)
        except fl.UsageError as error:
            said = str(error)
            assert said and "\n" not in said and len(said) < 2000, f"no line: {said!r}"
            return "refused"
        return "returned"


def _requests(given: dict[str, Any], out: Any) -> Generator[tuple[dict[str, Any], Any]]:
    """A call's operands and its output; of requests in pages each by itself, key by key."""
    if given.get("block_table") is None:
        yield given, out
        return
    table, lens, lengths = np.asarray(given["block_table"]), given.get("seq_lens"), given.get("lengths")
    size, words, rows = given["k"].shape[2], given.get("draft_mask"), given["q"].shape[2]
    for b in range(len(table)):
        n = int(lens[b]) if lens is not None else lengths[b][1] if lengths else table.shape[1] * size
        own = {name: np.zeros((1, given[name].shape[1], n, given[name].shape[3])) for name in "kv"}
        for name, key in product("kv", range(n)):
            own[name][0, :, key] = given[name][table[b, key // size], :, key % size]
        shown = None if words is None else np.ones((rows, n), bool)
        for i, draft in product(range(rows), range(rows)) if shown is not None else ():
            if n - rows + draft >= 0:
                shown[i, n - rows + draft] = int(words[b, i]) >> draft & 1
        yield {**given, "q": given["q"][b : b + 1], **own, "lengths": None, "mask": shown}, out[b : b + 1]


def _hold(given: dict[str, Any], out: Any) -> None:
    """Hold `out` to attention by loops, where the operands are finite and the scores within float32."""
    q, k, v = (np.asarray(given[name]).astype(np.float64) for name in "qkv")
    if not all(np.isfinite(x).all() and (abs(x) < 1e3).all() for x in (q, k, v)):
        return
    if given.get("dropout") is not None:  # the oracle draws no random bytes
        return
    exact = oracle(q, k, v, given)
    if exact is None:
        return
    tolerance = {"float16": 4e-3, "bfloat16": 4e-2}.get(np.asarray(given["q"]).dtype.name, 2e-4) * max(
        1.0, float(abs(v).max(initial=0))
    )
    if given.get("algorithm") is None:
        rounded = 4 * float(
            np.spacing(float(given.get("soft_cap") or 0))
        )  # scores reach the cap, and exponentials their last bit
        tolerance = (1e-9 + rounded) * max(1.0, float(abs(v).max(initial=0)))
    np.testing.assert_allclose(np.asarray(out, np.float64), exact, atol=tolerance, rtol=tolerance)


# The command line, from its own definition

TEXTS = [
    "",
    "x",
    "0",
    "1",
    "7",
    "-1",
    "1.5",
    "nan",
    "1e400",
    "16",
    "64",
    str(2**62),
    "9" * 30,
    "a" * 3000,
    "1,2",
    "none",
    "\x1b[31m",
    "größe",
]
WORDS: Mapping[str, list[str]] = {
    "algorithm": [*fl.CATALOGUE, "flash9", "x.py:f", ":"], "blocks": ["0", "1", "7"],
    "target": ["flash2", "nowhere.cu", "nowhere.py", "nowhere.py:k", "math:sqrt", "flash9"],
    "arg": ["x=float32[8]", "x=float32[8]:poison(1:2)", "x=float32[8]:poison(7:9)", "p.x=float32[8]:out", "p.=1"],
    "algorithms": [*fl.CATALOGUE, "flash9"], "against": ["standard", "flash1", "nosuch"], "device": ["h100", "a100", "t4", "h1000"],
    "dtype": ["float16", "float32", "bfloat16", "float17", "float8_e4m3fn"],
    "tile": ["16x16", "64x64", "17x13", "0x1", "axb", "9x9x9"],
    "window": ["3,0", "none,1", "1", "a,b"], "lengths": ["3,4", "3:4", "a", ","], "head": ["0,0", "0,1", "0", "9,9"],
    "len_q": ["0", "1", "40", "64", str(2**40)], "head_dim": ["16", "40", "64", "512"], "heads": ["1", "2", "3", "4"],
    "page_size": ["0", "1", "16"], "pages": ["0", "3", "300"], "trace": ["lognormal:alpaca", "lognormal:"],
    "policy": ["fcfs", "shortest", "lifo"], "layers": ["1", "3"], "scheme": [*SCHEMES, "rings"],
    "ranks": ["1", "2", "3", "4"], "layout": ["zigzag", "contiguous", "zag"],
}  # fmt: skip
"""Texts that an option or argument of this name takes, or nearly takes. Any other gets `TEXTS`."""


class Typed(NamedTuple):
    """The words of a command."""

    words: tuple[str, ...]


@functools.cache
def commands() -> dict[str, Any]:
    from typer.main import get_command

    from flashlab.cli import app

    group: Any = get_command(app)
    return group.commands


def a_command(random: Random) -> Typed:
    """A command with some of its options, and arguments."""
    name, command = random.choice(list(commands().items()))
    options = [p for p in command.params if p.param_type_name == "option" and p.name not in ("help", "demo")]
    words = [name]
    for parameter in command.params:
        if parameter.param_type_name == "argument" and random.random() < 0.9:
            words += _text(random, parameter.name)
    for option in random.sample(options, min(len(options), random.choice([0, 1, 1, 2, 3, 5]))):
        spelled = random.choice([*option.opts, *option.secondary_opts])
        words += [spelled] if option.is_flag else [spelled, *_text(random, option.name)]
    if name == "serve":  # the last word counts: a day of more requests takes long
        words += ["--requests", random.choice(["0", "1", "2"])]
    return Typed(tuple(words))


def _text(random: Random, name: str) -> list[str]:
    return [random.choice(WORDS[name] if name in WORDS and random.random() < 0.7 else TEXTS)]


def ended(typed: Typed) -> str:
    """How a command ended: "0", "1" or "2". Anything else is raised."""
    from typer.testing import CliRunner

    from flashlab.cli import app

    with warnings.catch_warnings(), np.errstate(all="ignore"):
        warnings.simplefilter("ignore")
        result = CliRunner().invoke(app, list(typed.words))
    if result.exception is not None and not isinstance(result.exception, SystemExit):
        raise result.exception
    assert result.exit_code in (0, 1, 2), result.exit_code
    if result.exit_code == 2 and not result.stdout:
        said = [line for line in result.stderr.splitlines() if not line.endswith("from the formula at once")]
        assert len(said) == 1 and said[0].startswith("flashlab: "), result.stderr
    return str(result.exit_code)


# Files

Parser = tuple[str, Callable[[], bytes], Callable[[Path], object]]


def _npz() -> bytes:
    content = io.BytesIO()
    np.savez(content, **dict(zip("qkv", fl.random_inputs(fl.Problem(**BASE)), strict=True)))
    return content.getvalue()


def _safetensors() -> bytes:
    parts = [x.tobytes() for x in fl.random_inputs(fl.Problem(**BASE))]
    at, header = 0, dict[str, Any]({"__metadata__": {"causal": "true", "model": "m"}})
    for name, part in zip("qkv", parts, strict=True):
        header[name] = {"dtype": "F16", "shape": [1, 2, 9, 16], "data_offsets": [at, at + len(part)]}
        at += len(part)
    text = json.dumps(header).encode()
    return len(text).to_bytes(8, "little") + text + b"".join(parts)


def _progress() -> bytes:
    return json.dumps(
        {"schema": 1, "predictions": {"01.1": {"right": True}}, "exercises": {"00.1": {"tries": 1}}}
    ).encode()


def _result() -> bytes:
    return next(Path(__file__).parents[2].glob("docs/results/verify/*.jsonl")).read_bytes()[:20_000]


def _whole_result() -> bytes:
    files = Path(__file__).parents[2].glob("docs/results/*/*.jsonl")
    return min(files, key=lambda path: path.stat().st_size).read_bytes()


def _read_progress(path: Path) -> object:
    from flashlab.lessons import record

    os.environ["FLASHLAB_HOME"] = str(path.parent)
    return record.read(), fl.progress()


def _read_results(path: Path) -> object:
    from flashlab.measure import results

    return results.find(path.parents[1])


def _scan(path: Path) -> object:
    from flashlab.emulator import scan, source
    from flashlab.emulator.files import parameters_of
    from flashlab.player import sources

    text = path.read_text(encoding="utf-8", errors="replace")
    return (
        source.kernels_of(text),
        scan.pieces_of(scan.Tokens.of(text)),
        parameters_of(text, "flash2"),
        sources.marks(text),
    )


def _strings(path: Path) -> object:
    from flashlab.emulator import strings

    return strings.embedded(path), [each.source for each in strings.embedded(path)], strings.names_a_kernel(path, "k")


def _python() -> bytes:
    return b"""import cupy as cp
N = 4
CODE = f"__global__ void k(float* x) {{ x[{N}] = %d; }}" % N + "// {}".format(N)
k = cp.RawKernel(CODE.replace("x", "y"), "k", options=("-DA=1",))
m = cp.RawModule(code="\n".join([CODE, CODE[1:3]]), name_expressions=[f"k<{t}>" for t in (1, 2)])
"""


def _argument(path: Path) -> object:
    from flashlab.cli import emulate

    return emulate.values("--arg", [f"x={path}:q"])


def _document() -> bytes:
    return json.dumps({"schema": 1, **fl.count("flash2", fl.Problem(**BASE)).to_dict()}).encode()


def _diff(path: Path) -> object:
    from flashlab.views import differences

    return differences.compare(differences.read("a", path), json.loads(_document()))


def _mooncake() -> bytes:
    line = {"timestamp": 1, "input_length": 700, "output_length": 2, "hash_ids": [1, 2]}
    return b"\n".join(json.dumps({**line, "timestamp": n}).encode() for n in range(3))


def _azure() -> bytes:
    return b"TIMESTAMP,ContextTokens,GeneratedTokens\n2023-11-16 18:17:03.9799600,4808,10\n2023-11-16 18:17:04.03,3,8\n"


def _trace(path: Path) -> object:
    from flashlab.serve import traces

    return traces.read(str(path))


PARSERS: Mapping[str, Parser] = {
    "traces, Mooncake's": ("day.jsonl", _mooncake, _trace),
    "traces, Azure's": ("day.csv", _azure, _trace),
    "documents of diff": ("x.json", _document, _diff),
    "load_inputs, .npz": ("x.npz", _npz, lambda path: fl.load_inputs(path)),
    "load_inputs, .safetensors": ("x.safetensors", _safetensors, lambda path: fl.load_inputs(path)),
    "--arg, .npz": ("x.npz", _npz, _argument),
    "results, cut": ("kind/x.jsonl", _result, _read_results),
    "results": ("kind/x.jsonl", _whole_result, _read_results),
    "progress": ("progress.json", _progress, _read_progress),
    "scanning of .cu": (
        "k.cu",
        lambda: (Path(fl.__file__).parents[1] / "kernels_cu" / "flash1.cu").read_bytes(),
        _scan,
    ),
    "strings of .py": ("k.py", _python, _strings),
}


def damaged(random: Random, content: bytes) -> bytes:
    """The content with a few bytes changed, cut out, doubled or put in, or with something else in its place."""
    if random.random() < 0.05:
        return random.randbytes(random.randrange(200))
    for _ in range(random.randrange(1, 5)):
        at, n = random.randrange(len(content) + 1), random.randrange(1, 40)
        content = random.choice(
            [
                content[:at] + random.randbytes(min(n, len(content) - at)) + content[at + n :],
                content[:at] + content[at + n :],
                content[:at] + content[at : at + n] + content[at:],
                content[:at]
                + random.choice([b"[" * 3000, b"{}", b"null", b"\0", b'"', b"-1", b"1e999", b"NaN", b"*/"])
                + content[at:],
                content[:at],
            ]
        )
    return content


def parsed(name: str, content: bytes) -> str:
    """What became of a file: "read" or "refused". Anything else is raised."""
    file, _, read = PARSERS[name]
    with tempfile.TemporaryDirectory() as folder, warnings.catch_warnings():
        warnings.simplefilter("ignore")
        path = Path(folder) / file
        path.parent.mkdir(exist_ok=True)
        path.write_bytes(content)
        try:
            read(path)
        except fl.UsageError as error:
            assert "\n" not in str(error), str(error)
            return "refused"
        return "read"


# All together


@contextlib.contextmanager
def apart() -> Generator[None]:
    """A folder of its own, nothing is compiled, nothing is verified, and no child is started."""
    building, verifying = importlib.import_module("flashlab.emulator.build"), importlib.import_module("flashlab.verify")
    there = {
        "cli": importlib.import_module("flashlab.verify.apart"),
        "emulate": importlib.import_module("flashlab.emulator.apart"),
        "run": importlib.import_module("flashlab.emulator.programs"),
    }

    def none(*_: Any, **__: Any) -> Any:
        raise fl.Unavailable("nothing is run here")

    kept = [
        (building, "compiler"),
        (verifying, "verified"),
        (there["cli"], "Session"),
        (there["emulate"], "call_apart"),
        (there["run"], "call_apart"),
    ]
    before = [(module, name, getattr(module, name)) for module, name in kept]
    home, here = {name: os.environ.get(name) for name in ("FLASHLAB_CACHE", "FLASHLAB_HOME", "COLUMNS")}, Path.cwd()
    with tempfile.TemporaryDirectory() as folder:
        for module, name in kept:
            if name != "verified":
                setattr(module, name, none)
        os.environ |= {"FLASHLAB_CACHE": folder, "FLASHLAB_HOME": folder, "COLUMNS": "100"}
        os.chdir(folder)
        try:
            yield
        finally:
            os.chdir(here)
            for module, name, value in before:
                setattr(module, name, value)
            for name, value in home.items():
                os.environ.pop(name) if value is None else os.environ.update({name: value})


class Kind(NamedTuple):
    """Of a kind of calls: how often it is drawn, how one is drawn, and what runs it. `said` is how a failure is printed."""

    weight: float
    draw: Callable[[Random], Any]
    run: Callable[[Any], str]
    said: Callable[[Any], str] = repr


def _command(random: Random) -> Typed:
    typed = a_command(random)
    return (
        Typed((*typed.words, "--check", "nosuch")) if typed.words[0] == "verify" else typed
    )  # it would run for seconds


def _file(random: Random) -> tuple[str, bytes]:
    name = random.choice(list(PARSERS))
    return name, damaged(random, PARSERS[name][1]())


def _beside_loops(random: Random) -> Posed:
    return problem_of(random.choice(OPERATIONS), random)


KINDS: Mapping[str, Kind] = {
    "call": Kind(5, a_call, outcome),
    "plan": Kind(1, a_plan, planned),
    "command": Kind(3, _command, ended, lambda typed: f"flashlab {' '.join(map(repr, typed.words))}"),
    "file": Kind(2, _file, lambda file: parsed(*file), lambda file: f"{file[0]}: {file[1][:3000]!r}"),
    "numbers": Kind(0.3, _beside_loops, lambda posed: "returned" if held(posed) else "beyond float32"),
    "day": Kind(0.5, fuzz_serve.a_day, fuzz_serve.served),
    "pages": Kind(0.5, fuzz_serve.a_manager, fuzz_serve.managed),
}
"""What needs nothing but the base install."""


@functools.cache
def kinds() -> Mapping[str, Kind]:
    """All kinds: with torch also the calls of its doors."""
    if importlib.util.find_spec("torch") is None:
        return KINDS
    from tests.properties import test_fuzz_operators, test_fuzz_torch

    def said(call: tuple[str, tuple[Any, ...], dict[str, Any]]) -> str:
        name, given, options = call
        return f"{name}({[str(x)[:80] for x in given]}, { {key: str(x)[:80] for key, x in options.items()} })"

    doors = {"torch": test_fuzz_torch, "operator": test_fuzz_operators}
    return {
        **KINDS,
        **{
            name: Kind(1, door.a_call, lambda call, door=door: door.outcome(*call), said)
            for name, door in doors.items()
        },
    }


def one(random: Random, among: Mapping[str, Kind] = KINDS) -> tuple[str, str]:
    """A call of any kind: the kind, and what became of it. Raises what it may not raise, with the call as a note."""
    name = random.choices(list(among), [kind.weight for kind in among.values()])[0]
    kind = among[name]
    drawn = kind.draw(random)
    try:
        return name, kind.run(drawn)
    except BaseException as error:
        error.add_note(kind.said(drawn))
        raise


class TooLong(Exception):
    """A call takes more processor time than any may."""


@contextlib.contextmanager
def limited(seconds: float) -> Generator[None]:
    """No more processor time than so much. Raises `TooLong`. Only where there are such timers, so not on Windows."""

    def stop(*_: Any) -> None:
        raise TooLong(f"more than {seconds:g} s of processor time")

    before = signal.signal(signal.SIGVTALRM, stop)
    signal.setitimer(signal.ITIMER_VIRTUAL, seconds)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_VIRTUAL, 0)
        signal.signal(signal.SIGVTALRM, before)


class Became(NamedTuple):
    """What became of a call: its number, its kind, "returned" or the like, and the seconds that it took. Of what may not be raised
    it is the error's kind, its words and the call."""

    number: int
    kind: str
    what: str
    seconds: float
    said: str = ""


def made(seed: str, number: int) -> Became:
    """Make a call of a run. It follows from the seed and its number."""
    begun = time.perf_counter()
    try:
        with limited(60):
            kind, what = one(Random(f"{seed} {number}"), kinds())
    except Exception as error:
        said = (getattr(error, "__notes__", None) or [""])[-1][:1500]
        what = f"{type(error).__name__}: {str(error).splitlines()[0] if str(error) else ''}"[:150]
        return Became(number, FAILED, what, time.perf_counter() - begun, said)
    return Became(number, kind, what, time.perf_counter() - begun)


FAILED = "FAILED"
MEMORY = 8 << 30
"""Bytes that a process of a run may hold: a call that wants more fails."""


def part(seed: str, numbers: range, to: Connection) -> None:
    """Make some calls of a run, and tell what became of each."""
    import resource

    resource.setrlimit(resource.RLIMIT_DATA, (MEMORY, MEMORY))
    with apart():
        for n in numbers:
            to.send(made(seed, n))
    to.close()


def run(seed: str, numbers: range, processes: int) -> Generator[Became]:
    """Make the calls of a run in processes. One that ends before its last call has failed at a call, and another takes the rest."""
    context = multiprocessing.get_context("spawn")
    left = dict[Any, tuple[range, Any]]()  # by connection: the calls that nothing is known of, and their process

    def begin(numbers: range) -> None:
        ours, theirs = context.Pipe(duplex=False)
        process = context.Process(target=part, args=(seed, numbers, theirs))
        process.start()
        theirs.close()
        left[ours] = numbers, process

    for i in range(processes):
        begin(numbers[i::processes])
    while left:
        for ours in wait(left):
            rest, process = left[ours]
            try:
                found: Became = ours.recv()  # pyright: ignore[reportAttributeAccessIssue]
            except EOFError:
                process.join()
                del left[ours]
                if rest:
                    yield Became(rest[0], FAILED, f"the process ended with {process.exitcode}", 0.0)
                    begin(rest[1:])
                continue
            left[ours] = rest[1:], process
            yield found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--calls", type=int, default=1000)
    parser.add_argument("--seed", default="0")
    parser.add_argument("--first", type=int, default=0, help="the number of the first call")
    parser.add_argument("--processes", type=int, default=1)
    given = parser.parse_args()
    begun, numbers = time.perf_counter(), range(given.first, given.first + given.calls)
    became, failures, slowest = Counter[tuple[str, str]](), Counter[str](), Became(0, "", "", 0.0)
    for each in run(given.seed, numbers, given.processes):
        slowest = max(slowest, each, key=lambda each: each.seconds)
        if each.kind != FAILED:
            became[each.kind, each.what] += 1
            continue
        failures[each.what] += 1
        if failures[each.what] <= 2:
            print(f"{FAILED} {each.number}: {each.what}\n    {each.said}", flush=True)
    for (kind, what), n in sorted(became.items()):
        print(f"{kind:<8} {what:<14} {n:>8,}")
    for what, n in failures.most_common():
        print(f"{FAILED:<23} {n:>8,}  {what}")
    print(f"the slowest was call {slowest.number}: {slowest.seconds:.1f} s")
    with_torch = f"torch {importlib.metadata.version('torch')}" if len(kinds()) > len(KINDS) else "without torch"
    print(
        f"{sum(became.values()) + sum(failures.values()):,} calls, {sum(failures.values()):,} findings of {len(failures)} kinds,"
        f" seed {given.seed}, numbers {numbers.start:,} to {numbers.stop - 1:,}, flashlab {fl.__version__}, Python"
        f" {platform.python_version()}, NumPy {np.__version__}, {with_torch}, {given.processes} processes,"
        f" {time.perf_counter() - begun:.0f} s"
    )
    sys.exit(1 if failures else 0)


if __name__ == "__main__":
    main()
