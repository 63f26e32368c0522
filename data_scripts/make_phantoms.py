"""Generate phantom datasets: synthetic scans in MSD layout with exact labels."""

import hashlib
import sys
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any, get_args

import nibabel as nib
import numpy as np
import numpy.typing as npt

from medspeed.common.data.dataset import by_number
from medspeed.common.data.label_files import gzipped
from medspeed.common.data.volumes import read_volume
from medspeed.common.files import atomic_path, read_object, sha256_of
from medspeed.common.flags import Parser
from medspeed.data_scripts import fill, phantoms, run_program
from medspeed.data_scripts.painting import Random, Scan, Size, read_anatomy

Drawing = Callable[[Random], Scan]

CT_VERSION = 2  # raised when the same parameters give other scans
MRI_VERSION = 2  # likewise
_MOST_AT_ONCE = 16  # a case of MSD's size takes about half a gigabyte while it is made
_KINDS = {
    "ct": (read_anatomy("abdomen.yaml"), phantoms.draw_abdomen, CT_VERSION),
    "mri": (read_anatomy("head.yaml"), phantoms.draw_head, MRI_VERSION),
}
_EXAMPLES = """examples:
  medspeed data make-phantoms ct --to data/phantoms --cases 20
  medspeed data make-phantoms ct --to data/large --cases 4 --size msd --seed 1
  medspeed data make-phantoms ct --to data/around_labels --labels data/Task09_Spleen
  medspeed data make-phantoms mri --to data/heads --cases 20
"""
_AROUND = "draw a CT around each label volume (or the first N) in this folder: MSD layout or .nii.gz files"
PARSER = Parser(description=__doc__, epilog=_EXAMPLES)
_kinds = PARSER.add_subparsers(dest="kind", required=True)
for _kind, (_anatomy, *_) in _KINDS.items():
    _text = f"Make {_anatomy['what']}. Same seed, same bytes."
    _one = _kinds.add_parser(_kind, help=_anatomy["what"], description=_text, epilog=_EXAMPLES)
    _to = "new or empty folder for the dataset"
    _one.add_argument("--to", dest="folder", type=Path, required=True, metavar="DIR", help=_to)
    _one.add_argument("--cases", type=int, required=_kind == "mri", metavar="N", help="number of scans")
    _one.add_argument("--seed", type=int, default=0, metavar="S", help="same seed, same bytes (default 0)")
    _sized, _sizes = _one.add_mutually_exclusive_group(), "small: {small} (default); msd: {msd}".format(**_anatomy)
    _sized.add_argument("--size", choices=get_args(Size), default="small", help=_sizes)
    if _kind == "ct":  # which take their size from the labels
        _sized.add_argument("--labels", type=Path, metavar="FOLDER", help=_AROUND)


def make_phantoms(
    kind: str, folder: Path, cases: int | None, size: Size = "small", labels: Path | None = None, seed: int = 0
) -> Path:
    """Make a set of synthetic scans in MSD layout; return its folder.

    The same parameters give the same bytes, on any number of cores, with the same packages on the same kind of
    processor; each case depends on (seed, its index) alone. A set that is already there is left as it is, an
    unfinished one is finished. ValueError or FileNotFoundError where a parameter cannot be used, or `folder` holds
    something else.

    Args:
        kind: "ct", abdomens with a labelled spleen; or "mri", heads [X, Y, Z, 4] int16 with labelled brain tumours,
            skull-stripped: 0 outside the brain, above 0 inside. Channels and label numbers are those of MSD Task01.
        folder: where the set goes.
        cases: how many; with `labels`, the first so many by name, None for all.
        size: "small" (CT: about 96 x 96 x 64 voxels of 3.5 mm, MRI: 72 x 88 x 64 of 2.3 mm) or "msd" (512 x 512 x 50 to
            168, as in MSD Task09; 240 x 240 x 155 of 1 mm, as in Task01).
        labels: a folder in MSD layout, or of .nii.gz label volumes: each gets a CT on its own grid around it.
        seed: draws everything.
    """
    if labels is not None:
        assert kind == "ct", kind
        return _around_labels(folder, cases, labels, seed)
    if cases is None:
        raise ValueError("--cases is missing: give the number of phantoms, such as --cases 20")
    anatomy, draw, version = _KINDS[kind]
    parameters = {"kind": kind, "version": version, "cases": cases, "size": size, "seed": seed}
    scans = {f"phantom_{index:03d}": partial(draw, size) for index in range(cases)}
    return write_set(folder, scans, anatomy["about"], parameters)


