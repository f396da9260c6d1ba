"""Stages from a TOML file: one offline stage, or a recipe that hands each model to the next."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import tomli_w

from agentrl.errors import ConfigError
from agentrl.evaluation.label import LabelPlan, label_turns
from agentrl.evaluation.run import EvalPlan, EvalProgress, evaluate
from agentrl.records.files import write_bytes_atomic, write_json_atomic
from agentrl.records.plain import plain
from agentrl.registry import factory
from agentrl.report.display import console, count_bar, episode_bar
from agentrl.report.page import write_report
from agentrl.settings import check, read_toml, set_value
from agentrl.trainers.config import TrainConfig
from agentrl.trainers.folder import latest_checkpoint
from agentrl.trainers.offline.card import Measurement, summary
from agentrl.trainers.offline.settings import (
    REWARD_MODELS,
    Card,
    LabelSettings,
    PlaySettings,
    StageSettings,
)
from agentrl.trainers.offline.stage import RESULT, held_out_prompts, run_stage
from agentrl.trainers.session import train_with_display

Row = dict[str, Any]
ONLINE = "online"
"""A stage that trains on the groups it plays: its other settings are those of a run."""
PLAY = "play"
"""A stage that only plays: later ones find its episodes in `{NAME.run}/episodes.jsonl`."""
LABEL = "label"
"""A stage that labels the turns of played episodes, in `{NAME.run}/labels.jsonl`."""
_SETTINGS: dict[str, type[TrainConfig | PlaySettings | LabelSettings | StageSettings]] = {
    ONLINE: TrainConfig,
    PLAY: PlaySettings,
    LABEL: LabelSettings,
}


def is_offline(config: Path, overrides: Sequence[str] = ()) -> bool:
    """Whether a TOML file names a stage or a recipe; anything else is a run's settings."""
    try:
        row = _read(config, overrides)
    except ConfigError:
        return False  # whoever reads a run's settings reports what is wrong with the file
    return "stage" in row or "stages" in row


def run_offline(
    config: Path, folder: Path, *, overrides: Sequence[str] = (), resume: bool = False
) -> dict[str, Any]:
    """Run the stage or the recipe of a file and show its progress on the terminal.

    Returns:
        the result of the stage (`run_stage`), or of the recipe: "stages", the results in order,
        "run" and "model", the last policy. Both have "said", a summary for people.

    Raises:
        ConfigError: a setting is wrong; nothing was written.
    """
    row = _read(config, overrides)
    if "stages" in row:
        return _run_recipe(row, str(config), folder, resume)
    settings = check(StageSettings, row, str(config), overrides=overrides)
    return _run_one(settings, folder, resume)


def _run_one(settings: StageSettings, folder: Path, resume: bool) -> dict[str, Any]:
    noted = set[str]()

    def note(sentence: str) -> None:
        noted.add(sentence)
        _print(sentence)

    result = run_stage(settings, folder, resume=resume, listen=_show, note=note)
    for warning in result["signs"]:
        if warning not in noted:
            console.print(
                plain(warning), style="yellow", markup=False, highlight=False, soft_wrap=True
            )
    report = str(write_report(folder))
    return {**result, "report": report, "said": f"{summary(result)}\n  report {report}"}


def _run_recipe(row: Row, where: str, folder: Path, resume: bool) -> dict[str, Any]:
    """Run all stages in order; finished ones are skipped, and the first unfinished one resumes."""
    stages = row.pop("stages")
    model = row.pop("model", "")
    _check_recipe(row, stages, where)
    _claim({"model": model, **row, "stages": stages}, folder, resume)
    made: dict[str, str] = {}
    results = []
    for number, (name, own) in enumerate(stages.items(), 1):
        place = folder / f"{number}-{name}"
        settings = _filled({"model": model, **_defaults(row, own), **own}, made, where)
        console.rule(f"{number}/{len(stages)} {name}")
        continues = resume and place.exists()
        if own["stage"] == ONLINE:
            result = _run_online(settings, row, place, continues)
        elif own["stage"] == PLAY:
            result = _play(check(PlaySettings, settings, f"{where}: {name}"), place)
        elif own["stage"] == LABEL:
            result = _label(check(LabelSettings, settings, f"{where}: {name}"), place)
        else:
            result = _run_one(check(StageSettings, settings, f"{where}: {name}"), place, continues)
        _print(result["said"])
        results.append({"name": name, **result})
        made |= {name: str(result["model"]), f"{name}.run": str(place)}
        if own["stage"] not in REWARD_MODELS:
            model = str(result["model"])
    said = "\n".join(f"{each['name']}: {each['said']}" for each in results)
    recipe = {"run": str(folder), "model": model, "stages": results}
    write_json_atomic(folder / "recipe.json", recipe)
    return {**recipe, "said": said}


