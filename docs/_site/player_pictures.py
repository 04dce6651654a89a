"""Draws pictures of the player in docs/pictures, for pages that cannot run it: `python -m docs._site.player_pictures`.

It needs Chromium and Playwright (requirements/test.txt). The code alone decides what is drawn. The browser's version
and fonts decide how, so that two machines' pictures differ in some pixels.
"""

from __future__ import annotations

import shutil
import tempfile
from pathlib import Path

import flashlab as fl

PICTURES = Path(__file__).resolve().parents[2] / "docs" / "pictures"
BROWSERS = ("chromium", "chromium-browser", "google-chrome", "google-chrome-stable", "chrome")


def draw(player: fl.Player, path: Path, *, width: int = 1280, height: int = 900, position: str = "") -> None:
    """Draw the player as it opens, or at a position as its links write it (`"step=40&clock=steps"`)."""
    from PIL import Image
    from playwright.sync_api import sync_playwright

    browser = next(filter(None, map(shutil.which, BROWSERS)), None)
    if browser is None:
        raise SystemExit("no Chromium: on Debian, apt-get install chromium")
    with tempfile.TemporaryDirectory() as folder, sync_playwright() as playwright:
        page_file = player.save(Path(folder) / "player.html")
        running = playwright.chromium.launch(executable_path=browser)
        page = running.new_page(
            viewport={"width": width, "height": height}, color_scheme="light", reduced_motion="reduce"
        )
        page.goto(f"{page_file.as_uri()}#{position}")
        page.wait_for_selector("main[data-ready]")
        page.screenshot(path=path)
        Image.open(path).convert("RGB").quantize(192, dither=Image.Dither.NONE).save(
            path, optimize=True
        )  # a third of the bytes
        running.close()


def main() -> None:
    problem = fl.Problem(batch=1, heads=1, len_q=128, head_dim=64, dtype="float16", causal=True)
    q, k, v = fl.random_inputs(problem)
    standard, flash2 = (
        fl.simulate(name, q, k, v, causal=True, tile=(32, 32), device="a100", trace=(0, 0)).trace
        for name in ("standard", "flash2")
    )
    assert standard is not None and flash2 is not None
    draw(fl.player(flash2), PICTURES / "player.png", position="step=69")
    draw(fl.player(standard, flash2), PICTURES / "player_two.png", position="step=160", height=780)


if __name__ == "__main__":
    main()
