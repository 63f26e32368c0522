"""The scans of an input: volumes in files, or DICOM series; found, and read."""

from collections import Counter
from collections.abc import Sequence
from pathlib import Path

from medspeed.common.console import say
from medspeed.common.data import dataset
from medspeed.common.data.dicom import find_series, group_channels, read_series
from medspeed.common.data.volumes import Volume, read_volume
from medspeed.common.files import plural, printable
from medspeed.common.inference.scan_memory import Scan


def find_scans(path: Path, channels: int = 1, names: Sequence[str] = ()) -> list[Scan]:
    """Return a file; or those of a folder: its NIfTI, NRRD and MetaImage files, or the DICOM series in and below it.

    For a model of several channels, whose names are given, the series of a study become one scan.

    What lies beside the volumes of a DICOM study (scouts, single images, screen captures) is left out with a word.

    Raises:
        FileNotFoundError: there is none.
        ValueError: two files have one name but for the suffix, or the folder holds both kinds.
    """
    if path.is_file():
        return [path]
    named = (file for file in path.glob("[!.]*") if file.name.lower().endswith(dataset.SUFFIXES))
    files = sorted(filter(Path.is_file, named))
    for header in sorted(file for file in path.glob("[!.]*") if file.suffix.lower() in (".mhd", ".nhdr", ".hdr")):
        say(
            printable(f"{header.name}: skipped, its voxels lie in another file: save it as .mha, .nrrd or .nii.gz"),
            "warning",
        )
    stems = Counter(map(stem_of, files))
    if twice := [file.name for file in files if stems[stem_of(file)] > 1]:
        raise ValueError(f"{path}: {' and '.join(twice[:4])} would write the same output: rename or remove one")
    found = find_series(path) if path.is_dir() else ()
    for series in found:
        if not series.is_volume:
            say(printable(f"{series.name}: skipped, not a volume: {series.problem or series.modality}"))
    volumes = [series for series in found if series.is_volume]
    if files and volumes:  # without the path: folders of DICOM studies are often named after patients
        raise ValueError(
            f"--input: found {plural(len(files), 'volume file')} and {len(volumes)} DICOM series; expected one kind"
        )
    if not files and not volumes:
        raise FileNotFoundError(
            f"{path}: no such file, or a folder without {', '.join(dataset.SUFFIXES)} files or DICOM series"
        )
    return [*files, *(group_channels(volumes, names) if volumes and channels > 1 else volumes)]


def stem_of(scan: Scan) -> str:
    """Return the name without the suffix of a file."""
    return dataset.stem_of(scan.name)


def read_scan(scan: Scan, channels: int) -> Volume:
    """Read the voxels of a scan, [X, Y, Z] or, of several channels, [X, Y, Z, C].

    Raises:
        FileNotFoundError, ValueError: as `read_volume` and `read_series`.
    """
    if isinstance(scan, Path):
        return read_volume(scan, channels)
    if channels != max(1, len(scan.channels)) and not scan.problem:
        raise ValueError(f"{scan.name}: one channel, the model expects {channels}: combine the series into a 4-D NIfTI")
    try:
        return read_series(scan)
    except OSError as error:  # its message would hold the path, and with it perhaps the patient's name
        raise ValueError(f"{scan.name}: a file cannot be read ({error.strerror}): copy it again") from None
