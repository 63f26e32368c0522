"""Segment scans with a trained run: label maps on the grid of the input, measurements, overlays."""

from medspeed.common.config import parse_config
from medspeed.common.inference.options import DOUBTS, InferConfig

if __name__ == "__main__":
    CONFIG = parse_config(InferConfig, {}, description=__doc__ + DOUBTS)  # before torch: --help answers at once

from medspeed.common.inference.folder_job import Predictions
from medspeed.common.inference.runs import load_models
from medspeed.common.inference.scans import segment_scans
from medspeed.common.run import one_line_errors
from medspeed.models import find_network


def main(config: InferConfig) -> Predictions:
    """Segment every scan; one that cannot be read is set aside, and the others are done all the same."""
    return segment_scans(config, load_models(config.model, "brats", find_network, config.network))


if __name__ == "__main__":
    with one_line_errors():
        raise SystemExit(main(CONFIG).status)
