#!/usr/bin/env bash
# gpu_visit.sh: what there is to learn in ten minutes on a host with a GPU; no network is needed.
#
#   benchmarks/gpu_visit.sh [--output FOLDER] [--minutes N] [--limit PART=SECONDS]... [--break PART] [--rehearse]
#
#   --output    the record: summary.md, summary.json (all figures), parts/, logs/, and the same as FOLDER.tar.gz;
#               default runs/gpu-visit-TIME
#   --minutes   for all parts together; default 9
#   --limit     seconds of a part instead of its own
#   --break     makes a part fail, to see that the others go on
#   --rehearse  tiny sizes, for a CPU: what it would do, and no figure that means anything
#
# The parts, in this order, so that the first ones are worth the visit if time runs out:
#   survey      each convolution of the networks, forward and backward, in each layout
#   tests       pytest -m gpu
#   steps-APP   a training step of each app: the guide's, ours in eager mode, in a CUDA graph, as by default (auto), compiled
#   profile-APP the operations of each app's steps by default that take the most
#   target      spleen phantoms to a Dice of 0.90, from nothing and again
#   files       CT scans to masks, file to file
# A part that fails or runs out of time stops no other; the record says so. Each writes its figures as it gets them.
# PYTHON names the interpreter; MEDSPEED_COMMIT the commit, where there is no .git.
set -u
unset CDPATH
cd "$(dirname "$0")/.." || exit 1
python=${PYTHON:-python3}
output=runs/gpu-visit-$(date +%Y%m%d-%H%M%S) minutes=9 broken='' rehearse=''
declare -A limits=()
usage() { sed -n '2,22s/^# \{0,1\}//p' "$0"; }
while [ $# -gt 0 ]; do
  case $1 in
    --output) output=${2:?--output needs a folder}; shift ;;
    --minutes) minutes=${2:?--minutes needs a number}; shift ;;
    --limit) [[ ${2-} =~ ^[a-z-]+=[0-9]+$ ]] || { echo "--limit ${2-}: expected PART=SECONDS" >&2; exit 2; }
      limits[${2%%=*}]=${2#*=}; shift ;;
    --break) broken=${2:?--break needs a part}; shift ;;
    --rehearse) rehearse=yes ;;
    -h|--help) usage; exit 0 ;;
    *) echo "gpu_visit.sh: $1: no such option (see --help)" >&2; exit 2 ;;
  esac
  shift
done
[[ $minutes =~ ^[1-9][0-9]*$ ]] || { echo "--minutes $minutes: expected a whole number above 0" >&2; exit 2; }
mkdir -p "$output" && [ -z "$(ls -A "$output")" ] || { echo "--output $output: must be a new or empty folder" >&2; exit 2; }
output=$(cd "$output" && pwd) work=$(mktemp -d "${TMPDIR:-/tmp}/gpu-visit.XXXXXX")
parts=$output/parts logs=$output/logs
mkdir "$parts" "$logs"
export PYTHONPATH="$PWD${PYTHONPATH:+:$PYTHONPATH}" PYTHONUNBUFFERED=1 REHEARSAL=$rehearse
end=$((SECONDS + 60 * minutes))

note() { printf '%s\t%s\t%s\n' "$1" "$2" "$3" >>"$output/parts.tsv"; }

part() { # NAME SECONDS COMMAND...
  local name=$1 limit=${limits[$1]:-$((slower * $2))} began=$SECONDS left=$((end - SECONDS)) status=0 said
  shift 2
  if [ "$left" -le 0 ]; then
    echo "== $name: no time is left"
    note "$name" "no time left" 0
    return
  fi
  [ "$limit" -le "$left" ] || limit=$left
  [ "$name" != "$broken" ] || set -- bash -c 'echo "broken on purpose" >&2; exit 1'
  echo "== $name (at most $limit s; $left s are left)"
  timeout --kill-after=5 "$limit" "$@" >"$logs/$name.log" 2>&1 &
  running=$! at=$name
  wait "$running" || status=$? # unlike a command in the foreground it gives way to a signal
  running=''
  case $status in 0) said=done ;; 124 | 137) said="out of time" ;; *) said="failed, status $status" ;; esac
  [ "$status" -eq 0 ] || tail -n 3 "$logs/$name.log"
  echo "   $name: $said after $((SECONDS - began)) s"
  note "$name" "$said" $((SECONDS - began))
}

