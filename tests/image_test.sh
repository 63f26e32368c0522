#!/usr/bin/env bash
# Builds the image and runs the apps in it as a user that is not root; `make image-test`. The first failure ends it.
#
# With docker or podman where one answers, else with buildah, which needs no daemon. What the environment may say:
#   ENGINE             docker, podman or buildah
#   BASE_IMAGE         the base; by default python:3.12-slim-bookworm, and with buildah one made by debootstrap
#   RUN_AS             uid:gid of the one who runs it; by default the caller, or 12345:12345 for root
#   CERTIFICATES       folder of certificates that the build shall see (buildah); by default SSL_CERT_DIR
#   PIP_INDEX_URL, PIP_EXTRA_INDEX_URL, PIP_FIND_LINKS, PIP_CERT    handed to the build
#   LOCK               the file of digests that the build takes; empty for constraints.txt, as where PIP_FIND_LINKS is given
#   MIRROR             of Debian, for debootstrap
set -euo pipefail
cd "$(dirname "$0")/.."

IMAGE=${IMAGE:-localhost/medspeed-test}
WRITABLE='^/(tmp|cache|app/runs|proc|sys|dev)(/|$)'  # of the image: all else may be mounted read-only
passed=0
work=$(mktemp -d)
container=

say() { printf '%s\n' "$*"; }
pass() { passed=$((passed + 1)); say "ok   $*"; }
fail() { say "FAIL $*" >&2; exit 1; }

clean_up() {
    if [ -n "$container" ]; then buildah rm "$container" >/dev/null 2>&1 || true; fi
    rm -rf "$work"
}
trap clean_up EXIT

choose_engine() {
    for engine in docker podman; do
        if command -v "$engine" >/dev/null && "$engine" info >/dev/null 2>&1; then echo "$engine"; return; fi
    done
    command -v buildah >/dev/null || fail "no docker or podman answers and there is no buildah: install one of them"
    echo buildah
}

