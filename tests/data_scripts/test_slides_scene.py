import numpy as np
import pytest

from data_scripts import slides_scene
from data_scripts.slides_lesions import mask_of
from data_scripts.slides_scene import draw_slide
from data_scripts.slides_tissue import draw_tissue


def test_a_slide_is_its_picture_its_lesions_and_their_mask() -> None:
    slide = draw_slide(768, True, np.random.default_rng(0))
    assert slide.image.shape == (768, 768, 3)
    assert slide.image.dtype == np.uint8
    assert slide.lesions
    assert np.array_equal(slide.mask, mask_of(slide.lesions, 768))
    normal = draw_slide(768, False, np.random.default_rng(0))
    assert not normal.lesions
    assert not normal.mask.any()


@pytest.mark.parametrize("size", [512, 1024])
def test_each_slide_with_tumour_has_a_lesion_that_counts(size, monkeypatch) -> None:
    """Of the first scenes one in three (512 px) or ten (1024 px) has no room for it: then another is drawn."""
    monkeypatch.setattr(slides_scene, "_set", lambda size, tissue, mask, rng: None)
    monkeypatch.setattr(slides_scene, "_draw_tile", lambda scene, top, left, height, width, rng: 0)
    for seed in range(12):
        slide = draw_slide(size, True, np.random.default_rng(seed))
        assert max(lesion.long_axis for lesion in slide.lesions) > min(200, 0.2 * size)


def test_no_room_at_all_is_told(monkeypatch) -> None:
    monkeypatch.setattr(slides_scene, "draw_lesions", lambda *_: [])
    monkeypatch.setattr(slides_scene, "draw_tissue", lambda size, rng: TISSUE)
    with pytest.raises(ValueError, match=r"slides of 512 px: 40 drawn ones had no room for a lesion; take a larger"):
        draw_slide(512, True, np.random.default_rng(0))


TISSUE = draw_tissue(512, np.random.default_rng(0))
