"""Where results lie in a checkout."""

from pathlib import Path

RESULTS = Path(__file__).resolve().parents[3] / "docs" / "results"
