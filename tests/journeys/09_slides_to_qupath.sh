#!/usr/bin/env bash
# Slides are scanned: outlines that QuPath imports, the map over the slide, the detections; then patches are scored.
set -euo pipefail
source "$(dirname "$0")/tiny.sh"

pathology_run
medspeed infer pathology --model "$shared/pathology" --input "$shared/slides/testing/images" --output scans --device cpu
medspeed evaluate pathology --scans scans --data "$shared/slides"

ls scans/*
python - <<'PY'
import json, tifffile
from pathlib import Path
folders = [path.parent for path in Path("scans").glob("*/slide.json")]
assert len(folders) == 2
outlines = 0
for folder in folders:
    slide, found = json.load(open(folder / "slide.json")), json.load(open(folder / "detections.geojson"))
    assert found["type"] == "FeatureCollection"
    outlines += len(found["features"])
    for feature in found["features"]:
        assert feature["geometry"]["type"] in ("Polygon", "MultiPolygon") and feature["properties"]["objectType"]
    assert bool(found["features"]) == (slide["probability"] >= 0.5), slide["probability"]
    tifffile.imread(folder / "probability.tif")
assert outlines, "no slide has an outline"
PY

# Patches, cut from a slide by whatever a person has.
python - "$shared/slides/testing/images" <<'PY'
import sys
from pathlib import Path
import numpy, tifffile
from PIL import Image
Path("patches").mkdir()
slide = tifffile.imread(sorted(Path(sys.argv[1]).iterdir())[0], key=0)
for number in range(4):
    Image.fromarray(slide[400 : 464, 300 + 64 * number : 364 + 64 * number]).save(f"patches/{number}.png")
PY
medspeed infer pathology --model "$shared/pathology" --input patches --output scored --device cpu
cat scored/probabilities.csv
test "$(wc -l < scored/probabilities.csv)" = 5
