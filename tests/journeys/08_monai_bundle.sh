#!/usr/bin/env bash
# A trained run becomes a MONAI bundle, which runs with MONAI alone and finds what `infer` finds.
set -euo pipefail
source "$(dirname "$0")/tiny.sh"

spleen_run
mkdir scans
cp "$shared/phantoms/imagesTr/phantom_000.nii.gz" scans
medspeed export spleen --model "$shared/spleen" --to bundle --output bundle
medspeed infer spleen --model "$shared/spleen" --input scans --output ours --device cpu --backend torch --precision fp32

cd bundle
sha256sum --check --strict --quiet SHA256SUMS
# Where another package is called medspeed, nothing of this one can be imported.
mkdir -p ../trap/medspeed && echo "raise ImportError('the bundle imports the project')" > ../trap/medspeed/__init__.py
PYTHONPATH=../trap python -m monai.bundle run --config_file configs/inference.json --bundle_root . \
    --dataset_dir ../scans --output_dir ../theirs
cd ..

python - <<'PY'
import nibabel, numpy
ours, theirs = (nibabel.load(f"{folder}/phantom_000.nii.gz") for folder in ("ours", "theirs"))
assert numpy.allclose(ours.affine, theirs.affine, atol=1e-4)
ours, theirs = numpy.asarray(ours.dataobj), numpy.asarray(theirs.dataobj)
assert ours.any(), "nothing was found"
assert (ours != theirs).mean() < 1e-4, (ours != theirs).sum()
PY
