"""Prepare your own scans: check a folder of images and labels, and convert it to the MSD layout used for training."""

import argparse
import dataclasses
import os
import re
import shlex
import shutil
import sys
from collections import Counter, defaultdict
from collections.abc import Sequence
from functools import partial
from pathlib import Path

import nibabel as nib
import numpy as np

from medspeed.common.console import say
from medspeed.common.data.dataset import read_dataset
from medspeed.common.data.label_files import gzipped, write_label
from medspeed.common.data.volumes import read_volume
from medspeed.common.files import write_json
from medspeed.common.flags import Parser, flag_of
from medspeed.data_scripts import on_each, raw_sets, run_program, whole_folder
from medspeed.data_scripts.raw_sets import RawCase, RawSet

_MOST_AT_ONCE = 8  # a case of 512 x 512 x 1000 takes about three gigabytes while it is read
_MOST_NAMED = 5  # cases that a note names
_EXAMPLES = """examples:
  medspeed data to-msd --images scans --labels masks --names background liver --modality CT --to data/liver
  medspeed data to-msd --images scans --labels masks --names background liver --modality CT --to data/liver \\
      --values 255=1 --skip-bad --link
  medspeed data to-msd --nnunet nnUNet_raw/Dataset003_Liver --to data/liver
  medspeed data to-msd --check data/liver
"""


def _mapping(text: str) -> tuple[int, int]:
    match = re.fullmatch(r"(-?\d+)=(\d+)", text)
    if match is None:
        raise argparse.ArgumentTypeError(f"{text!r}: expected OLD=NEW in whole numbers, such as 255=1")
    return int(match[1]), int(match[2])


PARSER = Parser(description=__doc__, epilog=_EXAMPLES)
_add = PARSER.add_mutually_exclusive_group(required=True).add_argument
_IMAGES, _VALUES = "a folder of .nii.gz, .nii, .nrrd or .mha images; needs --labels", "replace label values: 255=1"
_add("--images", type=Path, metavar="DIR", help=_IMAGES)
_add("--nnunet", type=Path, metavar="DIR", help="a folder in nnU-Net's raw layout, DatasetXXX_Name")
_add("--check", type=Path, metavar="DIR", help="a folder in MSD layout: check it and write nothing")
_add = PARSER.add_argument
_add("--labels", type=Path, metavar="DIR", help="label maps for --images, paired by file name")
_add("--to", type=Path, metavar="DIR", help="new folder for the dataset in MSD layout")
_add("--names", nargs="+", metavar="NAME", help="names of the labels 0, 1, ...; background first")
_add("--modality", nargs="+", metavar="NAME", help="modality of each channel: CT, or FLAIR T1w ...")
_add("--values", nargs="+", action="extend", type=_mapping, default=[], metavar="OLD=NEW", help=_VALUES)
_add("--skip-bad", action="store_true", help="skip unusable cases and list them")
_add("--link", action="store_true", help="link unchanged files instead of copying them")


