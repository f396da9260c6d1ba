"""Reads and checks every table of settings: TOML files, `--set key=value`, and their mistakes.

Settings are pydantic models with the configuration `STRICT`. `load` reads one from a file, `check`
builds one from plain values, and both report all mistakes at once, a line each, as setting, value
and fix. `describe` lists the settings of a model for documentation.
"""

from __future__ import annotations

import difflib
import json
import re
import tomllib
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from datetime import date, time
from pathlib import Path
from types import NoneType, UnionType
from typing import Annotated, Any, Literal, NamedTuple, TypeVar, Union, get_args, get_origin

from annotated_types import Ge, Gt, Le, Lt
from pydantic import BaseModel, ConfigDict, ValidationError
from pydantic.fields import FieldInfo
from pydantic_core import ErrorDetails

from agentrl.errors import ConfigError, UserError

Model = TypeVar("Model", bound=BaseModel)
Hint = Callable[[str, Any], str | None]

STRICT = ConfigDict(
    frozen=True, extra="forbid", strict=True, allow_inf_nan=False, use_attribute_docstrings=True
)
"""Numbers are finite, text is never taken for a number, and unknown keys are refused."""

_BARE_KEY = re.compile("[A-Za-z0-9_-]+")
# Longer values would bury the sentence that they stand in.
_MOST_SHOWN_CHARS = 80
_MOST_NAMES = 12


class SettingError(ValueError):
    """A mistake that a validator finds: what is wrong and the fix.

    Attributes:
        setting: its dotted name inside the model that is validated; empty for the whole model.
    """

    def __init__(self, message: str, setting: str = "") -> None:
        super().__init__(message)
        self.setting = setting


class Mistake(NamedTuple):
    """One thing that is wrong with a table of settings."""

    setting: str
    """Dotted name, as `--set` takes it."""
    kind: str
    """Pydantic's name for this kind of mistake, such as "extra_forbidden"."""
    value: Any
    text: str
    """What is wrong and the fix, without the name and the value of the setting."""


def load(
    model_cls: type[Model],
    path: str | Path,
    overrides: Sequence[str] = (),
    *,
    what: str = "config",
    hint: Hint | None = None,
) -> Model:
    """Read settings from a TOML file, apply `key=value` overrides, and check everything.

    Args:
        model_cls: the pydantic model of the settings.
        path: the TOML file.
        overrides: values of `--set`.
        what: what the file holds, for messages.
        hint: see `check`.

    Raises:
        ConfigError: the file cannot be read, or settings are wrong.
    """
    data = read_toml(path, what)
    for override in overrides:
        set_value(data, override)
    return check(model_cls, data, str(path), overrides=overrides, hint=hint)


def check(
    model_cls: type[Model],
    data: Mapping[str, Any],
    source: str,
    *,
    overrides: Sequence[str] = (),
    hint: Hint | None = None,
    error: type[UserError] = ConfigError,
    option: Callable[[str], str] | None = None,
) -> Model:
    """Build settings from plain values.

    Args:
        model_cls: the pydantic model of the settings.
        data: the values, with `overrides` already applied.
        source: where the values come from; every line of the error begins with it.
        overrides: `key=value` pairs of the command line; their mistakes are blamed on `--set`.
        hint: half a sentence about an unknown setting and its value, or None.
        error: the error to raise.
        option: spells a dotted setting as the command line's option, as in "--top-p".

    Raises:
        error: settings are wrong; one line for each, and `setting` names the first.
    """
    try:
        return model_cls.model_validate(data)
    except ValidationError as invalid:
        mistakes = find_mistakes(invalid, model_cls, data, hint)
    lines = []
    for mistake in mistakes:
        text = describe_mistake(mistake, option)
        blamed = next((each for each in overrides if _touches(each, mistake.setting)), None)
        start = source if blamed is None else f"--set {blamed}"
        lines.append(f"{start}: {text}" if start else text)
    raise error("\n".join(lines), setting=mistakes[0].setting or None)


