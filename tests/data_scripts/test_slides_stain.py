import numpy as np
import pytest

from data_scripts.slides_stain import INK_COLOURS, Stain, develop, draw_stain, scan

STAIN = Stain(
    haematoxylin=np.array([0.65, 0.70, 0.29], np.float32),
    eosin=np.array([0.07, 0.99, 0.11], np.float32),
    white=np.array([240, 238, 242], np.float32),
    blur=0.6,
    noise=2.0,
)


def light_of(haematoxylin: float = 0, eosin: float = 0, ink: float = 0, colour: str = "blue") -> np.ndarray:
    def fields(value: float) -> np.ndarray:
        return np.full((32, 32), value, np.float32)

    light = develop(fields(haematoxylin), fields(eosin), fields(ink), colour, STAIN, fields(1))
    return np.asarray(light[16, 16])


def test_light_falls_exponentially_with_the_dyes() -> None:
    """Beer and Lambert: densities add, light is white * exp(-density)."""
    assert light_of() == pytest.approx(STAIN.white)
    assert light_of(0.5, 0.8) == pytest.approx(
        [240 * np.exp(-0.5 * 0.65 - 0.8 * 0.07), 238 * np.exp(-0.5 * 0.70 - 0.8 * 0.99),
         242 * np.exp(-0.5 * 0.29 - 0.8 * 0.11)], rel=1e-4
    )  # fmt: skip


def test_haematoxylin_is_blue_and_eosin_pink() -> None:
    red, green, blue = light_of(haematoxylin=1)
    assert blue > red > green
    red, green, blue = light_of(eosin=0.5)
    assert min(red, blue) > 1.3 * green


@pytest.mark.parametrize(("colour", "brightest"), [("blue", 2), ("green", 1)])
def test_ink_has_its_colour(colour: str, brightest: int) -> None:
    assert colour in INK_COLOURS
    light = light_of(ink=1, colour=colour)
    assert int(light.argmax()) == brightest
    assert light.min() < 80


def test_black_ink_is_grey_and_dark() -> None:
    light = light_of(ink=1, colour="black")
    assert np.ptp(light) < 25
    assert light.max() < 80


def test_focus_spreads_an_edge() -> None:
    dye = np.zeros((32, 32), np.float32)
    dye[:, 16:] = 1
    nothing = np.zeros_like(dye)
    row = develop(dye, nothing, nothing, "blue", STAIN, nothing + 1)[16, :, 0]
    assert row[10] > row[15] > row[16] > row[22]


def test_the_sensors_noise_is_what_it_is_said_to_be() -> None:
    pixels = scan(np.full((200, 200, 3), 120, np.float32), 2.0, np.random.default_rng(0))
    assert pixels.dtype == np.uint8
    assert pixels.mean() == pytest.approx(120, abs=0.1)
    assert pixels.std() == pytest.approx(2.0, abs=0.1)
    assert scan(np.full((4, 4, 3), 255, np.float32), 5.0, np.random.default_rng(0)).max() <= 255


def test_stains_differ_from_slide_to_slide_within_what_labs_do() -> None:
    stains = [draw_stain(np.random.default_rng(seed)) for seed in range(30)]
    strengths = np.array([[np.linalg.norm(stain.haematoxylin), np.linalg.norm(stain.eosin)] for stain in stains])
    assert (strengths.std(0) > 0.1).all()
    assert ((strengths > [0.8, 0.55]) & (strengths < [1.45, 1.25])).all()
    assert all((stain.white <= 252).all() for stain in stains)
