"""The package as `pip install` leaves it: away from the checkout, beside other people's `common` and `models`."""

import os
import shutil
import site
import subprocess
import sys
import sysconfig
import tarfile
import venv
import zipfile
from pathlib import Path

import pytest

pytest.importorskip("setuptools", minversion="77")
ROOT = Path(__file__).parents[2]
BUILD = "import sys; from setuptools import build_meta; getattr(build_meta, sys.argv[1])(sys.argv[2])"


def run(command: list[object], cwd: Path, **environ: str) -> str:
    plain = {name: value for name, value in os.environ.items() if name not in {"PYTHONPATH", "COMP_LINE"}}
    done = subprocess.run(
        list(map(str, command)), cwd=cwd, env=plain | environ, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def copy_of_the_checkout(folder: Path) -> Path:
    """Return a copy of what git keeps, links as links."""
    kept = run(["git", "ls-files", "--cached", "--others", "--exclude-standard", "-z"], ROOT).split("\0")
    for name in filter(None, kept):
        if name.startswith(("tests/", "benchmarks/records/")) or not os.path.lexists(ROOT / name):
            continue
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        shutil.copy2(ROOT / name, folder / name, follow_symlinks=False)
    return folder


@pytest.fixture(scope="module")
def built(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """Return the wheel of the checkout, and the source distribution with the wheel made of it."""
    source, made = copy_of_the_checkout(tmp_path_factory.mktemp("source")), tmp_path_factory.mktemp("made")
    run([sys.executable, "-c", BUILD, "build_sdist", made], source)
    run([sys.executable, "-c", BUILD, "build_wheel", made / "direct"], source)
    archive = next(made.glob("*.tar.gz"))
    with tarfile.open(archive) as tar:
        tar.extractall(made / "unpacked", filter="data")
    run([sys.executable, "-c", BUILD, "build_wheel", made / "again"], next((made / "unpacked").iterdir()))
    (wheel,), (again,) = (made / "direct").glob("*.whl"), (made / "again").glob("*.whl")
    return {"sdist": archive, "wheel": wheel, "wheel of the sdist": again}


@pytest.fixture(scope="module")
def installed(built, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return an environment with the wheel, this one's libraries, and decoys that lie before them on the path."""
    folder = tmp_path_factory.mktemp("environment")
    venv.create(folder, with_pip=False, symlinks=True)
    packages = Path(sysconfig.get_path("purelib", "venv", {"base": str(folder), "platbase": str(folder)}))
    pip = [sys.executable, "-m", "pip", "--disable-pip-version-check", "--python", folder / "bin" / "python"]
    run([*pip, "install", "--quiet", "--no-deps", "--no-index", built["wheel"]], folder)
    (packages / "libraries.pth").write_text("\n".join(site.getsitepackages()))
    for decoy in ("apps", "common", "models"):
        (packages / decoy).mkdir()
        (packages / decoy / "__init__.py").write_text("raise ImportError('somebody else uses this name')\n")
    return folder


def test_wheel_and_sdist_hold_one_import_name_and_all_of_it(built):
    with zipfile.ZipFile(built["wheel"]) as wheel, zipfile.ZipFile(built["wheel of the sdist"]) as again:
        names = set(wheel.namelist())
        assert names == set(again.namelist())
    tops = {name.split("/")[0] for name in names}
    assert {top for top in tops if not top.endswith(".dist-info")} == {"medspeed"}
    tracked = {
        path.relative_to(ROOT).as_posix()
        for room in ("apps", "common", "models", "data_scripts", "benchmarks")
        for path in (ROOT / room).rglob("*")
        if path.suffix in {".py", ".j2", ".yaml"} and "records" not in path.parts and "__pycache__" not in path.parts
    }
    assert {f"medspeed/{name}" for name in tracked} <= names
    assert {
        "medspeed/py.typed",
        *(f"medspeed/demo/{path.name}" for path in (ROOT / "medspeed/demo").iterdir()),
    } <= names
    with tarfile.open(built["sdist"]) as archive:
        kept = {name.split("/", 1)[1] for name in archive.getnames() if "/" in name}
    assert {"README.md", "LICENSE", "CHANGELOG.md", "constraints.txt", "docs/techniques.md"} <= kept


def test_the_installed_command_answers_beside_packages_of_the_same_names(installed, tmp_path):
    command = installed / "bin" / "medspeed"
    assert run([command, "--version"], tmp_path).startswith("medspeed ")
    assert "usage: medspeed train spleen" in run([command, "train", "spleen", "--help"], tmp_path)
    place = run([installed / "bin" / "python", "-c", "import medspeed.common as c; print(c.__file__)"], tmp_path)
    assert Path(place.strip()).is_relative_to(installed)


@pytest.mark.slow
def test_the_installed_package_trains_and_infers(installed, tmp_path):
    command, home = installed / "bin" / "medspeed", {"HOME": str(tmp_path / "home")}
    flags = ["--channels", "[4,8]", "--crop_size", "[16,16,16]", "--batch_size", "2"]
    run([command, "train", "spleen", "--fast_dev_run", "true", "--engine", "none", *flags, "--run", "tried"],
        tmp_path, **home)  # fmt: skip
    (data,) = (tmp_path / "home" / ".cache" / "medspeed").rglob("dataset.json")
    scan = min((data.parent / "imagesTr").iterdir())
    run([command, "infer", "spleen", "--model", "tried", "--input", scan, "--output", "masks"], tmp_path, **home)
    assert list((tmp_path / "masks").glob("*.nii.gz"))
    said = run([command, "infer", "spleen", "--model", "demo", "--input", scan, "--output", "demo"], tmp_path, **home)
    assert list((tmp_path / "demo").glob("*.nii.gz"))
    assert "SYNTHETIC DATA" in said
    assert not (tmp_path / "common").exists()
