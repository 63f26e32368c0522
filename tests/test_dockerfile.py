"""The image unbuilt (tests/image_test.sh builds it): what Dockerfile, .dockerignore and compose.yaml say."""

import fnmatch
import json
import re
import shlex
from pathlib import Path

import pytest
import yaml

ROOT = Path(__file__).parents[1]
SECRET = re.compile(r"passw|secret|token|api_?key|credential|private", re.IGNORECASE)


def instructions() -> list[tuple[str, str]]:
    """Return the Dockerfile's instructions, (name, rest), comments dropped and continued lines joined."""
    lines = [line for line in (ROOT / "Dockerfile").read_text().splitlines() if not line.lstrip().startswith("#")]
    joined = "\n".join(lines).replace("\\\n", " ")
    return [(line.split(maxsplit=1)[0], line.split(maxsplit=1)[1]) for line in joined.splitlines() if line.strip()]


def only(name: str) -> str:
    (found,) = [rest for instruction, rest in instructions() if instruction == name]
    return found


def place(name: str, part: str) -> int:
    (found,) = [i for i, (instruction, rest) in enumerate(instructions()) if instruction == name and part in rest]
    return found


def environment() -> dict[str, str]:
    return dict(word.split("=", 1) for word in shlex.split(only("ENV")))


def ignored(path: str) -> bool:
    """Return whether .dockerignore keeps a file out of the build; the last line that fits decides, as Docker has it."""
    parts = path.split("/")
    parents = ["/".join(parts[: depth + 1]) for depth in range(len(parts))]
    verdict = False
    for line in (ROOT / ".dockerignore").read_text().splitlines():
        if not line or line.startswith("#"):
            continue
        pattern = line.removeprefix("!")
        # `**/` stands for any number of folders, none included; fnmatch lets * cross slashes, Docker does not.
        name = pattern.removeprefix("**/")
        fits = any(
            fnmatch.fnmatch(parent.rsplit("/", 1)[-1], name)
            if pattern.startswith("**/")
            else parent.count("/") == pattern.count("/") and fnmatch.fnmatch(parent, pattern)
            for parent in parents
        )
        verdict = not line.startswith("!") if fits else verdict
    return verdict


def test_the_base_is_an_argument_with_a_pinned_default():
    assert instructions()[0] == ("ARG", "BASE_IMAGE=nvidia/cuda:13.0.2-base-ubuntu24.04")
    assert instructions()[1] == ("FROM", "${BASE_IMAGE}")


def test_the_user_is_a_number_that_is_not_root():
    user, group = only("USER").split(":")
    assert int(user) > 0
    assert int(group) > 0


def test_any_script_can_be_run_and_training_is_the_default():
    assert json.loads(only("ENTRYPOINT")) == ["python"]
    assert json.loads(only("CMD")) == ["apps/spleen/train.py"]
    names = [name for name, _ in instructions()]
    assert names.index("USER") < names.index("ENTRYPOINT")


def test_nothing_is_downloaded_by_address():
    assert "ADD" not in {name for name, _ in instructions()}
    assert not [rest for name, rest in instructions() if re.search(r"\b(curl|wget)\b|https?://", rest)]


def test_no_secret_is_asked_for_or_kept():
    assert not [rest for name, rest in instructions() if name in {"ARG", "ENV", "COPY"} and SECRET.search(rest)]
    assert not SECRET.search((ROOT / "compose.yaml").read_text())


def test_the_dependencies_are_installed_before_the_source_is_copied():
    install = place("RUN", "--editable")
    assert place("COPY", "pyproject.toml constraints.txt") < install
    assert shlex.split(instructions()[install][1].split("&&")[0]) == ["mkdir", "medspeed"]
    linked = [path.name for path in (ROOT / "medspeed").iterdir() if path.is_symlink() and path.is_dir()]
    for folder in ("medspeed", *linked):
        assert install < place("COPY", f"{folder} {folder}")


def test_pip_leaves_no_cache_and_takes_tested_versions():
    for _, rest in instructions():
        for call in re.findall(r"pip install[^&]*", rest):
            assert "--no-cache-dir" in call
            hashed = "--require-hashes" in call and "--no-deps" in call and "--no-build-isolation" in call
            assert hashed or "build.lock" in call or "--no-index" in call or "-c constraints.txt" in call
    assert {"PIP_INDEX_URL", "PIP_FIND_LINKS"} <= {rest for name, rest in instructions() if name == "ARG"}


def test_the_lock_is_taken_unless_the_builder_says_otherwise():
    assert ("ARG", "LOCK=requirements.lock") in instructions()
    install = instructions()[place("RUN", "--editable")][1]
    locked, _ = install.split('[ -n "${LOCK}" ]; then')[1].split("else")
    assert all("--require-hashes" in call or "--no-index" in call for call in re.findall(r"pip install[^&;]*", locked))


