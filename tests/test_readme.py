"""What the README says is true: its commands parse or run, its files exist, its numbers are a record's."""

import re
import shlex
import subprocess
import sys
from pathlib import Path

import pytest

from apps.spleen.config import SpleenConfig, parse_spleen_config
from benchmarks.tables import results_table
from common.config import config_to_yaml, parse_config
from common.inference.options import InferConfig
from data_scripts import fetch_msd, make_phantoms

ROOT = Path(__file__).parents[1]
README = (ROOT / "README.md").read_text()
BLOCKS = re.findall(r"```bash\n(.*?)```", README, flags=re.DOTALL)
COMMANDS = [line.split("#")[0].strip() for block in BLOCKS for line in block.splitlines() if line.strip()]
RECORD = ROOT / "benchmarks" / "records" / "2026-11-20_cpu_spleen-guide-against-fast"


def test_there_are_commands():
    assert len(COMMANDS) >= 10


@pytest.mark.parametrize("command", [line for line in COMMANDS if line.startswith("make ")])
def test_make_commands_are_targets(command):
    assert f"\n{command.split()[1]}:" in (ROOT / "Makefile").read_text()


@pytest.mark.parametrize("command", [line for line in COMMANDS if line.startswith("python ")])
def test_python_commands_are_understood(command, tmp_path, monkeypatch):
    """Each is parsed by the program's own parser; what it would train, download or segment is tested elsewhere."""
    script, *arguments = shlex.split(command)[1:]
    assert (ROOT / script).is_file()
    monkeypatch.chdir(tmp_path)
    if "--help" in arguments:
        done = subprocess.run([sys.executable, ROOT / script, "--help"], capture_output=True, check=False)
        assert done.returncode == 0
    elif script == "apps/spleen/train.py":
        stored = tmp_path / "runs" / "mine" / "config.yaml"
        stored.parent.mkdir(parents=True)
        stored.write_text(config_to_yaml(SpleenConfig()))
        assert isinstance(parse_spleen_config(arguments), SpleenConfig)
    elif script == "apps/spleen/infer.py":
        assert isinstance(parse_config(InferConfig, {}, arguments), InferConfig)
    else:
        assert script.startswith("data_scripts/")
        parse = fetch_msd.parse_options if "fetch_msd" in script else make_phantoms.make_parser().parse_args
        assert parse(arguments).to


def test_every_path_that_the_map_names_exists():
    for path in re.findall(r"^\| `([a-z_]+/[a-z_/]*)` \|", README, flags=re.MULTILINE):
        if path not in {"overlays/", "exports/"}:  # of a run folder
            assert (ROOT / path).is_dir(), path


def test_the_numbers_are_the_records():
    assert results_table(RECORD) in README


def test_the_order_of_the_sections():
    found = re.findall(r"^#+ (.*)$", README, flags=re.MULTILINE)
    assert found == [
        "Medspeed", "What it measures", "Two commands", "Real data", "Train", "Infer", "What the clock covers", "Map",
        "Your own organ", "Licences",
    ]  # fmt: skip


def test_it_says_what_it_is_not_for():
    assert "Not for clinical use" in README
    assert "unproven" in README
