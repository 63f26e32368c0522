"""The free-response curve as a picture and as a table."""

from pathlib import Path

import numpy as np
from matplotlib.figure import Figure
from matplotlib.layout_engine import ConstrainedLayoutEngine

from apps.pathology.froc import FALSE_POSITIVE_RATES, FrocResult
from common.files import write_text
from common.observe.figures import save_png

_CURVE, _SCORE = "#0072B2", "#D55E00"


def draw_froc(path: Path, result: FrocResult) -> None:
    """Draw the curve over false positives per slide (logarithmic), and the six points of the score, as a PNG.

    Raises:
        OSError: the folder cannot be written or the disk is full.
    """
    figure = Figure(figsize=(7, 5), dpi=120, layout=ConstrainedLayoutEngine(w_pad=0.1, h_pad=0.1))
    axes = figure.subplots()
    rates = np.geomspace(FALSE_POSITIVE_RATES[0] / 2, FALSE_POSITIVE_RATES[-1] * 2, 400)
    curve = np.interp(rates, result.false_positives[::-1], result.sensitivities[::-1])
    axes.plot(rates, curve, color=_CURVE, linewidth=1.8)
    axes.plot(FALSE_POSITIVE_RATES, result.at_rates, "o", color=_SCORE, markersize=6, clip_on=False, zorder=3)
    for rate, share in zip(FALSE_POSITIVE_RATES, result.at_rates, strict=True):
        below = share > 0.9
        place = (0, -14) if below else (0, 8)
        axes.annotate(f"{share:.2f}", (rate, share), place, textcoords="offset points", ha="center", fontsize=9)
    axes.set_xscale("log", base=2)
    axes.set_xticks(FALSE_POSITIVE_RATES, [f"{rate:g}" for rate in FALSE_POSITIVE_RATES])
    axes.set_xlim(rates[0], rates[-1])
    axes.set_ylim(0, 1.02)
    axes.set_xlabel("false positives per slide")
    axes.set_ylabel("sensitivity, lesions")
    axes.set_title(
        f"FROC score {result.score:.3f}: {result.lesions} lesions, {result.slides} slides", loc="left", fontsize=11
    )
    axes.grid(color="0.9")
    for side in ("top", "right"):
        axes.spines[side].set_visible(False)
    save_png(path, figure)


def write_froc_csv(path: Path, result: FrocResult) -> None:
    """Write the curve's points as CSV: `false_positives_per_slide,sensitivity`, most false positives first.

    Raises:
        OSError: the folder cannot be written or the disk is full.
    """
    points = zip(result.false_positives.tolist(), result.sensitivities.tolist(), strict=True)
    rows = "".join(f"{false!r},{share!r}\n" for false, share in points)
    write_text(path, "false_positives_per_slide,sensitivity\n" + rows)
