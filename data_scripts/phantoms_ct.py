"""Abdominal CT phantoms: the patient and the organs in Hounsfield units.

Organs are drawn for one reference patient (abdominal cavity of half width 135 mm and half depth 88 mm, origin at its
centre, z = 0 at the first lumbar vertebra) with random variation, then scaled, turned and moved as a whole. The
spleen is made hard to tell from its HU alone: liver within 6 HU, stomach wall 25 below, kidneys 25 above, all near it.
"""

from dataclasses import dataclass

import numpy as np

from data_scripts.painting import LONG, Ellipsoid, Look, Matrix, Part, Point, ellipsoid, grown, rotation, tube
from data_scripts.phantoms_ct_bones import pelvis, ribs, spine

CAVITY = (135.0, 88.0)  # mm: half axes of the reference patient's abdominal cavity
WALL = 13.0  # mm of muscle and ribs around it
SPLEEN_CENTRE = (-97.0, -33.0, 8.0)  # mm: about where the reference spleen's centre of mass lies
LOOK = Look(empty=-1000.0, noise=24.0, texture=5.0, bounds=(-1024.0, 3071.0))


@dataclass(frozen=True)
class Patient:
    """What differs from patient to patient before the anatomy is drawn: fat in mm, contrast in HU."""

    fat: float
    spleen: float
    liver: float
    kidney: float
    stomach: float
    blood: float
    muscle: float
    fat_hu: float


def draw_patient(rng: np.random.Generator) -> Patient:
    """Draw a patient: liver within 6 HU of the spleen, kidneys about 25 over it, stomach wall about 25 under it."""
    spleen = rng.uniform(102, 108)
    return Patient(
        fat=rng.uniform(8, 32),
        spleen=spleen,
        liver=spleen + rng.uniform(-6, 6),
        kidney=spleen + rng.uniform(22, 30),
        stomach=spleen - rng.uniform(20, 29),
        blood=spleen + rng.uniform(25, 70),
        muscle=rng.uniform(50, 62),
        fat_hu=rng.uniform(-110, -92),
    )


def abdomen(patient: Patient, rng: np.random.Generator) -> list[Part]:
    """Return the reference patient's anatomy, in the order it is painted; the spleen, labelled 1, comes last."""
    cavity = ellipsoid((0, 0, 0), (*CAVITY, LONG), lumps=0.008)
    high = rng.uniform(-12, 12)
    left_dome = ellipsoid((-60, -6, -30), (82, 84, 108 + high), lumps=0.01)
    right_dome = ellipsoid((60, -2, -30), (84, 87, 122 + high), lumps=0.01)
    left = (grown(cavity, -1.0), grown(left_dome, -3.5))
    right = (grown(cavity, -1.0), grown(right_dome, -3.5))
    left_kidney, right_kidney = _kidney(-1, rng), _kidney(1, rng)
    fundus, corpus, antrum = _stomach(rng)
    # fat between the spleen and what lies beside it: from none, where they touch, to a few millimetres
    gap = rng.uniform((1.0, 0.0, 0.0), (3.5, 5.0, 4.0))
    around = (grown(cavity, -gap[0]), grown(left_dome, -3.5 - gap[0]))
    beside = (grown(left_kidney, gap[1]), grown(fundus, gap[2]), grown(corpus, gap[2]))
    return [
        *_wall(patient, cavity),
        *ribs(CAVITY, rng),
        *_thorax(patient, cavity, (left_dome, right_dome), rng),
        *_bowel(patient, cavity, rng),
        *spine(patient.muscle, rng),
        *pelvis(patient.muscle),
        *_liver(patient, right, right_kidney, rng),
        *_vessels(patient, rng),
        *_painted_kidney(patient, left_kidney, left),
        *_painted_kidney(patient, right_kidney, right),
        Part("pancreas", patient.spleen - 15, (tube((-80, -8, 12), (15, 20, -8), 11, lumps=0.12),)),
        *_hollow("stomach", (fundus, corpus, antrum), patient.stomach, 4.5, rng, gas=0.75, inside=left),
        _spleen(patient, around, beside, rng),
    ]


def _about(rng: np.random.Generator, point: Point, spread: float) -> Matrix:
    """Return a point, each coordinate moved by up to `spread` mm."""
    return np.asarray(point, dtype=np.float64) + rng.uniform(-spread, spread, 3)


def _sized(rng: np.random.Generator, radii: Point, share: float) -> Matrix:
    """Return half axes, each changed by up to the share given."""
    return np.asarray(radii, dtype=np.float64) * rng.uniform(1 - share, 1 + share, 3)


