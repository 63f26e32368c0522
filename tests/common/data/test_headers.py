import gzip
import itertools
import zlib
from contextlib import suppress

import nibabel as nib
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from medspeed.common.data import volumes
from medspeed.common.data.headers import nifti_header
from medspeed.common.data.label_files import write_label
from medspeed.common.data.volumes import read_header, read_volume

NRRD = {
    "type": "short", "dimension": "3", "space": "left-posterior-superior", "sizes": "4 3 2", "endian": "little",
    "space directions": "(2,0,0) (0,0,1.5) (0,-0.5,0)", "encoding": "raw", "space origin": "(10,20,30)",
}  # fmt: skip
META = {
    "ObjectType": "Image", "NDims": "3", "BinaryData": "True", "CompressedData": "False", "ElementSpacing": "2 1.5 0.5",
    "TransformMatrix": "1 0 0 0 0 1 0 -1 0", "Offset": "10 20 30", "DimSize": "4 3 2", "ElementType": "MET_SHORT",
    "ElementDataFile": "LOCAL",
}  # fmt: skip
# X runs to the patient's left, Y upwards, Z to the front; L is -R, and P is -A.
AFFINE = np.array([[-2.0, 0, 0, -10], [0, 0, 0.5, -20], [0, 1.5, 0, 30], [0, 0, 0, 1]])
VOXELS = np.arange(24, dtype="<i2").reshape((4, 3, 2), order="F")
BODY = VOXELS.tobytes("F")
AXES = [
    np.eye(3)[:, list(order)] * signs
    for order in itertools.permutations(range(3))
    for signs in itertools.product((-1, 1), repeat=3)
]
OBLIQUE = np.array([[0.36, 0.48, -0.8], [-0.8, 0.6, 0.0], [0.48, 0.64, 0.6]])  # a rotation


def nrrd(path, body=BODY, **fields):
    """Write an NRRD file with other fields; None leaves one out, and an underscore is a space."""
    content = NRRD | {name.replace("_", " "): value for name, value in fields.items()}
    lines = [f"{name}: {value}" for name, value in content.items() if value is not None]
    path.write_bytes("\n".join(["NRRD0005", "# a comment", *lines, "key:=value", "", ""]).encode() + body)
    return path


def meta(path, body=BODY, **fields):
    content = {**META, **fields}
    last = content.pop("ElementDataFile")
    lines = [f"{name} = {value}" for name, value in content.items() if value is not None]
    path.write_bytes("\n".join([*lines, f"ElementDataFile = {last}", ""]).encode() + body)
    return path


@pytest.fixture
def itk():
    return pytest.importorskip("SimpleITK", reason="needs SimpleITK: pip install SimpleITK")


@pytest.fixture(params=[nrrd, meta])
def written(request, tmp_path):
    """Return what writes a file of either format, with a body and with other fields."""
    ending = ".nrrd" if request.param is nrrd else ".mha"
    return lambda *body, **fields: request.param(tmp_path / f"scan{ending}", *body, **fields)


def test_a_volume_lies_where_the_header_says(written):
    volume = read_volume(written())
    assert np.array_equal(volume.voxels, VOXELS)
    assert volume.voxels.dtype == np.dtype(np.int16)
    assert volume.voxels.flags.f_contiguous
    assert volume.voxels.flags.writeable
    assert np.array_equal(volume.affine, AFFINE)
    header = read_header(volume.path)
    assert header.shape == (4, 3, 2)
    assert np.array_equal(header.affine, AFFINE)


@pytest.mark.parametrize(
    ("space", "flips"), [("RAS", (1, 1, 1)), ("left-anterior-superior", (-1, 1, 1)), ("LPS", (-1, -1, 1))]
)
def test_an_nrrd_says_in_which_space(tmp_path, space, flips):
    affine = read_volume(nrrd(tmp_path / "a.nrrd", space=space)).affine
    lps = np.diag([-1, -1, 1, 1]) @ AFFINE
    assert np.array_equal(affine, np.diag([*flips, 1]) @ lps)


def test_compressed_and_big_endian_voxels(tmp_path):
    big = VOXELS.astype(">i2").tobytes("F")
    packed = nrrd(tmp_path / "a.nrrd", gzip.compress(big), endian="big", encoding="gzip")
    deflated = meta(tmp_path / "a.mha", zlib.compress(big), BinaryDataByteOrderMSB="True", CompressedData="True")
    for path in (packed, deflated):
        assert np.array_equal(read_volume(path).voxels, VOXELS)
        assert read_volume(path).voxels.dtype == np.dtype(np.int16)


