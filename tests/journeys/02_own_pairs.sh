#!/usr/bin/env bash
# Own CT scans and masks, paired by name: checked and converted, trained on, and a new scan segmented.
set -euo pipefail
source "$(dirname "$0")/tiny.sh"

# The scans a person would have.
phantoms
mkdir scans masks new truth
for number in 000 001 002; do
    cp "$shared/phantoms/imagesTr/phantom_$number.nii.gz" "scans/patient_${number}_ct.nii.gz"
    cp "$shared/phantoms/labelsTr/phantom_$number.nii.gz" "masks/patient_${number}_seg.nii.gz"
done
cp "$shared/phantoms/imagesTr/phantom_003.nii.gz" new/tuesday.nii.gz
cp "$shared/phantoms/labelsTr/phantom_003.nii.gz" truth/tuesday.nii.gz

medspeed data to-msd --images scans --labels masks --names background spleen --modality CT --to data/own | tee said
grep -q "label 1 spleen .* in 3 of 3 cases" said
medspeed data to-msd --check data/own
medspeed train spleen --data data/own --run runs/own --split all --fast-dev-run "${tiny[@]}"
medspeed infer spleen --model runs/own --input new --output found --device cpu
medspeed evaluate spleen --predictions found --references truth --labels spleen=1

head found/measurements.csv
python - <<'PY'
import csv, nibabel, numpy
scan, mask = nibabel.load("new/tuesday.nii.gz"), nibabel.load("found/tuesday.nii.gz")
assert mask.shape == scan.shape and numpy.allclose(mask.affine, scan.affine, atol=1e-4)
assert set(numpy.unique(mask.dataobj)) <= {0, 1} and mask.get_data_dtype() == "uint8"
found, truth = (numpy.asarray(nibabel.load(f"{folder}/tuesday.nii.gz").dataobj) > 0 for folder in ("found", "truth"))
(row,) = csv.DictReader(open("found/evaluation.csv"))
assert abs(float(row["dice"]) - 2 * (found & truth).sum() / (found.sum() + truth.sum())) < 1e-6, row
PY
test -s found/tuesday.png
