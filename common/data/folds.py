"""Cross-validation: which cases each fold holds out, those of a group (such as a patient's scans) together."""

import hashlib
import re
from collections import Counter
from collections.abc import Collection, Mapping, Sequence
from contextlib import suppress
from pathlib import Path, PurePosixPath
from typing import Any

from medspeed.common.data.dataset import Dataset, Split
from medspeed.common.files import plural, read_object, read_rows

# What folds are stratified by: the labels in a case (of a slide: tumour or normal), and their volume in mm3.
Content = tuple[Sequence[str], int]


def split_fold(
    dataset: Dataset, volumes_ml: Sequence[Sequence[float]], fold: int, folds: int, groups: str | None, seed: int
) -> Split:
    """Hold out one fold of a dataset, of whose cases the volume of each label is known; else see `deal_folds`."""
    contents = {}
    for case, volumes in zip(dataset.cases, volumes_ml, strict=True):
        labels = [label for label, volume in zip(dataset.labels, volumes, strict=True) if volume]
        contents[case.name] = labels or ["no label"], round(sum(volumes) * 1000)
    record = deal_folds(contents, folds, groups, seed)
    filled = {record["fold_of"][name] for name, (labels, _) in contents.items() if labels != ["no label"]}
    if len(filled) < folds:
        raise ValueError(f"folds {folds}: only {len(filled)} hold out a case with a label; lower --folds")
    held = tuple(case for case in dataset.cases if record["fold_of"][case.name] == fold)
    rest = tuple(case for case in dataset.cases if record["fold_of"][case.name] != fold)
    description = f"fold {fold} of {folds} (from 0): {len(held)} of {plural(len(contents), 'case')} held out"
    return Split(rest, held, True, f"{description}; {record['how']}", {"fold": fold, **record})


def trained_before(init: Path, name: str | None, judged: Collection[str]) -> tuple[list[str], str]:
    """Return what a run's weights, the file `init`, were trained on, and what to warn of where that is `judged`, or "".

    The `name` is of the dataset; with None, cases of one name are taken for the same.
    """
    beside = init if init.with_name("split.json").is_file() else init.resolve()  # where a link leads to
    about = beside.with_name("summary.json")
    with suppress(ValueError, OSError, LookupError, TypeError):  # no run of ours lies beside the weights
        split = read_object(about.with_name("split.json"))
        own, trained = {*split["training"]}, {*split["training"], *split.get("trained_before", ())}
        same = name is None or not about.is_file() or read_object(about)["data"].get("name") == name
        said = "NOT HELD OUT:" if same and own & {*judged} else "NOT HELD OUT, if these are the same scans:"
        seen = ", ".join(sorted(trained & {*judged}))
        return sorted(trained), f"{said} the weights of --init were trained on {seen}"[:300] if seen else ""
    return [], "no split.json beside the weights of --init lists what trained them: validation cases may be among them"


def deal_folds(contents: Mapping[str, Content], folds: int, groups: str | None, seed: int) -> dict[str, Any]:
    """Return how cases, by name, are dealt to 2 or more folds: "fold_of" and "group_of" each case, "how", and the rest.

    The largest groups (see `group_cases`) come first, each to a fold with the fewest cases; of several, to that with
    the fewest of the same labels, rare ones weighing more. Groups with the same labels go by volume. A digest of seed
    and names decides what is left, so that each platform has the same. Fewer groups than folds are a ValueError.
    """
    group_of, members = group_cases(groups, sorted(contents)), dict[str, list[str]]()
    for name, group in group_of.items():
        members.setdefault(group, []).append(name)
    if len(members) < folds:
        raise ValueError(f"folds {folds}: there are only {plural(len(members), 'group')} of cases; lower --folds")
    labels = {group: Counter(label for name in members[group] for label in contents[name][0]) for group in members}
    rarity = {label: len(contents) // count for label, count in sum(labels.values(), Counter[str]()).items()}
    sizes, held, fold_of = [0] * folds, [Counter[str]() for _ in range(folds)], dict[str, int]()

    def cost(fold: int, group: str) -> tuple[int, int, int, bytes]:
        alike = sum(held[fold][label] * count * rarity[label] for label, count in labels[group].items())
        digest = hashlib.sha256(f"{seed}:{group}:{fold}".encode()).digest()
        return sizes[fold] // len(members[group]), alike, sizes[fold], digest

    volume = {group: sum(contents[name][1] for name in members[group]) for group in members}
    for group in sorted(members, key=lambda each: (-len(members[each]), sorted(labels[each].items()), -volume[each])):
        fold = min(range(folds), key=lambda each: cost(each, group))
        sizes[fold] += len(members[group])
        held[fold] += labels[group]
        fold_of |= dict.fromkeys(members[group], fold)
    how = f"stratified by labels and their volume, groups: {groups or 'each case'}, seed {seed}"
    return {"folds": folds, "seed": seed, "how": how, "groups": groups, "fold_of": fold_of, "group_of": group_of}


def group_cases(groups: str | None, names: Sequence[str]) -> dict[str, str]:
    """Return the group of each case, by name: the case itself without `groups`.

    `groups` is "FILE.csv:COLUMN", a table whose first column names the cases, with or without suffix; or a regular
    expression, whose first group (without one, the whole match) is the group. What is neither, and cases without a
    group, are a ValueError that names them; a table that is not there is a FileNotFoundError.
    """
    path, _, column = (groups or "").rpartition(":")
    try:
        matches = {name: not path.endswith(".csv") and re.search(groups or ".+", name) for name in names}
    except re.error as error:
        raise ValueError(f"groups {groups}: expected FILE.csv:COLUMN or a regular expression ({error})") from error
    found = {name: match[min(len(match.groups()), 1)] for name, match in matches.items() if match}
    found |= _listed_groups(Path(path), column, names) if path.endswith(".csv") else {}
    if missing := [name for name in names if not found.get(name)]:
        found_none = f"no group for {len(missing)} of {len(names)}: {', '.join(missing[:5])}"
        raise ValueError(f"groups {groups}: {found_none}; expected FILE.csv:COLUMN that lists all, or a pattern in all")
    return {name: found[name] for name in names}


def _listed_groups(path: Path, column: str, names: Sequence[str]) -> dict[str, str]:
    rows = read_rows(path)
    _, header = next(rows, ("", []))
    if header[1:].count(column) != 1:
        raise ValueError(f"{path}: expected one column {column!r} after the first, which names the cases: {header}")
    found, known = dict[str, str](), {*names}
    for where, row in rows:
        group, name = dict(zip(header, row, strict=False)).get(column, "").strip(), row[0].strip()
        aliases = name, f"images/{name}", PurePosixPath(name).stem, name.removesuffix(".nii.gz")
        case = next((each for each in aliases if each in known), name)
        if found.setdefault(case, group) != group:
            raise ValueError(f"{where}: an earlier line gives {case} another {column}; keep one of them")
    return found
