#!/usr/bin/env bash
# First run: no data, no choices. Phantoms are drawn, and the whole way is gone on them in two steps.
set -euo pipefail
source "$(dirname "$0")/tiny.sh"

medspeed --version
medspeed train spleen --run first --fast-dev-run "${tiny[@]}" 2>&1 | tee said

grep -q "SYNTHETIC DATA" said
test "$(wc -l < said)" -le 60 # in a file there are no progress bars
for file in summary.json report.html progress.png best.safetensors exports/model_fp32.onnx; do
    test -s "first/$file"
done
ls first/overlays/*.png
python - <<'PY'
import json
summary = json.load(open("first/summary.json"))
assert summary["steps"] == 2, summary["steps"]
assert summary["onnx"]["max_abs_diff"] <= 1e-3, summary["onnx"]
PY