def test_the_image_holds_its_sbom():
    assert place("COPY", "apps apps") < place("RUN", "apps/sbom.py >sbom.json") < place("USER", "")


def test_apt_is_used_only_where_the_base_has_no_python_and_leaves_nothing():
    (call,) = [rest for name, rest in instructions() if "apt-get" in rest]
    assert call.startswith('if ! python3 -c "import ensurepip, venv"; then')
    assert "--no-install-recommends" in call
    assert all(f" {each} " in call for each in ("gcc", "libc6-dev", "python3-dev"))  # Triton compiles its launchers
    assert "rm -rf /var/lib/apt/lists/*" in call


@pytest.mark.parametrize(
    "name", ["HOME", "XDG_CACHE_HOME", "MPLCONFIGDIR", "TORCHINDUCTOR_CACHE_DIR", "TRITON_CACHE_DIR", "CUPY_CACHE_DIR"]
)
def test_what_programs_keep_goes_to_a_volume(name):
    volumes = json.loads(only("VOLUME"))
    assert any(environment()[name].startswith(volume) for volume in volumes)


def test_any_user_may_write_to_the_volumes():
    (made,) = re.findall(r"install -d -m 1777 ([^&]*)", instructions()[place("RUN", "useradd")][1])
    assert made.split() == json.loads(only("VOLUME"))
    assert only("WORKDIR") == "/app"  # where the apps write runs/


def test_the_labels_are_those_of_the_oci():
    labels = dict(word.split("=", 1) for word in shlex.split(only("LABEL")))
    assert {name.removeprefix("org.opencontainers.image.") for name in labels} >= {
        "title", "description", "licenses", "base.name", "revision",
    }  # fmt: skip
    assert labels["org.opencontainers.image.base.name"] == "${BASE_IMAGE}"
    # an argument from before FROM is empty behind it unless it is named again
    assert place("FROM", "BASE") < max(i for i, found in enumerate(instructions()) if found == ("ARG", "BASE_IMAGE"))


@pytest.mark.parametrize(
    "path",
    [
        ".git/config", ".venv/bin/python", "runs/spleen/best.safetensors", "data/a.nii.gz", ".env", ".netrc", "id_rsa",
        "apps/__pycache__/a.pyc", "apps/spleen/__pycache__/a.pyc", "common/.mypy_cache/a", ".pytest_cache/a", "build/a",
        "medspeed.egg-info/PKG-INFO", "tests/test_dockerfile.py", "benchmarks/records/a/record.json", "apps/.env",
    ],
)  # fmt: skip
def test_what_the_image_does_not_need_stays_out(path):
    assert ignored(path)


@pytest.mark.parametrize(
    "path", ["apps/spleen/train.py", "common/observe/report.html.j2", "pyproject.toml", "constraints.txt", "LICENSE"]
)
def test_what_the_image_needs_goes_in(path):
    assert not ignored(path)


def test_every_source_that_is_copied_is_there():
    for sources in (rest.split()[:-1] for name, rest in instructions() if name == "COPY"):
        for source in sources:
            assert (ROOT / source).exists(), source
            assert not ignored(source), source


# --- compose.yaml ---

SERVICES = yaml.safe_load((ROOT / "compose.yaml").read_text())["services"]


@pytest.mark.parametrize("name", ["train", "infer", "train-gpu", "infer-gpu"])
def test_a_service_runs_an_app_read_only_as_the_caller(name):
    service = SERVICES[name]
    interpreter, script = service["entrypoint"]
    assert interpreter == "python"
    assert (ROOT / script).is_file()
    assert service["read_only"] is True
    assert service["tmpfs"] == ["/tmp"]
    assert service["user"] == "${RUN_AS:-" + only("USER") + "}"
    assert f"{instructions()[0][1].split('=')[1]}" in service["build"]["args"]["BASE_IMAGE"]


def test_each_volume_of_the_image_is_a_named_one():
    named = yaml.safe_load((ROOT / "compose.yaml").read_text())["volumes"]
    mounts = dict(reversed(mount.split(":")[:2]) for mount in SERVICES["train"]["volumes"] if mount[0] != "$")
    assert set(mounts) == set(json.loads(only("VOLUME")))
    assert set(mounts.values()) == set(named)


def test_a_gpu_is_asked_for_by_the_gpu_services_alone():
    assert {name for name, service in SERVICES.items() if "deploy" in service} == {"train-gpu", "infer-gpu"}
    for name in ("train-gpu", "infer-gpu"):
        (device,) = SERVICES[name]["deploy"]["resources"]["reservations"]["devices"]
        assert device["capabilities"] == ["gpu"]
        assert SERVICES[name]["profiles"] == ["gpu"]
