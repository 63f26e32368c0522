"""The documentation holds: each command is parsed by the program's own parser, each link and anchor leads somewhere.

What a command would train, download or segment is tested elsewhere. Programs of others are known by name alone.
"""

import argparse
import importlib
import importlib.util
import re
import shlex
import subprocess
import sys
import tomllib
from collections.abc import Callable, Sequence
from pathlib import Path

import numpy as np
import pytest
import torch
import yaml
from PIL import Image
from torch.distributed.run import get_args_parser

from medspeed import cli
from medspeed.apps import doctor, folds
from medspeed.apps.brats.config import BratsConfig
from medspeed.apps.brats.config import parse as parse_brats
from medspeed.apps.brats.export import BratsExport
from medspeed.apps.pathology.config import EvaluateConfig, PathologyConfig, ScanConfig
from medspeed.apps.pathology.config import parse as parse_pathology
from medspeed.apps.pathology.export import PathologyExport
from medspeed.apps.pathology.model import PathologyModel
from medspeed.apps.spleen.config import SpleenConfig
from medspeed.apps.spleen.config import parse as parse_spleen
from medspeed.apps.spleen.export import SpleenExport
from medspeed.benchmarks import ladder, speedrun
from medspeed.common.config import config_to_yaml, parse_config
from medspeed.common.inference import options
from medspeed.common.inference.model import save_weights, write_model
from medspeed.common.inference.options import InferConfig
from medspeed.data_scripts import fetch_camelyon16, fetch_msd, make_phantoms, make_slides, to_msd
from tests.test_capabilities import FLAGS

ROOT = Path(__file__).parents[1]
GUIDES = [ROOT / name for name in ("README.md", "CONTRIBUTING.md", "SECURITY.md")]
GUIDES += [*sorted((ROOT / "docs").glob("*.md")), *sorted((ROOT / "apps").glob("*/README.md"))]
PAGES = [*GUIDES, ROOT / "CHANGELOG.md", *sorted((ROOT / "benchmarks").rglob("*.md"))]
TRAIN = {
    "apps/spleen/train.py": (SpleenConfig, parse_spleen),
    "apps/brats/train.py": (BratsConfig, parse_brats),
    "apps/pathology/train.py": (PathologyConfig, parse_pathology),
}
OTHERS: dict[str, type] = {
    "apps/spleen/infer.py": InferConfig,
    "apps/brats/infer.py": InferConfig,
    "apps/pathology/infer.py": ScanConfig,
    "apps/spleen/evaluate.py": options.EvaluateConfig,
    "apps/brats/evaluate.py": options.EvaluateConfig,
    "apps/pathology/evaluate.py": EvaluateConfig,
    "apps/spleen/export.py": SpleenExport,
    "apps/brats/export.py": BratsExport,
    "apps/pathology/export.py": PathologyExport,
}
PARSERS: dict[str, Callable[[Sequence[str]], argparse.Namespace]] = {
    "apps/doctor.py": doctor.PARSER.parse_args,
    "benchmarks/ladder.py": ladder.PARSER.parse_args,
    "benchmarks/speedrun.py": lambda words: speedrun.parse_options(words)[0],
    "data_scripts/fetch_msd.py": fetch_msd.PARSER.parse_args,
    "data_scripts/fetch_camelyon16.py": fetch_camelyon16.PARSER.parse_args,
    "data_scripts/make_phantoms.py": make_phantoms.PARSER.parse_args,
    "data_scripts/make_slides.py": make_slides.PARSER.parse_args,
    "data_scripts/to_msd.py": to_msd.parse_options,
}
FOREIGN = {"cd", "mkdir", "source", "curl", "nsys", "nsys-ui", "tritonserver"}
FOREIGN_FLAGS = {
    "gpus", "build-arg", "user", "memory", "network", "require-hashes", "hash", "collectors", "rehearse", "write",
    "help", "standalone", "nproc-per-node", "nnodes", "node-rank", "master-addr", "run-path", "strict",
    "baseline", "optimized", "verify-dataset-integrity", "c", "crop", "signals-to-handle", "resolution", "extra",
}  # fmt: skip


