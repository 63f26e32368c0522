"""The rules of the house that no linter holds."""

import ast
import re
import subprocess
import sys
from importlib import import_module
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
ROOMS = ("apps", "benchmarks", "common", "data_scripts", "models")
CODE = [path for room in ROOMS for path in sorted((ROOT / room).rglob("*.py"))]
# The guide's limits are 300 lines a file (200 in an app's own folder) and 60 a function. What is longer has its reason.
LONGER_FUNCTIONS = {
    "common/training/fit.py:fit": "the one training loop, whose names are the seams of training",
}


def name(path: Path) -> str:
    return path.relative_to(ROOT).as_posix()


@pytest.mark.parametrize("path", CODE, ids=name)
def test_files_and_functions_stay_within_the_guide(path):
    source = path.read_text()
    parts = path.relative_to(ROOT).parts
    limit = 200 if parts[0] == "apps" and len(parts) <= 3 else 300
    assert source.count("\n") <= limit
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.FunctionDef) and f"{name(path)}:{node.name}" not in LONGER_FUNCTIONS:
            assert (node.end_lineno or node.lineno) - node.lineno < 60, node.name


def test_train_reads_within_120_lines():
    for train in (ROOT / "apps").glob("*/train.py"):
        assert train.read_text().count("\n") <= 120, name(train)


def test_no_module_is_named_like_a_dependency_or_the_standard_library():
    taken = set(sys.stdlib_module_names) | {"torch", "monai", "numpy", "nibabel", "onnx", "tensorrt", "tqdm", "cucim"}
    scripts = [path for path in CODE if path.parts[-2] in {"spleen", "data_scripts", "benchmarks", "peers"}]
    assert not [name(path) for path in scripts if path.stem in taken]


def test_an_app_goes_by_the_name_of_its_folder():
    """Else folds and the doctor would run another app for a new one that was copied from it."""
    for train in (ROOT / "apps").glob("*/train.py"):
        app = train.parent.name
        assert app == import_module(f"medspeed.apps.{app}.config").RECIPES["fast"].APP
        for program in ("infer", "evaluate", "export"):
            named = re.findall(r'"(brats|pathology|spleen)"', (train.parent / f"{program}.py").read_text())
            assert {*named} <= {app}, program


def test_apps_never_import_each_other():
    apps = [folder.name for folder in (ROOT / "apps").iterdir() if (folder / "train.py").is_file()]
    for path in CODE:
        room, app = path.relative_to(ROOT).parts[:2]
        if room != "apps" or app not in apps:
            continue
        others = [f"medspeed.apps.{other}" for other in apps if other != app]
        assert not [other for other in others if other in path.read_text()], name(path)


@pytest.mark.parametrize(
    "module",
    [
        "medspeed.data_scripts.make_phantoms",
        "medspeed.data_scripts.fetch_msd",
        "medspeed.data_scripts.to_msd",
    ],
)
def test_what_must_start_at_once_does_not_load_torch(module):
    program = f"import sys, {module}; sys.exit(any(name in sys.modules for name in ('torch', 'monai')))"
    assert subprocess.run([sys.executable, "-c", program], cwd=ROOT, check=False).returncode == 0


@pytest.mark.parametrize("module", ["compare", "ladder", "visit_parts", "harness"])
def test_a_process_that_measures_our_side_does_not_load_monai(module):
    """Each measured process imports the script that starts it: MONAI would count as 300 MiB of our peak memory."""
    program = f"import sys, medspeed.benchmarks.{module}; sys.exit('monai' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", program], cwd=ROOT, check=False).returncode == 0


def test_torch_load_is_always_weights_only():
    for path in CODE:
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.Call) and ast.unparse(node.func) == "torch.load":
                assert any(word.arg == "weights_only" and ast.unparse(word.value) == "True" for word in node.keywords)
