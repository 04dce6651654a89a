"""Draws everything anew that comes from data: README, pages, tables, pictures, and the lessons' extract of the results.

    python -m docs._site            # or: make figures

Each part is also a command of its own (`python -m docs._site.flash3`). None of them measures anything.
"""

import contextlib
import runpy
import shutil
import sys
import tempfile
from pathlib import Path

from flashlab.cli import main
from flashlab.views.progress import track

ROOT = Path(__file__).resolve().parents[2]
PARTS = (
    "readme", "headlines", "audit", "flash3", "time_model", "emulator", "triton", "decoding", "mla", "serve", "parallel",
    "backward", "found", "clients", "kinds", "drawings", "race_picture", "player_pictures",
)  # fmt: skip


def draw(part: str) -> None:
    runpy.run_module(f"docs._site.{part}", run_name="__main__")


if __name__ == "__main__":
    sys.argv = sys.argv[:1]
    for part in track("parts")(PARTS):
        draw(part)
    runpy.run_path(str(ROOT / "notebooks" / "source" / "measured.py"), run_name="__main__")
    with tempfile.TemporaryDirectory() as folder:
        sys.argv = ["flashlab", "compare", "--sample", "--out", folder]
        with contextlib.suppress(SystemExit):
            main()
        for name in ("bytes.png", "lengths.png"):  # those that pages show
            shutil.copy(Path(folder) / name, ROOT / "docs" / "pictures" / name)
