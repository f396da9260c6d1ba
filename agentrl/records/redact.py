"""Secrets are taken out of everything that is written: by value, by name, and by form.

By value: variables of this process's environment whose names say that they are secret. By name:
entries such as `password`. By form: the rules of detect-secrets, and a few newer keys. Each is also
found in base64, in hex, with percent signs, reversed, and with a separator after every character.
Token ids stay as they are: training needs them.
"""

from __future__ import annotations

import base64
import binascii
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
_SHORTEST = 8
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
_ENTRIES = (
    *("password", "passwd", "api_key", "apikey", "client_secret", "clientsecret", "access_token"),
    *("accesstoken", "auth_token", "authtoken", "secret_key", "secretkey", "private_key"),
    *("privatekey", "authorization"),
)
_OWN_RULES = (
    r"-----BEGIN [A-Z0-9 ]*PRIVATE KEY(?: BLOCK)?-----(?:.*?-----END [^-]*-----|.*)",
    r"sk-(?:ant|proj)-[A-Za-z0-9_\-]{20,}",
    r"hf_[A-Za-z0-9]{30,}",
    r"AIza[0-9A-Za-z_\-]{35}",
    r"github_pat_[A-Za-z0-9_]{40,}",
)
_PLUGINS = (
    *("artifactory", "aws", "azure_storage_key", "basic_auth", "cloudant", "github_token"),
    *("gitlab_token", "jwt", "mailchimp", "npm", "openai", "private_key", "pypi_token", "sendgrid"),
    *("slack", "softlayer", "square_oauth", "stripe", "telegram_token", "twilio"),
)
_CHUNK = re.compile(
    r"(?<![A-Za-z0-9+/_\-])[A-Za-z0-9+/_\-]{22,}+={0,2}"
)  # longer than the digits of a float
_QUOTED = re.compile(r"[^\s%\"']*(?:%[0-9A-Fa-f]{2}[^\s%\"']*){2,}")
_MAYBE_SPACED = tuple(
    re.compile(rf"{mark}[^\n]{mark}[^\n]{mark}[^\n]{mark}") for mark in (" ", "-", r"\|")
)
_SPACED = re.compile(r"\S([ |\-])(?:[^\n]\1){9,}\S")


class Redactor:
    """Takes secrets out of text and rows.

    Args:
        values: secrets that are known, of at least 8 characters.
    """

    def __init__(self, values: frozenset[str] = frozenset()) -> None:
        self._values = sorted((v for v in values if len(v) >= _SHORTEST), key=len, reverse=True)
        self._reversed = [value[::-1] for value in self._values]

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
        return _SPACED.sub(lambda found: self._unless(found[0], _joined(found[0])), text)

    def row(self, row: Any, dumped: str) -> Any:
        """A row of JSON values without secrets; the same object where it holds none.

        Args:
            row: the values.
            dumped: the row as JSON, where a look is cheap.
        """
        lower = dumped.lower()
        named = any(f'{entry}":' in lower for entry in _ENTRIES)
        return self._clean(row) if named or self._is_suspicious(dumped) else row

    def _clean(self, value: Any, name: str = "") -> Any:
        if isinstance(value, str):
            return MARK if value and _SECRET_ENTRY.search(name) else self.text(value)
        if isinstance(value, Mapping):
            if value.keys() == {"base64"}:
                data = base64.b64decode(str(value["base64"]))
                text = data.decode("latin-1")
                return value if self.text(text) == text else {"text": MARK}
            return {
                self.text(str(key)): item if key == "segments" else self._clean(item, str(key))
                for key, item in value.items()
            }
        if isinstance(value, list | tuple):
            return [self._clean(item, name) for item in value]
        return value

    def _raw(self, text: str) -> str:
        for value in (*self._values, *self._reversed):
            text = text.replace(value, MARK)
        if _has_form(text):
            for rule in _rules():
                text = rule.sub(MARK, text)
        return text

    def _unless(self, chunk: str, decoded: Any) -> str:
        return MARK if any(self._raw(one) != one for one in decoded) else chunk

    def _is_suspicious(self, text: str) -> bool:
        """Whether it may hold a secret; cheap, and wrong only by saying yes."""
        if any(value in text for value in (*self._values, *self._reversed)) or _has_form(text):
            return True
        if any(sign in text for sign in _SIGNS_REVERSED):
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
            if len(value) >= _SHORTEST and _SECRET_NAME.search(name) and not value.startswith("/")
        )
    )


@lru_cache(maxsize=8)
def _redactor_of(values: frozenset[str]) -> Redactor:
    return Redactor(values | {form for value in values for form in _encoded(value.encode())})


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

    found = [re.compile(rule, re.DOTALL) for rule in _OWN_RULES]
    for name in _PLUGINS:
        for item in vars(import_module(f"detect_secrets.plugins.{name}")).values():
            if isinstance(item, type) and issubclass(item, RegexBasedDetector):
                rules = item.denylist
                found += rules if isinstance(rules, list | tuple) else []
    return tuple(dict.fromkeys(found))


def _has_form(text: str) -> bool:
    return any(sign in text for sign in _SIGNS) or any(form.search(text) for form in _FORMS)


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
    return any(hint.search(text) for hint in _MAYBE_SPACED) and bool(_SPACED.search(text))


def _joined(spaced: str) -> Iterator[str]:
    yield spaced[::2]