def parse_options(arguments: Sequence[str] | None = None) -> argparse.Namespace:
    """Parse the command line; a mistake, or options that do not fit together, end the program with status 2."""
    options = PARSER.parse_args(arguments)
    source = next(name for name in ("check", "nnunet", "images") if getattr(options, name))
    needed = {"check": [], "nnunet": ["to"], "images": ["labels", "names", "modality", "to"]}[source]
    every = ["labels", "to", "names", "modality", "values", "skip_bad", "link"]
    for name in {"check": every, "nnunet": ["labels", "modality"], "images": []}[source]:
        if getattr(options, name):
            why = "writes nothing" if options.check else "has its dataset.json"
            PARSER.error(f"{flag_of(name)}: drop it: --{source} {why}")
    for name in needed:
        if not getattr(options, name):
            due = ", ".join(f"--{each}" for each in needed)
            PARSER.error(f"--{name} is missing: --{source} needs {due}; see examples")
    if len(dict(options.values)) < len({*options.values}):
        PARSER.error("--values: gives a value two meanings; give each once")
    if options.names and len(options.names) < 2:
        remedy = "expected background and at least one structure: --names background liver"
        PARSER.error(f"--names {options.names[0]}: {remedy}")
    return options


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command line; return the exit status: 0, 1 where cases are bad, or 2 after one line on what to change."""
    return run_program("to_msd", partial(_convert, parse_options(arguments)))


def _convert(options: argparse.Namespace) -> int:
    """Check the cases of a set, write the good ones where asked to, and tell what there is."""
    if options.to and os.path.lexists(options.to):  # before an hour of checks, not after it
        raise FileExistsError(f"--to {options.to}: already exists; choose a new folder, or delete it")
    raw = _find(options)
    whole = [case for case in raw.cases if not case.problems]
    on_each(whole, partial(raw_sets.examine, raw=raw), "checking", _MOST_AT_ONCE)
    good = [case for case in raw.cases if not case.problems]
    for case in raw.cases:
        for problem in case.problems:
            print(f"{'skipped' if options.skip_bad else 'bad'}: {case.name}: {problem}", file=sys.stderr)
    stopped = len(good) < len(raw.cases) and not options.skip_bad
    if stopped:
        changed = "take them out of dataset.json; to change names or values, convert with --images, --labels and --to"
        rest = changed if options.check else "skip their cases with --skip-bad"
        print(f"fix these files, or {rest}", file=sys.stderr)
    if stopped or not good or (any(case.label for case in raw.cases) and not any(case.label for case in good)):
        print(f"{len(good)} of {len(raw.cases)} cases are usable; nothing was written", file=sys.stderr)
        return 1
    if options.check is None:
        _write_set(options.to, raw, good, options.link)
    _report(options.check or options.to, raw, good)
    return 0


def _find(options: argparse.Namespace) -> RawSet:
    """Return the set that the options name; what can be known to be wrong before its cases are read is a ValueError."""
    if options.check:
        return raw_sets.read_msd(options.check)
    if options.nnunet:
        raw = raw_sets.read_nnunet(options.nnunet, options.names)
    else:
        name = options.to.resolve().name
        raw = raw_sets.pair_folders(options.images, options.labels, name, options.modality, options.names)
    names = [*filter(None, raw.labels)]
    different = raw.labels[0] and 1 < len(names) == len({*filter(str.strip, names)}) <= 256
    if not different or not all(map(str.strip, raw.modality)) or not all(map(str.isprintable, names)):
        expected = "expected printable names for all, different for labels"
        raise ValueError(f"channels {raw.modality}, labels {raw.labels}: {expected}")
    for old, new in options.values:
        if new not in range(len(raw.labels)) or not raw.labels[new]:
            raise ValueError(f"--values {old}={new}: there is no label {new}; name it, too")
    return dataclasses.replace(raw, values=dict(options.values))


def _write_set(folder: Path, raw: RawSet, good: Sequence[RawCase], link: bool) -> None:
    """Write the good cases of a set; the folder appears when it is whole, or not at all.

    The problems of the other cases are kept in `dataset.json` (the key "left_out" is ours). With `link`, files that
    stay as they are become hard links (symbolic ones to another file system).
    """
    cases, tests = (sorted(case.name for case in good if bool(case.label) == labelled) for labelled in (True, False))
    listing = {
        "name": raw.name,
        "description": f"{folder.resolve().name}: converted by data_scripts/to_msd.py",
        "tensorImageSize": "4D" if len(raw.modality) > 1 else "3D",
        "modality": dict(enumerate(raw.modality)),
        "labels": {number: name for number, name in enumerate(raw.labels) if name},
        "numTraining": len(cases),
        "numTest": len(tests),
        "training": [{"image": f"./imagesTr/{n}.nii.gz", "label": f"./labelsTr/{n}.nii.gz"} for n in cases],
        "test": [f"./imagesTs/{n}.nii.gz" for n in tests],
        "left_out": [{"case": c.name, "reason": "; ".join(c.problems)} for c in raw.cases if c.problems],
    }
    with whole_folder(folder) as place:
        on_each(good, partial(_write_case, place, raw, link), "writing", _MOST_AT_ONCE)
        write_json(place / "dataset.json", listing)
        if cases:
            read_dataset(place)  # what training would refuse is not left


def _write_case(folder: Path, raw: RawSet, link: bool, case: RawCase) -> None:
    target = folder / ("imagesTr" if case.label else "imagesTs") / f"{case.name}.nii.gz"
    target.parent.mkdir(parents=True, exist_ok=True)
    if len(case.images) > 1 or not _take_over(case.images[0], target, link):
        volume = raw_sets.read_image(case, raw)
        image = nib.Nifti1Image(volume.voxels, volume.affine, dtype=volume.voxels.dtype)
        image.header.set_xyzt_units("mm")
        target.write_bytes(gzipped(image.to_bytes()))
    if case.label:
        target = folder / "labelsTr" / target.name
        target.parent.mkdir(exist_ok=True)
        if case.relabelled or not _take_over(case.label, target, link):
            label = read_volume(case.label)
            write_label(target, raw_sets.read_numbers(label, raw), label.affine)


def _take_over(source: Path, target: Path, link: bool) -> bool:
    """Copy or link a NIfTI file, whose content stays as it is; .nii is compressed. False for another format."""
    name = source.name.lower()
    if name.endswith(".nii"):
        target.write_bytes(gzipped(source.read_bytes()))
    elif name.endswith(".nii.gz") and not link:
        shutil.copyfile(source, target)
    elif name.endswith(".nii.gz"):
        try:
            target.hardlink_to(source.resolve())
        except OSError:  # another file system, or one without hard links
            target.symlink_to(source.resolve())
    return name.endswith((".nii", ".nii.gz"))


def _report(folder: Path, raw: RawSet, good: Sequence[RawCase]) -> None:
    """Print what is to be looked at, a small table, and the next commands."""
    for note, names in _notes(raw, good).items():
        more = f" and {len(names) - _MOST_NAMED} more" if len(names) > _MOST_NAMED else ""
        say(f"note: {note}: {', '.join(names[:_MOST_NAMED])}{more}")
    labelled = [case for case in good if case.label]
    orientations = Counter(case.orientation for case in good).most_common()
    rows = {
        "cases": f"{len(labelled)} labelled, {len(good) - len(labelled)} for test",
        "channels": ", ".join(raw.modality),
        "shape R, A, S": _range([case.shape for case in good]),
        "spacing mm": _range([case.spacing for case in good]),
        "orientation": ", ".join(f"{axes} {count}" for axes, count in orientations),
        "intensity": f"{min(case.least for case in good):g} to {max(case.most for case in good):g}",
    }
    for number, name in enumerate(raw.labels):
        if number and name:
            volumes = [case.volumes[number] for case in labelled if case.volumes[number]] or [0.0]
            size = f"{min(volumes):.3g} to {max(volumes):.3g} ml, median {np.median(volumes):.3g}"
            rows[f"label {number} {name}"] = f"in {np.count_nonzero(volumes)} of {len(labelled)} cases, {size}"
    say(f"{folder}: in MSD layout", "result")
    for title, text in rows.items():
        say(f"  {title:<{max(map(len, rows))}}  {text}")
    enhancing = any("enhancing" in name.lower() or name.lower() == "et" for name in raw.labels)
    tumour = enhancing and len([*filter(None, raw.labels)]) == 4  # with more, the tissues are not all of one tumour
    app = "spleen" if len(raw.modality) == 1 else "brats" if tumour else "brats --regions labels"
    if not labelled:
        tests = shlex.quote(f"{folder}/imagesTs")
        return say(f"next: medspeed infer {app.split()[0]} --model RUN --input {tests} --output masks")
    train = f"  medspeed train {app} --data {shlex.quote(str(folder))}"
    say(f"next: a two-step trial run, then the training:\n{train} --fast-dev-run\n{train}")


def _notes(raw: RawSet, good: Sequence[RawCase]) -> dict[str, list[str]]:
    """Return what is to be looked at, with the names of the cases."""
    notes: dict[str, list[str]] = defaultdict(list)
    twins: dict[tuple[str, ...], list[str]] = defaultdict(list)
    for case in good:
        twins[case.digests].append(case.name)
        for note in case.notes:
            notes[note].append(case.name)
    for names in twins.values():
        if len(names) > 1:
            notes["identical images; keep one of them, or the same scan may be in training and validation"] += names
    if raw.ignored in map(str, raw.values):
        taught = raw.labels[raw.values[int(raw.ignored)]]
        notes[f"voxels that dataset.json says to ignore become {taught}"] += [case.name for case in good if case.label]
    for number, name in enumerate(raw.labels if any(case.label for case in good) else ()):
        if number and name and not any(case.volumes[number] for case in good if case.volumes):
            notes["no case contains this label"].append(f"{number} {name}")
    return notes


def _range(figures: Sequence[tuple[float, ...]]) -> str:
    """Return the least, the median and the most of each axis; one figure where they are all alike."""
    parts = np.quantile(figures, (0, 0.5, 1), axis=0).tolist()
    least, median, most = ("x".join(f"{value:.4g}" for value in part) for part in parts)
    return least if least == most else f"{least} to {most}, median {median}"


if __name__ == "__main__":
    sys.exit(main())
