"""The anatomy of the abdominal CT phantoms: tables of organs and of their Hounsfield units.

Organs are those of one reference patient (abdominal cavity of half width 135 mm and half depth 88 mm, origin at its
centre, z = 0 at the first lumbar vertebra); each patient strays from it. The spleen is made hard to tell from its HU
alone: liver within 6 HU, stomach wall 25 below, kidneys 25 above, all near it.
"""

from math import cos, sin

import numpy as np

from data_scripts.painting import LONG, Organ, ball, both, chain, rotation, tube

Tissues = dict[str, tuple[float, float]]  # HU, from and to

CAVITY = (135.0, 88.0)  # mm: half axes of the reference patient's abdominal cavity
WALL = 13.0  # mm of muscle and ribs around it
SPLEEN_CENTRE = (-97.0, -33.0, 8.0)  # mm: about where the reference spleen's centre of mass lies

# fmt: off
_HU: Tissues = {
    "couch": (-150, -150), "skin": (20, 20), "fat": (-110, -92), "muscle": (50, 62), "bone": (380, 520),
    "marrow": (150, 250), "disc": (90, 90), "cord": (30, 30), "lung": (-850, -850), "lung vessel": (-100, -100),
    "colon": (62, 74), "bowel": (74, 90), "content": (5, 85), "gas": (-950, -950), "water": (8, 12),
    "calcium": (600, 600),
}
# what tells these from the spleen is where they lie: HU less the spleen's
_BESIDE_SPLEEN: Tissues = {
    "spleen": (0, 0), "liver": (-6, 6), "liver vein": (24, 36), "kidney": (22, 30), "medulla": (14, 22),
    "stomach": (-29, -20), "pancreas": (-15, -15), "vein": (5, 50), "artery": (25, 70),
}

