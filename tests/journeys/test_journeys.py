"""Ten people's tasks, each a script that a person could type, run whole in a folder of its own.

What their check at the end finds wrong fails them; here they only have to end well. They share trained runs.
"""

import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
SCRIPTS = sorted(Path(__file__).parent.glob("[0-9][0-9]_*.sh"))
NEEDS = {"07_triton": ["tritonclient"], "08_monai_bundle": ["ignite", "fire"], "10_notebook": ["nbclient", "ipykernel"]}


@pytest.fixture(scope="session")
def shell(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    """Return the environment of a shell that knows this checkout as the command `medspeed`."""
    command = tmp_path_factory.mktemp("bin") / "medspeed"
    command.write_text(f'#!/bin/sh\nexec "{sys.executable}" -m medspeed.cli "$@"\n')
    command.chmod(0o755)
    path = f"{command.parent}:{Path(sys.executable).parent}:{os.environ['PATH']}"
    shared = str(tmp_path_factory.mktemp("journeys"))
    return {**os.environ, "PATH": path, "PYTHONPATH": str(ROOT), "MEDSPEED_JOURNEYS": shared}


def test_there_are_ten_that_the_shell_understands():
    assert [path.name[:2] for path in SCRIPTS] == [f"{number:02}" for number in range(1, 11)]
    for path in SCRIPTS:
        assert os.access(path, os.X_OK), path
        assert "\nset -euo pipefail\n" in path.read_text()
        subprocess.run(["bash", "-n", path], check=True)


@pytest.mark.slow
@pytest.mark.parametrize("script", SCRIPTS, ids=lambda path: path.stem)
def test_a_journey_ends_well(script: Path, shell: dict[str, str], tmp_path: Path):
    for module in NEEDS.get(script.stem, []):
        pytest.importorskip(module)
    if script.stem == "10_notebook" and not list((ROOT / "notebooks").glob("*.ipynb")):
        pytest.skip("no notebook in notebooks/")
    done = subprocess.run(["bash", script], cwd=tmp_path, env=shell, capture_output=True, text=True, check=False)
    assert done.returncode == 0, f"{done.stdout[-4000:]}\n{done.stderr[-4000:]}"
