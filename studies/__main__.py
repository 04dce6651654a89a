"""`python -m studies NAME …` runs a study. `python -m studies` lists them."""

from __future__ import annotations

import sys
from importlib import import_module

from simulator.errors import Unavailable, UsageError, unknown
from studies import division, pools, timed

OTHERS = (
    "audited",
    "blind",
    "clients",
    "corpus",
    "exploits",
    "model",
    "named",
    "overhead",
    "parallel",
    "programs",
    "rates",
    "serve",
    "upstream",
)


def main(name: str = "", *words: str) -> None:
    """Run a study. What its user can mend is told in a line, with status 2."""
    studies = timed.STUDIES | {study.name: study for study in (division.RUNS, pools.POOLS, pools.MIXED)}
    known = sorted((*studies, *OTHERS))
    try:
        if name in studies:
            timed.run(studies[name], words)
        elif name in OTHERS:
            import_module(f"studies.{name}").main(words)
        elif name:
            raise unknown("study", name, known)
        else:
            print(__doc__, *known, sep="\n  ")
    except (UsageError, Unavailable) as error:
        print(f"studies: {error}", file=sys.stderr)
        sys.exit(2)


if __name__ == "__main__":
    main(*sys.argv[1:])
