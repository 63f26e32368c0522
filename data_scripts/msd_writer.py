"""Write a set in MSD layout: the folder appears when it is whole, or not at all."""

import os
import shutil
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import nibabel as nib
from isal import igzip

from common.data.volumes import write_label
from common.files import flush_to_disk, write_json
from data_scripts.case_checks import Finding, Rules, on_each, read_any, read_image, read_numbers
from data_scripts.raw_sets import RawCase, RawSet, Reason


def write_set(
    folder: Path,
    raw: RawSet,
    good: Sequence[Finding],
    bad: Sequence[Reason],
    rules: Rules,
    link: bool = False,
    progress: bool = True,
) -> None:
    """Write the good cases of a set; a killed run leaves a hidden folder at most, which the next one removes.

    Args:
        folder: must not be there.
        raw: the set that the cases are of.
        good: what to write.
        bad: what is left out, kept with its reasons in `dataset.json`.
        rules: what label values mean.
        link: whether files that stay as they are become hard links (symbolic ones to another file system).
        progress: whether to show a progress bar.

    Raises:
        FileExistsError: the folder is there.
        OSError: the disk is full or cannot be written; nothing stays.
    """
    refuse_existing(folder)
    scratch = folder.with_name(f".{folder.name}.unfinished")
    if scratch.exists():
        shutil.rmtree(scratch)
    try:
        for part in {"imagesTr", "labelsTr", *("imagesTs" for finding in good if not finding.case.label)}:
            (scratch / part).mkdir(parents=True)
        on_each(good, lambda finding: _write_case(scratch, finding, rules, link), "writing", progress)
        write_json(scratch / "dataset.json", _listing(folder.resolve().name, raw, good, bad))
        flush_to_disk(scratch)
        scratch.rename(folder)
    finally:
        shutil.rmtree(scratch, ignore_errors=True)


def refuse_existing(folder: Path) -> None:
    """Raise FileExistsError where anything is in the place of the folder to be."""
    if os.path.lexists(folder):
        raise FileExistsError(f"--to {folder}: is there already; name a new folder, or delete that one")


def _write_case(folder: Path, finding: Finding, rules: Rules, link: bool) -> None:
    case = finding.case
    image = folder / ("imagesTr" if case.label else "imagesTs") / f"{case.name}.nii.gz"
    if len(case.images) > 1:
        _write_stack(image, case)
    else:
        _take_over(case.images[0], image, link)
    if case.label is None:
        return
    target = folder / "labelsTr" / f"{case.name}.nii.gz"
    if finding.relabelled:
        label = read_any(case.label)
        write_label(target, read_numbers(label, rules), label.affine)
    else:
        _take_over(case.label, target, link)


def _write_stack(path: Path, case: RawCase) -> None:
    """Write the channels of a case as one file [X, Y, Z, C]."""
    volume = read_image(case, len(case.images))
    image = nib.Nifti1Image(volume.voxels, volume.affine, dtype=volume.voxels.dtype)
    image.header.set_xyzt_units("mm")
    path.write_bytes(igzip.compress(image.to_bytes(), 1, mtime=0))
    flush_to_disk(path)


def _take_over(source: Path, target: Path, link: bool) -> None:
    """Copy or link a file whose content stays as it is; .nii is compressed."""
    if source.name.lower().endswith(".nii"):
        target.write_bytes(igzip.compress(source.read_bytes(), 1, mtime=0))
    elif link:
        _link(source.resolve(), target)
        return
    else:
        shutil.copyfile(source, target)
    flush_to_disk(target)


def _link(source: Path, target: Path) -> None:
    try:
        target.hardlink_to(source)
    except OSError:  # another file system, or one without hard links
        target.symlink_to(source)


def _listing(name: str, raw: RawSet, good: Sequence[Finding], bad: Sequence[Reason]) -> dict[str, Any]:
    """Return the content of `dataset.json`; the key "left_out" is ours."""
    cases = sorted(finding.case.name for finding in good if finding.case.label)
    test = sorted(finding.case.name for finding in good if not finding.case.label)
    return {
        "name": raw.name,
        "description": f"{name}: converted by data_scripts/to_msd.py",
        "tensorImageSize": "4D" if len(raw.modality) > 1 else "3D",
        "modality": {str(number): text for number, text in enumerate(raw.modality)},
        "labels": {str(number): text for number, text in enumerate(raw.labels)},
        "numTraining": len(cases),
        "numTest": len(test),
        "training": [{"image": f"./imagesTr/{n}.nii.gz", "label": f"./labelsTr/{n}.nii.gz"} for n in cases],
        "test": [f"./imagesTs/{n}.nii.gz" for n in test],
        "left_out": [{"case": n, "reason": reason} for n, reason in bad],
    }
