"""The one settings module: what is accepted, how mistakes are reported, and what is described."""

from __future__ import annotations

from typing import Annotated, Any, Literal, Self

import pytest
from pydantic import BaseModel, Field, model_validator

from agentrl.errors import ConfigError, TaskError
from agentrl.settings import (
    STRICT,
    SettingError,
    check,
    describe,
    did_you_mean,
    load,
    nearest,
    read_pairs,
    read_toml,
    set_value,
)


class Square(BaseModel):
    """A shape with one length."""

    model_config = STRICT

    shape: Literal["square"] = "square"
    side: float = Field(default=1.0, gt=0)
    """Length of a side."""


class Circle(BaseModel):
    """A shape with a radius."""

    model_config = STRICT

    shape: Literal["circle"] = "circle"
    radius: float = Field(default=1.0, gt=0)
    """Half of the width."""


class Colour(BaseModel):
    """How a shape is filled."""

    model_config = STRICT

    name: Literal["red", "green", "blue"] = "red"
    """Name of the colour."""
    alpha: float = Field(default=1.0, ge=0, le=1)
    """Opacity."""

    @model_validator(mode="after")
    def _is_seen(self) -> Self:
        if self.name == "blue" and self.alpha == 0:
            raise SettingError("must be above 0 for blue: raise it", "alpha")
        return self


class Drawing(BaseModel):
    """Settings of a drawing."""

    model_config = STRICT

    title: str
    """What stands above the drawing."""
    copies: int = Field(default=1, ge=1)
    """How many to draw."""
    colour: Colour = Colour()
    shape: Annotated[Square | Circle, Field(discriminator="shape")] = Square()
    layers: list[Colour] = []
    """Colours from bottom to top."""
    extra: dict[str, Any] = {}
    """Free values."""


def mistake(row: dict[str, Any]) -> ConfigError:
    with pytest.raises(ConfigError) as caught:
        check(Drawing, row, "draw.toml")
    return caught.value


@pytest.mark.parametrize(
    ("row", "setting", "fix"),
    [
        ({"title": 3}, "title", "must be text"),
        ({"copies": "2"}, "copies", "must be a whole number"),
        ({"copies": True}, "copies", "must be a whole number"),
        ({"copies": 0}, "copies", "must be at least 1"),
        ({"colour": {"alpha": float("nan")}}, "colour.alpha", "must be a finite number"),
        ({"colour": {"alpha": 2.0}}, "colour.alpha", "must be at most 1"),
        ({"colour": {"name": "gren"}}, "colour.name", "did you mean 'green'?"),
        ({"colour": {"name": "blue", "alpha": 0}}, "colour.alpha", "raise it"),
        ({"colour": "red"}, "colour", "must be a table, as in colour = {…}"),
        ({"layers": [{"alpha": 1.0}, {"alfa": 1.0}]}, "layers.1.alfa", "'layers.1.alpha'?"),
        ({"layers": {}}, "layers", "must be a list"),
        ({"coppies": 2}, "coppies", "did you mean 'copies'?"),
        ({"alpha": 1.0}, "alpha", "did you mean 'colour.alpha'?"),
        ({"shape": {"shape": "squre"}}, "shape.shape", "did you mean 'square'?"),
        ({"shape": {"side": 2.0}}, "shape.shape", "choose square or circle"),
        ({"shape": {"shape": "square", "radius": 2.0}}, "shape.radius", "belongs to 'circle'"),
        ({"shape": {"shape": "circle", "radius": 0}}, "shape.radius", "must be greater than 0"),
    ],
)
def test_a_mistake_names_setting_value_and_fix(row, setting, fix):
    error = mistake({"title": "t"} | row)
    assert error.setting == setting and fix in str(error)
    assert str(error).startswith("draw.toml: ") and len(str(error).splitlines()) == 1