def _around_labels(folder: Path, cases: int | None, labels: Path, seed: int) -> Path:
    """Make a CT around each of the first label volumes of a folder, under the name and licence of the labels."""
    if not labels.is_dir():
        raise FileNotFoundError(f"--labels {labels}: no such folder; expected one with labelsTr or .nii.gz labels")
    held = labels / "labelsTr" if (labels / "labelsTr").is_dir() else labels
    files = sorted(held.glob("[!.]*.nii.gz"))  # MSD's archives hold a hidden twin of each file, written by a desktop
    if not files:
        raise FileNotFoundError(f"--labels {labels}: no .nii.gz files in {held}; pass the folder that contains them")
    cases = len(files) if cases is None else cases
    if cases > len(files):
        raise ValueError(f"--cases {cases}: {labels} contains {len(files)} label volumes; use at most that many")
    files = files[: max(cases, 0)]
    digest = hashlib.sha256("".join(f"{path.name} {sha256_of(path)}\n" for path in files).encode()).hexdigest()
    own = labels / "dataset.json"
    given = read_object(own, "fix it or remove it") if own.is_file() else {}
    if "labels" not in given:
        highest = max((int(_read_label(path)[0].max()) for path in files), default=1)
        given["labels"] = {"0": "background", "1": "spleen"} | {str(n): f"label_{n}" for n in range(2, highest + 1)}
    by_number(given["labels"], "labels", own)
    name = given.get("name", labels.name)
    about = {
        "name": name,
        "description": f"Synthetic CT drawn around real labels; no patient was scanned, results are none of {name}",
        "reference": f"labels: {given.get('reference', labels.name)}; images: medspeed, data_scripts/make_phantoms.py",
        "licence": f"that of the labels ({given.get('licence', 'see their source')}); not for clinical use",
        "modality": {"0": "CT"},
        "labels": given["labels"],
    }
    parameters = {"kind": "ct", "version": CT_VERSION, "cases": cases, "labels_sha256": digest, "seed": seed}

    def draw(path: Path, rng: Random) -> Scan:
        return phantoms.scan_around(*_read_label(path), rng)

    scans = {path.name.removesuffix(".nii.gz"): partial(draw, path) for path in files}
    return write_set(folder, scans, about, parameters)


def _read_label(path: Path) -> tuple[npt.NDArray[np.uint8], npt.NDArray[np.float64]]:
    """Return a label volume [X, Y, Z] uint8 and its affine to RAS mm."""
    volume = read_volume(path)
    label: npt.NDArray[np.uint8] = volume.voxels.astype(np.uint8)
    if not np.array_equal(label, volume.voxels):
        raise ValueError(f"{path}: contains values other than the integers 0 to 255; is it a label volume?")
    return label, volume.affine


def write_set(folder: Path, scans: Mapping[str, Drawing], about: dict[str, Any], parameters: dict[str, Any]) -> Path:
    """Write the cases that are missing, each as it is drawn, then `dataset.json`."""
    if not scans:
        raise ValueError(f"--cases {parameters['cases']}: must be at least 1")
    pairs = [{"image": f"./imagesTr/{name}.nii.gz", "label": f"./labelsTr/{name}.nii.gz"} for name in scans]
    files = [(folder / pair["image"], folder / pair["label"]) for pair in pairs]
    axes = "4D" if len(about["modality"]) > 1 else "3D"
    lists = {"tensorImageSize": axes, "numTraining": len(pairs), "numTest": 0, "training": pairs, "test": []}

    def make(index: int) -> None:
        scan = [*scans.values()][index](np.random.default_rng([parameters["seed"], index]))
        for path, voxels in zip(files[index], (scan.image, scan.label), strict=True):
            image = nib.Nifti1Image(voxels, scan.affine)
            image.header.set_xyzt_units("mm")
            image.header["descrip"] = b"synthetic phantom, not a patient"
            with atomic_path(path) as part:  # bytes that depend on no time and no name
                part.write_bytes(gzipped(image.to_bytes()))

    return fill(folder / "dataset.json", parameters, files, make, lambda: about | lists, _MOST_AT_ONCE)


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command line; return the exit status."""
    options = vars(PARSER.parse_args(arguments))
    told = f"synthetic {options['kind'].upper()} (MSD layout), seed {options['seed']}; not for clinical use"
    return run_program("make_phantoms", lambda: f"{make_phantoms(**options)}: {told}")


if __name__ == "__main__":
    sys.exit(main())
