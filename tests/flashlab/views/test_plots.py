"""The pictures: drawn for every kind of problem, nothing written over anything else, all that is counted shown."""

from __future__ import annotations

from itertools import combinations
from pathlib import Path
from typing import Any

import matplotlib.colors
import numpy as np
import pytest

import flashlab as fl
from flashlab.views import plots

P = fl.Problem(batch=1, heads=4, kv_heads=2, len_q=1024, head_dim=64, dtype="float16", causal=True)
CASES: dict[str, Any] = {
    "sample": fl.compare(P),
    "a million tokens": fl.compare(P.replace(len_q=1_000_000, heads=32, kv_heads=8, head_dim=128)),
    "small device": fl.compare(P.replace(dtype="float32", causal=False), device="t4"),
    "one row": fl.compare(P.replace(len_q=1, len_kv=3), algorithms=["flash2"]),
    "nothing": fl.compare(P.replace(len_q=0)),
    "no keys": fl.compare(P.replace(len_kv=0)),
    "window, batch": fl.compare(P.replace(batch=128, window=(128, None), head_dim=256), lse=True),
}


def texts(figure: Any) -> list[Any]:
    import matplotlib.text

    figure.draw_without_rendering()
    return [t for t in figure.findobj(matplotlib.text.Text) if t.get_visible() and t.get_text().strip()]


def boxes(figure: Any) -> list[tuple[str, Any]]:
    """The texts that are drawn, with where: ticks outside their axis are not."""
    whole = figure.bbox
    return [
        (t.get_text(), box)
        for t in texts(figure)
        if (box := t.get_window_extent()).width and box.x0 < whole.x1 and box.x1 > whole.x0
    ]


def ticks_in_view(figure: Any) -> set[int]:
    out: set[int] = set()
    for ax in figure.axes:
        for axis, (low, high) in ((ax.xaxis, sorted(ax.get_xlim())), (ax.yaxis, sorted(ax.get_ylim()))):
            for tick in [*axis.get_major_ticks(), *axis.get_minor_ticks()]:
                if not low <= tick.get_loc() <= high:
                    out |= {id(tick.label1), id(tick.label2)}
    return out


def assert_tidy(figure: Any) -> None:
    """No text on another, none cut off by the edge."""
    figure.draw_without_rendering()
    unseen = ticks_in_view(figure)
    drawn = [(t.get_text(), t.get_window_extent()) for t in texts(figure) if id(t) not in unseen]
    for (one, a), (two, b) in combinations(drawn, 2):
        overlap = min(a.x1, b.x1) - max(a.x0, b.x0) > 1 and min(a.y1, b.y1) - max(a.y0, b.y0) > 1
        assert not overlap, f"{one!r} is on {two!r}"
    for text, box in drawn:
        assert box.x0 >= -1 and box.y0 >= -1, f"{text!r} is cut"
        assert box.x1 <= figure.bbox.x1 + 1 and box.y1 <= figure.bbox.y1 + 1, f"{text!r} is cut"


@pytest.mark.alike(
    "sample",
    "a million tokens-lengths",
    "small device-roofline",
    "one row-bytes",
    "nothing-lengths",
    "no keys-roofline",
    "window, batch-bytes",
)
@pytest.mark.parametrize("name", ["bytes", "lengths", "roofline"])
@pytest.mark.parametrize("case", CASES)
def test_pictures_are_tidy(case: str, name: str) -> None:
    assert_tidy(CASES[case].plot()[name])


