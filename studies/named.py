"""Which mistakes a failing report names: `python -m studies named` verifies the faulty functions of `faults`.

The functions were written from the definitions of the operations, before the lists of mistakes were looked at (`git log` says so).
`MEANT` was written afterwards: the words of a report that are the fault's. A fault that a report calls something else is named
wrongly.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np

from flashlab.measure import results
from flashlab.measure.results import Kind
from studies.faults import FAULTS, Fault
from studies.rows import data, row, shown

PAIRS = 12_000
"""The most (query, key) pairs of a problem, but for ragged batches and pages."""
EXAMPLES = 20
"""Random problems per fault."""
CHECKS = ("rule", "masks", "ragged", "dropout", "search")
"""Of attention: those that hold results to the rule, from which mistakes are named."""

MEANT: Mapping[str, Mapping[str, str]] = {
    "dense": {
        "no scale": "the scale is 1: it is missing",
        "scaled by the head dim": "the scale is 1/head_dim",
        "its own scale whatever is asked": "the scale is 1/sqrt(head_dim)",
        "the scale twice": "the scale is applied twice",
        "soft cap multiplied outside only": "tanh is of scores that aren't divided by the cap",
        "soft cap not multiplied back": "tanh isn't multiplied with the cap",
        "soft cap before the scale": "products that aren't scaled yet",
        "soft cap cuts instead of bending": "cuts scores off",
        "soft cap ignored": "the soft cap is ignored",
        "alibi with the wrong sign": "added, not subtracted",
        "alibi ignored": "ALiBi is ignored",
        "alibi signed": "distances to later keys are negative",
        "alibi from the top left": "ALiBi's distances are aligned top-left",
        "alibi scaled like the scores": "ALiBi's bias is scaled like scores",
        "alibi slopes of the first head": "all heads have the slope of head 0",
        "causal ignored": "the causal mask is ignored",
        "causal hides the diagonal": "misses its last key",
        "causal shows one more": "one key too many",
        "causal from the top left": "the causal mask is aligned top-left",
        "causal the other way round": "the causal mask is the other way round",
        "window ignored": "the window is ignored",
        "window one short on the left": "the window's left side is one key too narrow",
        "window one long on the right": "the window's right side is one key too wide",
        "window's sides swapped": "the window's sides are swapped",
        "window from the top left": "the window is aligned top-left",
        "mask ignored": "the mask is ignored",
        "mask inverted": "the mask is inverted",
        "mask instead of causal": "the causal mask is ignored beside a mask",
        "mask shows what either shows": "not what both do",
        "sinks ignored": "the sinks are ignored",
        "sinks counted twice": "the sinks are added twice",
        "sink without the maximum": "exponentials aren't relative to the maximum",
        "sink added without exp": "without an exponential",
        "sink of the first head": "the sink of head 0",
        "sink left out of the LSE": "the LSE lacks the sinks",
        "sink left out of the output": "the LSE has the sinks",
        "no division": "not divided by the sum",
        "no maximum": "the maximum is not subtracted",
        "LSE without the maximum": "the LSE lacks the maximum",
        "LSE to base 2": "the LSE is to base 2",
        "LSE is the maximum": "the LSE is the maximum alone",
        "LSE negative": "the LSE is negated",
        "LSE rounded to half": "the LSE is rounded to float16",
        "heads interleaved": "KV heads are interleaved",
        "keys of the first head": "all heads read KV head 0 (its keys alone)",
        "sequence 0 for all": "K is that of sequence 0",
        "values in place of keys": "the scores are made of V",
        "empty rows are the mean of v": "hidden scores are finite",
    },
    "tiled": {
        "output not rescaled": "the accumulator is not rescaled",
        "sum not rescaled": "the sum is not rescaled",
        "rescaled the other way round": "rescaled upside-down",
        "last ragged tile dropped": "the keys of the last tile are dropped",
        "first tile dropped": "the keys of the first tile are dropped",
        "last key of each tile dropped": "the last key of each tile is dropped",
        "last key counted twice": "the last key counts twice in the sum",
        "only the last tile's output is divided": "the sum of the last tile alone",
        "padding counted as scores of 0": "padded keys count",
        "values of the tile before": "the values of a tile are those of the tile before",
        "accumulator in half": "rounded",
        "causal per tile": "the causal mask hides whole tiles alone",
    },
    "ragged": {
        "lengths ignored": "the keys of all sequences",
        "one key of the neighbour": "one key of the next one",
        "the last key of each sequence is lost": "the last key",
        "keys begin where queries do": "keys begin where its queries do",
        "last sequence not done": "the last sequence is left out",
        "causal by place in the batch": "aligned",
        "keys of the sequence before": "the keys of the one before",
    },
    "merged": {
        "parts averaged": "the parts are averaged",
        "parts added": "aren't divided by the sum of their weights",
        "weights by the maximum": "a part's weight follows from its maximum alone",
        "second part lost": "the last part is left out",
        "LSE of the larger part": "the LSE of merged parts is the largest",
        "LSEs added": "the LSEs of parts are added",
        "weights to base 2": "the weights of parts are powers to base 2",
        "parts not divided before they are weighed": "parts aren't divided by their own sums",
    },
    "backward": {
        "no delta": "D is missing",
        "delta from dout alone": "D is the sum of dO alone",
        "delta added": "D is added to dP",
        "dq without the scale": "dq lacks the scale",
        "dk with the scale twice": "dk has the scale twice",
        "first head of a group alone": "not summed over the group",
        "mean over the group": "averaged over the group",
        "dk and dv swapped": "dk and dv are swapped",
        "soft cap's slope forgotten": "the soft cap's derivative is missing",
        "causal ignored": "the causal mask is ignored",
        "dv from ds": "dv is made of dS",
        "window's left side ignored": "the window's left side is ignored",
    },
    "paged": {
        "page off by one at an edge": "the last key of a page is read from the next one",
        "first key of each page dropped": "the first key of each page is dropped",
        "table of the first request": "the block table of request 0",
        "pages in the pool's order": "in their order in the pool",
        "last page whole": "the whole last page is read",
        "values of the next slot": "a key's row within its page is one too far",
        "last page left out": "the last page is dropped",
        "length of the longest request": "the length of the longest",
        "newest token left out": "the newest key is dropped",
        "causal from the top left": "the causal mask is aligned top-left",
    },
    "dropout": {
        "kept weights not divided": "aren't divided by the share that is kept",
        "the LSE of the kept weights": "dropped before the sum",
        "the share dropped is kept": "dropout is taken for the share that is kept",
        "dropout ignored": "dropout is ignored",
        "every head drops the same": "all heads drop the same weights",
    },
}  # fmt: skip
"""Words of the report that name each fault."""

NAMED = row(
    "Named",
    'A faulty function: what the report says of it, and whether that is the fault. `named` is "right", "wrong" or "no". '
    "Where the report has two guesses, one of them is to be the fault.",
    family=str, fault=str, verdict=str, likely=str, named=str, smallest=str,
)  # fmt: skip
DATA = data("Faults", "Faulty functions, and what reports call them.", NAMED)


def verified(fault: Fault) -> dict[str, Any]:
    """The row of one fault."""
    import flashlab as fl

    conventions: dict[str, Any] = {"lse": "e"}
    if fault.family == "backward":
        conventions = {"operation": "backward"}
    if fault.family == "paged":
        conventions["operation"] = "paged"
    domain = fl.Domain() if fault.family in ("ragged", "paged") else fl.Domain(pairs=PAIRS)
    random: dict[str, Any] = {} if "operation" in conventions else {"examples": EXAMPLES, "checks": CHECKS}
    with np.errstate(all="ignore"):
        report = fl.verify(fl.Adapter(fault.fn, domain=domain, **conventions), dtypes=["float32"], **random)
    likely = report.failing.likely if report.failing else ""
    meant = MEANT[fault.family][fault.name]
    named = "no" if not likely else "right" if meant in likely else "wrong"
    smallest = report.failing.message if report.failing else ""
    return {
        "family": fault.family, "fault": fault.name, "verdict": report.verdict, "likely": likely, "named": named,
        "smallest": smallest,
    }  # fmt: skip


def headline(of: Any) -> str:
    """How many were killed, and how many of these were named."""
    count = {word: sum(each.named == word for each in of.rows) for word in ("right", "wrong")}
    failed = sum(each.verdict == "failed" for each in of.rows)
    return (
        f"faults: {failed} of {len(of.rows)} faulty functions are found; the mistake is named in {count['right']}, and named "
        f"wrongly in {count['wrong']}"
    )


KIND = Kind(
    "faults", "Numbers: what the report calls a mistake",
    "faulty functions of every operation, written before the lists of mistakes were looked at: found or not, named or not",
    "python -m studies named", DATA, headline, shown("operation=family | fault | named | the report says=likely"),
)  # fmt: skip


def main(words: Sequence[str]) -> None:
    """Verify all, or those of some families, and save what was found."""
    parser = argparse.ArgumentParser("python -m studies named", description=KIND.holds)
    parser.add_argument("--family", action="append", choices=sorted(MEANT), help="only these; saves nothing")
    parser.add_argument("--jobs", type=int, default=1, help="processes")
    parser.add_argument(
        "--rows", type=Path, help="a file of rows, a line each: what it has isn't done again, the rest is added"
    )
    parser.add_argument("--out", default=results.FOLDER, help="folder of the file")
    parser.add_argument("--force", action="store_true", help="replace the file of that name")
    given = parser.parse_args(words)
    chosen = [fault for fault in FAULTS if not given.family or fault.family in given.family]
    kept: Path | None = given.rows
    known = kept.read_text(encoding="utf-8").splitlines() if kept and kept.exists() else list[str]()
    rows: list[dict[str, Any]] = [json.loads(line) for line in known]
    done = {(each["family"], each["fault"]) for each in rows}
    with ProcessPoolExecutor(given.jobs) as pool:
        for each in pool.map(verified, [fault for fault in chosen if (fault.family, fault.name) not in done]):
            rows.append(each)
            if kept:
                with kept.open("a", encoding="utf-8") as file:
                    file.write(json.dumps(each) + "\n")
            print(f"{each['family']:9} {each['named']:6} {each['fault']}: {each['likely']}", flush=True)
    found = {"rows": rows}
    print(headline(DATA.model_validate(found)))
    if not given.family:
        print(results.save(KIND, [], found, subject="functions", folder=given.out, replace=given.force))