_BONE, _DIAPHRAGM, _KIDNEY = {"bone": 0, "marrow": -2.5}, {"muscle": 0, "fat": -3.5}, {"kidney": 0, "medulla": -8}
_LEFT, _RIGHT = {"cavity": -1, "left dome": -3.5}, {"cavity": -1, "right dome": -3.5}
_TRUNK = (
    Organ("cavity", {"muscle": WALL, "fat": 0}, (ball((0, 0, 0), (*CAVITY, LONG)),), lumps=0.008),
    Organ("back muscles", {"muscle": 0}, both(ball((33, -72, 0), (30, 21, LONG))), lumps=0.03),
    Organ("psoas", {"muscle": 0}, both(ball((40, -32, -120), (19, 17, 95))), lumps=0.03),
    # chains of short tubes that slope down from the spine to the front; the last ones are short
    Organ("ribs", {"bone": 0}, both(*(
        solid for number in range(9) for solid in chain([
            (141 * sin(turn), -94 * cos(turn), 25 * number - 23 * (1 + turn))
            for turn in np.arange(0.35, (1.3, 1.7, 2.2)[min(number, 2)], 0.17).tolist()], 4.5)))),
    Organ("left lung", {"lung": 0}, (ball((-74, -14, 180), (68, 92, 176)),), inside={"cavity": -0.5}),
    Organ("right lung", {"lung": 0}, (ball((74, -14, 180), (68, 92, 176)),), inside={"cavity": -0.5}),
    Organ("lung vessels", {"lung vessel": 0}, both(*(
        tube((30, -15, 150), end, 3) for end in ((60, -60, 95), (110, -50, 90), (85, -30, 80), (65, 0, 105)))), 12),
    Organ("heart", {"artery": 0}, (ball((-18, 32, 132), (58, 46, 46)),), sized=0.08, inside={"cavity": -0.5}),
    Organ("left dome", _DIAPHRAGM, (ball((-60, -6, -30), (82, 84, 108)),), sized=0.05, lumps=0.01,
          inside={"cavity": -0.5, "left lung": 3}),
    Organ("right dome", _DIAPHRAGM, (ball((60, -2, -30), (84, 87, 122)),), sized=0.05, lumps=0.01,
          inside={"cavity": -0.5, "right lung": 3}),
)
# loops of small bowel in front and below, and the colon around them with its bend under the spleen
_BOWEL = tuple(
    Organ("bowel", {"bowel": 0, "content": -3}, (tube((x - 30, y, z - 9), (x + 30, y + 9, z + 9), 14),), shift=15,
          sized=0.3, lumps=0.06, tilt=40, inside={"cavity": -3}, gas=0.3)
    for z in range(-320, -40, 40) for x in (-75, -35, 5, 45, 85) for y in (5, 40)
)
_COLON = tuple(
    Organ("colon", {"colon": 0, "content": -2.5}, (part,), shift=4, sized=0.12, lumps=0.05, inside={"cavity": -3},
          gas=0.75)
    for part in (
        tube((-112, -22, -35), (-106, -15, -190), 18), tube((110, -12, -60), (98, 5, -200), 23),
        tube((-100, -10, -175), (-5, -20, -260), 16), tube((-104, 12, -22), (-66, 56, -14), 18),
        tube((-72, 58, -20), (5, 64, -50), 18), tube((-5, 64, -52), (95, 40, -62), 19),
    )
)
_BONES = (
    Organ("crura", {"muscle": 0}, both(tube((16, -2, 70), (10, -8, -50), 7))),
    Organ("vertebrae", _BONE, (ball((0, -25, 0), (22, 17, LONG)),)),
    Organ("arches", _BONE, (ball((0, -50, 0), (18, 13, LONG)),)),
    Organ("spines", {"bone": 0}, tuple(tube((0, -59, z), (0, -89, z - 10), 5) for z in range(-278, 280, 34))),
    Organ("processes", {"bone": 0}, tuple(tube((-42, -55, z), (42, -55, z), 5) for z in range(-272, 280, 34))),
    Organ("discs", {"disc": 0}, tuple(ball((0, -25, z), (23, 18, 5)) for z in range(-255, 290, 34))),
    Organ("canal", {"cord": 0}, (ball((0, -49, 0), (10, 8.5, LONG)),)),
    Organ("pelvis", {"muscle": 15, **_BONE}, both(ball((98, -28, -215), (8, 52, 60), rotation(2, 35))), lumps=0.1),
    Organ("hips", _BONE, both(ball((92, -4, -295), (25, 25, 25)))),
    Organ("sacrum", _BONE, (ball((0, -58, -235), (46, 17, 55)),), lumps=0.05),
    Organ("bladder", {"water": 0}, (ball((0, 12, -300), (42, 36, 32)),), lumps=0.03),
)
_ORGANS = (
    # the upper poles tilt to the spine and backwards
    Organ("left kidney", _KIDNEY, (ball((-58, -38, -38), (28, 26, 55), rotation(1, -12) @ rotation(0, 10)),),
          shift=6, sized=0.1, lumps=0.02, tilt=4, inside=_LEFT),
    Organ("right kidney", _KIDNEY, (ball((58, -38, -42), (28, 26, 55), rotation(1, 12) @ rotation(0, 10)),),
          shift=6, sized=0.1, lumps=0.02, tilt=4, inside=_RIGHT),
    Organ("left sinus", {"fat": 0}, (ball((-44, -33, -38), (13, 9, 25)),), lumps=0.03, inside={"left kidney": 0}),
    Organ("right sinus", {"fat": 0}, (ball((44, -33, -42), (13, 9, 25)),), lumps=0.03, inside={"right kidney": 0}),
    Organ("liver", {"liver": 0}, (ball((70, 2, 14), (68, 80, 82)),), shift=5, sized=0.07, lumps=0.02, inside=_RIGHT,
          carved={"right kidney": 3}),
    Organ("left lobe", {"liver": 0}, (tube((78, 32, 20), (-55, 42, 42), 31),), shift=6, sized=0.2, lumps=0.04,
          inside={"cavity": -1}),
    Organ("liver veins", {"liver vein": 0}, tuple(tube((20, 10, 15), end, 4.5) for end in (
        (90, -20, 45), (100, 20, 10), (60, 45, 50), (75, -35, 10), (70, 10, 70))), shift=5),
    Organ("gallbladder", {"water": 0}, (tube((45, 38, -22), (62, 58, -48), 14),), shift=6, inside={"cavity": -1}),
    Organ("vena cava", {"vein": 0}, (ball((22, 2, 0), (13, 10, LONG)),)),
    Organ("aorta", {"artery": 0}, (ball((-13, 2, 0), (11, 11, LONG)),)),
    Organ("calcium", {"calcium": 0}, (ball((-22, -3, -20), (2.5, 4, 7)),), sized=0.3),
    Organ("portal vein", {"vein": 0}, (tube((5, 14, -2), (50, 18, 24), 7),)),
    Organ("splenic vein", {"vein": 0}, (tube((8, 14, -2), (-72, -18, 10), 5),), shift=4),
    Organ("renal vein", {"vein": 0}, (tube((-45, -26, -28), (12, 12, -24), 5),)),
    Organ("pancreas", {"pancreas": 0}, (tube((-80, -8, 12), (15, 20, -8), 11),), lumps=0.12),
    # fundus, body and antrum, from under the left dome forward and to the middle
    Organ("stomach", {"stomach": 0, "content": -4.5}, (
        ball((-50, 10, 36), (38, 36, 42)), ball((-58, 36, 2), (31, 30, 46)), tube((-58, 42, -22), (18, 46, -24), 19),
    ), shift=6, sized=0.12, lumps=0.04, inside=_LEFT, gas=0.75),
    Organ("hilum", {}, (ball((-33, 1, 4), (44, 46, 80), rotation(0, 22)),), shift=4, sized=0.05, lumps=0.01, tilt=10),
)
# fmt: on


