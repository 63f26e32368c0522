import json
from pathlib import Path

import pytest

from apps.pathology.slide_set import SlideEntry, read_slide_set, split_slides

GUIDE = [
    "training/images/normal_001.tif",
    "training/images/tumor_001.tif",
    "training/images/tumor_002.tif",
    "training/annotations/tumor_001.xml",
    "training/masks/tumor_001_mask.tif",
    "training/masks/tumor_002_mask.tif",
    "testing/images/test_001.tif",
    "testing/images/test_002.tif",
    "testing/annotations/test_002.xml",
]
CHALLENGE = [
    "training/normal/normal_001.tif",
    "training/tumor/tumor_001.tif",
    "training/tumor/tumor_002.tif",
    "training/lesion_annotations/tumor_001.xml",
    "training/lesion_annotations/tumor_002.xml",
    "testing/images/test_001.tif",
    "testing/images/test_002.tif",
    "testing/lesion_annotations/test_002.xml",
]
BUCKET = [
    "images/normal_001.tif",
    "images/tumor_001.tif",
    "images/tumor_002.tif",
    "images/test_001.tif",
    "images/test_002.tif",
    "annotations/tumor_001.xml",
    "annotations/test_002.xml",
    "masks/normal_001_mask.tif",
    "masks/tumor_002_mask.tif",
    "masks/test_001_mask.tif",
]


def lay_out(folder: Path, files: list[str]) -> Path:
    for file in files:
        (folder / file).parent.mkdir(parents=True, exist_ok=True)
        (folder / file).touch()
    return folder


@pytest.mark.parametrize("files", [GUIDE, CHALLENGE, BUCKET], ids=["guide", "challenge", "bucket"])
def test_every_layout_gives_the_same_slides(tmp_path, files):
    found = read_slide_set(lay_out(tmp_path / "set", files))
    assert [(entry.name, entry.tumour) for entry in found.training] == [
        ("normal_001", False),
        ("tumor_001", True),
        ("tumor_002", True),
    ]
    assert [(entry.name, entry.tumour) for entry in found.testing] == [("test_001", False), ("test_002", True)]
    assert (found.name, found.synthetic) == ("set", False)
    for entry in found.training + found.testing:
        assert entry.path.is_file()
        assert entry.path.stem == entry.name
        assert (entry.annotation is not None) == any(file.endswith(f"/{entry.name}.xml") for file in files)
        assert (entry.mask is not None) == any(file.endswith(f"/{entry.name}_mask.tif") for file in files)


def test_masks_receipts_and_hidden_files_are_no_slides(tmp_path):
    lay_out(tmp_path, [*GUIDE, "training/images/._tumor_001.tif", "training/images/tumor_001_mask.tif"])
    lay_out(tmp_path, ["training/images/tumor_001.tif.receipt.json", "training/images/tumor_003.tif.part"])
    assert [entry.name for entry in read_slide_set(tmp_path).training] == ["normal_001", "tumor_001", "tumor_002"]


@pytest.mark.parametrize("place", ["testing", "evaluation", "."])
def test_reference_decides_over_annotations(tmp_path, place):
    lay_out(tmp_path, GUIDE)
    (tmp_path / place).mkdir(exist_ok=True)
    (tmp_path / place / "reference.csv").write_text("test_001,Tumor,IDC,Macro\nTest_002.tif,Normal,None,None\n\n")
    assert [entry.tumour for entry in read_slide_set(tmp_path).testing] == [True, False]


def test_references_that_do_not_fit(tmp_path):
    lay_out(tmp_path, GUIDE)
    reference = tmp_path / "testing" / "reference.csv"
    reference.write_text("test_001,Tumor,IDC,Macro\n")
    with pytest.raises(ValueError, match=r"reference\.csv does not name test_002"):
        read_slide_set(tmp_path)
    reference.write_text("test_001,Tumor\ntest_002,Maybe\n")
    with pytest.raises(ValueError, match=r"reference\.csv, line 2: .*Maybe"):
        read_slide_set(tmp_path)


def test_slides_json_names_the_set(tmp_path):
    lay_out(tmp_path, GUIDE)
    (tmp_path / "slides.json").write_text(json.dumps({"name": "Phantoms", "synthetic": True}))
    found = read_slide_set(tmp_path)
    assert (found.name, found.synthetic) == ("Phantoms", True)
    (tmp_path / "slides.json").write_text("[]")
    with pytest.raises(ValueError, match=r"slides\.json: expected a name"):
        read_slide_set(tmp_path)


@pytest.mark.parametrize(
    ("more", "message"),
    [
        ("training/images/tumor_003.tif", r"tumor_003\.tif: neither an annotation \(tumor_003\.xml\) nor a mask"),
        ("training/images/case_7.tif", r"case_7\.tif: a training slide is named tumor_"),
        ("training/normal/Normal_001.tiff", r"images/normal_001\.tif.* are named alike"),
        ("testing/images/tumor_002.svs", r"tumor_002\.svs.* are named alike"),
    ],
)
def test_slides_that_are_refused(tmp_path, more, message):
    with pytest.raises(ValueError, match=message):
        read_slide_set(lay_out(tmp_path, [*GUIDE, more]))


@pytest.mark.parametrize("files", [[], ["testing/images/test_001.tif"]])
def test_folders_without_training_slides(tmp_path, files):
    with pytest.raises(FileNotFoundError, match="no training slides"):
        read_slide_set(lay_out(tmp_path / "set", files))


def entries(tumour: int, normal: int) -> list[SlideEntry]:
    names = [f"tumor_{n:03d}" for n in range(tumour)] + [f"normal_{n:03d}" for n in range(normal)]
    return [SlideEntry(name, Path(name), name.startswith("tumor"), None, None) for name in names]


@pytest.mark.parametrize(
    ("tumour", "normal", "held"), [(4, 4, (1, 1)), (8, 20, (2, 5)), (2, 3, (1, 1)), (1, 3, (0, 1)), (3, 0, (1, 0))]
)
def test_split_is_stratified(tumour, normal, held):
    whole = entries(tumour, normal)
    training, validation = split_slides(whole, 0.25, 0)
    assert (sum(each.tumour for each in validation), sum(not each.tumour for each in validation)) == held
    assert sorted(each.name for each in training + validation) == sorted(each.name for each in whole)


def test_split_depends_on_seed_and_names_alone():
    whole = entries(20, 20)
    assert split_slides(whole, 0.25, 3) == split_slides(whole[::-1], 0.25, 3)
    assert split_slides(whole, 0.25, 3) != split_slides(whole, 0.25, 4)


def test_nothing_to_hold_out():
    with pytest.raises(ValueError, match="2 training slides: to hold one out"):
        split_slides(entries(1, 1), 0.25, 0)


def test_without_reference_and_annotations_nothing_is_known_of_test_slides(tmp_path):
    lay_out(tmp_path, [*GUIDE])
    for annotation in (tmp_path / "testing").rglob("*.xml"):
        annotation.unlink()
    assert read_slide_set(tmp_path).testing == ()


def test_slides_with_tumour_that_is_not_marked_are_known_by_name_unless_they_are_drawn(tmp_path):
    names = ["training/images/Tumor_010.tif", "training/annotations/Tumor_010.xml"]
    lay_out(tmp_path, [*GUIDE, *names])
    assert [each.name for each in read_slide_set(tmp_path).training if each.part] == ["Tumor_010"]
    (tmp_path / "slides.json").write_text(json.dumps({"name": "Phantoms", "synthetic": True}))
    assert not any(each.part for each in read_slide_set(tmp_path).training)