def find_mistakes(
    invalid: ValidationError,
    model_cls: type[BaseModel],
    data: Any,
    hint: Hint | None = None,
) -> list[Mistake]:
    """The mistakes behind an error of pydantic: unknown settings first, one for each setting."""
    mistakes: dict[str, Mistake] = {}
    problems = invalid.errors(include_url=False)
    suggested = set[str]()
    for problem in sorted(problems, key=lambda each: each["type"] != "extra_forbidden"):
        setting = _dotted(problem, data)
        kind, value = problem["type"], problem["input"]
        if kind == "extra_forbidden":
            text = _explain_unknown(setting, problem, model_cls, hint)
            suggested.update(re.findall(r"did you mean '(.*?)'", text))
        elif kind.startswith("union_tag"):
            models, _ = _models_at(model_cls, problem["loc"])
            tag = problem["ctx"].get("tag")
            text = _explain_choice(tag, [each for each in map(_tag, models) if each])
            setting = f"{setting}.{_discriminator(problem)}".lstrip(".")
            kind, value = "missing" if tag is None else "literal_error", tag
        else:
            text = _explain(problem, setting.rpartition(".")[2])
        cause = problem.get("ctx", {}).get("error")
        if isinstance(cause, SettingError) and cause.setting and isinstance(value, Mapping):
            value = value.get(cause.setting, value)
        if kind == "missing" and setting in suggested:
            continue  # it is not missing but misspelt
        mistakes.setdefault(setting, Mistake(setting, kind, value, text))
    return list(mistakes.values())


def describe_mistake(mistake: Mistake, option: Callable[[str], str] | None = None) -> str:
    """One line: the setting, its value, and the fix."""
    setting, kind, value, text = mistake
    if not setting:
        return text
    if kind == "extra_forbidden":
        return f"setting {setting!r} is unknown: {text}"
    if kind == "missing":
        return f"setting {setting!r} is missing: {text}"
    colon = "" if text.startswith(("must ", "is ", "needs ")) else ":"
    spelt = option(setting) if option is not None else f"{setting}="
    if kind == "value_error" and isinstance(value, Mapping | BaseModel):
        return f"{spelt.rstrip('=')}{colon} {text}"
    space = "" if spelt.endswith("=") else " "
    return f"{spelt}{space}{_shown(value)}{colon} {text}"


# --- values from files and from the command line


def read_toml(path: str | Path, what: str = "config") -> dict[str, Any]:
    """The table in a TOML file.

    Raises:
        ConfigError: there is no such file, or it is not TOML; the sentence begins with `what`.
    """
    file = Path(path)
    try:
        return tomllib.loads(file.read_text(encoding="utf-8"))
    except (FileNotFoundError, IsADirectoryError, NotADirectoryError):
        raise ConfigError(f"{what} {file} does not exist: give the path of a TOML file") from None
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        raise ConfigError(f"{what} {file} is not valid TOML: {error}") from None


def parse_value(text: str) -> Any:
    """A value of the command line: TOML or JSON where it is either, else text."""
    try:
        return tomllib.loads(f"value = {text}")["value"]
    except tomllib.TOMLDecodeError:
        pass
    try:
        return json.loads(text)
    except ValueError:
        return text


def split_pair(pair: str, option: str = "--set") -> tuple[str, Any]:
    """The key and the value of `key=value`.

    Raises:
        ConfigError: it has no key or no equals sign.
    """
    key, separator, text = pair.partition("=")
    if not separator or not key.strip():
        raise ConfigError(f"{option} {pair!r}: write it as key=value")
    return key.strip(), parse_value(text)


def read_pairs(pairs: Iterable[str] | None, option: str = "--set") -> dict[str, Any]:
    """The values of a repeatable option `key=value`, by their keys."""
    return dict(split_pair(pair, option) for pair in pairs or ())


def set_value(data: dict[str, Any], override: str, option: str = "--set") -> None:
    """Set one value in nested tables, from `key=value` as the command line gives it.

    A number in the key is a place in a list, as in `env.0.floor=0.5`. A table that is given by its
    name alone, as in `loss.credit = "grpo"`, becomes `{name = "grpo"}` where a key leads into it.

    Raises:
        ConfigError: it is not such a pair, or the key leads into something that is not a table.
    """
    key, value = split_pair(override, option)
    *path, last = key.split(".")
    place: Any = data
    for step in path:
        index = _list_index(place, step, override, option) if isinstance(place, list) else step
        if isinstance(place, dict):
            place.setdefault(step, {})
        if isinstance(place[index], str):
            place[index] = {"name": place[index]}
        place = place[index]
        if not isinstance(place, dict | list):
            raise ConfigError(f"{option} {override!r}: {step!r} is not a table", setting=key)
    place[_list_index(place, last, override, option) if isinstance(place, list) else last] = value