def test_all_mistakes_are_reported_a_line_each_and_a_misspelt_setting_is_not_missing_too():
    error = mistake({"tilte": "t", "copies": 0, "colour": {"alpha": 2.0, "nme": "red"}})
    lines = str(error).splitlines()
    assert [line.startswith("draw.toml: ") for line in lines] == [True] * 4
    assert error.setting == "colour.nme" or error.setting == "tilte"
    assert "'title' is missing" not in str(error)
    assert mistake({}).setting == "title"


def test_the_error_can_be_another_one_and_an_option_is_spelt_as_such():
    with pytest.raises(TaskError) as caught:
        check(
            Drawing, {"title": "t", "copies": 0}, "", error=TaskError, option=lambda _: "--copies"
        )
    assert str(caught.value) == "--copies 0 must be at least 1"


def test_a_mistake_of_the_command_line_is_not_blamed_on_the_file(tmp_path):
    file = tmp_path / "draw.toml"
    file.write_text('title = "t"\ncopies = 0\n')
    with pytest.raises(ConfigError) as caught:
        load(Drawing, file, ["colour.alpha=3", "title=x"])
    assert {line.partition(": ")[0] for line in str(caught.value).splitlines()} == {
        "--set colour.alpha=3",
        str(file),
    }
    loaded = load(Drawing, file, ["copies=2", "colour.name=blue", 'extra={"a": null}'])
    assert (loaded.copies, loaded.colour.name, loaded.extra) == (2, "blue", {"a": None})


@pytest.mark.parametrize(
    ("pair", "value"),
    [
        ("a=1", 1),
        ("a=1.5", 1.5),
        ("a=true", True),
        ("a=[1, 2]", [1, 2]),
        ("a={b = 1}", {"b": 1}),
        ('a={"b": null}', {"b": None}),
        ("a=word", "word"),
        ("a=x=y", "x=y"),
        ("a='1'", "1"),
        ("a=", ""),
    ],
)
def test_values_of_the_command_line_are_toml_or_json_or_text(pair, value):
    assert read_pairs([pair]) == {"a": value}
    nested: dict[str, Any] = {}
    set_value(nested, f"t.{pair}")
    assert nested == {"t": {"a": value}}


@pytest.mark.parametrize("override", ["steps", "=3", "list.x=1", "list.7=1", "number.x=1"])
def test_an_override_that_leads_nowhere_is_refused(override):
    with pytest.raises(ConfigError, match="--set"):
        set_value({"list": [1], "number": 3}, override)


def test_a_table_given_by_its_name_takes_further_settings():
    row: dict[str, Any] = {"loss": {"credit": "grpo"}}
    set_value(row, "loss.credit.floor=0.5")
    assert row == {"loss": {"credit": {"name": "grpo", "floor": 0.5}}}


def test_a_file_that_cannot_be_read_is_named(tmp_path):
    (tmp_path / "bad.toml").write_text("a = = 3")
    (tmp_path / "latin.toml").write_bytes(b"a = '\xff'")
    for name in ("bad.toml", "latin.toml", "none.toml", "."):
        with pytest.raises(ConfigError, match="suite"):
            read_toml(tmp_path / name, "suite")


def test_the_nearest_name():
    assert nearest("on", ["no", "off", "on"]) == "on"
    assert nearest("hihg", ["hug", "high"]) == "high"
    assert nearest("zzz", ["high"]) is None and nearest("zzz", ["high"], 0.0) == "high"
    assert did_you_mean("grp", ["grpo", "ppo"]) == "did you mean 'grpo'?"
    assert did_you_mean("zzz", ["grpo", "ppo"]) == "choose grpo or ppo"


def test_every_setting_is_described():
    rows = {row.name: row for row in describe(Drawing)}
    assert rows["copies"] == ("copies", "whole number", "1", "at least 1", "How many to draw.")
    assert rows["title"].default == "" and rows["title"].type == "text"
    assert rows["colour.alpha"].range == "at least 0 and at most 1"
    assert rows["colour.name"].type == "'red' or 'green' or 'blue'"
    assert rows["layers"].type == "list of table" and "layers.N.alpha" in rows
    assert rows["shape.shape"].type == "'square' or 'circle'"
    assert rows["shape.radius"].description == "Only for 'circle'. Half of the width."
