import json
from pathlib import Path

import pytest

from medspeed.apps.pathology.slides.camelyon import read_slide_set

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
        there = [file for ending in (".xml", "_mask.tif") for file in files if file.endswith(f"/{entry.name}{ending}")]
        assert entry.marks == (tmp_path / "set" / there[0] if there else None)  # an annotation before a mask


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


def test_the_header_of_the_public_bucket_s_reference_is_passed_over(tmp_path):
    lay_out(tmp_path, GUIDE)
    rows = "image,type,center,class\ntest_001.tif,tumor,0,macro\ntest_002.tif,normal,1,negative\n"
    (tmp_path / "testing" / "reference.csv").write_text(rows)
    assert [entry.tumour for entry in read_slide_set(tmp_path).testing] == [True, False]


def test_references_that_do_not_fit(tmp_path):
    lay_out(tmp_path, GUIDE)
    reference = tmp_path / "testing" / "reference.csv"
    reference.write_text("test_001,Tumor,IDC,Macro\n")
    with pytest.raises(ValueError, match=r"reference\.csv does not list test_002"):
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
    with pytest.raises(ValueError, match=r"slides\.json: expected a JSON object"):
        read_slide_set(tmp_path)


@pytest.mark.parametrize(
    ("more", "message"),
    [
        ("training/images/tumor_003.tif", r"tumor_003\.tif: neither an annotation \(tumor_003\.xml\) nor a mask"),
        ("training/images/case_7.tif", r"case_7\.tif: a training slide must be named tumor_"),
        ("training/normal/Normal_001.tiff", r"images/normal_001\.tif.* have the same name"),
        ("testing/images/tumor_002.svs", r"tumor_002\.svs.* have the same name"),
    ],
)
def test_slides_that_are_refused(tmp_path, more, message):
    with pytest.raises(ValueError, match=message):
        read_slide_set(lay_out(tmp_path, [*GUIDE, more]))


@pytest.mark.parametrize("files", [[], ["testing/images/test_001.tif"]])
def test_folders_without_training_slides(tmp_path, files):
    with pytest.raises(FileNotFoundError, match="no training slides"):
        read_slide_set(lay_out(tmp_path / "set", files))


def test_without_reference_and_annotations_nothing_is_known_of_test_slides(tmp_path):
    lay_out(tmp_path, [*GUIDE])
    for annotation in (tmp_path / "testing").rglob("*.xml"):
        annotation.unlink()
    assert read_slide_set(tmp_path).testing == ()


def test_slides_with_tumour_that_is_not_marked_are_known_by_name_unless_the_set_has_another_name(tmp_path):
    names = ["training/images/Tumor_010.tif", "training/annotations/Tumor_010.xml"]
    lay_out(tmp_path, [*GUIDE, *names])
    assert [each.name for each in read_slide_set(tmp_path).training if each.part] == ["Tumor_010"]
    (tmp_path / "slides.json").write_text(json.dumps({"name": "Camelyon16"}))
    assert any(each.part for each in read_slide_set(tmp_path).training)
    (tmp_path / "slides.json").write_text(json.dumps({"name": "Own slides"}))
    assert not any(each.part for each in read_slide_set(tmp_path).training)


def test_slides_of_every_suffix_that_is_scanned_train(tmp_path):
    names = ["normal_001.ndpi", "normal_002.mrxs", "tumor_001.svs", "tumor_002.TIFF"]
    lay_out(tmp_path, [f"training/images/{name}" for name in names])
    lay_out(tmp_path, [f"training/annotations/tumor_00{number}.xml" for number in (1, 2)])
    assert [entry.path.name for entry in read_slide_set(tmp_path).training] == names


def test_a_test_slide_that_is_marked_in_part_is_known_by_name(tmp_path):
    lay_out(tmp_path, [*GUIDE, "testing/images/Test_114.tif", "testing/annotations/Test_114.xml"])
    assert [each.name for each in read_slide_set(tmp_path).testing if each.part] == ["Test_114"]


def test_a_mask_alone_does_not_say_whether_a_test_slide_has_tumour(tmp_path):
    lay_out(tmp_path, [*GUIDE, "testing/masks/test_001_mask.tif"])
    with pytest.raises(ValueError, match=r"reference\.csv: missing, and test_001_mask\.tif alone .*NAME,Tumor"):
        read_slide_set(tmp_path)
    (tmp_path / "testing" / "reference.csv").write_text("test_001,Tumor\ntest_002,Tumor\n")
    assert [each.tumour for each in read_slide_set(tmp_path).testing] == [True, True]


@pytest.mark.parametrize(
    ("text", "said"),
    [
        (b"a" * 200_000 + b",Tumor\n", "expected CSV text in UTF-8 .field larger"),
        (b"\xff\xfe\0", "expected CSV text in UTF-8 "),
        (b"test_001,Normal\ntest_002,Tumor\ntest_001,Tumor\n", "line 3: an earlier line disagrees about 'test_001'"),
    ],
)
def test_a_damaged_reference_is_named_in_one_line(tmp_path, text, said):
    folder = lay_out(tmp_path / "set", GUIDE)
    (folder / "testing" / "reference.csv").write_bytes(text)
    with pytest.raises(ValueError, match=rf"reference\.csv, .*{said}|reference\.csv, {said}"):
        read_slide_set(folder)


@pytest.mark.parametrize("text", ["null", '{"name": 5}', '{"synthetic": "no"}', "[" * 100_000])
def test_a_damaged_list_of_slides_is_named_in_one_line(tmp_path, text):
    folder = lay_out(tmp_path / "set", GUIDE)
    (folder / "slides.json").write_text(text)
    with pytest.raises(ValueError, match=r"slides\.json: .*remove"):
        read_slide_set(folder)
