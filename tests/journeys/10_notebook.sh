#!/usr/bin/env bash
# The notebook, from data to overlay, executed from its first cell to its last.
set -euo pipefail
export MEDSPEED_NOTEBOOK_QUICK=1 # a few steps on small scans

cp "$(dirname "$0")/../../notebooks/spleen.ipynb" .
jupyter execute --inplace spleen.ipynb

test "$(ls notebook-output/masks/*.nii.gz | wc -l)" = 2
test -f notebook-output/run/report.html
python - <<'PY'
import json
cells = [cell for cell in json.load(open("spleen.ipynb"))["cells"] if cell["cell_type"] == "code"]
assert all(cell["execution_count"] for cell in cells), "a cell was not run"
outputs = [output for cell in cells for output in cell["outputs"]]
assert not [output for output in outputs if output.get("name") == "stderr"], "something was said on stderr"
assert any("Dice" in "".join(output.get("text", "")) for output in outputs), "no Dice is shown"
data = [output.get("data", {}) for output in outputs]
assert sum("image/png" in each for each in data) == 3, "not the curves and a picture of each new scan"
assert any("report.html" in "".join(each.get("text/html", "")) for each in data), "no link to the report"
PY