def _list_index(places: list[Any], step: str, override: str, option: str) -> int:
    if not step.isdecimal() or int(step) >= len(places):
        raise ConfigError(
            f"{option} {override!r}: {step!r} is not a place in a list of {len(places)}: give a"
            f" number from 0 to {len(places) - 1}"
        )
    return int(step)


def as_toml(value: Any) -> str:
    """A value as TOML and `--set` write it, on one line that is safe to print.

    TOML has no None: in a table or a list it is left out.
    """
    if isinstance(value, bool):
        return str(value).lower()
    if isinstance(value, str):
        return _quote(value)
    if isinstance(value, date | time):
        return value.isoformat()
    if isinstance(value, BaseModel):
        return as_toml(value.model_dump(mode="json"))
    if isinstance(value, Mapping):
        rows = [f"{_key(key)} = {as_toml(each)}" for key, each in value.items() if each is not None]
        return f"{{{', '.join(rows)}}}"
    if isinstance(value, list | tuple):
        return f"[{', '.join(as_toml(each) for each in value if each is not None)}]"
    return "".join(map(_escape, repr(value)))


def _key(key: Any) -> str:
    return str(key) if _BARE_KEY.fullmatch(str(key)) else _quote(str(key))


def _quote(text: str) -> str:
    shown = str.__repr__(text)  # without escapes, TOML and Python read quotes alike
    if "\\" not in shown:
        return shown
    escaped = "".join(f"\\{char}" if char in '"\\' else _escape(char) for char in text)
    return f'"{escaped}"'


def _escape(char: str) -> str:
    if char.isprintable():
        return char
    return f"\\u{ord(char):04x}" if ord(char) < 0x10000 else f"\\U{ord(char):08x}"


# --- names


def nearest(name: str, names: Iterable[str], cutoff: float = 0.6) -> str | None:
    """The name that is most like a misspelt one; among the best, one with the same letters."""
    wanted = str(name).lower()
    close = difflib.get_close_matches(wanted, list(names), n=3, cutoff=cutoff)
    same_letters = [each for each in close if sorted(each) == sorted(wanted)]
    return next(iter([*same_letters, *close]), None)


def did_you_mean(name: Any, names: Iterable[str]) -> str:
    """Half a sentence for a misspelt name: the nearest one, or all that there are."""
    choices = list(names)
    near = nearest(str(name), choices)
    if near is not None:
        return f"did you mean {near!r}?"
    if not choices:
        return "leave it out"
    return f"choose {list_names(choices)}"


def list_names(names: Sequence[str], last_word: str = "or") -> str:
    """Names in a sentence: "a, b or c"."""
    if len(names) < 2:
        return "".join(names)
    return f"{', '.join(names[:-1])} {last_word} {names[-1]}"


# --- the wording of mistakes


def _explain(problem: ErrorDetails, name: str) -> str:
    kind, context = problem["type"], problem.get("ctx", {})
    fixes = {
        "missing": f"add {name} = …",
        "finite_number": "must be a finite number",
        "string_too_short": "must not be empty",
        "int_type": "must be a whole number",
        "int_from_float": "must be a whole number",
        "float_type": "must be a number",
        "bool_type": "must be true or false",
        "string_type": "must be text",
        "list_type": f"must be a list, as in {name} = […]",
        "tuple_type": f"must be a list, as in {name} = […]",
        "dict_type": f"must be a table, as in {name} = {{…}}",
        "model_type": f"must be a table, as in {name} = {{…}}",
        "model_attributes_type": f"must be a table, as in {name} = {{…}}",
        "greater_than": f"must be greater than {context.get('gt')}",
        "greater_than_equal": f"must be at least {context.get('ge')}",
        "less_than": f"must be less than {context.get('lt')}",
        "less_than_equal": f"must be at most {context.get('le')}",
        "too_short": f"must have at least {context.get('min_length')} values",
        "too_long": f"must have at most {context.get('max_length')} values",
    }
    if kind in fixes:
        return fixes[kind]
    if kind == "literal_error":
        choices = re.findall(r"'(.*?)'|(\w+)", context["expected"].replace(" or ", ", "))
        names = [quoted or bare for quoted, bare in choices]
        return _explain_choice(problem["input"], names)
    text = problem["msg"].removeprefix("Value error, ").replace("Input should", "it must")
    return text[:1].lower() + text[1:]


