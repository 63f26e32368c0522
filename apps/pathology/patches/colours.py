"""What tells patches apart without a network: their colours."""

import numpy as np

from medspeed.apps.pathology.patches.store import Patches
from medspeed.apps.pathology.scan.froc import auc

_BINS = 16  # of each channel's histogram
_MOST = 4096  # training patches that are looked at, evenly spread


def colour_auc(training: Patches, judged: Patches) -> float:
    """Return the AUC of a logistic regression on the colour histograms of patches, fitted to the training patches.

    The features are square roots of shares, standardised; the penalty on their squared weights is 1.
    """
    rows = np.linspace(0, len(training.table) - 1, min(len(training.table), _MOST)).astype(np.int64)
    fitted, label = histograms(training, rows), training.table.label[rows]
    centre, spread = fitted.mean(0), fitted.std(0) + 1e-6
    inputs = np.insert((fitted - centre) / spread, 0, 1.0, axis=1)
    weights, penalty = np.zeros(inputs.shape[1]), np.eye(inputs.shape[1])
    penalty[0, 0] = 1e-6  # of the bias
    for _ in range(25):  # steps of Newton's method, far more than it takes
        found = 1 / (1 + np.exp(-(inputs @ weights).clip(-30, 30)))
        bend = (inputs * (found * (1 - found))[:, None]).T @ inputs + penalty
        weights -= np.linalg.solve(bend, inputs.T @ (found - label) + penalty @ weights)
    return auc(judged.table.label, (histograms(judged, np.arange(len(judged.table))) - centre) / spread @ weights[1:])


def histograms(patches: Patches, rows: np.ndarray) -> np.ndarray:
    """Return the square roots of the shares of red's, green's and blue's levels in some patches, [M, 48]."""
    counted = []
    for row in rows:
        levels = np.asarray(patches.pixels[row])[:, ::2, ::2].reshape(3, -1) // (256 // _BINS)
        counted.append(np.bincount((levels + np.arange(0, 3 * _BINS, _BINS)[:, None]).ravel(), minlength=3 * _BINS))
    return np.sqrt(np.array(counted) / levels.shape[1])