def test_a_field_without_a_value_leaves_the_next_line_alone(tmp_path):
    big, blank = VOXELS.astype(">i2").tobytes("F"), " " * 60_000  # which once took half a minute
    turned = nrrd(tmp_path / "a.nrrd", big, content="\nendian: BIG", endian=None, x=f"\nx{blank}y")
    assert np.array_equal(read_volume(turned).voxels, VOXELS)
    comment = f"\nTransformMatrix = {META['TransformMatrix']}\nx{blank}y"
    assert np.array_equal(read_header(meta(tmp_path / "a.mha", TransformMatrix=None, Comment=comment)).affine, AFFINE)


def test_an_axis_of_one_channel_is_none(tmp_path):
    listed = nrrd(tmp_path / "a.nrrd", sizes="1 4 3 2", space_directions=f"none {NRRD['space directions']}")
    long = meta(tmp_path / "a.mha", NDims="4", DimSize="4 3 2 1", ElementSpacing="2 1.5 0.5 1",
                TransformMatrix="1 0 0 0 0 0 1 0 0 -1 0 0 0 0 0 1", Offset="10 20 30 0")  # fmt: skip
    for path in (listed, long):
        assert np.array_equal(read_volume(path).voxels, VOXELS)
        assert read_header(path).shape == (4, 3, 2)


def test_channels_come_last_wherever_they_lie(tmp_path):
    channels = np.stack([VOXELS, VOXELS + 100], axis=3)
    first = np.moveaxis(channels, 3, 0)
    paths = [
        nrrd(tmp_path / "first.nrrd", first.tobytes("F"), sizes="2 4 3 2", dimension="4",
             space_directions=f"none {NRRD['space directions']}"),
        nrrd(tmp_path / "last.nrrd", channels.tobytes("F"), sizes="4 3 2 2", dimension="4",
             space_directions=f"{NRRD['space directions']} none"),
        meta(tmp_path / "first.mha", first.tobytes("F"), ElementNumberOfChannels="2"),
        meta(tmp_path / "last.mha", channels.tobytes("F"), NDims="4", DimSize="4 3 2 2", ElementSpacing="2 1.5 0.5 1",
             TransformMatrix="1 0 0 0 0 0 1 0 0 -1 0 0 0 0 0 1", Offset="10 20 30 0"),
    ]  # fmt: skip
    for path in paths:
        volume = read_volume(path, channels=2)
        assert np.array_equal(volume.voxels, channels)
        assert np.array_equal(volume.affine, AFFINE)
        assert np.array_equal(read_volume(path, channels=2, first_only=True).voxels, channels[..., :1])
        with pytest.raises(ValueError, match="expected 3-D, one channel, found"):
            read_volume(path)


