"""Train the demo weights in medspeed/demo anew, on phantoms: python -m tests.make_demo, two minutes on two cores."""

import shutil
import tempfile
from pathlib import Path
from typing import Any

from medspeed import train
from medspeed.apps.spleen.export import TASK
from medspeed.common.export.model_card import model_card
from medspeed.common.files import read_object, write_json, write_text

FOLDER = Path(__file__).resolve().parents[1] / "medspeed" / "demo"
# What of a summary says how good the weights are, and nothing of the machine that trained them.
_KEPT = ("app", "recipe", "held_out", "precision", "seed", "cases", "steps", "quality")


def main() -> None:
    """Train with the defaults but for size and precision, and keep weights, model, fingerprint, quality and card."""
    with tempfile.TemporaryDirectory() as scratch:
        run = Path(scratch) / "run"
        summary: dict[str, Any] = train(
            "spleen", run=run, epochs=16, crop_size=(48, 48, 32), channels=(8, 16, 32), validate_every=4,
            precision="fp32", engine="none", store=Path(scratch) / "store",
        )  # fmt: skip
        FOLDER.mkdir(exist_ok=True)
        for name in ("best.safetensors", "model.json", "fingerprint.json"):
            shutil.copyfile(run / name, FOLDER / name)
        flips = read_object(run / "plan.json")["crops"]["flips"]
    data = {"name": summary["data"]["name"], "synthetic": summary["data"]["synthetic"]}
    write_json(FOLDER / "plan.json", {"crops": {"flips": flips}})
    write_json(FOLDER / "summary.json", {**{name: summary[name] for name in _KEPT}, "data": data})
    write_text(FOLDER / "README.md", model_card(FOLDER, TASK))


if __name__ == "__main__":
    main()
