"""What a run decides before it starts, kept in its folder: the split, the fingerprint and the plan."""

import json
from collections.abc import Callable
from typing import Any, Protocol, TypeVar

from common.data.cases import Dataset, Split, split_cases, split_of
from common.data.fingerprint import Fingerprint, fingerprint
from common.data.store import store_folder
from common.files import write_json
from common.inference.model_file import write_model
from common.observe.run import Run
from common.training.config import SegmentationConfig
from common.training.dev_run import few_cases
from common.training.distributed import Ranks
from common.training.source import check_partitions


class Plan(Protocol):
    """An app's decisions."""

    @property
    def model(self) -> Any:  # noqa: ANN401 - each app's own
        """What inference needs too."""
        ...

    @property
    def partitions(self) -> int:
        """Parts of the training cases."""
        ...

    @property
    def batch_size(self) -> int:
        """Crops in one step, over all ranks."""
        ...

    def to_json(self) -> dict[str, Any]:
        """Return the plan as JSON takes it."""
        ...


P = TypeVar("P", bound=Plan)


def decide(
    app: str,
    dataset: Dataset,
    config: SegmentationConfig,
    make_plan: Callable[[Split, Fingerprint], tuple[P, list[str]]],
    from_json: Callable[[dict[str, Any]], P],
    run: Run,
    ranks: Ranks,
) -> tuple[Split, P]:
    """Split the dataset, take its fingerprint, plan the run, say each choice and write all of it into the run folder.

    The leader does it for all ranks. A resumed run finds the decisions of its first start, whatever has changed around
    it since.

    Args:
        app: name of the app, for `model.json`.
        dataset: the cases.
        config: how to split, where fingerprints are kept, cases read at the same time, and whether a few cases are
            enough.
        make_plan: from the split and the fingerprint of its training cases to the plan and the lines that explain it.
        from_json: from `Plan.to_json` back to the plan.
        run: where it is written.
        ranks: those that train together.

    Raises:
        ValueError: what is decided does not fit the data, or these ranks cannot share it.
    """
    kept = run.directory / "plan.json"

    def make() -> tuple[dict[str, Any], dict[str, Any]]:
        if run.resumed and kept.is_file():
            stored = (run.directory / "split.json").read_text(encoding="utf-8")
            return json.loads(stored), json.loads(kept.read_text(encoding="utf-8"))
        chosen = split_cases(dataset, config.split)
        if config.fast_dev_run:
            chosen = few_cases(chosen, config.partitions or ranks.world, run)
        kept_figures = store_folder(config.store / "fingerprints", dataset.folder)
        figures = fingerprint(chosen.training, dataset, kept_figures, workers=config.workers)
        plan, choices = make_plan(chosen, figures)
        for line in (chosen.description, *choices):
            run.say(line)
        write_json(run.directory / "split.json", chosen.to_json())
        write_json(run.directory / "fingerprint.json", figures.to_json())
        write_model(run.directory, app, plan.model)
        write_json(kept, plan.to_json())
        return chosen.to_json(), plan.to_json()

    names, content = ranks.once(make)
    plan = from_json(content)  # of a resumed run its first one, which these ranks must be able to share
    check_partitions(plan.partitions, plan.batch_size, config.accumulate, ranks.world, config.alike())
    return split_of(dataset, names, run.directory / "split.json"), plan