summary() { # with the standard library alone: a record comes out whatever is broken
  "$python" - "$output" <<'PYTHON'
import json
import os
import sys
from pathlib import Path
from xml.etree import ElementTree

folder = Path(sys.argv[1])


def told(path):
    """Return the figures of a part, of JSON or of pytest's XML."""
    try:
        if path.suffix == ".json":
            return json.loads(path.read_text())
        suite = ElementTree.parse(path).getroot()[0]
        broken = [case for case in suite if case.find("failure") is not None or case.find("error") is not None]
        counts = {key: int(suite.get(key, 0)) for key in ("tests", "failures", "errors", "skipped")}
        return counts | {"broken": [f"{case.get('classname')}.{case.get('name')}" for case in broken]}
    except (ValueError, IndexError, ElementTree.ParseError) as error:
        return {"damaged": str(error)}


def line(name, content):
    """Return the figures of a part that the table shows."""
    if name.startswith(("steps-", "profile-")):
        ways = {way: each for way, each in content.items() if way not in ("app", "flags", "environment", "damaged")}
        steps = ("computed, s per step", "s per step")  # by the device's clock, where there is a run
        shown = {way: each if isinstance(each, str) else next(filter(None, map(each.get, steps)), None) for way, each in ways.items()}
        return "s per step: " + ", ".join(f"{way} {value}"[:100] for way, value in shown.items())
    if name == "survey":
        reached = ", ".join(f"{key} {value:.4g}" for key, value in content.items() if isinstance(value, float))
        return f"{len(content.get('convolutions', ()))} convolutions; {reached}"
    if name == "target":
        runs = [(side, run) for side, each in content.get("runs", {}).items() for run in each]
        return ", ".join(f"{side} {run['seconds']} s (held: {run['held']})" for side, run in runs)
    return ", ".join(f"{key} {value}" for key, value in content.items() if isinstance(value, int | float))


found = {path.stem: told(path) for path in sorted((folder / "parts").glob("*.[jx]*"))}
about = next((each["environment"] for each in found.values() if "environment" in each), {})
smi = (folder / "nvidia-smi.csv").read_text().split("\n")
versions = " ".join(f"{name} {version}" for name, version in (about.get("versions") or {}).items())
record = {
    "gpu": about.get("device"),
    "driver": smi[1] if len(smi) > 1 else None,
    "versions": versions,
    "commit": about.get("git") or os.environ.get("MEDSPEED_COMMIT"),
}
states = [row.split("\t") for row in (folder / "parts.tsv").read_text().splitlines()]
rehearsal = ["Rehearsal on tiny sizes: no figure here means anything.", ""] if os.environ.get("REHEARSAL") else []
rows = [f"| {name} | {state} | {took} | {line(name, found.get(name, {}))} |" for name, state, took in states]
text = ["# GPU visit", "", *rehearsal, *(f"- {key}: {value}" for key, value in record.items()), ""]
text += ["| part | state | s | figures |", "|---|---|---|---|", *rows, ""]
(folder / "summary.md").write_text("\n".join(text))
record |= {"rehearsal": bool(rehearsal), "states": {name: state for name, state, _ in states}, "parts": found}
(folder / "summary.json").write_text(json.dumps(record, indent=1) + "\n")
print("\n".join(text))
PYTHON
}

