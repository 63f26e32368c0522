#!/usr/bin/env bash
# A folder in nnU-Net's raw layout: names, channels and labels come from its dataset.json; its test scans are segmented.
set -euo pipefail
source "$(dirname "$0")/tiny.sh"

# The folder a person would have.
phantoms
raw=nnUNet_raw/Dataset009_Spleen
mkdir -p $raw/imagesTr $raw/labelsTr $raw/imagesTs
for number in 000 001 002; do
    cp "$shared/phantoms/imagesTr/phantom_$number.nii.gz" "$raw/imagesTr/spleen_${number}_0000.nii.gz"
    cp "$shared/phantoms/labelsTr/phantom_$number.nii.gz" "$raw/labelsTr/spleen_$number.nii.gz"
done
cp "$shared/phantoms/imagesTr/phantom_003.nii.gz" $raw/imagesTs/spleen_003_0000.nii.gz
cat > $raw/dataset.json <<'JSON'
{"channel_names": {"0": "CT"}, "labels": {"background": 0, "spleen": 1}, "numTraining": 3, "file_ending": ".nii.gz"}
JSON

medspeed data to-msd --nnunet $raw --to data/spleen --link | tee said
grep -q "3 labelled, 1 for test" said
medspeed train spleen --data data/spleen --run run --split all --fast-dev-run "${tiny[@]}"
medspeed infer spleen --model run --input data/spleen/imagesTs --output predictions --device cpu

python - <<'PY'
import nibabel, numpy
scan = nibabel.load("nnUNet_raw/Dataset009_Spleen/imagesTs/spleen_003_0000.nii.gz")
mask = nibabel.load("predictions/spleen_003.nii.gz")
assert mask.shape == scan.shape and numpy.allclose(mask.affine, scan.affine, atol=1e-4)
PY
