"""Haematoxylin and eosin on a slide, and the scanner's eye: absorption, focus, noise, and the ink of a pen."""

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
from scipy import ndimage

Floats = npt.NDArray[np.float32]
Bytes = npt.NDArray[np.uint8]

# Optical density per unit of stain in R, G, B. Source: Ruifrok and Johnston, Quantification of histochemical staining
# by colour deconvolution, Anal Quant Cytol Histol 2001
_HAEMATOXYLIN = (0.65, 0.70, 0.29)
_EOSIN = (0.07, 0.99, 0.11)
_INKS = {"blue": (1.5, 0.9, 0.2), "green": (1.5, 0.35, 0.9), "black": (1.7, 1.6, 1.4)}  # densities seen on slides
INK_COLOURS = tuple(_INKS)


@dataclass(frozen=True)
class Stain:
    """How one slide was stained and scanned: the densities [3] of both dyes, the white [3], focus (px) and noise.

    `noise` is a standard deviation in grey levels of 0 to 255.
    """

    haematoxylin: Floats
    eosin: Floats
    white: Floats
    blur: float
    noise: float


def draw_stain(rng: np.random.Generator) -> Stain:
    """Draw the stain of a slide: hue and strength of both dyes, the lamp, focus and noise differ as between labs."""

    def dye(density: tuple[float, float, float], strength: float) -> Floats:
        hue = np.asarray(density) + rng.normal(0, 0.045, 3)
        return (strength * hue / np.linalg.norm(hue)).astype(np.float32)

    return Stain(
        haematoxylin=dye(_HAEMATOXYLIN, rng.uniform(0.85, 1.4)),
        eosin=dye(_EOSIN, rng.uniform(0.6, 1.2)),
        white=(rng.uniform(236, 249) + rng.normal(0, 1.5, 3)).clip(0, 252).astype(np.float32),
        blur=float(rng.uniform(0.5, 0.9)),
        noise=float(rng.uniform(1.2, 3.0)),
    )


def develop(haematoxylin: Floats, eosin: Floats, ink: Floats, colour: str, stain: Stain, lamp: Floats) -> Floats:
    """Return the light [H, W, 3], 0 to 255, that passes through dyes and ink [H, W] (Beer and Lambert), out of focus.

    Args:
        haematoxylin: units of the dye, 1 about a dark nucleus.
        eosin: units of the dye, 1 about a red blood cell.
        ink: 0 none to 1 a full stroke, in `colour`, one of INK_COLOURS.
        colour: the pen's.
        stain: the slide's.
        lamp: share of the white that falls on each pixel.
    """
    dyes = [ndimage.gaussian_filter(dye, stain.blur, truncate=3.0) for dye in (haematoxylin, eosin)]
    light = np.empty((*ink.shape, 3), np.float32)
    inked = bool(ink.any())
    for channel in range(3):
        density = dyes[0] * stain.haematoxylin[channel]
        density += dyes[1] * stain.eosin[channel]
        if inked:
            density += ink * np.float32(_INKS[colour][channel])
        np.exp(-density, out=density)
        light[..., channel] = density * lamp * stain.white[channel]
    return light


def scan(light: Floats, noise: float, rng: np.random.Generator) -> Bytes:
    """Return light as the sensor's bytes, with its noise."""
    noisy = rng.standard_normal(light.shape, dtype=np.float32)
    noisy *= np.float32(noise)
    noisy += light
    noisy += np.float32(0.5)
    return np.clip(noisy, 0, 255, out=noisy).astype(np.uint8)
