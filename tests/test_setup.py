"""setup.sh chooses the installer and the build of PyTorch, tried with stand-ins for Python, uv and nvidia-smi."""

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
_PYTHON = f"""#!/bin/sh
case "$*" in
    *urllib*) exit $UNREACHABLE ;;
    "-m venv .venv") mkdir -p .venv/bin; cp "$0" .venv/bin/python ;;
    *"config list"*) echo "$CONFIGURED" ;;
    "-m pip"*) echo "pip $PIP_EXTRA_INDEX_URL $*" >> log ;;
    *) exec {sys.executable} "$@" ;;
esac
"""


def stand_in(path: Path, text: str) -> None:
    path.write_text(text)
    path.chmod(0o755)


@pytest.fixture
def set_up(tmp_path):
    """Return what runs setup.sh in a folder of its own: its output, and the installations it asked for."""
    shutil.copy(ROOT / "setup.sh", tmp_path)
    (tmp_path / "bin").mkdir()
    stand_in(tmp_path / "bin" / "python3", _PYTHON)

    def run(*extras: str, unreachable: int = 0, configured: str = "", **tools: str) -> tuple[str, list[str]]:
        for tool, text in tools.items():
            stand_in(tmp_path / "bin" / tool.replace("_", "-"), f"#!/bin/sh\n{text}\n")
        hidden = [name for name in ("uv", "nvidia-smi") if name.replace("-", "_") not in tools]
        for name in hidden:  # the machine's own
            stand_in(tmp_path / "bin" / name, "#!/bin/sh\nexit 1\n")
        keep = {name: value for name, value in os.environ.items() if not name.startswith(("PIP_", "UV_"))}
        path = f"{tmp_path / 'bin'}:{os.environ['PATH']}"
        given = {"PATH": path, "UNREACHABLE": str(unreachable), "CONFIGURED": configured}
        done = subprocess.run(
            [tmp_path / "setup.sh", *extras], env=keep | given, capture_output=True, text=True, check=True
        )
        return done.stdout, (tmp_path / "log").read_text().splitlines()

    return run


def test_a_machine_without_a_gpu_gets_the_cpu_build(set_up):
    said, (first, *_) = set_up()
    assert "CPU build of PyTorch, 2.1 GB" in said
    assert first.startswith("pip https://download.pytorch.org/whl/cpu -m pip install")
    assert ".[rtx]" in first


@pytest.mark.parametrize(
    "how",
    [{"unreachable": 1}, {"configured": "global.index-url='https://mirror'"}, {"nvidia_smi": "exit 0"}],
    ids=["offline", "mirror", "gpu"],
)
def test_else_pip_finds_the_build(set_up, how):
    said, (first, *_) = set_up("dev,rtx", **how)
    assert "5.4 GB" in said
    assert first.startswith("pip  -m pip install")
    assert ".[dev,rtx]" in first


def test_uv_installs_where_it_is(set_up):
    said, asked = set_up(uv='echo "uv $UV_TORCH_BACKEND $*" >> log')
    assert all(line.startswith("uv cpu pip install") for line in asked)
    assert ".[rtx]" in asked[0]
    assert "uv failed" not in said


@pytest.mark.parametrize(("how", "failed"), [({}, True), ({"configured": "global.find-links='/wheels'"}, False)])
def test_pip_installs_where_uv_cannot(set_up, how, failed):
    said, (first, *_) = set_up(uv="exit 1", **how)
    assert first.startswith("pip")
    assert ("uv failed" in said) == failed


def test_an_old_python_is_named(set_up, tmp_path):
    stand_in(tmp_path / "bin" / "python3", "#!/bin/sh\necho 'Python 3.11.4 or newer is needed' >&2; exit 1\n")
    with pytest.raises(subprocess.CalledProcessError) as error:
        set_up()
    assert "3.11.4 or newer" in error.value.stderr
