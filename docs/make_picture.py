"""Draw the pictures of README and docs from a finished run and a record: `python docs/make_picture.py RUN`.

overlay.webp is the worst validation case, as the run drew it. report.webp is the run's report in Chromium, where that
is installed. overview.webp shows both, and seconds per step on the rungs of the spleen ladder; without Chromium the
run's curves stand where the report would.
"""

import argparse
import json
import shutil
import subprocess
import tempfile
from pathlib import Path

from matplotlib.axes import Axes
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure
from PIL import Image

ROOT = Path(__file__).parents[1]
LADDER = ROOT / "benchmarks" / "records" / "2026-11-22_cpu-bf16_ladder-spleen" / "ladder.json"
SHORT = {  # rungs that are shown, by how their names begin
    "baseline": "baseline: plain MONAI script",
    "CacheDataset": "+ CacheDataset",
    "Novograd, MONAI": "guide: + DiceCE, Novograd",
    "channels innermost": "+ store, channels-last",
    "bf16": "+ bf16",
    "fast's": "fast: the default",
}
REPORT = 900, 1360  # px of its upper part that is shown
BLUE, ORANGE, GREY = "#0072B2", "#D55E00", "#8a94a0"


def main() -> None:
    """Write the pictures, and say how large they are."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("run", type=Path, help="folder of a finished run of the spleen app on phantoms")
    parser.add_argument("--to", type=Path, default=ROOT / "docs" / "images", help="folder for the pictures")
    given = parser.parse_args()
    given.to.mkdir(parents=True, exist_ok=True)
    overlay, report = Image.open(worst_case(given.run)).convert("RGB"), photograph(given.run / "report.html")
    images = {"overlay": overlay, "report": report, "overview": draw_overview(given.run, overlay, report)}
    for name, image in images.items():
        if image is not None:
            path = given.to / f"{name}.webp"
            image.save(path, quality=82, method=6)
            print(f"{path}: {image.width}x{image.height}, {path.stat().st_size} bytes")


def worst_case(run: Path) -> Path:
    """Return the overlay of the validation case with the lowest Dice."""
    cases = json.loads((run / "summary.json").read_text(encoding="utf-8"))["quality"]["per_case"]
    return run / "overlays" / f"{min(cases, key=cases.__getitem__)}.png"


def photograph(page: Path) -> Image.Image | None:
    """Return the upper part of a page as Chromium shows it; None where that is not installed, or there is no page."""
    chromium = shutil.which("chromium")
    if chromium is None or not page.is_file():
        return None
    with tempfile.TemporaryDirectory() as folder:
        picture = Path(folder) / "page.png"
        flags = ["--headless", "--no-sandbox", "--disable-gpu", "--hide-scrollbars", "--virtual-time-budget=5000"]
        size = f"--window-size={REPORT[0]},{REPORT[1]}"
        command = [chromium, *flags, size, f"--screenshot={picture}", page.resolve().as_uri()]
        subprocess.run(command, check=True, capture_output=True)
        return Image.open(picture).convert("RGB")


def draw_overview(run: Path, overlay: Image.Image, report: Image.Image | None) -> Image.Image:
    """Return the composed picture."""
    figure = Figure(figsize=(16, 10), dpi=100, facecolor="white")
    show(figure.add_axes((0.01, 0.455, 0.575, 0.5)), overlay, "Each scan: prediction (filled), reference (outline)")
    draw_ladder(figure.add_axes((0.185, 0.075, 0.4, 0.315)))
    if report is None:
        draw_curves(figure.add_axes((0.65, 0.075, 0.29, 0.88)), run)
    else:
        show(figure.add_axes((0.6, 0.01, 0.39, 0.945)), report, "Each run: a self-contained report")
    canvas = FigureCanvasAgg(figure)
    canvas.draw()
    return Image.frombytes("RGBA", canvas.get_width_height(), bytes(canvas.buffer_rgba())).convert("RGB")


def show(axes: Axes, image: Image.Image, title: str) -> None:
    """Show a picture in a thin frame, with a title."""
    axes.imshow(image, interpolation="lanczos")
    axes.set(xticks=[], yticks=[])
    for spine in axes.spines.values():
        spine.set_color("#cccccc")
    axes.set_title(title, loc="left", fontsize=17)


def draw_curves(axes: Axes, run: Path) -> None:
    """Draw loss and validation Dice of a run over its epochs."""
    rows = [json.loads(line) for line in (run / "metrics.jsonl").read_text(encoding="utf-8").splitlines()]
    epochs = [row for row in rows if "loss" in row and "epoch" in row]
    axes.plot([row["epoch"] for row in epochs], [row["loss"] for row in epochs], color=BLUE, linewidth=2.5)
    axes.set_ylabel("loss", color=BLUE, fontsize=15)
    axes.set_xlabel("epoch", fontsize=15)
    right = axes.twinx()
    found = [row for row in epochs if row.get("dice") is not None]
    right.plot([row["epoch"] for row in found], [row["dice"] for row in found], "o-", color=ORANGE, linewidth=2.5)
    right.set_ylabel("validation Dice", color=ORANGE, fontsize=15)
    right.set_ylim(0, 1)
    for each in (axes, right):
        each.tick_params(labelsize=13)
        each.spines["top"].set_visible(False)
    axes.set_title("Each run: its curves", loc="left", fontsize=17)


def draw_ladder(axes: Axes) -> None:
    """Draw seconds per step on the rungs that matter, the speed against the first, and the Dice of the recipes."""
    climb = json.loads(LADDER.read_text(encoding="utf-8"))["climb"]
    rungs = [(short, rung) for start, short in SHORT.items() for rung in climb if rung["rung"].startswith(start)]
    names, seconds = [short for short, _ in rungs], [rung["s per step"] for _, rung in rungs]
    axes.barh(names, seconds, color=[ORANGE if ":" in name else GREY for name in names], height=0.72)
    axes.invert_yaxis()
    axes.set_xlim(0, max(seconds) * 1.42)
    for row, (name, rung) in enumerate(rungs):
        quality = f", Dice {rung['Dice']:.2f}" if ":" in name else ""
        axes.text(seconds[row], row, f" {seconds[0] / seconds[row]:.1f}x{quality}", va="center", fontsize=14)
    axes.set_xlabel(f"seconds per step; Dice after {rungs[0][1]['steps']} steps", fontsize=15)
    axes.set_title("Each technique: what it gains on two CPU cores", loc="left", fontsize=17)
    axes.tick_params(labelsize=14)
    for side in ("top", "right"):
        axes.spines[side].set_visible(False)


if __name__ == "__main__":
    main()