SWEEPS: dict[str, Any] = {
    "lengths": (fl.sweep(None, P, len_q=[2**i for i in range(9, 18)]), None, "hbm_read"),
    "sram": (fl.sweep(["flash1", "flash2"], P, sram=[2**i for i in range(12, 18)]), None, "hbm_read"),
    "infeasible": (fl.sweep(["flash1", "flash2"], P, sram=[2048, 65536], len_q=[1024, 4096], tile="64x64"), "len_q", "hbm_peak"),
    "all infeasible": (fl.sweep(["flash1", "flash2"], P, sram=[2048, 4096], tile="64x64"), None, "hbm_peak"),
    "tiles": (fl.sweep("flash2", P, tile=[(32, 32), (64, 64), (128, 64)], device=["h100", "4090"]), "tile", "sram_read"),
    "devices": (fl.sweep(None, P, device=list(fl.DEVICES), dram=True), None, "dram_estimate"),
    "intensity": (fl.sweep("flash2", P, head_dim=[32, 64, 128, 256]), None, "intensity"),
    "algorithms": (fl.sweep(None, P), "algorithm", "exp"),
    "many": (fl.sweep(["standard", "online_softmax", "flash1", "flash2"], P, len_q=[100, 200],
                      dtype=["float32", "float16"], device=["t4", "h100"]), None, "hbm_write"),
    "one cell": (fl.sweep("flash2", P), None, "flops_matmul"),
    "zeros": (fl.sweep("flash2", P, len_q=[0, 100]), None, "hbm_read"),
}  # fmt: skip


@pytest.mark.parametrize("case", SWEEPS)
def test_sweeps_are_tidy(case: str) -> None:
    tab, x, y = SWEEPS[case]
    assert_tidy(tab.plot(x, y))


def test_the_bars_are_the_counts() -> None:
    """The segments of a bar add up to what is requested, to the byte."""
    counts = [row.counts for row in CASES["sample"].rows]
    figure = plots.bytes_by_tensor(counts)
    for ax, level in zip(figure.axes, ("hbm", "sram"), strict=True):
        size = 1024**2
        assert ax.get_xlabel() == "MiB"
        by_row: dict[float, float] = {}
        for bar in ax.patches:
            by_row[bar.get_y()] = by_row.get(bar.get_y(), 0) + bar.get_width() * size
        expected = [getattr(getattr(c, level), way) for c in counts for way in ("read", "write")]
        np.testing.assert_allclose([by_row[y] for y in sorted(by_row)], expected)


def test_the_memory_of_the_device_is_marked_and_exceeded() -> None:
    figure = CASES["sample"].plot()["lengths"]
    said = [text for text, _ in boxes(figure)]
    assert any("memory of H100 SXM: 74.5 GiB" in text for text in said)
    assert "24.0 TiB" in said and {"4k tokens", "128k tokens", "1M tokens"} <= set(said)


def test_colours_differ_for_everyone() -> None:
    """Lightness alone, or the colours as the colour-blind see them, tell the algorithms apart."""
    rungs = {
        "flash3_1",
        "flash3_2",
        "flash3_3",
        "flash_decoding_1",
        "flash_decoding_2",
    }  # shades of the colour at the top
    names = [name for name in fl.catalogue.of() if name not in rungs]
    rgb = {name: np.array(matplotlib.colors.to_rgb(plots._colour(name))) for name in names}  # pyright: ignore[reportPrivateUsage]
    deutan = np.array([[0.367, 0.861, -0.228], [0.280, 0.673, 0.047], [-0.012, 0.043, 0.969]])
    protan = np.array([[0.152, 1.053, -0.205], [0.115, 0.786, 0.099], [-0.004, -0.048, 1.052]])
    for matrix in (np.eye(3), deutan, protan):
        for a, b in combinations(rgb.values(), 2):
            assert np.linalg.norm(matrix @ (a - b)) > 0.12


def test_a_notebook_shows_it_without_pyplot() -> None:
    figure: Any = CASES["one row"].plot()["bytes"]
    assert figure._repr_png_().startswith(b"\x89PNG")


@pytest.mark.parametrize("ending", ["png", "svg", "pdf"])
def test_save_by_the_ending(tmp_path: Path, ending: str) -> None:
    figure = CASES["one row"].plot()["bytes"]
    path = plots.save(figure, tmp_path / f"picture.{ending}")
    start = {"png": b"\x89PNG", "svg": b"<?xml", "pdf": b"%PDF"}[ending]
    assert path.read_bytes().startswith(start)


def test_drawing_leaves_the_users_settings_alone() -> None:
    before = dict(matplotlib.rcParams)
    CASES["one row"].plot()
    assert dict(matplotlib.rcParams) == before
