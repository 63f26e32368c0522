"""The papers of what is handed over: the model card of a run, in Markdown, and the digests of all files."""

import os
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import jinja2
import msgspec

from medspeed.common.files import atomic_path, read_object, sha256_of, write_text


def _kind(*needed: tuple[str, Any], **fields: Any) -> type[msgspec.Struct]:  # noqa: ANN401 - types
    return msgspec.defstruct("Kind", [*needed, *((name, kind, None) for name, kind in fields.items())])


_DATA = _kind(folder=str, name=str | None, synthetic=bool)
_QUALITY = _kind(
    *(("name", str), ("value", float | None), ("selected_on", str), ("per_case", dict[str, float])),
    per_region=dict[str, float | None],
)
_KINDS: dict[str, Any] = {  # what is read of the files of a run; they may hold more
    "summary": _kind(
        data=_DATA, quality=_QUALITY, cases=dict[str, int], held_out=bool, recipe=str, seed=int, steps=int
    ),
    "split": _kind(description=str, training=list[str], validation=list[str]),
    "environment": _kind(python=str, versions=dict[str, str | None], git=str | None),
}
_PACKAGES = ("torch", "monai", "numpy", "onnx", "onnxruntime", "tensorrt", "tensorrt-rtx")


def model_card(run: Path, task: str) -> str:
    """Return the model card of a run: `model_card.md.j2`, filled in.

    It holds what the run's own files say, if they are there, and the licence that the dataset states, while that still
    lies where it was; what is not known is called so. No path, host or user is in it. The task, what the network does,
    is a sentence without a full stop.

    Raises:
        ValueError: one of the files is no JSON object, or a value in it of another type.
    """
    files = {name: read_if_there(run / f"{name}.json") for name in ("model", "summary", "split", "environment")}
    data, quality, environment = files["summary"].get("data", {}), files["summary"].get("quality"), files["environment"]
    packages = {name: environment.get("versions", {}).get(name) for name in _PACKAGES}
    # The digests are those of what is there now, and not of what the summary remembers.
    exports = sorted(file for kind in ("onnx", "plan") for file in (run / "exports").glob(f"model_*.{kind}"))
    found = [file for file in (run / "best.safetensors", *exports) if file.is_file()]
    values = {
        "task": task,
        "synthetic": data.get("synthetic"),  # None where it is not known
        "figures": _figures(quality) if quality else {},
        "dataset": read_if_there(Path(data["folder"]) / "dataset.json") if data.get("folder") else {},
        "digests": {file.relative_to(run).as_posix(): sha256_of(file) for file in found},
        "versions": {"Python": environment.get("python"), **packages, "medspeed revision": environment.get("git")},
    }
    return filled(Path(__file__).with_name("model_card.md.j2"), files | values)


def filled(template: Path, values: Mapping[str, Any]) -> str:
    """Return a template of Jinja's, filled in; in Markdown values stay text (see `plain`), and may be missing."""
    markdown = ".md" in template.suffixes
    environment = jinja2.Environment(
        undefined=jinja2.ChainableUndefined if markdown else jinja2.StrictUndefined,
        finalize=plain if markdown else None,
        trim_blocks=True,
        lstrip_blocks=True,
        keep_trailing_newline=True,
    )
    environment.policies["json.dumps_kwargs"] = {}  # in the order that we give
    return environment.from_string(template.read_text(encoding="utf-8")).render(values)


def write_package(folder: Path, files: Mapping[str, str | bytes]) -> Path:
    """Write files, by their paths in the folder, and last SHA256SUMS, for `sha256sum --check`; return the folder.

    Raises:
        FileExistsError: the folder holds something, which would be mixed with what is handed over.
    """
    if any(path.is_symlink() or not path.is_dir() for path in folder.rglob("*")):  # of a full disk
        raise FileExistsError(f"{folder}: not empty; remove it, or choose another folder")
    for name, content in files.items():
        with atomic_path(folder / name) as part:
            part.write_bytes(content.encode() if isinstance(content, str) else content)
    write_text(folder / "SHA256SUMS", "".join(f"{sha256_of(folder / name)}  {name}\n" for name in sorted(files)))
    return folder


def read_if_there(path: Path) -> dict[str, Any]:
    """Return the JSON object that a run holds, an empty one without such a file; a ValueError names a wrong value."""
    remedy = "restore it, or remove it from the run folder"
    content = read_object(path, remedy) if os.path.isfile(path) else {}  # noqa: PTH113 - no error where we may not look
    try:
        msgspec.convert(content, _KINDS.get(path.stem, dict[str, Any]))
    except msgspec.ValidationError as error:
        raise ValueError(f"{path}: {error}; {remedy}") from error
    return content


def plain(value: object) -> object:
    """Return a value that stays one line of text in Markdown: nothing is begun or ended by it, and no link is made."""
    if not isinstance(value, str):
        return value
    line = re.sub(r" +", " ", "".join(letter if letter.isprintable() else " " for letter in value))
    return re.sub(r"([\\`*|<>\[\]&#~@]|(?<=:)/|(?i:(?<=www)\.))", r"\\\1", line)


def _figures(quality: dict[str, Any]) -> dict[str, float | None]:
    """Return the rows of the table of quality: of a segmentation by structure, of a classifier as it has them."""
    cases, regions = quality["per_case"], quality.get("per_region")
    if not regions:
        return cases or {"mean": quality["value"]}
    worst = {"worst case": min(cases.values()), "cases": len(cases)} if cases else {}
    return {"mean": quality["value"], **regions, **worst}
