#!/usr/bin/env bash
# The notebook, from data to overlay, executed from its first cell to its last.
set -euo pipefail
export MEDSPEED_NOTEBOOK_QUICK=1 # a few steps on small scans

cp "$(dirname "$0")/../../notebooks/spleen.ipynb" .
jupyter execute --inplace spleen.ipynb

ls notebook-output/masks
python - <<'PY'
import json
cells = [cell for cell in json.load(open("spleen.ipynb"))["cells"] if cell["cell_type"] == "code"]
assert all(cell["execution_count"] for cell in cells), "a cell was not run"
outputs = [output for cell in cells for output in cell["outputs"]]
assert any("Dice" in "".join(output.get("text", "")) for output in outputs), "no Dice is shown"
assert sum("image/png" in output.get("data", {}) for output in outputs) >= 2, "no overlay is shown"
PY
