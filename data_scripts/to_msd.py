"""Bring your own scans: check a folder of images and labels, and put it into the layout that training takes (MSD's)."""

import argparse
import re
import shlex
import sys
from collections import Counter, defaultdict
from collections.abc import Sequence
from pathlib import Path

import numpy as np

from data_scripts.case_checks import Facts, Finding, Rules, examine_all, find_twins
from data_scripts.msd_writer import refuse_existing, write_set
from data_scripts.raw_sets import RawSet, Reason, pair_folders, read_msd, read_nnunet

_MOST_NAMED = 5  # cases that a note names
_EXAMPLES = """examples:
  python data_scripts/to_msd.py --images scans --labels masks --names background liver --modality CT --to data/liver
  python data_scripts/to_msd.py --images scans --labels masks --names background liver --modality CT --to data/liver \\
      --values 255=1 --skip_bad --link
  python data_scripts/to_msd.py --nnunet nnUNet_raw/Dataset003_Liver --to data/liver
  python data_scripts/to_msd.py --check data/liver
"""


def parse_options(arguments: Sequence[str] | None = None) -> argparse.Namespace:
    """Parse the command line; a mistake ends the program with status 2."""
    parser = argparse.ArgumentParser(
        description=__doc__, epilog=_EXAMPLES, formatter_class=argparse.RawDescriptionHelpFormatter, allow_abbrev=False
    )
    source = parser.add_mutually_exclusive_group(required=True)
    source.add_argument("--images", type=Path, metavar="DIR", help="a folder of .nii.gz or .nii images; needs --labels")
    source.add_argument("--nnunet", type=Path, metavar="DIR", help="a folder in nnU-Net's raw layout, DatasetXXX_Name")
    source.add_argument("--check", type=Path, metavar="DIR", help="a folder in MSD layout: looked at, nothing written")
    parser.add_argument("--labels", type=Path, metavar="DIR", help="the label maps of --images, paired by file name")
    parser.add_argument("--to", type=Path, metavar="DIR", help="new folder for the set in MSD layout")
    parser.add_argument("--names", nargs="+", metavar="NAME", help="of the label numbers 0, 1, ...: background first")
    parser.add_argument("--modality", nargs="+", metavar="NAME", help="of each channel: CT, or MRI, or FLAIR T1w ...")
    parser.add_argument(
        "--values",
        nargs="+",
        type=_mapping,
        default=[],
        metavar="OLD=NEW",
        help="label values that mean another: 255=1",
    )
    parser.add_argument("--skip_bad", action="store_true", help="leave out cases that cannot be used, and say so")
    parser.add_argument("--link", action="store_true", help="link files that stay as they are, instead of copying them")
    options = parser.parse_args(arguments)
    if mistake := _mistake(options):
        parser.error(mistake)
    return options


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command line; return the exit status: 0, 1 where cases are bad, or 2 after one line on what to change."""
    options = parse_options(arguments)
    try:
        raw = _find(options)
        rules = Rules(raw.modality, raw.labels, dict(options.values), rounds=options.check is None)
        findings = examine_all(raw, rules)
        bad = [*raw.unpaired, *((f.case.name, problem) for f in findings for problem in f.problems)]
        good = [finding for finding in findings if not finding.problems]
        _say_bad(bad, options.skip_bad)
        if (bad and not options.skip_bad) or not any(finding.case.label for finding in good):
            _say(f"{len(good)} of {len(good) + len({name for name, _ in bad})} cases can be used; nothing was written")
            return 1
        if options.check is None:
            write_set(options.to, raw, good, bad, rules, options.link)
    except (ValueError, OSError) as error:
        _say(re.sub(r"\s*\n\s*", " ", f"to_msd.py: error: {error}"))
        return 2
    _report(options.check or options.to, raw, good)
    return 0


def _mistake(options: argparse.Namespace) -> str | None:
    """Return what is wrong with the options together; None where they fit."""
    if options.check:
        extra = [n for n in ("labels", "to", "names", "modality", "values", "skip_bad", "link") if getattr(options, n)]
        return f"--check writes nothing: leave out --{extra[0]}" if extra else None
    if not options.to:
        return "--to is missing: name a new folder for the set, such as --to data/liver"
    if options.names and len(options.names) < 2:
        return f"--names {options.names[0]}: name the background and at least one structure: --names background liver"
    if options.nnunet:
        named = options.labels or options.modality
        return "--labels, --modality: with --nnunet its dataset.json names them; leave them out" if named else None
    missing = [name for name in ("labels", "names", "modality") if not getattr(options, name)]
    example = "--labels masks --names background liver --modality CT"
    return f"--{missing[0]} is missing: --images needs three more, such as {example}" if missing else None


def _find(options: argparse.Namespace) -> RawSet:
    if options.check:
        return read_msd(options.check)
    refuse_existing(options.to)  # before an hour of checks, not after it
    if options.nnunet:
        return read_nnunet(options.nnunet, options.names)
    return pair_folders(options.images, options.labels, options.to.resolve().name, options.modality, options.names)


def _mapping(text: str) -> tuple[int, int]:
    match = re.fullmatch(r"(-?\d+)=(\d+)", text)
    if match is None:
        raise argparse.ArgumentTypeError(f"{text!r}: expected OLD=NEW in whole numbers, such as 255=1")
    return int(match[1]), int(match[2])


def _say(text: str) -> None:
    print(text, file=sys.stderr)


def _say_bad(bad: Sequence[Reason], skip: bool) -> None:
    """Print every case that cannot be used, with all its reasons."""
    for name, reason in bad:
        _say(f"{'left out' if skip else 'bad'}: {name}: {reason}")
    if bad and not skip:
        _say("mend these files, or leave their cases out with --skip_bad")


def _report(folder: Path, raw: RawSet, good: Sequence[Finding]) -> None:
    """Print what is to be looked at, a small table, and the next commands."""
    for note, names in _notes(raw, good).items():
        print(f"note: {note}: {', '.join(names[:_MOST_NAMED])}" + _more(len(names)))
    facts = [finding.facts for finding in good if finding.facts]
    labelled = [finding.facts for finding in good if finding.facts and finding.case.label]
    rows = {
        "cases": f"{len(labelled)} labelled, {len(good) - len(labelled)} for test",
        "channels": ", ".join(raw.modality),
        "shape R, A, S": _range([fact.shape for fact in facts]),
        "spacing mm": _range([fact.spacing for fact in facts]),
        "orientation": ", ".join(f"{axes} {n}" for axes, n in Counter(f.orientation for f in facts).most_common()),
        "intensity": f"{min(fact.least for fact in facts):g} to {max(fact.most for fact in facts):g}",
    }
    rows |= {f"label {number} {name}": _amount(labelled, number) for number, name in enumerate(raw.labels) if number}
    width = max(map(len, rows))
    print(f"{folder}: in MSD layout")
    for name, text in rows.items():
        print(f"  {name:<{width}}  {text}")
    data = shlex.quote(str(folder))
    print("next, two steps through everything, then the training:")
    print(f"  python apps/spleen/train.py --data {data} --fast_dev_run true")
    print(f"  python apps/spleen/train.py --data {data}")


def _notes(raw: RawSet, good: Sequence[Finding]) -> dict[str, list[str]]:
    """Return what is to be looked at, with the names of the cases."""
    notes: dict[str, list[str]] = defaultdict(list)
    for finding in good:
        for note in finding.notes:
            notes[note].append(finding.case.name)
    for twins in find_twins([finding.case for finding in good]):
        notes["the same image byte for byte; keep one, or a copy may validate what it trained"] += twins
    volumes = [finding.facts.volumes for finding in good if finding.facts and finding.case.label]
    for number, name in enumerate(raw.labels):
        if number and not any(volume[number] for volume in volumes):
            notes["no case has a voxel of this label"].append(f"{number} {name}")
    return notes


def _range(figures: Sequence[tuple[float, ...]]) -> str:
    """Return the least, the median and the most of each axis; one figure where they are all alike."""
    parts = [np.min(figures, axis=0), np.median(figures, axis=0), np.max(figures, axis=0)]
    least, median, most = ("x".join(f"{value:.4g}" for value in part.tolist()) for part in parts)
    return least if least == most else f"{least} to {most}, median {median}"


def _amount(facts: Sequence[Facts], number: int) -> str:
    """Return in how many cases a label is, and how large it is there."""
    volumes = [fact.volumes[number] for fact in facts if fact.volumes[number]]
    if not volumes:
        return f"in 0 of {len(facts)} cases"
    size = f"{min(volumes):.3g} to {max(volumes):.3g} ml, median {np.median(volumes):.3g}"
    return f"in {len(volumes)} of {len(facts)} cases, {size}"


def _more(count: int) -> str:
    return f" and {count - _MOST_NAMED} more" if count > _MOST_NAMED else ""


if __name__ == "__main__":
    sys.exit(main())
