"""Secrets are taken out of everything that is written: by value, by name, and by form.

By value: variables of this process's environment whose names say that they are secret, unless the
value begins with a slash or is what honest text holds as well (`is_common`). By form: the rules of
detect-secrets, and a few newer keys. Each is also found in base64, in hex, with percent signs,
reversed, and with the same separator after every character: one to three times the same character
that is no letter and no digit. By name: entries such as `password` of `FREE` tables.

A record's own keys, what it is known by (`IDENTITY`) and token ids stay as they are: readers,
resuming and training need them.
"""

from __future__ import annotations

import base64
import binascii
import json
import os
import re
from collections.abc import Iterator, Mapping
from contextlib import suppress
from functools import lru_cache
from typing import Any
from urllib.parse import quote, unquote

MARK = "[redacted]"

_SECRET_NAME = re.compile(
    r"(?:^|_)(?:API_?KEY|KEY|TOKEN|SECRET|PASSWORD|PASSWD|PASS|CREDENTIALS?|AUTH)(?:_|$)", re.I
)
_SECRET_ENTRY = re.compile(
    r"(?:api_?key|password|passwd|client_?secret|access_?token|auth_?token|secret_?key"
    r"|private_?key|authorization)$",
    re.I,
)
# One of these stands in every such name, its letters folded.
_NAMES = (
    *("api_key", "apikey", "password", "passwd", "client_secret", "clientsecret", "access_token"),
    *("accesstoken", "auth_token", "authtoken", "secret_key", "secretkey", "private_key"),
    *("privatekey", "authorization"),
)
_SHORTEST, _FEWEST_DIFFERENT, _LONGEST_WORDS = 8, 5, 16
# One of these stands in every text that a rule matches: looking for them costs microseconds.
_SIGNS = (
    *("AKC", "A3T", "ABIA", "ACCA", "AKIA", "ASIA", "aws", "AccountKey=", "ghp_", "gho_", "ghu_"),
    *("ghs_", "ghr_", "github_pat_", "glpat-", "gldt-", "glft-", "glsoat-", "glrt-", "GR1348941"),
    *("glcbt-", "glimt-", "glptt-", "glagent-", "gloas-", "eyJ", "-us", "_authToken", "T3BlbkFJ"),
    *("PRIVATE KEY", "PuTTY-User", "pypi-Ag", "SG.", "xox", "hooks.slack", "sq0csp-", "k_live_"),
    *("sk-ant-", "sk-proj-", "hf_", "AIza", "cloudant", "softlayer"),
)
_SIGNS_REVERSED = tuple(sign[::-1] for sign in _SIGNS)
# Of rules without a sign; each begins with a letter that the search can jump to.
_FORMS = tuple(
    map(
        re.compile,
        (r"://[^:/\s]+:[^@/\s]+@", "AC[a-z0-9]{32}", "SK[a-z0-9]{32}", ":[0-9A-Za-z_-]{35}"),
    )
)
_OWN_RULES = tuple(
    re.compile(rule, re.DOTALL)
    for rule in (
        r"-----BEGIN [A-Z0-9 ]*PRIVATE KEY(?: BLOCK)?-----(?:.*?-----END [^-]*-----|.*)",
        r"sk-(?:ant|proj)-[A-Za-z0-9_\-]{20,}",
        r"hf_[A-Za-z0-9]{30,}",
        r"AIza[0-9A-Za-z_\-]{35}",
        r"github_pat_[A-Za-z0-9_]{40,}",
    )
)
_PLUGINS = (
    *("artifactory", "aws", "azure_storage_key", "basic_auth", "cloudant", "github_token"),
    *("gitlab_token", "jwt", "mailchimp", "npm", "openai", "private_key", "pypi_token", "sendgrid"),
    *("slack", "softlayer", "square_oauth", "stripe", "telegram_token", "twilio"),
)
_CHUNK = re.compile(
    r"(?<![A-Za-z0-9+/_\-])[A-Za-z0-9+/_\-]{22,}+={0,2}"
)  # longer than the digits of a float
# From where a run begins, and without a second try: the time grows with the length alone.
_QUOTED = re.compile(r"(?<![^\s%\"'])[^\s%\"']*+(?:%[0-9A-Fa-f]{2}[^\s%\"']*+){2,}")
_MAYBE_SPACED = re.compile(r"(([\W_])\2{0,2})[^\n]\1[^\n]\1[^\n]\1")
_SPACED = re.compile(r"[^\n](([\W_])\2{0,2})(?:[^\n]\1){9,}[^\n]")
_WINDOW = 4096
"""Characters in which a rule of detect-secrets is looked for; what begins there may be longer."""
_REMEMBERED, _LONGEST_REMEMBERED = 8192, 4096
"""Strings, and characters of one, whose look is kept: episodes of a group say much the same."""