def _wall(patient: Patient, cavity: Ellipsoid) -> list[Part]:
    """Couch, skin, subcutaneous fat, the muscle wall with the back muscles, and the fat inside."""
    skin = ellipsoid((0, -2, 0), (CAVITY[0] + WALL + patient.fat, CAVITY[1] + WALL + patient.fat * 0.8, LONG), 0.008)
    back = -CAVITY[1] - WALL - patient.fat * 0.8 - 6
    arc = ellipsoid((0, back + 500, 0), (500, 500, LONG))
    strip = ellipsoid((0, back, 0), (210, 45, LONG))
    return [
        Part("couch", -150, (arc,), inside=(strip,), carved=(grown(arc, -5.0),)),
        Part("skin", 20, (skin,)),
        Part("fat", patient.fat_hu, (grown(skin, -2.2),)),
        Part("muscle wall", patient.muscle, (grown(cavity, WALL),)),
        Part("cavity", patient.fat_hu + 5, (cavity,)),
        Part("back muscles", patient.muscle, tuple(ellipsoid((s * 33, -72, 0), (30, 21, LONG), 0.03) for s in (-1, 1))),
        Part("psoas", patient.muscle, tuple(ellipsoid((s * 40, -32, -120), (19, 17, 95), 0.03) for s in (-1, 1))),
    ]


def _thorax(
    patient: Patient, cavity: Ellipsoid, domes: tuple[Ellipsoid, Ellipsoid], rng: np.random.Generator
) -> list[Part]:
    """The bases of the lungs, the heart, and the two domes of the diaphragm with the fat under them."""
    lungs = tuple(ellipsoid((s * 74, -14, 180), (68, 92, 176)) for s in (-1, 1))
    inner = (grown(cavity, -0.5),)
    return [
        Part("lung", -850, lungs, inside=inner),
        *(Part("lung vessel", -100, (tube(a, b, 3.0),)) for a, b in _lung_vessels(rng)),
        Part("heart", patient.blood - 10, (ellipsoid((-18, 32, 132), _sized(rng, (58, 46, 46), 0.08)),), inside=inner),
        *(
            Part("diaphragm", value, (grown(dome, shrink),), inside=(*inner, grown(lung, 3.0)))
            for value, shrink in ((patient.muscle, 0.0), (patient.fat_hu + 5, -3.5))
            for dome, lung in zip(domes, lungs, strict=True)
        ),
    ]


def _lung_vessels(rng: np.random.Generator) -> list[tuple[Point, Point]]:
    sides = [-1, 1] * 5
    return [((s * 30, -15, 150), _about(rng, (s * 85, -30, 95), 35)) for s in sides]


def _hollow(
    name: str,
    solids: tuple[Ellipsoid, ...],
    wall: float,
    thickness: float,
    rng: np.random.Generator,
    gas: float,
    inside: tuple[Ellipsoid, ...] = (),
) -> list[Part]:
    """A hollow organ: wall, fluid or food, and with the chance `gas` a bubble over the fluid's level."""
    hollow = tuple(grown(solid, -thickness) for solid in solids)
    content = float(rng.choice([rng.uniform(5, 40), wall + rng.uniform(-12, 0)]))
    level = solids[0].centre + np.array([0, rng.uniform(-0.3, 0.5) * np.linalg.norm(solids[0].axes[1]), 0])
    parts = [Part(name, wall, solids, inside), Part(name + " content", content, hollow, inside)]
    if rng.random() < gas:
        parts.append(Part(name + " gas", -950, hollow, inside, surface=level))
    return parts


def _bowel(patient: Patient, cavity: Ellipsoid, rng: np.random.Generator) -> list[Part]:
    """Loops of small bowel in front and below, and the colon around them with its bend under the spleen."""
    inside = (grown(cavity, -3.0),)
    parts = []
    for _ in range(60):
        angle, out = rng.uniform(0, 2 * np.pi), np.sqrt(rng.uniform(0, 0.6))
        middle = np.array([105 * out * np.cos(angle), 22 + 52 * out * np.sin(angle), rng.uniform(-330, -35)])
        along = rng.normal(size=3) * (30, 18, 22)
        loop = tube(middle - along, middle + along, rng.uniform(12, 17), 0.06)
        parts += _hollow("bowel", (loop,), patient.stomach + rng.uniform(-8, 8), 3.0, rng, gas=0.3, inside=inside)
    colon: list[tuple[Point, Point, float]] = [
        ((-112, -22, -35), (-106, -15, -190), 19),
        ((110, -12, -60), (98, 5, -200), 24),
        ((-100, -10, -175), (-5, -20, -260), 17),
        (_about(rng, (-104, 12, -22), 7), (-66, 56, -14), 19),
        ((-72, 58, -20), (5, 64, -50), 19),
        ((-5, 64, -52), (95, 40, -62), 20),
    ]
    for start, stop, radius in colon:
        loop = tube(start, stop, radius * rng.uniform(0.8, 1.1), 0.05)
        parts += _hollow("colon", (loop,), patient.muscle + 12, 2.5, rng, gas=0.75, inside=inside)
    return parts