def draw_tissues(rng: np.random.Generator) -> Tissues:
    """Draw the HU of a patient: liver within 6 of the spleen, kidneys about 25 over it, stomach wall 25 under it."""
    spleen = rng.uniform(102, 108)
    beside = {name: spleen + rng.uniform(low, high) for name, (low, high) in _BESIDE_SPLEEN.items()}
    return {**_HU, **{name: (value, value) for name, value in beside.items()}}


def abdomen(fat: float, rng: np.random.Generator) -> list[Organ]:
    """Return the organs in the order they are painted, with `fat` mm of fat under the skin; the spleen comes last.

    The spleen is a crescent along the wall behind the stomach, hollowed by its hilum, by stomach and kidney.
    """
    depth = CAVITY[1] + WALL + 0.8 * fat
    couch = Organ("couch", {"couch": 0}, (ball((0, -depth - 12, 0), (210, 8, LONG)),))
    body = ball((0, -2, 0), (CAVITY[0] + WALL + fat, depth, LONG))
    skin = Organ("skin", {"skin": 0, "fat": -2.2}, (body,), lumps=0.008)
    # fat between the spleen and what lies beside it: from none, where they touch, to a few millimetres
    wall, kidney, stomach = rng.uniform((1.0, 0.0, 0.0), (3.5, 5.0, 4.0)).tolist()
    bulk = ball((-94, -27, 10), rng.uniform(0.9, 1.1) * np.array([41, 46, 62]), rotation(0, 22))
    around = {"cavity": -wall, "left dome": -3.5 - wall}
    beside = {"hilum": 0, "left kidney": kidney, "stomach": stomach}
    spleen = Organ("spleen", {"spleen": 0}, (bulk,), 4, 0.05, 0.01, 10, around, beside)
    return [couch, skin, *_TRUNK, *_BOWEL, *_COLON, *_BONES, *_ORGANS, spleen]