def _explain_choice(value: Any, choices: Sequence[str]) -> str:
    if value is None:
        return f"choose {list_names(choices)}"
    near = nearest(str(value), choices)
    if near is not None and len(choices) > 3:
        return f"did you mean {near!r}? Choose {list_names(choices)}"
    if near is not None:
        return f"must be {list_names(choices)}; did you mean {near!r}?"
    return f"must be {list_names(choices)}"


def _explain_unknown(
    setting: str, problem: ErrorDetails, model_cls: type[BaseModel], hint: Hint | None
) -> str:
    last = str(problem["loc"][-1])
    table, _, _ = setting.rpartition(".")
    models, others = _models_at(model_cls, problem["loc"][:-1])
    owners = [tag for each in others if last in each.model_fields and (tag := _tag(each))]
    if owners:
        return f"it belongs to {list_names([repr(tag) for tag in owners])}"
    fields = [name for each in models for name in each.model_fields]
    for row in describe(model_cls):
        steps = row.name.split(".")
        if last in steps:  # the same name in another table
            return f"did you mean {'.'.join(steps[: steps.index(last) + 1])!r}?"
    explained = hint(setting, problem["input"]) if hint is not None else None
    if explained:
        return explained
    near = nearest(last, fields)
    if near is not None:
        return f"did you mean {f'{table}.{near}'.lstrip('.')!r}?"
    return f"settings are {', '.join(fields)}" if fields else "leave it out"


def _dotted(problem: ErrorDetails, data: Any) -> str:
    """The name of a setting as `--set` takes it: a place in the values, without pydantic's own
    steps, such as the member of a union that was tried.
    """
    names: list[str] = []
    place = data
    loc = problem["loc"]
    for step in loc:
        in_table = isinstance(place, Mapping) and step in place
        in_list = isinstance(place, list | tuple) and isinstance(step, int) and step < len(place)
        if in_table or in_list:
            place = place[step]
        elif step != loc[-1] or problem["type"] != "missing":
            continue
        names.append(str(step))
    cause = problem.get("ctx", {}).get("error")
    if isinstance(cause, SettingError) and cause.setting:
        names.append(cause.setting)
    return ".".join(names)


def _discriminator(problem: ErrorDetails) -> str:
    return str(problem["ctx"]["discriminator"]).strip("'")


def _touches(override: str, setting: str) -> bool:
    key = override.partition("=")[0].strip()
    return f"{setting}.".startswith(f"{key}.") or f"{key}.".startswith(f"{setting}.")


def _shown(value: Any) -> str:
    text = as_toml(value)
    return text if len(text) <= _MOST_SHOWN_CHARS else f"{text[: _MOST_SHOWN_CHARS - 1]}…"


# --- what settings a model has


class SettingRow(NamedTuple):
    """One setting, for documentation."""

    name: str
    """Dotted name; `N` is a place in a list."""
    type: str
    default: str
    """As TOML writes it; empty for a setting that must be given."""
    range: str
    """The numbers that are allowed, as in "at least 1"; empty if all are."""
    description: str


def describe(model_cls: type[Any], prefix: str = "") -> list[SettingRow]:
    """All settings of a model (or pydantic dataclass) with those of its tables, in order."""
    rows: dict[str, SettingRow] = {}
    for name, field in model_cls.__pydantic_fields__.items():
        dotted = f"{prefix}{name}"
        tables = list(_models_in(field.annotation))
        is_list = any(_is_list(each) for each in _flatten(field.annotation))
        if not tables or is_list or not all(_is_model(each) for each in _flatten(field.annotation)):
            rows[dotted] = _row(dotted, field)
        inner_prefix = f"{dotted}.N." if is_list else f"{dotted}."
        for row in _rows_of_tables(tables, inner_prefix):
            rows.setdefault(row.name, row)
    return list(rows.values())