def _run_online(settings: Row, defaults: Row, folder: Path, resume: bool) -> dict[str, Any]:
    """Run one online stage, with the card that offline stages have."""
    done = folder / RESULT
    if done.exists():
        _print(f"{folder} is finished: nothing to do")
        finished: dict[str, Any] = json.loads(done.read_text())
        return finished
    card = check(Card, settings.pop("card", {}), "card")
    config = check(TrainConfig, settings, str(folder))
    trained = train_with_display(config, folder, resume=resume)
    last = latest_checkpoint(folder)
    model = str(last.model) if last else config.model
    prompts = []
    if "data" in defaults:
        row = {"stage": "sft", "model": config.model, "seed": config.seed, "data": defaults["data"]}
        prompts = held_out_prompts(check(StageSettings, row, "data"))
    measurement = Measurement(
        card,
        before=config.model,
        after=model,
        run=folder,
        chat=config.chat,
        compute=config.compute,
        seed=config.seed,
    )
    result: dict[str, Any] = {
        "stage": ONLINE,
        "run": str(folder),
        "model": model,
        "steps": trained["steps"],
        "eval": trained["eval"],
        "card": measurement.measure(prompts),
    }
    result["said"] = summary(result)
    write_json_atomic(done, result)
    return result


def _play(settings: PlaySettings, folder: Path) -> dict[str, Any]:
    """Play training tasks; an interrupted evaluation resumes, a finished one is reused."""
    plan = EvalPlan(
        make=factory(settings.env, **settings.env_settings),
        policy=f"hf:{settings.model}",
        split="train",
        limit=settings.tasks,
        samples=settings.samples,
        temperature=settings.temperature,
        sandbox=settings.sandbox,
        seed=settings.seed,
        chat=settings.chat,
        out=folder,
    )
    with episode_bar("playing") as bar:
        started = lambda episodes: bar.restart("playing", episodes)  # noqa: E731 - one line
        found = evaluate(plan, EvalProgress(started=started, episode=bar.episode))
    passed, episodes = found["pass_at"].get("1"), found["n_episodes"]
    rate = "unknown" if passed is None else f"{passed:.3f}"
    said = f"{PLAY}: {episodes} episodes of {found['n_tasks']} tasks, pass@1 {rate}"
    return {"stage": PLAY, "run": str(folder), "model": settings.model, "said": said, "eval": found}


def _label(settings: LabelSettings, folder: Path) -> dict[str, Any]:
    """Label the turns of played episodes; interrupted labelling resumes, finished labels stay."""
    plan = LabelPlan(
        run=Path(settings.run),
        policy=f"hf:{settings.model}",
        out=folder,
        completions=settings.completions,
        limit=settings.limit,
        temperature=settings.temperature,
        sandbox=settings.sandbox,
        chat=settings.chat,
    )
    with count_bar("labelling") as progress:
        found = label_turns(plan, progress)
    mean = "unknown" if found["mean"] is None else f"{found['mean']:.3f}"
    said = f"{LABEL}: {found['n_turns']} turns of {found['n_episodes']} episodes, mean {mean}"
    shared = {"stage": LABEL, "run": str(folder), "model": settings.model, "said": said}
    return {**shared, "label": found}


