"""Figures as SVG that stands alone, and as PNG, which an installed browser makes of it."""

import os
import re
import shutil
import subprocess
import tempfile
from collections.abc import Mapping
from pathlib import Path

from matsmerge.errors import OutputError
from matsmerge.lab.reports.chart_drawing import draw_chart, svg, text
from matsmerge.lab.reports.document import Block, Figure, Table
from matsmerge.lab.reports.palette import COLOURS, FONT
from matsmerge.lab.reports.table_drawing import draw_table

PICTURE_SUFFIXES = (".png", ".svg")
_BROWSERS = ("chromium", "chromium-browser", "google-chrome", "google-chrome-stable", "chrome")
_FLAGS = ("--headless", "--no-sandbox", "--disable-gpu", "--no-first-run", "--hide-scrollbars")
_SMALL = ("--disable-dev-shm-usage",)  # of a container the shared memory may be small, or full
_QUIET = ("--disable-background-networking", "--disable-component-update", "--disable-sync")
_WIDTH, _PANEL = 700, 440  # pixels, of which a PNG has two by two: alone, and side by side
_TITLE, _EDGE = 34, 16  # pixels of a panel's title, and around all
_SECONDS = 120  # in which a browser has drawn anything


def find_browser() -> str | None:
    """Chrome or Chromium, or what the environment names as BROWSER_PATH."""
    named = os.environ.get("BROWSER_PATH")
    return next(
        (found for name in (named, *_BROWSERS) if name and (found := shutil.which(name))), None
    )


def check_picture(suffix: str) -> None:
    """Refuse to begin without a browser, if one is needed."""
    if suffix == ".png" and find_browser() is None:
        raise OutputError(
            "a .png file is drawn by Chrome or Chromium, and none was found; install one (Debian: "
            "chromium), name one in the environment as BROWSER_PATH, or write a .svg file"
        )


def draw_panels(panels: Mapping[str, Block], suffix: str, *, side_by_side: bool = False) -> bytes:
    """Figures and tables with their titles, as the bytes of a .png or .svg file."""
    width = _PANEL if side_by_side else _WIDTH
    parts, x, y, height = [], float(_EDGE), float(_EDGE), 0.0
    for title, block in panels.items():
        above = _TITLE if len(panels) > 1 else 0
        if above:
            parts.append(text(x, y + 10, title, bold=True))
        drawn = _drawn(block, width)
        parts.append(drawn.replace("<svg", f'<svg x="{x:g}" y="{y + above:g}"', 1))
        tall = above + float(re.findall(r'height="([\d.]+)"', drawn)[0])
        height = max(height, y + tall)
        x, y = (x + width + 2 * _EDGE, y) if side_by_side else (x, y + tall + _EDGE)
    whole = width + 2 * _EDGE if not side_by_side else x - _EDGE
    content = _alone(svg(parts, whole, height + _EDGE))
    return content.encode() if suffix == ".svg" else _rasterised(content, whole, height + _EDGE)


def _drawn(block: Block, width: float) -> str:
    if isinstance(block, Figure):
        return draw_chart(block.chart, width)
    assert isinstance(block, Table)
    return draw_table(block, width)


def _alone(drawn: str) -> str:
    """With light colours in place of the page's variables, on a ground."""
    filled = re.sub(r"var\(--([\w-]+)\)", lambda found: COLOURS[found[1]][0], drawn)
    head, rest = filled.split(">", 1)
    ground = f'<rect width="100%" height="100%" fill="{COLOURS["surface"][0]}"/>'
    return f'{head} font-family="{FONT}">{ground}{rest}\n'


def _rasterised(content: str, width: float, height: float) -> bytes:
    browser = find_browser()
    assert browser is not None  # `check_picture` has looked
    with tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as folder:
        source, target = Path(folder) / "figure.html", Path(folder) / "figure.png"
        source.write_text(f'<meta charset="utf-8"><body style="margin:0">{content}', "utf-8")
        size = f"--window-size={round(width)},{round(height)}"
        here = [f"--user-data-dir={folder}/profile", f"--screenshot={target}"]
        command = [browser, *_FLAGS, *_SMALL, *_QUIET, "--force-device-scale-factor=2", size, *here]
        try:
            subprocess.run(
                [*command, source.as_uri()], capture_output=True, timeout=_SECONDS, check=True
            )
            return target.read_bytes()
        except (OSError, subprocess.SubprocessError) as error:
            reason = f"{type(error).__name__}: {error}".partition("\n")[0]
            raise OutputError(
                f"the browser did not draw a picture ({reason}); try again"
            ) from error
