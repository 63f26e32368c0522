"""Evaluate label maps against references: Dice, surface distances, volumes, components; also of a run on a dataset."""

from medspeed.common.config import parse_config
from medspeed.common.inference.options import DEFINITIONS, EvaluateConfig

if __name__ == "__main__":
    CONFIG = parse_config(EvaluateConfig, {}, description=__doc__ + DEFINITIONS)  # before torch: --help answers at once

from medspeed.common.inference.evaluation import run_evaluation
from medspeed.common.inference.labels import one_region_per_label
from medspeed.common.inference.scores import Evaluation
from medspeed.common.run import one_line_errors
from medspeed.models import find_network


def main(config: EvaluateConfig) -> Evaluation:
    """Evaluate every case."""
    return run_evaluation(config, "spleen", find_network, lambda dataset: one_region_per_label(dataset.labels))


if __name__ == "__main__":
    with one_line_errors():
        raise SystemExit(main(CONFIG).status)