def _defaults(row: Row, own: Row) -> Row:
    """The recipe's own settings, as far as a stage of that kind has them."""
    kind = _SETTINGS.get(own["stage"], StageSettings)
    trains = kind not in (PlaySettings, LabelSettings)
    known = {*kind.model_fields, *(("card",) if trains else ())}
    return {name: value for name, value in row.items() if name in known}


def _check_recipe(row: Row, stages: Mapping[str, Row], where: str) -> None:
    """See that every stage's settings are right before the first one runs."""
    known = {*TrainConfig.model_fields, *StageSettings.model_fields}
    if strange := sorted(row.keys() - known):
        raise ConfigError(f"{where}: setting {strange[0]!r} is unknown to every kind of stage")
    names: dict[str, str] = {}
    for name, own in stages.items():
        if "stage" not in own:
            raise ConfigError(f"{where}: stage {name!r} has no kind: add a line 'stage = \"sft\"'")
        settings = _filled({"model": "-", **_defaults(row, own), **own}, names, where)
        if own["stage"] == ONLINE:
            check(Card, settings.pop("card", {}), f"{where}: {name}: card")
        check(_SETTINGS.get(own["stage"], StageSettings), settings, f"{where}: {name}")
        names |= {name: "-", f"{name}.run": "-"}


def _filled(value: Any, made: Mapping[str, str], where: str) -> Any:
    """Settings with `{NAME}` replaced by the model of an earlier stage, `{NAME.run}` by its folder;
    the kind of a stage that plays is no setting of what it runs.
    """
    if isinstance(value, dict):
        return {
            key: _filled(inner, made, where)
            for key, inner in value.items()
            if key != "stage" or inner not in _SETTINGS
        }
    if isinstance(value, list):
        return [_filled(inner, made, where) for inner in value]
    if not (isinstance(value, str) and value.startswith("{") and "}" in value):
        return value
    name, _, rest = value[1:].partition("}")
    if name not in made:
        raise ConfigError(
            f"{where}: {value!r} names no earlier stage: use one of"
            f" {', '.join(made) or 'none: this is the first'}"
        )
    return made[name] + rest


def _claim(row: Row, folder: Path, resume: bool) -> None:
    path, text = folder / "recipe.toml", tomli_w.dumps(row)
    if path.exists():
        if not resume:
            raise ConfigError(
                f"{folder} holds a run already: continue it with --resume, or choose another --out"
            )
        if path.read_text() != text:
            raise ConfigError(
                f"{folder} was begun with another recipe (see {path}): resume it with that, or"
                " choose another --out"
            )
        return
    write_bytes_atomic(path, text.encode())


def _read(config: Path, overrides: Sequence[str]) -> Row:
    """The file's values with overrides; stages as a table by their names."""
    row = read_toml(config)
    if "stages" in row:
        row["stages"] = dict(_named(row["stages"], str(config)))
    for override in overrides:
        name = override.partition(".")[0]
        inside = name in row.get("stages", {})
        set_value(row["stages"] if inside else row, override)
    return row


def _named(stages: Any, where: str) -> Iterator[tuple[str, Row]]:
    seen = set[str]()
    for number, stage in enumerate(stages, 1):
        name = stage.get("name") if isinstance(stage, dict) else None
        if not isinstance(name, str) or not name.isidentifier() or name in seen:
            raise ConfigError(
                f"{where}: stage {number} has name={name!r}: give each a name of its own"
            )
        seen.add(name)
        yield name, {key: value for key, value in stage.items() if key != "name"}


def _print(sentence: str) -> None:
    console.print(plain(sentence), markup=False, highlight=False, soft_wrap=True)


def _show(row: Mapping[str, Any]) -> None:
    names = ("loss", "rewards/margins", "rewards/accuracies", "accuracy", "mean_token_accuracy")
    parts = [
        f"{name.rpartition('/')[2]} {row[f'train/{name}']:.3f}"
        for name in names
        if f"train/{name}" in row
    ]
    _print(f"step {row['step']:>5}  " + "  ".join(parts))
