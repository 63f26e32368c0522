"""A slide with its probabilities of tumour over it."""

from pathlib import Path

import numpy as np
from matplotlib.figure import Figure

from apps.pathology.scan import ProbabilityMap
from apps.pathology.tissue import low_power
from common.data.slides import Slide
from common.observe.figures import one_line, save_png

_DPI = 100
_LONGEST = 1600  # pixels of the slide in the picture, which with title and colour bar stays below 2000
_LEAST, _MOST = 0.1, 0.85  # opacity at probability 0 and 1: tissue shows through, and where was looked is seen
_COLOURS = "viridis"
_LEFT, _RIGHT, _TOP, _BOTTOM = 0.15, 1.1, 0.45, 0.15  # inches around the slide


def draw_heatmap(path: Path, slide: Slide, found: ProbabilityMap) -> None:
    """Draw the slide at low power, the scanned cells over it in the colours of their probability, as a PNG.

    Raises:
        OSError: the folder cannot be written or the disk is full.
    """
    level = slide.levels[0]
    longest = max(level.width, level.height)
    image, downsample = low_power(slide, max(1.0, longest / _LONGEST))
    scale = min(1.0, _LONGEST / max(image.shape))  # a level between may be larger than asked for
    width, height = (max(side * scale / _DPI, 2.0) for side in (image.shape[1], image.shape[0]))
    total = (width + _LEFT + _RIGHT, height + _TOP + _BOTTOM)
    figure = Figure(figsize=total, dpi=_DPI)
    axes = figure.add_axes((_LEFT / total[0], _BOTTOM / total[1], width / total[0], height / total[1]))
    axes.imshow(image, extent=(0, image.shape[1] * downsample, image.shape[0] * downsample, 0))
    rows, columns = found.values.shape
    start = found.offset - found.stride / 2
    extent = (start, start + columns * found.stride, start + rows * found.stride, start)
    opacity = np.where(found.scanned, _LEAST + (_MOST - _LEAST) * found.values, 0)
    drawn = axes.imshow(
        found.values, extent=extent, cmap=_COLOURS, vmin=0, vmax=1, alpha=opacity, interpolation="nearest"
    )
    axes.set_xlim(0, level.width)
    axes.set_ylim(level.height, 0)
    axes.set_axis_off()
    bar_axes = figure.add_axes((1 - 0.9 / total[0], _BOTTOM / total[1], 0.2 / total[0], height / total[1]))
    bar = figure.colorbar(drawn, cax=bar_axes)
    if bar.solids is not None:
        bar.solids.set_alpha(1)
    bar.set_label("probability of tumour", fontsize=9)
    title = f"{one_line(slide.name, 60)}   greatest {found.values.max(initial=0):.3f}"
    figure.text(_LEFT / total[0], 1 - 0.3 / total[1], title, fontsize=10, weight="bold", parse_math=False)
    save_png(path, figure, full_colour=True)
