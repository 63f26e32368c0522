"""The skeleton of the CT phantoms in Hounsfield units: ribs, spine and pelvis of the reference patient."""

from itertools import pairwise

import numpy as np

from data_scripts.painting import LONG, Part, ellipsoid, grown, rotation, tube


def ribs(cavity: tuple[float, float], rng: np.random.Generator) -> list[Part]:
    """Ribs in the wall: chains of short tubes that slope down from the spine to the front; the last ones are short."""
    first = rng.uniform(-34, -12)
    chain = []
    for number in range(9):
        reach = (70, 95, 125)[min(number, 2)]
        angles = np.arange(20, reach + 1, 15)
        turn = np.radians(angles)
        line = np.stack(
            [(cavity[0] + 6) * np.sin(turn), -(cavity[1] + 6) * np.cos(turn), first + 25 * number - 0.4 * angles],
            axis=1,
        )
        for side in (-1.0, 1.0):
            points = line * (side, 1, 1)
            for a, b in pairwise(points):
                chain.append(Part("rib", 420, (tube(a - 0.15 * (b - a), b + 0.15 * (b - a), 4.5),)))
    return chain


def spine(muscle: float, rng: np.random.Generator) -> list[Part]:
    """Vertebrae with a cortex, marrow, discs, the canal, and the processes behind; the crura in front."""
    y, first = -25.0, rng.uniform(-16, 16)
    levels = [first + 34 * k for k in range(-8, 9)]
    marrow = rng.uniform(150, 230)
    body = ellipsoid((0, y, 0), (22, 17, LONG))
    parts = [
        Part("crura", muscle, tuple(tube((s * 16, -2, 70), (s * 10, -8, -50), 7) for s in (-1, 1))),
        Part("vertebral cortex", 520, (body,)),
        Part("marrow", marrow, (grown(body, -2.5),)),
        Part("arch", 420, (ellipsoid((0, y - 25, 0), (18, 13, LONG)),)),
        Part("arch marrow", 250, (ellipsoid((0, y - 25, 0), (15, 11, LONG)),)),
    ]
    for z in levels:
        parts += [
            Part("spinous process", 400, (tube((0, y - 34, z - 6), (0, y - 64, z - 16), 5),)),
            Part("transverse process", 380, (tube((-42, y - 30, z), (42, y - 30, z), 5),)),
            Part("disc", 90, (ellipsoid((0, y, z + 17), (23, 18, 5)),)),
        ]
    return [*parts, Part("canal", 30, (ellipsoid((0, y - 24, 0), (10, 8.5, LONG)),))]


def pelvis(muscle: float) -> list[Part]:
    """Iliac wings, sacrum, femoral heads and the bladder, for scans that reach that far down."""
    wings = tuple(ellipsoid((s * 98, -28, -215), (8, 52, 60), 0.1, rotation(2, s * 35)) for s in (-1, 1))
    heads = tuple(ellipsoid((s * 92, -4, -295), (25, 25, 25)) for s in (-1, 1))
    sacrum = ellipsoid((0, -58, -235), (46, 17, 55), 0.05)
    return [
        Part("gluteal muscle", muscle, tuple(grown(wing, 15.0) for wing in wings)),
        *(
            Part("pelvic bone", value, tuple(grown(solid, shrink) for solid in (*wings, *heads, sacrum)))
            for value, shrink in ((480, 0.0), (220, -3.0))
        ),
        Part("bladder", 8, (ellipsoid((0, 12, -300), (42, 36, 32), 0.03),)),
    ]