make_base() {
    # A stand-in for python:slim, for where no registry can be reached.
    if buildah images --quiet localhost/medspeed-base:trixie >/dev/null 2>&1; then echo localhost/medspeed-base:trixie; return; fi
    command -v debootstrap >/dev/null || fail "BASE_IMAGE is not given and there is no debootstrap to make one"
    {
        debootstrap --variant=minbase --include=python3,python3-venv,ca-certificates trixie "$work/base" ${MIRROR:+"$MIRROR"}
        rm -rf "$work"/base/var/cache/apt/archives/*.deb "$work"/base/var/lib/apt/lists/*
        container=$(buildah from scratch)
        buildah add --quiet "$container" "$work/base" /
        buildah commit --quiet --rm "$container" localhost/medspeed-base:trixie
        rm -rf "$work/base"
    } >"$work/base.log" 2>&1 || { tail -20 "$work/base.log" >&2; fail "the base image could not be made"; }
    echo localhost/medspeed-base:trixie
}

build() {
    local arguments=(--build-arg "BASE_IMAGE=$base" --tag "$IMAGE") name folder
    if [ -n "${PIP_FIND_LINKS:-}" ]; then LOCK=${LOCK-}; fi  # whose torch may be of another build
    if [ -n "${LOCK+given}" ]; then arguments+=(--build-arg "LOCK=$LOCK"); fi
    for name in PIP_INDEX_URL PIP_EXTRA_INDEX_URL PIP_FIND_LINKS PIP_CERT; do
        if [ -n "${!name:-}" ]; then arguments+=(--build-arg "$name=${!name}"); fi
    done
    if [ "$engine" != buildah ]; then "$engine" build "${arguments[@]}" .; return; fi
    for folder in "${CERTIFICATES:-${SSL_CERT_DIR:-}}" "${PIP_FIND_LINKS:-}"; do
        if [ -d "$folder" ]; then arguments+=(--volume "$folder:$folder:ro"); fi
    done
    buildah bud --layers --isolation chroot "${arguments[@]}" .
}

# of_image FIELD: of the image's configuration, as Docker prints it
of_image() {
    if [ "$engine" = buildah ]; then
        buildah inspect --type image --format "{{.OCIv1.Config.$1}}" "$IMAGE"
    else
        "$engine" image inspect --format "{{.Config.$1}}" "$IMAGE"
    fi
}

# in_image [MOUNT ...] -- PROGRAM [ARGUMENT ...]: runs a program in the image as $run_as; the root is read-only where
# the engine can do that (buildah cannot: there the files that changed are looked for afterwards)
in_image() {
    local mounts=()
    while [ "$1" != -- ]; do mounts+=(--volume "$1"); shift; done
    shift
    if [ "$engine" = buildah ]; then
        buildah run --isolation chroot --user "$run_as" "${mounts[@]}" "$container" -- "$@"
    else
        "$engine" run --rm --read-only --tmpfs /tmp --user "$run_as" --cap-drop ALL --entrypoint "$1" "${mounts[@]}" \
            "$IMAGE" "${@:2}"
    fi
}

size() {
    if [ "$engine" = buildah ]; then
        buildah images --format '{{.Size}}' "$IMAGE"
    else
        "$engine" image inspect --format '{{.Size}}' "$IMAGE" | awk '{printf "%.2f GB\n", $1 / 1e9}'
    fi
}

engine=${ENGINE:-$(choose_engine)}
caller=$(id -u):$(id -g)
if [ "$(id -u)" = 0 ]; then caller=12345:12345; fi
run_as=${RUN_AS:-$caller}
if [ -n "${BASE_IMAGE:-}" ]; then base=$BASE_IMAGE
elif [ "$engine" = buildah ]; then base=$(make_base)
else base=python:3.12-slim-bookworm; fi
say "engine $engine, base $base, run as $run_as"

if command -v hadolint >/dev/null; then
    hadolint Dockerfile || fail "hadolint"
    pass "hadolint has nothing to say"
else
    say "skip hadolint: not installed"
fi

began=$SECONDS
build >"$work/build.log" 2>&1 || { tail -40 "$work/build.log" >&2; fail "the image cannot be built"; }
pass "built in $((SECONDS - began)) s, $(size)"

[ "$(of_image Entrypoint)" = "[python]" ] || fail "entry point $(of_image Entrypoint)"
[ "$(of_image Cmd)" = "[apps/spleen/train.py]" ] || fail "command $(of_image Cmd)"
pass "runs python, by default apps/spleen/train.py"

user=$(of_image User)
[[ $user =~ ^[1-9][0-9]*(:[1-9][0-9]*)?$ ]] || fail "user '$user': must be a number above 0"
pass "runs as $user unless told otherwise"

if of_image Env | grep -iE 'passw|secret|token|api_?key'; then fail "a secret in the environment"; fi
if [ "$engine" = buildah ]; then
    container=$(buildah from --pull-never "$IMAGE")
    # buildah 1.28 now and then mounts a volume of its own over the folder that --volume names
    buildah config --volume /cache- --volume /app/runs- "$container"
fi

# shellcheck disable=SC2016  # expanded in the image
leftovers='for path in /root/.cache /root/.config/pip /root/.netrc /etc/pip.conf /cache/.cache; do
    if [ -e "$path" ]; then echo "$path"; fi
done
find /app /venv /cache \( -name ".env" -o -name ".netrc" -o -name "id_*" -o -name "*.key" -o -name ".git" \)
find /var/lib/apt/lists /tmp -type f'
found=$(run_as=0:0 in_image -- sh -c "$leftovers")  # root sees it all
[ -z "$found" ] || fail "left in the image: $found"
pass "no cache of pip or apt, no key, no repository"

writable=$(in_image -- find / -xdev \( -type f -o -type d \) -writable -print 2>/dev/null | grep -vE "$WRITABLE" | head -5 || true)
writable=$(grep -vE '^/(run/lock|var/tmp)$' <<<"$writable" || true)  # open to all in Debian itself
[ -z "$writable" ] || fail "$run_as may write to: $writable"
pass "$run_as may write to /cache, /app/runs and /tmp alone"

mkdir "$work/runs" "$work/cache" "$work/data"
if [ "$(id -u)" = 0 ]; then chown "$run_as" "$work"/{runs,cache,data}; chmod 755 "$work"; fi
volumes=("$work/runs:/app/runs" "$work/cache:/cache")

run() {  # run NAME MOUNT ... -- PROGRAM ...: in_image, its output shown where it fails
    local name=$1 began=$SECONDS
    shift
    in_image "${volumes[@]}" "$@" >"$work/$name.log" 2>&1 || { tail -40 "$work/$name.log" >&2; fail "$name"; }
    say "     $name took $((SECONDS - began)) s"
}

in_image -- python -c "import json; print(len(json.load(open('/app/sbom.json'))['components']))" >"$work/sbom.log" || fail "no SBOM"
pass "names its $(cat "$work/sbom.log") packages in /app/sbom.json"

run help -- python apps/spleen/infer.py --help
run phantoms "$work/data:/data" -- python data_scripts/make_phantoms.py ct --to /data/ct --cases 3
run train "$work/data:/data:ro" -- python apps/spleen/train.py --data /data/ct --fast_dev_run true --engine none \
    --run runs/tried
[ -s "$work/runs/tried/summary.json" ] || fail "no summary of the training"
[ -s "$work/runs/tried/exports/model_fp32.onnx" ] || fail "no export of the training"
pass "trains on data that are mounted read-only, and exports"

run infer "$work/data:/data:ro" -- python apps/spleen/infer.py --model runs/tried --input /data/ct/imagesTr --output runs/masks
[ "$(find "$work/runs/masks" -name '*.nii.gz' | wc -l)" = 3 ] || fail "expected three label maps"
pass "segments a mounted folder"

run export "$work/data:/data:ro" -- python apps/spleen/export.py --model runs/tried --to bundle --output runs/bundle
[ -s "$work/runs/bundle/SHA256SUMS" ] || fail "no bundle"
pass "hands the model over as a bundle"

others=$(find "$work/runs" "$work/cache" "$work/data" ! -user "${run_as%%:*}" | head -3)
[ -z "$others" ] || fail "not owned by $run_as: $others"
pass "everything written belongs to $run_as"

if [ "$engine" = buildah ]; then
    root=$(buildah mount "$container")
    changed=$(cd "$root" && find . -xdev -type f -newer "$work/build.log" | sed 's/^\.//' | grep -vE "$WRITABLE" | head -5 || true)
    buildah umount "$container" >/dev/null
    [ -z "$changed" ] || fail "changed outside the volumes: $changed"
    pass "nothing else was written: the root can be read-only"
else
    pass "all of it with a read-only root"
fi

say "$passed checks passed; the image stays as $IMAGE"
