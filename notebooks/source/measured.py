"""What lessons 03, 04, 06 to 09, 11 to 15 and `flashlab serve` show of docs/results, in one small file that is installed with the
library.

    python notebooks/source/measured.py     docs/results to flashlab/data/measured.json

A test holds the file to what this makes today.
"""

from __future__ import annotations

import json
from datetime import datetime
from pathlib import Path
from typing import Any

from flashlab.base.files import replace_file
from flashlab.measure import results
from flashlab.measure.results import Result

ROOT = Path(__file__).resolve().parents[2]
TO = ROOT / "flashlab" / "data" / "measured.json"


def measured() -> dict[str, Any]:
    """Launches as ncu counted them, times of flash2 beside its peers and beside what came before it, the rungs of flash3, what
    binds them, the rates of an SM, FP8, the backward pass in any order of its blocks and in one."""
    counters, bench = of("counters", "standard"), of("bench", "flash2")  # of standard to flash2 in one run
    ladder, fp8, waits = of("ladder", "flash3"), of("fp8", "flash3_fp8"), of("waits", "flash1")
    launches = [
        {
            "case": row["case"],
            "algorithm": row["algorithm"],
            "launch": row["launch"],
            "problem": row["problem"],
            "requested": {x["what"]: x["measured"] for x in row["rows"]},
            "blocks": row["blocks"],
            "occupancy": row["occupancy"] / 100,
            "l2_hit_rate": row["l2_hit_rate"] / 100,
            "compulsory_read": row["dram"]["low"],
            "dram_read": row["dram"]["measured"],
            "dram_estimate": row["dram"]["estimate"],
            "dram_written": row["dram"]["written"],
        }
        for row in counters.data["launches"]
        if "L2" in row["case"]
    ]
    rates, profile = (results.latest(kind, ROOT / results.FOLDER) for kind in ("rates", "profile"))
    assert rates is not None and profile is not None
    cell = ("dtype", "head_dim", "causal", "length", "milliseconds")
    blind = [of("blind", "flash1", condition) for condition in ("unmeasured", "lengths")]
    before = [
        {"algorithm": row["algorithm"], **{key: row[key] for key in (*cell, "predicted")}}
        for result in blind
        for row in result.data["rows"]
        if row["algorithm"] in ("standard", "online_softmax", "flash1")
    ]
    kept = ("dtype", "head_dim", "causal", "length", "peer", "milliseconds", "tflops", "ratio")
    return {
        "device": counters.content["device"],
        "measured": {
            "counters": said(counters),
            "times": said(bench),
            "before_flash2": said(blind[0]),
            "waits": said(waits),
        },
        "summary": counters.data["summary"],
        "launches": launches,
        "before_flash2": before,
        "waits": waits.data["rows"],
        "times": [{key: row[key] for key in kept} for row in bench.data["rows"]],
        "ladder": {
            "measured": said(ladder),
            "rows": [{key: row[key] for key in (*kept, "of_matmul")} for row in ladder.data["rows"]],
        },
        "rates": _rates(rates.data["rows"]) | {"measured": said(rates)},
        "profile": {
            "measured": said(profile),
            "rows": [
                {key: row[key] for key in ("kernel", "head_dim", "causal", "length")}
                | {"busy": row["counters"]["busy"]}
                for row in profile.data["rows"]
                if row["kernel"] in ("flash3", "flash3_fp8")
            ],
        },
        "fp8": {"measured": said(fp8), **{key: fp8.data[key] for key in ("accuracy", "speed")}},
        "triton": _triton(of("bench", "flash2_triton")),
        "way_back": _way_back(of("bench", "flash3_backward"), of("bench", "flash3_backward_deterministic")),
        "decoding": _decoding("flash_decoding", "h200"),
        "rungs_of_decoding": _decoding("flash_decoding_1"),
        "pages": _decoding("paged_1"),
        "cascade": _decoding("cascade"),
        "latent": _latent(),
        "eight_bits_h100": _eight_bits("h100"),
        "eight_bits_h200": _eight_bits("h200"),
        "served": _served(),
        "parallel": _parallel(),
        "reading": {device: reading(device) for device in ("h100", "h200")},
        "computing": {device: computing(device) for device in ("h100", "h200")},
    }


def _triton(bench: Result) -> dict[str, Any]:
    """How many times as fast as a peer flash2 in Triton is, in each problem that was timed."""
    kept = ("dtype", "head_dim", "causal", "length", "peer", "ratio")
    rows = [{key: row[key] for key in kept} for row in bench.data["rows"] if row["peer"] is not None]
    return {"measured": said(bench), "rows": rows}


def _way_back(any_order: Result, one_order: Result) -> dict[str, Any]:
    """Milliseconds of flash3's backward pass where blocks add to dQ as they come, and in one order; and what the GPU gave at best:
    TFLOP/s of a matrix product, GB/s of a copy, whose bytes are read and written."""
    cell = ("dtype", "head_dim", "causal", "length")
    in_order = {
        tuple(row[key] for key in cell): row["milliseconds"] for row in one_order.data["rows"] if row["peer"] is None
    }
    rows = [
        {key: row[key] for key in (*cell, "milliseconds")} | {"in_one_order": in_order[of_cell]}
        for row in any_order.data["rows"]
        if row["peer"] is None and (of_cell := tuple(row[key] for key in cell)) in in_order
    ]
    (yardsticks,) = any_order.data["yardsticks"]
    return {
        "measured": "; ".join(dict.fromkeys((said(any_order), said(one_order)))),
        "yardsticks": yardsticks,
        "rows": rows,
    }


