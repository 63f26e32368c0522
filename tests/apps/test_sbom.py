"""The bill of materials that the image build writes."""

import json
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