finish() {
  trap - EXIT
  trap '' INT TERM PIPE
  [ -z "$running" ] || { kill "$running" && wait "$running"; note "$at" interrupted 0; }
  [ -z "$making" ] || [ -e "$work/made" ] || kill -- "-$making"
  cp "$work"/*.json "$parts" 2>/dev/null
  for app in spleen brats pathology; do
    cp "$work/profile-$app/auto/profile/operations.txt" "$parts/operations-$app.txt" 2>/dev/null
  done
  for log in "$work"/*/*/run.log; do  # which kernels and graphs a way took, and why not others
    way=${log%/run.log}
    [ ! -e "$log" ] || cp "$log" "$logs/$(basename "${way%/*}")-$(basename "$way").log"
  done
  cp "$work/masks/timings.json" "$parts/files.json" 2>/dev/null
  summary
  tar -czf "$output.tar.gz" -C "$(dirname "$output")" "$(basename "$output")" && echo "$output.tar.gz"
  rm -rf "$work"
}
making='' running=''
trap finish EXIT
trap 'exit 130' INT
trap 'exit 143' TERM

nvidia-smi --query-gpu=name,driver_version,memory.total,power.limit,clocks.max.sm --format=csv >"$output/nvidia-smi.csv" 2>/dev/null
touch "$output/parts.tsv"

# What each part is told: the plan of a real run on a GPU, or what a CPU does in seconds.
slower=1
if [ -n "$rehearse" ]; then
  slower=2
  large=(--cases 2 --seed 1) small=(--cases 4) heads=(--cases 4) slides=(--training 4 --testing 2 --size 512)
  tiny=('--spacing=[8,8,8]' '--crop_size=[16,16,16]' '--windows.size=[32,32,32]' --split=0.5:0)
  tiny+=(--batch_size 2 --crops.per_case 4)
  tiny+=(--epochs 2 --validate_every 2)
  spleen=("${tiny[@]}" '--channels=[4,8]') brats=("${tiny[@]}" --network.filters 8 '--network.blocks_down=[1,1]')
  pathology=(--held_out 0.5 --patch_size 64 --patches_per_slide 8 --tile_size 512 --batch_size 4 --epochs 2)
  goal=0.001 target=("${spleen[@]}") tests=(tests/common/training/test_fit.py) ways=(guide eager graph auto)
else
  large=(--cases 12 --size msd) small=(--cases 20) heads=(--cases 6 --size msd) slides=(--training 8 --testing 2)
  spleen=('--spacing=[1.5,1.5,2]' '--crop_size=[96,96,96]' --batch_size 16 --epochs 8 --validate_every 8)
  brats=('--crop_size=[224,224,144]' --batch_size 1 --epochs 6 --validate_every 6)
  pathology=(--patches_per_slide 600 --epochs 4 --validate_every 4)
  goal=0.90 target=(--epochs=120 --validate_every=2) tests=() ways=(guide eager auto graph compiled)
fi

# The data are made on the CPU while the convolutions are timed.
make() { "$python" "data_scripts/$1" "${@:2}" || touch "$work/lacking"; }
set -m # in a group of their own, which can be ended
{
  make make_phantoms.py mri --to "$work/heads" "${heads[@]}"
  make make_phantoms.py ct --to "$work/large" "${large[@]}"
  make make_slides.py --to "$work/slides" "${slides[@]}"
  make make_phantoms.py ct --to "$work/small" "${small[@]}"
  touch "$work/made"
} >"$logs/making.log" 2>&1 &
making=$!
set +m

steps() { # NAME SECONDS APP DATA FLAGS...
  part "$1" "$2" "$python" benchmarks/visit_parts.py --part "$3" --to "$work/$1.json" --ways "${ways[@]}" -- \
    --data "$work/$4" --store "$work/store" --engine none "${@:5}"
}
part survey 60 "$python" benchmarks/visit_parts.py --part survey --to "$parts/survey.json"
part tests 90 "$python" -m pytest -q -m gpu -W default -p no:cacheprovider --continue-on-collection-errors \
  --junitxml "$parts/tests.xml" "${tests[@]}"
part data 60 bash -c 'until [ -e "$1/made" ]; do sleep 0.2; done; [ ! -e "$1/lacking" ]' - "$work"
steps steps-spleen 75 spleen large "${spleen[@]}"
steps steps-brats 90 brats heads "${brats[@]}"
steps steps-pathology 75 pathology slides "${pathology[@]}"
ways=(auto)
steps profile-spleen 30 spleen large "${spleen[@]}" --profile torch
steps profile-brats 30 brats heads "${brats[@]}" --profile torch
steps profile-pathology 30 pathology slides "${pathology[@]}" --profile torch
part target 150 "$python" benchmarks/speedrun.py spleen-small --sides fast --target "$goal" --data "$work/small" \
  --seeds 1 --warm --output "$parts/target.json" -- "${target[@]}"
part files 60 "$python" apps/spleen/infer.py --model "$work/steps-spleen/eager" --input "$work/large/imagesTr" \
  --output "$work/masks"
