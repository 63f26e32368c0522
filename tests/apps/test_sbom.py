"""The bill of materials that the image build writes."""

import json
import os
import re
import subprocess
import sys
from importlib import metadata
from pathlib import Path

import torch

SCRIPT = Path(__file__).parents[2] / "apps" / "sbom.py"


def test_the_bill_names_each_installed_package_once():
    done = subprocess.run([sys.executable, str(SCRIPT)], capture_output=True, text=True, check=True)
    bill = json.loads(done.stdout)
    assert (bill["bomFormat"], bill["specVersion"], bill["version"]) == ("CycloneDX", "1.6", 1)
    assert bill["metadata"]["component"]["name"] == "medspeed"
    parts = {part["name"]: part for part in bill["components"]}
    show_path = [sys.executable, "-c", "import json, sys; print(json.dumps(sys.path))"]
    # Not this process's own path: setuptools, once imported, puts the packages it carries inside itself there.
    path = json.loads(subprocess.run(show_path, capture_output=True, text=True, check=True).stdout)
    installed = {re.sub(r"[-_.]+", "-", each.metadata["Name"]).lower() for each in metadata.distributions(path=path)}
    assert set(parts) == installed - {"medspeed"}
    assert len({part["bom-ref"] for part in bill["components"]}) == len(bill["components"])
    assert parts["torch"]["version"] == metadata.version("torch")
    assert parts["torch"]["purl"] == f"pkg:pypi/torch@{metadata.version('torch').replace('+', '%2B')}"
    assert torch.__version__.startswith(parts["torch"]["version"])  # a CUDA build from PyPI says "+cu" itself alone
    assert all(set(part) <= {"type", "bom-ref", "name", "version", "purl", "licenses"} for part in parts.values())


def test_of_two_copies_the_one_that_python_imports_counts(tmp_path):
    for name, about in (("onnx-9.9.9", "Metadata-Version: 2.1\nName: onnx\nVersion: 9.9.9\n"), ("left-1.0", "")):
        (tmp_path / f"{name}.dist-info").mkdir()
        (tmp_path / f"{name}.dist-info" / ("METADATA" if about else "RECORD")).write_text(about)
    environment = {**os.environ, "PYTHONPATH": str(tmp_path)}
    done = subprocess.run([sys.executable, str(SCRIPT)], capture_output=True, text=True, check=True, env=environment)
    parts = {part["name"]: part["version"] for part in json.loads(done.stdout)["components"]}
    assert (parts["onnx"], "left" in parts) == ("9.9.9", False)
