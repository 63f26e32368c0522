# Sourced by every journey: sizes that take seconds, and what the journeys share, made by the first that needs it.
# MEDSPEED_JOURNEYS names the folder of the latter; without it every journey has its own.
shared=${MEDSPEED_JOURNEYS:-$PWD/shared}
mkdir -p "$shared"
# fp32: what comes out is then the same on any processor but for rounding.
store=(--store "$shared/store" --device cpu --precision fp32 --engine none)
# Two levels of a U-Net on voxels of 6 mm.
tiny=("${store[@]}" --spacing 6 6 6 --channels 4 8 --crop-size 16 16 16 --windows.size 32 32 32 --batch-size 4)

phantoms() {
    [ -f "$shared/phantoms/dataset.json" ] || medspeed data make-phantoms ct --to "$shared/phantoms" --cases 4
}

# A trained run of the spleen app, good enough to find something.
spleen_run() {
    phantoms
    [ -f "$shared/spleen/summary.json" ] ||
        medspeed train spleen --data "$shared/phantoms" --run "$shared/spleen" --epochs 60 --validate-every 30 "${tiny[@]}"
}

# A trained run of the pathology app, on slides of 1024 pixels.
pathology_run() {
    [ -f "$shared/slides/slides.json" ] ||
        medspeed data make-slides --to "$shared/slides" --training 4 --testing 2 --size 1024
    [ -f "$shared/pathology/summary.json" ] ||
        medspeed train pathology --data "$shared/slides" --run "$shared/pathology" --patch-size 64 \
            --patches-per-slide 64 --batch-size 16 --epochs 6 --validate-every 6 --tile-size 1056 "${store[@]}"
}
