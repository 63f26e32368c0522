"""Draw the pictures of README and docs from a finished run and a record: `python docs/make_picture.py RUN`.

overlay.webp is the worst validation case of the run, as the run drew it. overview.webp shows that case, the curves of
the run, and seconds per step on each rung of the spleen ladder; with --report also a screenshot of the run's report.
"""

import argparse
import json
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
BLUE, ORANGE, GREY = "#0072B2", "#D55E00", "#8a94a0"


def main() -> None:
    """Write the pictures, and say how large they are."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("run", type=Path, help="folder of a finished run of the spleen app on phantoms")
    parser.add_argument("--report", type=Path, help="a screenshot of the run's report.html")
    parser.add_argument("--to", type=Path, default=ROOT / "docs" / "images", help="folder for the pictures")
    given = parser.parse_args()
    given.to.mkdir(parents=True, exist_ok=True)
    overlay = Image.open(worst_case(given.run)).convert("RGB")
    report = Image.open(given.report).convert("RGB") if given.report else None
    for name, image in (("overlay", overlay), ("overview", draw_overview(given.run, overlay, report))):
        path = given.to / f"{name}.webp"
        image.save(path, quality=82, method=6)
        print(f"{path}: {image.width}x{image.height}, {path.stat().st_size} bytes")


def worst_case(run: Path) -> Path:
    """Return the overlay of the validation case with the lowest Dice."""
    cases = json.loads((run / "summary.json").read_text(encoding="utf-8"))["quality"]["per_case"]
    return run / "overlays" / f"{min(cases, key=cases.__getitem__)}.png"


def draw_overview(run: Path, overlay: Image.Image, report: Image.Image | None) -> Image.Image:
    """Return the composed picture."""
    figure = Figure(figsize=(16, 9.4), dpi=100, layout="constrained", facecolor="white")
    columns: dict[str, Axes] = figure.subplot_mosaic([["case", "curves"], ["case", "ladder"]], width_ratios=(1.25, 1))
    show(columns["case"], report or overlay, "Report of a run" if report else "A validation case, from the report")
    draw_curves(columns["curves"], run)
    draw_ladder(columns["ladder"])
    canvas = FigureCanvasAgg(figure)
    canvas.draw()
    return Image.frombytes("RGBA", canvas.get_width_height(), bytes(canvas.buffer_rgba())).convert("RGB")


def show(axes: Axes, image: Image.Image, title: str) -> None:
    """Show a picture with a title and without axes."""
    axes.imshow(image, interpolation="lanczos")
    axes.set_axis_off()
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
    axes.set_title("Training on synthetic CT, two CPU cores", loc="left", fontsize=17)


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
    axes.set_title("From MONAI's baseline to the default recipe", loc="left", fontsize=17)
    axes.tick_params(labelsize=14)
    for side in ("top", "right"):
        axes.spines[side].set_visible(False)


if __name__ == "__main__":
    main()
