#!/usr/bin/env bash
# A DICOM series in, a DICOM-SEG on its slices out, as an archive or viewer takes it; and a NIfTI of the same voxels.
set -euo pipefail
source "$(dirname "$0")/tiny.sh"

spleen_run
# The series a person would have: a scan that the run knows, as CT slices.
python "$(dirname "$0")/dicom_series.py" "$shared/phantoms/imagesTr/phantom_000.nii.gz" study/series

medspeed infer spleen --model "$shared/spleen" --input study --output found --device cpu --largest-component

ls found
python - <<'PY'
from pathlib import Path
import highdicom, nibabel, numpy, pydicom
(path,) = Path("found").glob("*.dcm")
(nifti,) = Path("found").glob("*.nii.gz")
seg, mask = highdicom.seg.segread(path), numpy.asarray(nibabel.load(nifti).dataobj)
slices = [pydicom.dcmread(file, stop_before_pixels=True) for file in Path("study/series").iterdir()]
assert seg.Modality == "SEG" and seg.number_of_segments == 1
assert seg.get_segment_description(1).SegmentLabel == "spleen"
assert {uid for _, _, uid in seg.get_source_image_uids()} <= {each.SOPInstanceUID for each in slices}
assert mask.shape[2] == len(slices) and mask.any(), "the run finds nothing in a scan that it was trained on"
uids = [each.SOPInstanceUID for each in sorted(slices, key=lambda each: each.ImagePositionPatient[2])]
found = seg.get_pixels_by_source_instance(uids, ignore_spatial_locations=True, assert_missing_frames_are_empty=True)
assert int((found > 0).sum()) == int(mask.sum()), "SEG and NIfTI hold other voxels"
assert (found > 0).reshape(len(uids), -1).sum(1).tolist() in (counts := mask.sum((0, 1)).tolist(), counts[::-1])
assert seg.PatientName == "" and "Planted" not in str(seg), "the patient's name is in the SEG"
PY
