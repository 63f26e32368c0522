import numpy as np

from data_scripts.slides_tissue import draw_tissue

SIZE = 1536
TISSUES = [draw_tissue(SIZE, np.random.default_rng(seed)) for seed in range(12)]


def test_shares_are_shares_and_kinds_exclude_each_other() -> None:
    for tissue in TISSUES:
        parts = (tissue.stroma, tissue.sinus, tissue.follicle, tissue.mantle, tissue.density, tissue.fold)
        for part in parts:
            assert part.min() >= 0
            assert part.max() <= 1
        assert (tissue.stroma + tissue.sinus + tissue.follicle).max() <= 1 + 1e-5


def test_the_node_lies_in_the_tissue_and_fat_between_them() -> None:
    for tissue in TISSUES:
        assert (tissue.node_depth[tissue.depth < -10] < 0).all()
        assert not tissue.room()[tissue.node_depth <= 25].any()
    assert any(len(tissue.vacuoles) > 10 for tissue in TISSUES)


def test_there_is_glass_and_tissue_on_each_slide() -> None:
    shares = [float((tissue.depth > 0).mean()) for tissue in TISSUES]
    assert min(shares) > 0.15
    assert max(shares) < 0.95


def test_some_slides_have_folds_and_some_pen_marks() -> None:
    folds = [bool((tissue.fold > 0.3).any()) for tissue in TISSUES]
    inks = [bool((tissue.ink > 0.3).any()) for tissue in TISSUES]
    for found in (folds, inks):
        assert 0 < sum(found) < len(found)


def test_fat_cells_have_the_size_of_fat_cells() -> None:
    radii = np.concatenate([tissue.vacuoles[:, 2] for tissue in TISSUES]) / 2  # um
    assert radii.min() > 25
    assert radii.max() < 50
