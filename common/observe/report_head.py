"""The head of a report: what ran, on what, how well, and what must be known before the figure is believed."""

from typing import Any

from common.observe.report_files import RunFiles, mapping, number
from common.observe.report_page import Html, element, joined


def head(run: RunFiles) -> Html:
    """Return what ran, on what, how well, and what must be known before the figure is believed."""
    summary, quality = run.summary, mapping(run.summary.get("quality"))
    value = number(quality.get("value"))
    config = run.config
    title = summary.get("app") or run.directory.resolve().name
    recipe = summary.get("recipe") or config.get("recipe")
    figure = element("p", "—" if value is None else f"{value:.4f}", class_="figure")
    name = element("p", quality.get("name") or "no quality yet", class_="figure-name")
    return element(
        "header",
        element("h1", title, element("span", f"recipe {recipe}", class_="recipe") if recipe else None),
        *_banners(run),
        element("div", figure, element("div", name, _beside(quality, summary)), class_="hero"),
        _facts(run),
    )


def _banners(run: RunFiles) -> list[Html]:
    banners = []
    if mapping(run.summary.get("data")).get("synthetic"):
        text = "these are phantoms, and a figure on them says nothing about patients"
        banners.append(_banner("SYNTHETIC DATA", text))
    if run.summary.get("held_out") is False:
        text = "these cases were trained on; the figure says that the run works, not how good the model is"
        banners.append(_banner("NOT HELD OUT", text))
    if run.problems:
        listed = element("ul", *(element("li", problem) for problem in run.problems))
        banners.append(element("div", element("strong", "INCOMPLETE"), listed, class_="banner"))
    return banners


def _banner(title: str, text: str) -> Html:
    return element("p", element("strong", title), f": {text}", class_="banner")


def _beside(quality: dict[str, Any], summary: dict[str, Any]) -> Html:
    lines = []
    if quality.get("selected_on"):
        lines.append(f"weights selected on: {quality['selected_on']}")
    grid = mapping(summary.get("working_grid"))
    best, last, epoch = (number(grid.get(name)) for name in ("best", "last", "best_epoch"))
    if best is not None and last is not None and epoch is not None:
        lines.append(f"while training: best {best:.4f} (epoch {epoch:.0f}), last {last:.4f}")
    return joined(element("p", line, class_="note") for line in lines)


def _facts(run: RunFiles) -> Html:
    summary, environment = run.summary, run.environment
    data, counts = mapping(summary.get("data")), mapping(summary.get("cases"))
    device = [summary.get("device"), environment.get("device"), environment.get("processor")]
    command = environment.get("command")
    resumed = isinstance(command, list) and any(str(word).startswith("--resume") for word in command)
    facts = {
        "date": f"{environment.get('time', '')}{' (resumed)' if resumed else ''}".replace("T", " ").strip(),
        "device": ", ".join(dict.fromkeys(str(part) for part in device if part)),
        "precision": summary.get("precision"),
        "seed": summary.get("seed", run.config.get("seed")),
        "ranks": summary.get("ranks"),
        "data": data.get("name"),
        "cases": ", ".join(f"{count} {kind}" for kind, count in counts.items()),
        "steps": summary.get("steps"),
        "epochs": len(run.epochs) or None,
        "target": _target(mapping(summary.get("target"))),
        "code": _revision(environment.get("git")),
    }
    pairs = (
        element("div", element("dt", name), element("dd", value))
        for name, value in facts.items()
        if value not in (None, "")
    )
    return element("dl", *pairs, class_="facts")


def _revision(git: object) -> str | None:
    """Return the commit in twelve digits (the environment holds it whole), and whether files differed from it."""
    commit, mark, _ = str(git or "").partition("+changes")
    return f"{commit[:12]}{mark}" or None


def _target(target: dict[str, Any]) -> str | None:
    """Return what was to be reached, and what became of it."""
    seconds = number(target.get("seconds"))
    if not target or seconds is None:
        return None
    return f"{target.get('until')}: {'held' if target.get('held') else 'NOT reached'} after {seconds:.1f} s"