def _decoding(algorithm: str, device: str = "h100") -> dict[str, Any]:
    """Microseconds of problems of decoding, and of a kernel that only reads K and V."""
    found = of("decoding", algorithm, device=device)
    kept = ("batch", "heads", "kv_heads", "len_kv", "len_prefix", "nbytes", "microseconds")
    return {"measured": said(found), "rows": [{key: row[key] for key in kept} for row in found.data["rows"]]}


def _latent() -> dict[str, Any]:
    """Microseconds of latent attention as it decodes, and of a kernel that only reads the rows; bytes of the rows, and FLOPs."""
    found = of("decoding", "mla_hopper")
    kept = ("batch", "heads", "len_kv", "chunk", "nbytes", "flops", "microseconds")
    return {"measured": said(found), "rows": [{key: row.get(key) for key in kept} for row in found.data["rows"]]}


def _eight_bits(device: str) -> dict[str, Any]:
    """Microseconds of decoding over pages in 8 bits, in bfloat16, and of a kernel that only reads K and V of 8 bits."""
    found = of("decoding", "paged", condition="quantized", device=device)
    kept = ("batch", "kv_dtype", "page_size", "nbytes", "microseconds")
    return {"measured": said(found), "rows": [{key: row[key] for key in kept} for row in found.data["rows"]]}


def _served() -> dict[str, Any]:
    """Of servers' days: the used share of what is handed out, what sharing saves, and a day with prefixes and without."""
    found = results.latest("serve", ROOT / results.FOLDER)
    assert found is not None
    kept = ("caching", "requests", "prompt_tokens", "reused", "steps")
    days = [row for row in found.data["days"] if row["trace"] == "conversation_trace.jsonl"]
    return {
        "measured": f"a replay on a CPU, {_day(found)}",
        "shares": found.data["shares"],
        "sharing": found.data["sharing"],
        "found": [{key: row[key] for key in kept} for row in days],
    }


def _parallel() -> dict[str, Any]:
    """Milliseconds of attention on two GPUs and on one, by scheme and length, there and back, beside what the timeline said; and of
    decoding."""
    known = [each for each in results.find(ROOT / results.FOLDER, kind="parallel") if each.data["ranks"] == 2]
    speed, decode = ([each for each in known if each.subject == name][-1] for name in ("speed", "decode"))
    kept, of = ("contender", "length", "backward", "ms", "predicted"), ("contender", "keys", "ms")
    return {
        "measured": "; ".join(dict.fromkeys(f"{each.data['ranks']} GPUs, {said(each)}" for each in (speed, decode))),
        "speed": [{key: row[key] for key in kept} for row in speed.data["speeds"]],
        "decode": [{key: row[key] for key in of} for row in decode.data["decodes"]],
    }


def reading(device: str) -> dict[str, Any]:
    """How fast a GPU reads K and V, in bytes per second, and what a launch that decodes takes beyond that: of the cell with the
    fewest bytes, where it counts most."""
    known = results.find(ROOT / results.FOLDER, kind="decoding", algorithm="flash_decoding", device=device)
    found = [each for each in known if each.data["algorithm"] == "flash_decoding" and each.condition is None][-1]
    rows = found.data["rows"]
    rate = max(row["nbytes"] / row["microseconds"]["read"] for row in rows) * 1e6
    least = min(rows, key=lambda row: row["nbytes"])
    beyond = least["microseconds"]["flash_decoding"] / 1e6 - least["nbytes"] / rate
    source = f"decoding/{found.path.name}: {said(found)}"
    return {"bytes_per_second": rate, "seconds_per_launch": beyond, "source": source}


def computing(device: str) -> dict[str, Any]:
    """FLOPs per second that flash3 and flash3_backward reach: bfloat16, causal, head dim 128, the longest."""
    found: dict[str, Any] = {}
    sources: list[str] = []
    for way, algorithm in (("forward", "flash3"), ("backward", "flash3_backward")):
        known = results.find(ROOT / results.FOLDER, kind="bench", algorithm=algorithm, device=device)
        bench = [each for each in known if each.condition is None and each.data["algorithm"] == algorithm][-1]
        rows = [
            row
            for row in bench.data["rows"]
            if (row["dtype"], row["head_dim"], row["causal"], row["peer"]) == ("bfloat16", 128, True, None)
        ]
        found[way] = 1e12 * max(rows, key=lambda row: row["length"])["tflops"]
        sources.append(f"bench/{bench.path.name}: {said(bench)}")
    return found | {"source": "; ".join(sources)}


def _rates(rows: Any) -> dict[str, Any]:
    """FLOPs per clock of an SM by `mma.sync` and by wgmma, at the best number of warps; and the part of their rate that wgmma's
    products keep beside other instructions, issued without a pause."""

    def best(what: str) -> float:
        return max(row["value"] for row in rows if row["what"] == what)

    beside = {row["what"].removesuffix("_beside_products"): row["tensor_share"]
              for row in rows if row["what"].endswith("_beside_products")}  # fmt: skip
    return {"warp_products": best("warp_products"), "wgmma": best("products_128_sram"), "beside": beside}


def said(result: Result) -> str:
    """Where and when a result was measured, and which kernels have changed since."""
    older = f"; changed since: {', '.join(result.older)}" if result.older else ""
    return f"{result.content['device']['name']}, {_day(result)}{older}"


def _day(result: Result) -> str:
    day = datetime.fromisoformat(result.content["date"])
    return f"{day.day} {day:%B %Y}"


def of(kind: str, algorithm: str, condition: str | None = None, device: str = "h200") -> Result:
    """The newest result of this kind about this algorithm."""
    found = results.latest(kind, ROOT / results.FOLDER, algorithm=algorithm, device=device, condition=condition)
    assert found is not None, f"no {kind} of {algorithm} in {results.FOLDER}"
    return found


def text() -> str:
    return json.dumps(measured(), indent=1) + "\n"


if __name__ == "__main__":
    replace_file(TO, text())