def _liver(patient: Patient, right: tuple[Ellipsoid, ...], kidney: Ellipsoid, rng: np.random.Generator) -> list[Part]:
    """The right lobe, which fills the right dome; the left lobe, which may reach the spleen; veins, gallbladder."""
    tip = rng.uniform(-80, -30)
    right_lobe = ellipsoid(_about(rng, (70, 2, 14), 5), _sized(rng, (68, 80, 82), 0.07), 0.02)
    left_lobe = tube((78, 32, 20), (tip, 42, 42), rng.uniform(27, 35), 0.04)
    fossa = ellipsoid(kidney.centre + np.array([6, -22, -4]), (42, 36, 72))
    hilum = (20.0, 10.0, 15.0)
    ends = [(90, -20, 45), (100, 20, 10), (60, 45, 50), (75, -35, 10), (70, 10, 70)]
    return [
        Part("liver", patient.liver, (right_lobe,), right, carved=(grown(kidney, 2.0), fossa)),
        Part("liver, left lobe", patient.liver, (left_lobe,), right[:1]),
        *(Part("hepatic vein", patient.liver + 30, (tube(hilum, _about(rng, e, 12), 4.5),)) for e in ends),
        Part("gallbladder", 12, (tube((45, 38, -22), _about(rng, (62, 58, -48), 8), 14),), right[:1]),
    ]


def _vessels(patient: Patient, rng: np.random.Generator) -> list[Part]:
    """Aorta, vena cava, portal and splenic vein, the renal veins."""
    hilum = _about(rng, (-72, -18, 10), 6)
    return [
        Part("vena cava", patient.blood - 10, (ellipsoid((22, 2, 0), (13, 10, LONG)),)),
        Part("aorta", patient.blood, (ellipsoid((-13, 2, 0), (11, 11, LONG)),)),
        Part("aortic wall calcium", 600, (ellipsoid((-22, -3, rng.uniform(-80, 40)), (2.5, 4, 7)),)),
        Part("portal vein", patient.blood - 20, (tube((5, 14, -2), (50, 18, 24), 7),)),
        Part("splenic vein", patient.blood - 20, (tube((8, 14, -2), hilum, 5),)),
        Part("renal vein", patient.blood - 10, (tube((-45, -26, -28), (12, 12, -24), 5),)),
    ]


def _kidney(side: int, rng: np.random.Generator) -> Ellipsoid:
    """Return a kidney, its upper pole tilted to the spine and backwards."""
    turn = rotation(1, side * rng.uniform(8, 16)) @ rotation(0, rng.uniform(6, 14))
    centre = _about(rng, (side * 58, -38, -38 if side < 0 else -42), 6)
    return ellipsoid(centre, _sized(rng, (28, 26, 55), 0.1), 0.02, turn)


def _painted_kidney(patient: Patient, kidney: Ellipsoid, inside: tuple[Ellipsoid, ...]) -> list[Part]:
    """Cortex, medulla, and the fat of the sinus, which opens towards the spine."""
    inward = np.array([-np.sign(kidney.centre[0]) * 14, 5, 0])
    sinus = Ellipsoid(kidney.centre + inward, kidney.axes @ np.diag([0.45, 0.35, 0.45]), 0.03)
    return [
        Part("kidney", patient.kidney, (kidney,), inside),
        Part("medulla", patient.kidney - 8, (Ellipsoid(kidney.centre, kidney.axes * 0.72, 0.05),), inside),
        Part("sinus", patient.fat_hu + 30, (sinus,), inside),
    ]


def _stomach(rng: np.random.Generator) -> tuple[Ellipsoid, Ellipsoid, Ellipsoid]:
    """Return fundus, body and antrum, from under the left dome forward and to the middle."""
    fundus = ellipsoid(_about(rng, (-50, 10, 36), 6), _sized(rng, (38, 36, 42), 0.12), 0.03)
    corpus = ellipsoid(_about(rng, (-58, 36, 2), 6), _sized(rng, (31, 30, 46), 0.12), 0.04)
    antrum = tube((-58, 42, -22), (18, 46, -24), rng.uniform(17, 22), 0.04)
    return fundus, corpus, antrum


def _spleen(
    patient: Patient, inside: tuple[Ellipsoid, ...], neighbours: tuple[Ellipsoid, ...], rng: np.random.Generator
) -> Part:
    """A crescent along the wall behind the stomach, hollowed by stomach and kidney, of varying size and pose."""
    size = rng.uniform(0.9, 1.1)
    turn = rotation(2, rng.uniform(-10, 10)) @ rotation(1, rng.uniform(-10, 10)) @ rotation(0, rng.uniform(10, 35))
    x, y, z = SPLEEN_CENTRE
    radii = size * _sized(rng, (41, 46, 62), 0.05)
    bulk = ellipsoid(_about(rng, (x + 3, y + 6, z + 2), 4), radii, 0.01, turn)
    hollow = ellipsoid(_about(rng, (x + 64, y + 34, z - 4), 4), _sized(rng, (44, 46, 80), 0.05), 0.01, turn)
    return Part("spleen", patient.spleen, (bulk,), inside, carved=(hollow, *neighbours), label=1)
