from data_scripts.slide_sets import Entry, entries


def test_half_of_the_slides_have_tumour() -> None:
    slides = entries(5, 4)
    assert [entry.stem for entry in slides] == [
        "normal_001", "normal_002", "tumor_001", "tumor_002", "tumor_003",
        "test_001", "test_002", "test_003", "test_004"
    ]  # fmt: skip
    assert [entry.tumour for entry in slides] == [False, False, True, True, True, True, False, True, False]


def test_every_third_slide_is_compressed_without_loss() -> None:
    assert [entry.compression for entry in entries(0, 6)] == ["jpeg", "jpeg", "deflate"] * 2


def test_a_slide_is_drawn_alike_whatever_else_is() -> None:
    few, many = entries(2, 2), entries(8, 6)
    for entry in few:
        assert entry in many
        assert entry.generator(3).integers(2**31) == Entry(**vars(entry)).generator(3).integers(2**31)
    drawn = {entry.generator(seed).integers(2**62) for entry in many for seed in (0, 1)}
    assert len(drawn) == 2 * len(many)
