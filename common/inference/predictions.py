"""Results of `medspeed.predict`."""

from dataclasses import dataclass
from pathlib import Path
from typing import Any

Record = dict[str, Any]


@dataclass(frozen=True)
class Prediction:
    """Result of one scan or slide.

    Attributes:
        files: written files; the first is the label map on the scan's own grid (of a slide the map of tumor
            probability).
        record: measurements or detections, seconds per stage, and whatever else its JSON record holds.
    """

    files: tuple[Path, ...]
    record: Record

    @property
    def volumes_ml(self) -> dict[str, float]:
        """Volume of each structure in ml; empty for a slide."""
        return {each["structure"]: each["volume_ml"] for each in self.record.get("measures", ())}


@dataclass(frozen=True)
class Predictions:
    """Results of the scans or slides of this process.

    Attributes:
        done: by name of scan, also those that an earlier run with the same weights and options finished.
        failed: errors of the other scans, by name.
    """

    done: dict[str, Prediction]
    failed: dict[str, str]

    @property
    def status(self) -> int:
        """Exit status of a command: 1 if a scan failed, otherwise 0."""
        return 1 if self.failed else 0
