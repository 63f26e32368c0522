"""What comes out of scans and slides: the result of `medspeed.predict`."""

from dataclasses import dataclass
from pathlib import Path
from typing import Any

Record = dict[str, Any]


@dataclass(frozen=True)
class Prediction:
    """What came out of one scan or slide.

    Attributes:
        files: what was written of it; the first is the label map on the scan's own grid (for DICOM, a DICOM-SEG follows
            it), or of a slide the map of tumour probability.
        record: what is known of it, as its file in `records` says (of a slide, `slide.json`): measurements or
            detections, seconds per stage.
    """

    files: tuple[Path, ...]
    record: Record

    @property
    def volumes_ml(self) -> dict[str, float]:
        """Volume of each structure in ml; of a slide none."""
        return {each["structure"]: each["volume_ml"] for each in self.record.get("measures", ())}


@dataclass(frozen=True)
class Predictions:
    """What became of the scans or slides of this process.

    Attributes:
        done: what came out, by name of scan, those among them that an earlier call with the same weights and options
            has finished.
        failed: why the others were set aside, by name.
    """

    done: dict[str, Prediction]
    failed: dict[str, str]

    @property
    def status(self) -> int:
        """Exit status of a command: 1 where a scan was set aside, else 0."""
        return 1 if self.failed else 0