@pytest.mark.parametrize("dtype", ["i1", "u1", "i2", "u2", "i4", "u4", "i8", "f4", "f8"])
@pytest.mark.parametrize("ending", [".nrrd", ".mha"])
@pytest.mark.parametrize("packed", [False, True])
def test_reading_gives_what_simpleitk_wrote(tmp_path, itk, dtype, ending, packed):
    voxels = np.random.default_rng(0).integers(0, 100, (5, 4, 3)).astype(dtype)
    image = itk.GetImageFromArray(voxels.T)
    image.SetSpacing((0.7, 0.8, 3.1))
    image.SetOrigin((-120.5, 33.25, 1000.125))
    image.SetDirection(OBLIQUE.ravel().tolist())
    itk.WriteImage(image, str(tmp_path / f"a{ending}"), packed)
    volume = read_volume(tmp_path / f"a{ending}")
    assert volume.voxels.dtype == dtype
    assert np.array_equal(volume.voxels, voxels)
    due = np.eye(4)
    due[:3, :3], due[:3, 3] = OBLIQUE * (0.7, 0.8, 3.1), (-120.5, 33.25, 1000.125)
    np.testing.assert_allclose(volume.affine, np.diag([-1, -1, 1, 1]) @ due, rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize("ending", [".nrrd", ".mha"])
def test_a_scan_has_one_affine_in_every_format_to_the_last_bit(tmp_path, itk, ending):
    """Its axes in any order and direction, or oblique; as SimpleITK converts it from NIfTI."""
    voxels = np.zeros((4, 3, 2), np.uint8)
    for number, turn in enumerate([*AXES, OBLIQUE]):
        affine = np.eye(4)
        affine[:3, :3], affine[:3, 3] = turn * (0.78125, 0.7, 2.5), (-101.3, 55.7, -803.9)
        write_label(tmp_path / f"{number}.nii.gz", voxels, affine)
        itk.WriteImage(itk.ReadImage(str(tmp_path / f"{number}.nii.gz")), str(tmp_path / f"{number}{ending}"))
        nifti, other = (read_volume(tmp_path / f"{number}{each}") for each in (".nii.gz", ending))
        assert np.array_equal(other.affine, nifti.affine)
        assert other.voxels.shape == (4, 3, 2)


@pytest.mark.parametrize("ending", [".nrrd", ".mha"])
@pytest.mark.parametrize("turn", [*AXES[::7], OBLIQUE], ids=str)
def test_a_label_is_read_back_by_us_and_by_simpleitk(tmp_path, itk, ending, turn, monkeypatch):
    monkeypatch.setattr("medspeed.common.data.label_files._MEMBER", 17)  # several gzip members
    labels = np.asfortranarray(np.random.default_rng(0).integers(0, 4, (5, 4, 3)).astype(np.uint8))
    affine = np.eye(4, dtype=np.float64)
    affine[:3, :3], affine[:3, 3] = turn * (0.75, 1.25, 3.0), (-101.5, 55.25, -803.0)
    path = tmp_path / f"a{ending}"
    write_label(path, labels, affine)
    ours, theirs = read_volume(path), itk.ReadImage(str(path))
    assert np.array_equal(ours.voxels, labels)
    np.testing.assert_allclose(ours.affine, affine, rtol=1e-6)
    assert np.array_equal(itk.GetArrayFromImage(theirs).T, labels)
    for index in ((0, 0, 0), (4, 0, 0), (0, 3, 0), (0, 0, 2)):
        due = affine[:3] @ (*index, 1) * (-1, -1, 1)
        np.testing.assert_allclose(theirs.TransformIndexToPhysicalPoint(index), due, atol=1e-6)
    assert [each.name for each in tmp_path.iterdir()] == [path.name]


def test_a_sheared_label_comes_back(tmp_path):
    sheared = np.array([[1.0, 0, 0, 5], [0, 1.0, 0.5, -3], [0, 0, 2.0, 7], [0, 0, 0, 1]])
    for ending in (".nrrd", ".mha"):
        write_label(tmp_path / f"a{ending}", np.ones((2, 2, 2), np.uint8), sheared)
        np.testing.assert_allclose(read_volume(tmp_path / f"a{ending}").affine, sheared, rtol=1e-6)


@pytest.mark.parametrize(
    ("fields", "said"),
    [
        ({"space": None}, "its header has no 'space': save it as .nii.gz"),
        ({"space": "scanner-xyz"}, "space scanner-xyz"),
        ({"space_directions": "(1,0,0) (0,1,0)"}, "expected 3 vectors"),
        ({"space_directions": "(1,0) (0,1) (0,0)"}, "expected 3 numbers"),
        ({"space_directions": "(1,0,0) (1,0,0) (0,0,1)"}, "singular"),
        ({"space_directions": "(nan,0,0) (0,1,0) (0,0,1)"}, "not finite"),
        ({"space_directions": "(1e300,0,0) (0,1,0) (0,0,1)"}, "not finite"),
        ({"space_units": '"m" "m" "m"'}, "lengths in m, expected mm"),
        ({"space_origin": "(1e9,0,0)"}, "expected within 100000 mm"),
        ({"sizes": "4 3"}, "sizes 4 3 for 3 space directions"),
        ({"sizes": "4 3 0"}, r"sizes \(4, 3, 0\)"),
        ({"sizes": "4 3 -2"}, r"sizes \(4, 3, -2\)"),
        ({"sizes": "4 3 two"}, "invalid literal"),
        ({"sizes": "4000000 3000000 2000000"}, "the file can hold at most 48: truncated, or a wrong header"),
        ({"sizes": "4 3 3"}, "the file can hold at most 48"),
        ({"type": "block"}, "voxels of type block"),
        ({"encoding": "bzip2"}, "encoding bzip2"),
        ({"encoding": "gzip"}, "damaged"),
        ({"data_file": "/etc/hostname"}, "its voxels lie in another file"),
        ({"byte_skip": "-1"}, "voxels do not follow its header"),
    ],
)
def test_an_nrrd_header_that_cannot_be_meant_is_refused_in_one_line(tmp_path, fields, said):
    refused(nrrd(tmp_path / "a.nrrd", **fields), said)


@pytest.mark.parametrize(
    ("fields", "said"),
    [
        ({"DimSize": None}, "its header has no 'dimsize': save it as .nii.gz"),
        ({"DimSize": "4 3"}, "DimSize 4 3 with 1 channels"),
        ({"DimSize": "4 3 0"}, r"sizes \(4, 3, 0\)"),
        ({"DimSize": "4000000 3000000 2000000"}, "the file can hold at most 48"),
        ({"ElementSpacing": "1 1"}, "expected 3 numbers"),
        ({"ElementSpacing": "0 1 1"}, "singular"),
        ({"TransformMatrix": "1 0 0 0 1 0 0 0"}, "expected 9 numbers"),
        ({"ElementType": "MET_STRING"}, "voxels of type STRING"),
        ({"ElementDataFile": "/etc/hostname"}, "ElementDataFile /etc/hostname, HeaderSize 0: its voxels"),
        ({"BinaryData": "False"}, "its voxels are text"),
        ({"CompressedData": "True"}, "damaged"),
        ({"ElementNumberOfChannels": "2000000000"}, "found"),
    ],
)
def test_a_metaimage_header_that_cannot_be_meant_is_refused_in_one_line(tmp_path, fields, said):
    refused(meta(tmp_path / "a.mha", **fields), said)


def refused(path, said):
    with pytest.raises(ValueError, match=said) as caught:
        read_volume(path)
    assert str(caught.value).startswith(str(path))
    assert "\n" not in str(caught.value)


def test_what_is_no_such_file_is_named(tmp_path):
    for name in ("a.nrrd", "a.mha"):
        (tmp_path / name).write_bytes(b"\0" * 100_000)
        refused(tmp_path / name, "is not a")
        with pytest.raises(FileNotFoundError, match="no such file"):
            read_volume(tmp_path / f"none{name}")
    (tmp_path / "a.mhd").write_text("NDims = 3")
    refused(tmp_path / "a.mhd", "save it as one of these")


def test_memory_is_bounded(written, monkeypatch):
    monkeypatch.setattr(volumes, "free_memory", lambda *_: 40)
    monkeypatch.setattr(volumes, "ALWAYS_TRIED", 0)
    with pytest.raises(ValueError, match=r"declares 48 bytes of voxels .*, 40 bytes of memory are free"):
        read_volume(written())


@settings(max_examples=60, deadline=None)
@given(data=st.data())
def test_no_cut_and_no_flipped_byte_of_compressed_voxels_goes_unnoticed(tmp_path_factory, data):
    """As it does in ITK's reader of MetaImage."""
    path = tmp_path_factory.mktemp("damaged") / f"a{data.draw(st.sampled_from(['.nrrd', '.mha']))}"
    labels = np.asfortranarray(np.random.default_rng(1).integers(0, 2, (9, 8, 7)).astype(np.uint8))
    write_label(path, labels, np.eye(4))
    content = bytearray(path.read_bytes())
    start = len(content) - len(content.split(b"\n\n" if path.suffix == ".nrrd" else b"LOCAL\n", 1)[1])
    place = start + data.draw(st.integers(0, 999)) * (len(content) - start) // 1000  # isal's length varies
    if data.draw(st.booleans()):
        del content[place:]
    else:
        content[place] ^= data.draw(st.integers(1, 255))
    path.write_bytes(bytes(content))
    with suppress(ValueError):
        assert np.array_equal(read_volume(path).voxels, labels)  # gzip's header has bytes that mean nothing


@pytest.mark.parametrize("codes", [(0, 0), (0, 1), (1, 0)])
def test_negative_voxel_sizes_are_read_as_nibabel_reads_them(codes, tmp_path):
    image = nib.Nifti1Image(np.zeros((4, 5, 6), np.uint8), np.diag([2.0, 3.0, 4.0, 1.0]))
    image.header["sform_code"], image.header["qform_code"] = codes
    content = bytearray(image.to_bytes())
    content[80:84] = np.float32(-2).tobytes()  # pixdim[1]
    (tmp_path / "a.nii").write_bytes(content)
    assert np.array_equal(nifti_header(tmp_path / "a.nii").affine, nib.load(tmp_path / "a.nii").affine)


def test_channels_are_read_as_simpleitk_writes_vectors(tmp_path):
    voxels = np.arange(4 * 5 * 6 * 2, dtype=np.int16).reshape(4, 5, 6, 1, 2)
    nib.save(nib.Nifti1Image(voxels, np.eye(4)), tmp_path / "a.nii.gz")
    assert np.array_equal(read_volume(tmp_path / "a.nii.gz", 2).voxels, voxels[:, :, :, 0])