def commands() -> list[str]:
    """Return every line of every bash block, without comments."""
    found = []
    for path in GUIDES:
        for block in re.findall(r"^ *```bash\n(.*?)^ *```", path.read_text(encoding="utf-8"), re.DOTALL | re.MULTILINE):
            lines = block.replace("\\\n", " ").splitlines()
            found += [shlex.join(words) for line in lines if (words := shlex.split(line, comments=True))]
    return sorted(set(found))


def test_there_are_commands_and_pages():
    assert len(commands()) >= 60
    assert len(GUIDES) >= 20


@pytest.mark.parametrize("command", commands())
def test_a_command_is_understood(command, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    words = shlex.split(command.replace("--node-rank N", "--node-rank 0"))
    words = words[: words.index(">")] if ">" in words else words
    while re.match(r"[A-Z_]+=", words[0]):
        words = words[1:]
    understood(words, tmp_path)


def understood(words, folder):
    """Parse a command as its program does."""
    program, rest = Path(words[0]).name, words[1:]
    if program in PROGRAMS:
        PROGRAMS[program](rest, folder)
    else:
        assert program in FOREIGN, words


def make_understood(words, folder):
    assert f"\n{words[0]}:" in (ROOT / "Makefile").read_text()


def python_understood(words, folder):
    if words[0] == "-m":
        assert importlib.util.find_spec(words[1]) is not None
    else:
        script_understood(words[0], words[1:], folder)


def torchrun_understood(words, folder):
    launched = get_args_parser().parse_args(words)
    assert launched.max_restarts == 0
    script_understood(launched.training_script, launched.training_script_args, folder)


def pip_understood(words, folder):
    extras = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["optional-dependencies"]
    assert set(re.findall(r"\[(\w+)\]", words[-1])) <= extras.keys()


def sbatch_understood(words, folder):
    start = next(place for place, word in enumerate(words) if word.endswith(".sh"))
    assert (ROOT / words[start]).is_file()
    script_understood("apps/brats/train.py", ["--run", *words[start + 1 :]], folder)


def bash_understood(words, folder):
    assert (ROOT / words[0]).is_file()


def medspeed_understood(words, folder):
    """Parse what follows `medspeed`."""
    if words[0].startswith("-"):
        assert cli.main(words) == 0
        return
    count = 1 if words[0] == "doctor" else 2
    module = cli.programs()[tuple(words[:count])]
    if words[0] == "folds":
        folds.parse(words[1:])
    script_understood(module.removeprefix("medspeed.").replace(".", "/") + ".py", words[count:], folder)


def script_understood(script, arguments, folder):
    """Parse the arguments of a script of this repository."""
    assert (ROOT / script).is_file(), script
    if {"--help", "--print-config", "--print_config"} & {*arguments}:  # test_capabilities asks each for its help
        return
    if "--config" in arguments:
        Path(folder, arguments[arguments.index("--config") + 1]).write_text("epochs: 5\n")
    if script in TRAIN:
        train_understood(script, arguments, folder)
    elif script in OTHERS:
        assert isinstance(parse_config(OTHERS[script], {}, arguments), OTHERS[script])
    elif script in PARSERS:
        assert PARSERS[script](arguments)


def train_understood(script, arguments, folder):
    """Parse the arguments of a training script, beside runs that could be resumed."""
    config, parse = TRAIN[script]
    for name in re.findall(r"runs/\S+", " ".join(arguments)):
        stored = folder / name.removesuffix("/best.safetensors") / "config.yaml"
        stored.parent.mkdir(parents=True, exist_ok=True)
        stored.write_text(config_to_yaml(config()))
    assert isinstance(parse(arguments), config)


def docker_understood(words, folder):
    """Parse the script that a container runs; of a build, that its arguments are the Dockerfile's."""
    dockerfile = (ROOT / "Dockerfile").read_text()
    for name in re.findall(r"--build-arg (\w+)=", " ".join(words)):
        assert f"\nARG {name}" in f"\n{dockerfile}"
    scripts = [place for place, word in enumerate(words) if word.endswith(".py")]
    if scripts:
        script_understood(words[scripts[0]], words[scripts[0] + 1 :], folder)


PROGRAMS: dict[str, Callable[[list[str], Path], None]] = {
    "make": make_understood,
    "medspeed": medspeed_understood,
    "python": python_understood,
    "torchrun": torchrun_understood,
    "docker": docker_understood,
    "pip": pip_understood,
    "sbatch": sbatch_understood,
    "bash": bash_understood,
}


def test_every_flag_that_a_text_names_exists():
    known = {flag.replace("_", "-") for flags in FLAGS.values() for flag in flags.split()} | FOREIGN_FLAGS
    named = {
        (path.name, flag)
        for path in GUIDES
        for code in re.findall(r"(?<!`)`([^`\n]+)`", path.read_text(encoding="utf-8"))
        for flag in re.findall(r"(?<![\w-])--([a-zA-Z][\w.-]*)", code)
    }
    assert len(named) >= 100
    assert {(page, flag) for page, flag in named if flag.removeprefix("no-").replace("_", "-") not in known} == set()


def test_every_program_that_a_text_names_exists():
    spans = [code for path in GUIDES for code in re.findall(r"(?<!`)`([^`\n]+)`", path.read_text(encoding="utf-8"))]
    named = {tuple(code.split()) for code in spans if re.match(r"(make|python|medspeed) [a-z]", code)}
    assert len(named) >= 20
    for program, *words in named:
        if program == "make":
            make_understood(words, ROOT)
        elif program == "python":
            assert (ROOT / words[0]).is_file(), words
        else:
            name = [word for word in words[:2] if not (word.startswith("-") or word.isupper())]
            assert any([*each[: len(name)]] == name for each in cli.programs()), words


def slugs(path: Path) -> set[str]:
    """Return the anchors of a page's headings that a repository browser and the site both give them."""
    text = re.sub(r"^ *```.*?^ *```", "", path.read_text(encoding="utf-8"), flags=re.DOTALL | re.MULTILINE)
    titles = [re.sub(r"[`*]", "", title).strip().lower() for title in re.findall(r"^#+ (.*)$", text, re.MULTILINE)]
    there = {re.sub(r"[^\w\s-]", "", title).replace(" ", "-") for title in titles}
    return there & {re.sub(r"[-\s]+", "-", re.sub(r"[^\w\s-]", "", title)) for title in titles}


@pytest.mark.parametrize("page", PAGES, ids=lambda path: str(path.relative_to(ROOT)))
def test_every_link_and_anchor_leads_somewhere(page):
    text = re.sub(r"^ *```.*?^ *```", "", page.read_text(encoding="utf-8"), flags=re.DOTALL | re.MULTILINE)
    for link in re.findall(r"\]\((?!https?:)([^)\s]+)\)", text):
        name, _, anchor = link.partition("#")
        target = (page.parent / name).resolve() if name else page
        assert target.exists(), link
        if anchor:
            assert anchor in slugs(target), link


def test_every_page_is_in_the_navigation():
    class Loader(yaml.SafeLoader):
        """YAML with MkDocs' tag for variables of the environment."""

    Loader.add_constructor("!ENV", lambda loader, node: "")
    navigation = str(yaml.load((ROOT / "mkdocs.yml").read_text(), Loader)["nav"])
    assert [path.name for path in (ROOT / "docs").glob("*.md") if f"'{path.name}'" not in navigation] == []


def test_the_workflow_builds_the_site_with_the_packages_of_the_extra():
    jobs = yaml.safe_load((ROOT / ".github/workflows/docs.yml").read_text())["jobs"]
    steps = [step.get("run", "") for step in jobs["build"]["steps"]]
    assert "mkdocs build --strict" in steps
    extras = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["optional-dependencies"]
    (install,) = [shlex.split(step) for step in steps if " install " in step]
    assert {each.split(">")[0] for each in extras["docs"]} <= set(install)
    assert set(extras["docs"]) <= set(extras["dev"])


def test_the_citation_is_of_this_version():
    citation = yaml.safe_load((ROOT / "CITATION.cff").read_text())
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    assert {"cff-version", "message", "title", "authors"} <= citation.keys()  # what its schema demands
    assert (citation["version"], citation["license"]) == (project["version"], project["license"])


def test_the_site_builds_strictly_and_loads_nothing_from_elsewhere(tmp_path):
    for package in ("mkdocs", "material", "mkdocstrings", "mkdocstrings_handlers.python"):
        pytest.importorskip(package, reason="pip install -c constraints.txt -e '.[docs]'")
    done = subprocess.run(
        [sys.executable, "-m", "mkdocs", "build", "--strict", "--site-dir", tmp_path / "site"],
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    for page in ("index.html", "api/index.html", "apps/brats/index.html", "CHANGELOG/index.html"):
        text = (tmp_path / "site" / page).read_text(encoding="utf-8")
        assert not re.findall(r'<(?:script|img|link rel="stylesheet")[^>]*(?:src|href)="(?:https?:)?//', text)
    api = (tmp_path / "site/api/index.html").read_text(encoding="utf-8")
    assert {"medspeed.api.train", "medspeed.api.predict", "medspeed.common.inference.options.InferConfig"} <= set(
        re.findall(r'id="([\w.]+)"', api)
    )


def test_the_programs_of_the_pages_name_what_there_is():
    for path in GUIDES:
        for program in re.findall(r"```python\n(.*?)```", path.read_text(encoding="utf-8"), re.DOTALL):
            compile(program, path.name, "exec")
            for module, names in re.findall(r"^from (medspeed[\w.]*) import (.*)$", program, re.MULTILINE):
                assert all(hasattr(importlib.import_module(module), name) for name in names.split(", ")), names


def test_the_program_that_scores_patches_runs(tmp_path, monkeypatch, capsys):
    (program,) = re.findall(r"```python\n(.*?)```", (ROOT / "docs/score_patches.md").read_text(), re.DOTALL)
    run = tmp_path / "runs/pathology/latest"
    run.mkdir(parents=True)
    model = PathologyModel(patch_size=32, mpp=0.5, tile_size=704, tile_batch=1, precision="fp32")
    network = model.build().eval()
    write_model(run, "pathology", model)
    save_weights(run / "best.safetensors", network.state_dict(), {})
    (tmp_path / "patches").mkdir()
    pixels = np.random.default_rng(0).integers(0, 256, (3, 32, 32, 3), np.uint8)
    for number, patch in enumerate(pixels):
        Image.fromarray(patch).save(tmp_path / "patches" / f"{number}.png")
    monkeypatch.chdir(tmp_path)
    exec(compile(program, "score_patches.md", "exec"), {})
    with torch.inference_mode():
        due = network(torch.from_numpy(pixels).permute(0, 3, 1, 2) / 127.5 - 1).flatten().sigmoid().tolist()
    found = [line.split(",") for line in capsys.readouterr().out.splitlines()]
    assert [name for name, _ in found] == ["0.png", "1.png", "2.png"]
    assert [float(score) for _, score in found] == pytest.approx(due, abs=1e-3)


def test_the_pictures_are_drawn_of_a_run(tmp_path):
    run = tmp_path / "run"
    (run / "overlays").mkdir(parents=True)
    (run / "summary.json").write_text('{"quality": {"per_case": {"good": 0.9, "bad": 0.4}}}')
    (run / "metrics.jsonl").write_text('{"epoch": 1, "loss": 0.5}\n{"epoch": 2, "loss": 0.4, "dice": 0.3}\n')
    for number, name in enumerate(("good", "bad")):
        Image.new("RGB", (90, 60), (255 * number, 0, 0)).save(run / "overlays" / f"{name}.png")
    command = [sys.executable, ROOT / "docs/make_picture.py", run, "--to", tmp_path / "made"]
    subprocess.run(command, check=True, capture_output=True)
    with Image.open(tmp_path / "made/overlay.webp") as overlay:
        assert overlay.size == (90, 60)
        assert np.asarray(overlay.convert("RGB"))[30, 45, 0] > 200  # the worst case that was judged
    with Image.open(tmp_path / "made/overview.webp") as overview:
        assert overview.size == (1600, 1000)
