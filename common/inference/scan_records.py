"""What is kept of each segmented scan: whether it is finished, with what it was made, and its measurements.

The record of a scan is written twice: before its first output, so that outputs can be told from foreign files, and,
whole, after its last one.
"""

import json
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from common.files import write_json
from common.inference.measures import Measures, write_measures
from common.inference.scan_files import Scan

_FOLDER = "records"
_VERSION = 1  # raise when outputs or records change for the same scan, weights and options


@dataclass(frozen=True)
class Records:
    """The records of an output folder.

    Args:
        output: the folder of the label maps.
        identity: all but the scan that decides what comes out.
        overlays: whether each scan gets a picture.
    """

    output: Path
    identity: dict[str, Any]
    overlays: bool

    @property
    def lock(self) -> Path:
        """File that stands for the tables of all scans (see `locked`)."""
        return self.output / _FOLDER / ".lock"

    def path(self, scan: Scan) -> Path:
        """Return the record of a scan."""
        return self.output / _FOLDER / f"{scan.name}.json"

    def label(self, scan: Scan) -> Path:
        """Return the label map of a scan."""
        return self.output / scan.label_name

    def seg(self, scan: Scan) -> Path:
        """Return the DICOM-SEG of a series."""
        return self.output / f"{scan.name}.dcm"

    def picture(self, scan: Scan) -> Path:
        """Return the overlay of a scan."""
        return self.output / f"{scan.stem}.png"

    def due(self, scan: Scan) -> list[Path]:
        """Return the outputs that a finished scan has."""
        segs = [self.seg(scan)] if scan.series is not None else []
        return [self.label(scan), *segs, *([self.picture(scan)] if self.overlays else [])]

    def mark(self, scan: Scan) -> dict[str, Any]:
        """Return all that decides what comes out for a scan as it is now.

        Raises:
            ValueError: a file of it is gone.
        """
        return {**self.identity, "version": _VERSION, "scan": scan.stamp()}

    def finished(self, scan: Scan) -> dict[str, Any] | None:
        """Return the record of a scan that is finished as it is now, with all its outputs; else None."""
        record = self.read(scan)
        try:
            whole = record is not None and record.get("mark") == self.mark(scan)
        except ValueError:
            return None
        return record if whole and all(path.is_file() for path in self.due(scan)) else None

    def read(self, scan: Scan) -> dict[str, Any] | None:
        """Return the record of a scan, finished or not; None where there is none that can be read."""
        try:
            record = json.loads(self.path(scan).read_text(encoding="utf-8"))
        except (ValueError, OSError):
            return None
        return record if isinstance(record, dict) else None

    def clear(self, scans: Sequence[Scan]) -> None:
        """Remove what earlier runs left of scans that are done anew: no old label map may pass for a new one.

        Raises:
            FileExistsError: an output is there that no record tells of: it is not this program's.
        """
        for scan in scans:
            foreign = [path for path in (self.label(scan), self.seg(scan)) if path.exists()]
            if foreign and not self.path(scan).is_file():
                raise FileExistsError(
                    f"{foreign[0]}: is there, and was not written by a run into this folder: choose another --output"
                )
        own = {path for scan in scans for path in (*self._outputs(scan), self.path(scan))}
        for part in (*self.output.glob(".part-*"), *self.lock.parent.glob(".part-*")):
            if part.parent / part.name.split("-", 2)[-1] in own:  # .part-RANDOM-NAME, of a process that was killed
                part.unlink(missing_ok=True)
        for scan in scans:
            if self.path(scan).is_file():
                for path in (*self._outputs(scan), self.path(scan)):
                    path.unlink(missing_ok=True)

    def _outputs(self, scan: Scan) -> tuple[Path, ...]:
        return self.label(scan), self.seg(scan), self.picture(scan)

    def begin(self, scan: Scan) -> None:
        """Note that outputs of a scan may be there from now on."""
        write_json(self.path(scan), {"scan": scan.name, "begun": True})

    def finish(self, scan: Scan, mark: dict[str, Any], measures: Iterable[Measures], seconds: dict[str, float]) -> None:
        """Note that all outputs of a scan are there."""
        found = [asdict(each) for each in measures]
        write_json(self.path(scan), {"scan": scan.name, "measures": found, "seconds": seconds, "mark": mark})

    def write_tables(self, scans: Sequence[Scan]) -> dict[str, dict[str, float]]:
        """Write `measurements.csv` of the finished scans; return the seconds of each."""
        records = [record for scan in scans if (record := self.finished(scan)) is not None]
        rows = [(each["scan"], [Measures(**found) for found in each["measures"]]) for each in records]
        write_measures(self.output / "measurements.csv", rows)
        return {each["scan"]: each["seconds"] for each in records}
