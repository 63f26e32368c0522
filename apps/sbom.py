"""Write an SBOM of the packages installed for this interpreter: `python apps/sbom.py > sbom.json` (CycloneDX, JSON).

Source: cyclonedx.org/docs/1.6/json; packages are named by package URLs (github.com/package-url/purl-spec).
"""

import json
import re
from importlib import metadata
from typing import Any
from urllib.parse import quote


def sbom() -> dict[str, Any]:
    """Return the bill of the installed Python packages, sorted by name; the same packages give the same bill."""
    parts = dict[str, dict[str, Any]]()
    for package in reversed([*metadata.distributions()]):  # of one name, Python imports the first
        if not package.metadata["Name"]:  # a folder that an update left
            continue
        name = re.sub(r"[-_.]+", "-", package.metadata["Name"]).lower()
        url = f"pkg:pypi/{name}@{quote(package.version, safe='.')}"
        parts[name] = {"type": "library", "bom-ref": url, "purl": url, "name": name, "version": package.version}
        if "License-Expression" in package.metadata:
            parts[name]["licenses"] = [{"expression": package.metadata["License-Expression"]}]
    whole = {**parts.pop("medspeed", {"name": "medspeed"}), "type": "application"}
    form = {"bomFormat": "CycloneDX", "specVersion": "1.6", "version": 1}
    return {**form, "metadata": {"component": whole}, "components": [parts[name] for name in sorted(parts)]}


if __name__ == "__main__":
    print(json.dumps(sbom(), indent=2))
