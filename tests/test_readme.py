"""What the README says is true: its commands parse or run, its files exist, its numbers are a record's."""

import argparse
import re
import shlex
import subprocess
import sys
from collections.abc import Callable, Sequence
from pathlib import Path

import pytest
from torch.distributed.run import get_args_parser

from medspeed.apps import doctor
from medspeed.apps.brats.config import BratsConfig, BratsExport
from medspeed.apps.brats.config import parse as parse_brats
from medspeed.apps.pathology.config import EvaluateConfig, PathologyConfig, PathologyExport, ScanConfig
from medspeed.apps.pathology.config import parse as parse_pathology
from medspeed.apps.spleen.config import SpleenConfig, SpleenExport
from medspeed.apps.spleen.config import parse as parse_spleen
from medspeed.benchmarks import ladder, time_to_target
from medspeed.common.config import config_to_yaml, parse_config
from medspeed.common.inference.options import InferConfig
from medspeed.data_scripts import fetch_camelyon16, fetch_msd, make_phantoms, make_slides, to_msd

ROOT = Path(__file__).parents[1]
README = (ROOT / "README.md").read_text()
APP_READMES = [path.read_text() for path in sorted((ROOT / "apps").glob("*/README.md"))]
BLOCKS = [block for text in (README, *APP_READMES) for block in re.findall(r"```bash\n(.*?)```", text, flags=re.DOTALL)]
COMMANDS = [line.split("#")[0].strip() for block in BLOCKS for line in block.splitlines() if line.strip()]
TRAIN = {
    "apps/spleen/train.py": (SpleenConfig, parse_spleen),
    "apps/brats/train.py": (BratsConfig, parse_brats),
    "apps/pathology/train.py": (PathologyConfig, parse_pathology),
}
OTHERS: dict[str, type] = {
    "apps/spleen/infer.py": InferConfig,
    "apps/brats/infer.py": InferConfig,
    "apps/pathology/infer.py": ScanConfig,
    "apps/pathology/evaluate.py": EvaluateConfig,
    "apps/spleen/export.py": SpleenExport,
    "apps/brats/export.py": BratsExport,
    "apps/pathology/export.py": PathologyExport,
}
DATA_SCRIPTS: dict[str, Callable[[Sequence[str]], argparse.Namespace]] = {
    "data_scripts/fetch_msd.py": fetch_msd.parse_options,
    "data_scripts/fetch_camelyon16.py": fetch_camelyon16.parse_options,
    "data_scripts/make_phantoms.py": make_phantoms.make_parser().parse_args,
    "data_scripts/make_slides.py": make_slides.make_parser().parse_args,
    "data_scripts/to_msd.py": to_msd.parse_options,
}
PROGRAMS: dict[str, Callable[[Sequence[str]], argparse.Namespace]] = {
    "apps/doctor.py": doctor.parse_options,
    "benchmarks/ladder.py": ladder.parse_options,
    "benchmarks/time_to_target.py": time_to_target.parse_options,
}


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
    elif script.endswith("train.py"):
        assert_parsed(script, arguments, tmp_path)
    elif script in OTHERS:
        assert isinstance(parse_config(OTHERS[script], {}, arguments), OTHERS[script])
    elif script in PROGRAMS:
        assert PROGRAMS[script](arguments).app
    else:
        assert DATA_SCRIPTS[script](arguments).to


@pytest.mark.parametrize("command", [line for line in COMMANDS if "torchrun" in line])
def test_torchrun_commands_are_understood(command, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    words = shlex.split(command.replace("--node-rank N", "--node-rank 0"))
    start = words.index("torchrun")
    launched = get_args_parser().parse_args(words[start + 1 :])
    assert launched.max_restarts == 0
    assert launched.training_script == words[words.index("--") + 1]
    split = words.index("--")
    assert (ROOT / words[split + 1]).is_file()
    assert_parsed(words[split + 1], words[split + 2 :], tmp_path)


def assert_parsed(script, arguments, folder):
    """Parse the arguments of a training script, beside a run that could be resumed."""
    config, parse = TRAIN[script]
    for name in re.findall(r"runs/\S+", " ".join(arguments)):
        stored = folder / name.removesuffix("/best.safetensors") / "config.yaml"
        stored.parent.mkdir(parents=True, exist_ok=True)
        stored.write_text(config_to_yaml(config()))
    assert isinstance(parse(arguments), config)


def test_every_path_that_the_map_names_exists():
    for path in re.findall(r"^\| `([a-z_]+/[a-z_/]*)` \|", README, flags=re.MULTILINE):
        if path not in {"overlays/", "exports/"}:  # of a run folder
            assert (ROOT / path).is_dir(), path


def test_the_order_of_the_sections():
    found = re.findall(r"^#+ (.*)$", README, flags=re.MULTILINE)
    assert found == [
        "Medspeed", "What it measures", "Two commands", "Real data", "Train", "Where the time goes", "Infer",
        "Hand over", "Container",
        "What the clock covers", "Map", "Your own organ", "Licences",
    ]  # fmt: skip


def test_it_says_what_it_is_not_for():
    assert "Not for clinical use" in README
    assert "unproven" in README
