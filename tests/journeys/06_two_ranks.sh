#!/usr/bin/env bash
# Two processes train one network: each holds half of the cases, and the losses are those of one process.
set -euo pipefail
source "$(dirname "$0")/tiny.sh"

[ -f heads/dataset.json ] || medspeed data make-phantoms mri --to heads --cases 5
flags=(--data heads --epochs 4 --parallel.partitions 2 --spacing 6 6 6 --network.filters 8 --network.blocks-down 1 1
    --crop-size 16 16 16 --windows.size 24 24 24 --batch-size 4 "${store[@]}")
export OMP_NUM_THREADS=1
torchrun --standalone --nproc-per-node 2 --no-python -- medspeed train brats --run two "${flags[@]}"
medspeed train brats --run one "${flags[@]}"

grep "^rank . holds" two/run.log
python - <<'PY'
import json, math, re
rows = re.findall(r"^rank . holds.*?: (.*)", open("two/run.log").read(), re.M)
first, second = ({*row.split(", ")} for row in rows)
assert len(first) == len(second) == 2 and not first & second, rows
judged = [json.load(open(f"{run}/summary.json"))["quality"] for run in ("one", "two")]
assert judged[0]["per_case"].keys() == judged[1]["per_case"].keys() and judged[0]["per_case"]
assert abs(judged[0]["value"] - judged[1]["value"]) < 0.01, judged
one, two = ([x for line in open(f"{run}/metrics.jsonl") for x in json.loads(line)["losses"]] for run in ("one", "two"))
assert json.load(open("two/summary.json"))["ranks"] == 2
assert len(one) == len(two) > 3 and all(map(math.isfinite, two))
assert max(abs(a - b) for a, b in zip(one, two)) < 1e-3, (one, two)
PY