def _rows_of_tables(tables: Sequence[type[BaseModel]], prefix: str) -> Iterator[SettingRow]:
    """The settings of one table, or of several of which one is chosen by its tag."""
    found: dict[str, list[tuple[str | None, SettingRow]]] = {}
    for table in tables:
        for row in describe(table, prefix):
            found.setdefault(row.name, []).append((_tag(table), row))
    for tagged in found.values():
        tags, row = [tag for tag, _ in tagged if tag], tagged[0][1]
        if len(tags) > 1 and all(as_toml(tag) == each.default for tag, each in tagged):
            yield row._replace(type=" or ".join(as_toml(tag) for tag in tags))
        elif tags and len(tagged) <= len(tables) // 2:
            owners = list_names([repr(tag) for tag in tags])
            yield row._replace(description=f"Only for {owners}. {row.description}")
        else:
            yield row


def _row(name: str, field: FieldInfo) -> SettingRow:
    default = "" if field.is_required() else as_toml(field.get_default(call_default_factory=True))
    description = " ".join((field.description or "").split())
    return SettingRow(name, _type_name(field.annotation), default, _range(field), description)


def _range(field: FieldInfo) -> str:
    words = []
    for bound in field.metadata:
        if isinstance(bound, Ge):
            words.append(f"at least {bound.ge}")
        elif isinstance(bound, Gt):
            words.append(f"greater than {bound.gt}")
        elif isinstance(bound, Le):
            words.append(f"at most {bound.le}")
        elif isinstance(bound, Lt):
            words.append(f"less than {bound.lt}")
    return " and ".join(words)


def _type_name(annotation: Any) -> str:
    names = {str: "text", int: "whole number", float: "number", bool: "true or false"}
    kinds: list[str] = []
    for each in _flatten(annotation):
        if each in names:
            kinds.append(names[each])
        elif get_origin(each) is Literal:
            kinds += [as_toml(choice) for choice in get_args(each)]
        elif _is_list(each):
            inner = [part for part in get_args(each) if part is not Ellipsis]
            kinds.append(f"list of {_type_name(inner[0])}" if inner else "list")
        elif _is_model(each) or get_origin(each) is dict:
            kinds.append("table")
        elif each is not NoneType:
            kinds.append("any value")
    return " or ".join(dict.fromkeys(kinds))


def _flatten(annotation: Any) -> Iterator[Any]:
    """The members of a union, without `Annotated`."""
    origin = get_origin(annotation)
    if origin is Annotated:
        yield from _flatten(get_args(annotation)[0])
    elif origin in (Union, UnionType):
        for member in get_args(annotation):
            yield from _flatten(member)
    else:
        yield annotation


def _models_in(annotation: Any) -> Iterator[type[BaseModel]]:
    for each in _flatten(annotation):
        if _is_model(each):
            yield each
        elif _is_list(each):
            for part in get_args(each):
                yield from _models_in(part)


def _models_at(
    model_cls: type[BaseModel], loc: Sequence[int | str]
) -> tuple[list[type[BaseModel]], list[type[BaseModel]]]:
    """The models that can stand at a place, and members of its union that were not chosen."""
    models: list[type[BaseModel]] = [model_cls]
    others: list[type[BaseModel]] = []
    for step in loc:
        fields = [each.model_fields[step] for each in models if step in each.model_fields]
        if fields and isinstance(step, str):
            models = [inner for field in fields for inner in _models_in(field.annotation)]
            others = []
            continue
        chosen = [each for each in models if step in (_tag(each), each.__name__)]
        if chosen:
            others = [each for each in models if each not in chosen]
            models = chosen
    return models, others


def _tag(model_cls: type[BaseModel]) -> str | None:
    """The value by which a table of a union is chosen, as "band" of `sampler = "band"`."""
    for field in model_cls.model_fields.values():
        if get_origin(field.annotation) is Literal and get_args(field.annotation) == (
            field.default,
        ):
            return str(field.default)
    return None


def _is_model(annotation: Any) -> bool:
    return isinstance(annotation, type) and issubclass(annotation, BaseModel)


def _is_list(annotation: Any) -> bool:
    return get_origin(annotation) in (list, tuple)