_SUSPICIOUS, _NAMED = "a secret, perhaps", "a name of one, perhaps"

PATHS = frozenset({"artifacts", "files", "side_effects"})
"""Tables of a record whose keys are paths: a name there says nothing of what a file holds."""
FREE = PATHS | {"arguments", "environment", "metadata", "request", "settings"}
"""Tables of a record whose keys a user or an agent chooses."""
IDENTITY = frozenset({"env", "policy", "run", "split", "task", "task_ids", "tasks"})
"""Names of a record's fields that say what it is of; they hold no text of an agent."""


class Redactor:
    """Takes secrets out of text and rows.

    Args:
        values: secrets that are known, of at least 8 characters.
    """

    def __init__(self, values: frozenset[str] = frozenset()) -> None:
        self._values = sorted((v for v in values if len(v) >= _SHORTEST), key=len, reverse=True)
        self._reversed = [value[::-1] for value in self._values]
        self._look_once = lru_cache(_REMEMBERED)(self._look)

    def text(self, text: str) -> str:
        """The text with `[redacted]` in the place of each secret."""
        if not self._is_suspicious(text):
            return text
        text = self._raw(text)
        back = text[::-1]
        if (cleaned := self._raw(back)) != back:
            text = cleaned[::-1].replace(MARK[::-1], MARK)
        text = _CHUNK.sub(lambda found: self._unless(found[0], _decoded(found[0])), text)
        if "%" in text:
            text = _QUOTED.sub(lambda found: self._unless(found[0], [unquote(found[0])]), text)
        return _SPACED.sub(lambda found: self._unless(found[0], _joined(found)), text)

    def row(self, row: Any) -> Any:
        """A record of JSON values without secrets; the same object where it holds none."""
        looks = set(map(self._seen, _strings(row)))
        if _SUSPICIOUS not in looks and not (_NAMED in looks and _has_named(row)):
            return row
        if isinstance(row, Mapping) and "segments" in row:
            rest = {name: item for name, item in row.items() if name != "segments"}
            return {**row, **self._own(rest, "")}
        return self._own(row, "")

    def _own(self, value: Any, name: str) -> Any:
        """What a record itself lays out; `name` is of the field that holds it."""
        if isinstance(value, str):
            return value if name in IDENTITY else self.text(value)
        if isinstance(value, Mapping):
            if name in FREE:
                return self._free(value, by_name=name not in PATHS)
            return {
                key: item if name == "task" and key == "id" else self._own(item, key)
                for key, item in value.items()
            }
        if isinstance(value, list | tuple):
            return [self._own(item, name) for item in value]
        return value

    def _free(self, value: Any, name: str = "", *, by_name: bool) -> Any:
        """What anybody may have laid out."""
        if isinstance(value, str):
            return MARK if by_name and value and _SECRET_ENTRY.search(name) else self.text(value)
        if isinstance(value, Mapping):
            if not by_name and value.keys() == {"base64"}:
                text = base64.b64decode(value["base64"]).decode("latin-1")
                return value if self.text(text) == text else {"text": MARK}
            return {
                self.text(str(key)): self._free(item, str(key), by_name=by_name)
                for key, item in value.items()
            }
        if isinstance(value, list | tuple):
            return [self._free(item, name, by_name=by_name) for item in value]
        return value

    def _raw(self, text: str) -> str:
        for value in (*self._values, *self._reversed):
            text = text.replace(value, MARK)
        if _has_form(text):
            for own in _OWN_RULES:
                text = own.sub(MARK, text)
            for rule in _rules():
                text = _without(rule, text)
        return text

    def _unless(self, chunk: str, decoded: Any) -> str:
        return MARK if any(self._raw(one) != one for one in decoded) else chunk

    def _seen(self, text: str) -> str:
        return self._look(text) if len(text) > _LONGEST_REMEMBERED else self._look_once(text)

    def _look(self, text: str) -> str:
        if self._is_suspicious(text):
            return _SUSPICIOUS
        return _NAMED if _has_any(_folded(text), _NAMES) else ""

    def _is_suspicious(self, text: str) -> bool:
        """Whether it may hold a secret; cheap, and wrong only by saying yes."""
        if _has_any(text, (*self._values, *self._reversed, *_SIGNS_REVERSED)) or _has_form(text):
            return True
        if any(
            self._raw(one) != one for found in _CHUNK.finditer(text) for one in _decoded(found[0])
        ):
            return True
        return ("%" in text and bool(_QUOTED.search(text))) or _is_spaced(text)


def redactor() -> Redactor:
    """The redactor of this process, by its environment as it is now."""
    return _redactor_of(
        frozenset(
            value
            for name, value in os.environ.items()
            if _SECRET_NAME.search(name) and not value.startswith("/") and not is_common(value)
        )
    )


