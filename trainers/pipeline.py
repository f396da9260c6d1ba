"""Stages from a TOML file: one offline stage, or a recipe that hands each model to the next."""

from __future__ import annotations

import json
import tomllib
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import tomli_w

from agentrl.errors import ConfigError
from agentrl.evaluation.results.turn_labels import LabelPlan, label_turns
from agentrl.evaluation.run import EvalPlan, EvalProgress, evaluate
from agentrl.records.files import write_bytes_atomic, write_json_atomic
from agentrl.records.plain import plain
from agentrl.registry import factory
from agentrl.report.display import console, count_bar, episode_bar
from agentrl.report.page import write_report
from agentrl.trainers.config import TrainConfig, validated
from agentrl.trainers.offline.card import Subject, card_lines, stage_card
from agentrl.trainers.offline.settings import (
    REWARD_MODELS,
    Card,
    LabelSettings,
    PlaySettings,
    StageSettings,
)
from agentrl.trainers.offline.stage import RESULT, held_out_prompts, run_stage
from agentrl.trainers.online import checkpoint
from agentrl.trainers.online.session import train_with_display
from agentrl.trainers.overrides import apply_override

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
        return False  # the reader of a run's settings says what is wrong with the file
    return "stage" in row or "stages" in row


def run_offline(
    config: Path, folder: Path, *, overrides: Sequence[str] = (), resume: bool = False
) -> dict[str, Any]:
    """Run the stage or the recipe of a file, and say on the terminal how it goes.

    Returns:
        the result of the stage (`run_stage`), or of the recipe: "stages", the results in order,
        "run" and "model", the last policy. Both have "said": a line for people.

    Raises:
        ConfigError: a setting is wrong; nothing was written.
    """
    row = _read(config, overrides)
    if "stages" in row:
        return _run_recipe(row, str(config), folder, resume)
    settings = validated(StageSettings, row, str(config), overrides)
    return _run_one(settings, folder, resume)


def _run_one(settings: StageSettings, folder: Path, resume: bool) -> dict[str, Any]:
    told = set[str]()

    def note(sentence: str) -> None:
        told.add(sentence)
        _say(sentence)

    result = run_stage(settings, folder, resume=resume, listen=_show, note=note)
    for sign in [one for one in result["signs"] if one not in told]:
        console.print(plain(sign), style="yellow", markup=False, highlight=False, soft_wrap=True)
    report = str(write_report(folder))
    return {**result, "report": report, "said": f"{_headline(result)}; report {report}"}


def _run_recipe(row: Row, where: str, folder: Path, resume: bool) -> dict[str, Any]:
    """All stages in order. A finished one is not run again; the first unfinished one goes on."""
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
        going = resume and place.exists()
        if own["stage"] == ONLINE:
            result = _run_online(settings, row, place, going)
        elif own["stage"] == PLAY:
            result = _play(validated(PlaySettings, settings, f"{where}: {name}"), place)
        elif own["stage"] == LABEL:
            result = _label(validated(LabelSettings, settings, f"{where}: {name}"), place)
        else:
            result = _run_one(validated(StageSettings, settings, f"{where}: {name}"), place, going)
        _say(result["said"])
        results.append({"name": name, **result})
        made |= {name: str(result["model"]), f"{name}.run": str(place)}
        if own["stage"] not in REWARD_MODELS:
            model = str(result["model"])
    said = "\n".join(f"{one['name']}: {one['said']}" for one in results)
    found = {"run": str(folder), "model": model, "stages": results}
    write_json_atomic(folder / "recipe.json", found)
    return {**found, "said": said}


def _run_online(settings: Row, defaults: Row, folder: Path, resume: bool) -> dict[str, Any]:
    """One online run, with the card that offline stages have."""
    done = folder / RESULT
    if done.exists():
        _say(f"{folder} is finished: nothing to do")
        found: dict[str, Any] = json.loads(done.read_text())
        return found
    card = validated(Card, settings.pop("card", {}), "card")
    config = validated(TrainConfig, settings, str(folder))
    trained = train_with_display(config, folder, resume=resume)
    last = checkpoint.latest(folder)
    model = str(last.model) if last else config.model
    whose = Subject(config.model, model, folder, config.chat, config.compute, config.seed)
    prompts = []
    if "data" in defaults:
        row = {"stage": "sft", "model": config.model, "seed": config.seed, "data": defaults["data"]}
        prompts = held_out_prompts(validated(StageSettings, row, "data"))
    measured = stage_card(card, whose, prompts)
    said = ", ".join([f"{trained['steps']} rounds", *card_lines(measured), f"model {model}"])
    result = {
        "stage": ONLINE, "run": str(folder), "model": model, "steps": trained["steps"],
        "eval": trained["eval"], "card": measured, "said": f"{ONLINE}: {said}",
    }  # fmt: skip
    write_json_atomic(done, result)
    return result


def _play(settings: PlaySettings, folder: Path) -> dict[str, Any]:
    """Play training tasks; an interrupted or finished evaluation goes on by itself."""
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
    """Label the turns of played episodes; interrupted or finished labels go on by themselves."""
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
            validated(Card, settings.pop("card", {}), f"{where}: {name}: card")
        validated(_SETTINGS.get(own["stage"], StageSettings), settings, f"{where}: {name}")
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
                f"{folder} holds a run already: go on with it by --resume, or choose another --out"
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
    try:
        row = tomllib.loads(config.read_text())
    except (OSError, tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        raise ConfigError(f"config {config} cannot be read: {error}") from error
    if "stages" in row:
        row["stages"] = dict(_named(row["stages"], str(config)))
    for override in overrides:
        name = override.partition(".")[0]
        inside = name in row.get("stages", {})
        apply_override(row["stages"] if inside else row, override)
    return row


def _named(stages: Any, where: str) -> Iterator[tuple[str, Row]]:
    seen = set[str]()
    for number, stage in enumerate(stages, 1):
        name = stage.get("name") if isinstance(stage, dict) else None
        if not isinstance(name, str) or not name.isidentifier() or name in seen:
            raise ConfigError(
                f"{where}: stage {number} has name={name!r}: give each a word of its own"
            )
        seen.add(name)
        yield name, {key: value for key, value in stage.items() if key != "name"}


def _say(sentence: str) -> None:
    console.print(plain(sentence), markup=False, highlight=False, soft_wrap=True)


def _show(row: Mapping[str, Any]) -> None:
    names = ("loss", "rewards/margins", "rewards/accuracies", "accuracy", "mean_token_accuracy")
    parts = [
        f"{name.rpartition('/')[2]} {row[f'train/{name}']:.3f}"
        for name in names
        if f"train/{name}" in row
    ]
    _say(f"step {row['step']:>5}  " + "  ".join(parts))


def _headline(result: Mapping[str, Any]) -> str:
    """What a stage changed on held-out rows, in one line."""
    before, after = result["before"], result["after"]
    if before.get("ties") == 1:  # the policy was the reference: nothing was right or wrong yet
        before = {name: value for name, value in before.items() if name != "accuracy"}
    shown = [
        f"{name} {before[name]:.3f} -> {value:.3f}" if name in before else f"{name} {value:.3f}"
        for name, value in after.items()
        if isinstance(value, float)
    ]
    shown += card_lines(result["card"])
    held_out = "held out: " + ", ".join(shown) if shown else "nothing held out"
    return f"{result['stage']}: {result['steps']} steps; {held_out}; model {result['model']}"
