#!/usr/bin/env bash
# A training that is told to stop, as a cluster or Ctrl+C does, saves its step; --resume goes on from there.
set -euo pipefail
source "$(dirname "$0")/tiny.sh"

phantoms
medspeed train spleen --data "$shared/phantoms" --run run --epochs 100 --validate-every 50 "${tiny[@]}" &
until [ -s run/metrics.jsonl ]; do
    kill -0 $! || exit 1
    sleep 0.05
done
kill -TERM $!
status=0
wait $! || status=$?
test $status = 143
ls run/checkpoints
cp run/metrics.jsonl before.jsonl
stored=$(readlink run/checkpoints/last) # epoch-000007-step-000002: seven epochs, and two steps

medspeed train spleen --resume run

python - "$stored" <<'PY'
import json, re, sys
epochs, steps = map(int, re.findall(r"\d+", sys.argv[1]))
before, after = (open(name).readlines() for name in ("before.jsonl", "run/metrics.jsonl"))
assert len(before) == epochs < 100, (len(before), sys.argv)
assert after[:epochs] == before, "epochs that were finished have been computed again"
lines = [json.loads(line) for line in after]
assert [line["epoch"] for line in lines] == list(range(lines[0]["epoch"], lines[0]["epoch"] + 100))
per_epoch, summary = len(lines[0]["losses"]), json.load(open("run/summary.json"))
assert all(len(line["losses"]) == per_epoch for line in lines), "steps of the broken epoch are missing or twice"
assert summary["steps"] == 100 * per_epoch
print(f"stopped after {epochs * per_epoch + steps} steps, went on to {summary['steps']}")
PY