def is_common(value: str) -> bool:
    """Whether honest text may hold the value by chance, so that it is not looked for: under 8
    characters, fewer than 5 different ones, or, under 16, a number or words without a digit, of
    which each has small letters, capitals, or a capital first.
    """
    if len(value) < _SHORTEST or len(set(value)) < _FEWEST_DIFFERENT:
        return True
    words = [word for word in re.split(r"[\W_]+", value) if word]
    plain = bool(words) and all(
        word.isalpha() and (word.islower() or word.isupper() or word.istitle()) for word in words
    )
    return len(value) < _LONGEST_WORDS and (plain or value.isdecimal())


@lru_cache(maxsize=8)
def _redactor_of(values: frozenset[str]) -> Redactor:
    escaped = {
        json.dumps(value, ensure_ascii=ascii_)[1:-1] for value in values for ascii_ in (True, False)
    }
    encoded = {form for value in values for form in _encoded(os.fsencode(value))}
    return Redactor(values | escaped | encoded)


def _encoded(value: bytes) -> Iterator[str]:
    """A known secret in base64 (by its place among other bytes), in hex, with percent signs."""
    for before in range(3):
        text = base64.b64encode(bytes(before) + value).decode()
        inner = text[-(-before * 8 // 6) : -4]  # what no neighbour changes
        yield from (inner, inner.replace("+", "-").replace("/", "_"))
    yield from (value.hex(), value.hex().upper(), quote(value, safe=""))


@lru_cache(maxsize=1)
def _rules() -> tuple[re.Pattern[str], ...]:
    """Loaded when first needed: detect-secrets is slow to import."""
    from importlib import import_module

    from detect_secrets.plugins.base import RegexBasedDetector

    found: list[re.Pattern[str]] = []
    for name in _PLUGINS:
        for item in vars(import_module(f"detect_secrets.plugins.{name}")).values():
            if isinstance(item, type) and issubclass(item, RegexBasedDetector):
                rules = item.denylist
                found += rules if isinstance(rules, list | tuple) else []
    return tuple(dict.fromkeys(found))


def _without(rule: re.Pattern[str], text: str) -> str:
    """The text with the mark in the place of what a rule of others finds. It is looked for within a
    window, since such a rule may begin anew at every character and read to the text's end.
    """
    kept, last, at = list[str](), 0, 0
    while at < len(text):
        end = at + _WINDOW
        found = rule.search(text, at, end)
        if not found and end >= len(text):
            break
        if not found:
            at += _WINDOW // 2
            continue
        if found.end() == end:
            found = rule.match(text, found.start()) or found
        kept += text[last : found.start()], MARK
        last = found.end()
        at = max(last, at + 1)
    return "".join((*kept, text[last:]))


def _has_form(text: str) -> bool:
    return _has_any(text, _SIGNS) or any(form.search(text) for form in _FORMS)


def _folded(text: str) -> str:
    """Small letters, those too that a pattern of any case takes for an i: with no dot or two."""
    return text.casefold().replace("ı", "i").replace("\u0307", "")


def _has_any(text: str, parts: tuple[str, ...]) -> bool:
    return any(map(text.__contains__, parts))


def _decoded(chunk: str) -> Iterator[str]:
    """What a run of letters says as hex and as base64, as text."""
    plain = chunk.rstrip("=")
    with suppress(ValueError):
        yield bytes.fromhex(plain).decode("latin-1")
    translated = plain.translate(str.maketrans("-_", "+/"))
    for start in range(4):  # it may follow other letters
        piece = translated[start:]
        piece = piece[: len(piece) - (len(piece) % 4 == 1)]
        try:
            yield base64.b64decode(piece + "=" * (-len(piece) % 4)).decode("latin-1")
        except (binascii.Error, ValueError):
            continue


def _is_spaced(text: str) -> bool:
    return bool(_MAYBE_SPACED.search(text)) and bool(_SPACED.search(text))


def _joined(found: re.Match[str]) -> Iterator[str]:
    yield found[0][:: len(found[1]) + 1]


def _strings(value: Any, depth: int = 0) -> Iterator[str]:
    """All text of a record, keys included, without its segments."""
    if isinstance(value, str):
        yield value
    elif isinstance(value, Mapping):
        for key, item in value.items():
            yield str(key)
            if depth or key != "segments":
                yield from _strings(item, depth + 1)
    elif isinstance(value, list | tuple):
        for item in value:
            yield from _strings(item, depth + 1)


def _has_named(value: Any) -> bool:
    """Whether an entry of any table has a name of a secret."""
    if isinstance(value, Mapping):
        return any(_SECRET_ENTRY.search(str(key)) or _has_named(value[key]) for key in value)
    return isinstance(value, list | tuple) and any(map(_has_named, value))
