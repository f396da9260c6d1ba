"""What well-known programs do with their arguments. A program or an option that is not here takes
the strictest class: nothing is said of it.

The table is short on purpose. Interpreters, `git`, `awk`, `xargs`, `env`, `ln` and `tar` are not in
it: each can run something else, or lead a later path out of the work area. Nor are the programs of
binutils, as `strings`: they read options from a file that an operand `@file` names.
"""

from __future__ import annotations

import posixpath
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Literal, NamedTuple

from agentrl.types import Effect

Use = Literal["text", "read", "write"]
"""What a word names: nothing, a path that is read, a path that is written."""


@dataclass(frozen=True)
class Program:
    """One program.

    Attributes:
        effect: what it does where its arguments are understood.
        operands: what each operand names; "pattern": the first is text, the others are read;
        flags: options without a value: letters, then long names.
        valued: options with a value -> what the value names.
        words: what an operand that is text may be; None for anything.
        harmless: no option of it does more, so that a file named like an option changes nothing.
        deep: options with which it goes into folders; None where it does so without one.
    """

    effect: Effect
    operands: Use | Literal["pattern", "last", "moved"] = "text"
    flags: frozenset[str] = frozenset()
    valued: Mapping[str, Use] = field(default_factory=dict)
    words: re.Pattern[str] | None = None
    harmless: bool = False
    deep: frozenset[str] | None = frozenset()


def _flags(letters: str = "", *names: str) -> frozenset[str]:
    return frozenset(f"-{letter}" for letter in letters) | {f"--{name}" for name in names}


def _reader(flags: str = "", *names: str, **valued: Use) -> Program:
    options = {f"-{name}" if len(name) == 1 else f"--{name}": use for name, use in valued.items()}
    return Program("read", "read", _flags(flags, *names), options, harmless=True)


def _list_reader(flags: str = "", *names: str, **valued: Use) -> Program:
    """Of a program with an option that names a list of files or writes one: `wc --files0-from`."""
    return replace(_reader(flags, *names, **valued), harmless=False)


# Addresses with p, d or q, and plain substitutions: `w`, `r` and `e` open files and run commands.
_SED = re.compile(
    r"(?:\d+|\$)?(?:,(?:\d+|\$))?[pdq=]|(?:\d+(?:,\d+)?)?s([/|#,])(?:(?!\1)[^\\\n])*\1"
    r"(?:(?!\1)[^\\\n])*\1[gIip]*"
)
_RECURSIVE = frozenset({"-r", "-R", "--recursive"})
_GREP_VALUED: Mapping[str, Use] = {
    **{"-A": "text", "-B": "text", "-C": "text", "-m": "text", "--include": "text"},
    **{"--exclude": "text", "--exclude-dir": "text", "--color": "text"},
}
_GREP = Program(
    "read",
    "pattern",
    _flags("EFGPiIvwxcnHhlLoqsrzabyU", "ignore-case", "count", "line-number", "recursive"),
    _GREP_VALUED,
    harmless=True,
    deep=_RECURSIVE,
)
_SUM = _list_reader("bt")
_ECHO = Program("read", "text", harmless=True)
_WEB = Program("network", "text")

PROGRAMS: Mapping[str, Program] = {
    "cat": _reader("AbeEnstTuv", "number"),
    "tac": _reader(),
    "head": _reader("qvz", n="text", c="text", lines="text", bytes="text"),
    "tail": _reader("qvz", n="text", c="text", lines="text", bytes="text"),
    "wc": _list_reader("clmLw", "lines", "words", "bytes", "chars"),
    "ls": replace(
        _reader("1aAbBcCdfFgGhHiklLmnNopqQrRsStuUvxXZ", "all", "almost-all", "color"),
        deep=frozenset({"-R"}),
    ),
    "stat": _reader("Lt", c="text", format="text"),
    "file": _list_reader("bi", "brief", "mime"),
    "du": replace(_list_reader("abchkmsx", d="text"), deep=None),
    "df": _reader("hkiT"),
    "nl": _reader(b="text", w="text"),
    "cut": _reader("sz", d="text", f="text", c="text", b="text"),
    "paste": _reader("sz", d="text"),
    "fold": _reader("bs", w="text"),
    "rev": _reader(),
    "diff": replace(_list_reader("abBcdeEinqrsuwyN", "brief", U="text"), deep=None),
    "cmp": _reader("bls"),
    "comm": _reader("123z"),
    "basename": Program("read", "text", _flags("az"), {"-s": "text"}, harmless=True),
    "dirname": Program("read", "text", _flags("z"), harmless=True),
    "realpath": _reader("emLPqsz"),
    "readlink": _reader("efmnqsvz"),
    "md5sum": _SUM,
    "sha1sum": _SUM,
    "sha256sum": _SUM,
    "grep": _GREP,
    "egrep": _GREP,
    "fgrep": _GREP,
    "tr": Program("read", "text", _flags("cCdst"), harmless=True),
    "sort": Program("read", "read", _flags("bdfghinMRrsuVz"), {"-k": "text", "-t": "text"}),
    "sed": Program("read", "pattern", _flags("nErsz"), words=_SED),
    "seq": Program("read", "text", _flags("w"), {"-s": "text"}, harmless=True),
    "printf": Program("read", "text", words=re.compile(r"(?:[^%]|%[sd%])*")),
    "pwd": Program("read", "text", _flags("LP")),
    "true": _ECHO,
    "false": _ECHO,
    "echo": _ECHO,
    ":": _ECHO,
    "date": Program("read", "text", _flags("uIR"), words=re.compile(r"\+.*")),
    "whoami": Program("read", "text"),
    "id": Program("read", "text", _flags("gGnru")),
    "uname": Program("read", "text", _flags("amnoprsv")),
    "nproc": Program("read", "text"),
    "sleep": Program("read", "text"),
    "touch": Program("write", "write", _flags("acm")),
    "mkdir": Program("write", "write", _flags("pv"), {"-m": "text"}),
    "tee": Program("write", "write", _flags("ai")),
    "cp": Program("write", "last", _flags("fnpvrR"), deep=_RECURSIVE),
    "mv": Program("write", "moved", _flags("fnv"), deep=None),
    "chmod": Program(
        "write",
        "pattern",
        _flags("Rv"),
        words=re.compile(r"[0-7]{3}|[ugoa]*[-+=][rwxX]+"),
        deep=_RECURSIVE,
    ),
    "rm": Program("irreversible", "write", _flags("frRvid"), deep=_RECURSIVE),
    "rmdir": Program("irreversible", "write", _flags("v")),
    "curl": _WEB,
    "wget": _WEB,
    "ping": _WEB,
    "nslookup": _WEB,
}
_FIND_TESTS = {"-name": 1, "-iname": 1, "-path": 1, "-ipath": 1, "-type": 1, "-size": 1}
_FIND_TESTS |= {"-maxdepth": 1, "-mindepth": 1, "-mtime": 1, "-mmin": 1, "-empty": 0, "-print": 0}
_FIND_TESTS |= {"-print0": 0, "-not": 0, "!": 0, "-o": 0, "-a": 0, "-readable": 0, "-prune": 0}
_GLOB = re.compile(r"[*?\[]")
_STDIN = frozenset(
    {
        *("cat", "tac", "head", "tail", "wc", "nl", "cut", "paste", "fold", "sort", "diff", "cmp"),
        *("comm", "md5sum", "sha1sum", "sha256sum", "grep", "egrep", "fgrep", "sed"),
    }
)
"""Programs for which `-` is their input, and not a file of that name."""
# Bash evaluates what `-v`, `-R` and comparisons of numbers are given; these evaluate nothing.
_FILE_TESTS = frozenset(f"-{letter}" for letter in "bcdefghkLprsSuwx")
_TEXT_TESTS = frozenset({"-n", "-z"})
_FILE_COMPARISONS = frozenset({"-nt", "-ot", "-ef"})
_TEXT_COMPARISONS = frozenset({"=", "!="})


class NotUnderstood(Exception):
    """A command of which the table does not say what it does; the message says why."""


@dataclass(frozen=True, slots=True)
class Word:
    """A word of a command line: its text, and whether the shell may expand it to file names."""

    text: str
    expands: bool = False


class Uses(NamedTuple):
    """What one command does.

    Attributes:
        named: the words that name paths.
        deep: whether what lies below those paths is read or written too.
    """

    effect: Effect
    named: list[tuple[Word, Use]]
    deep: bool = False


def uses_of(argv: Sequence[Word]) -> Uses:
    """The effect of one command, and the words of it that name paths.

    Args:
        argv: the program, then its arguments.

    Raises:
        NotUnderstood: the program, an option or an operand is not one of those that are known.
    """
    name, arguments = argv[0].text, argv[1:]
    if argv[0].expands:
        raise NotUnderstood("the program's name is expanded by the shell")
    if name == "find":
        return Uses("read", list(_find(arguments)), deep=True)
    if name == "test":
        return Uses("read", list(_test(arguments)))
    if name not in PROGRAMS:
        raise NotUnderstood(f"nothing is known of the program {name!r}")
    program = PROGRAMS[name]
    if name in ("echo", "true", "false", ":"):
        return Uses(program.effect, [])
    if program.effect == "network":
        return Uses("network", [(Word("?"), "write")])  # what it may write is not modelled
    named = [one for one in _uses(name, program, arguments) if one[1] != "text"]
    return Uses(program.effect, named, _goes_deep(program, arguments))


def _goes_deep(program: Program, arguments: Sequence[Word]) -> bool:
    deep = program.deep
    if deep is None:
        return True
    letters = {option[1] for option in deep if len(option) == 2}
    return bool(deep) and any(
        word.text in deep
        or (re.match("-[^-]", word.text) and letters & set(word.text))
        or (word.expands and _may_be_option(word))
        for word in arguments
    )


def _test(arguments: Sequence[Word]) -> Iterator[tuple[Word, Use]]:
    """One test of a file or of text, or its opposite."""
    if any(word.expands for word in arguments):
        raise NotUnderstood("test: a word may expand to an operator")
    words = [word.text for word in arguments]
    if len(words) == 3 and words[1] in _TEXT_COMPARISONS | _FILE_COMPARISONS:
        if words[1] in _FILE_COMPARISONS:
            yield from ((word, "read") for word in (arguments[0], arguments[2]))
    elif len(words) == 2 and words[0] in _FILE_TESTS:
        yield arguments[1], "read"
    elif words[:1] == ["!"] and 1 < len(words) < 5:
        yield from _test(arguments[1:])
    elif len(words) > 1 and not (len(words) == 2 and words[0] in _TEXT_TESTS):
        raise NotUnderstood(f"test: {' '.join(words)!r} is not one of the forms that are known")


def _uses(name: str, program: Program, arguments: Sequence[Word]) -> Iterator[tuple[Word, Use]]:
    operands, due, only_operands = list[Word](), list(arguments), False
    while due:
        word = due.pop(0)
        if word.expands and not program.harmless and not only_operands and _may_be_option(word):
            raise NotUnderstood(f"{name}: {word.text!r} may expand to an option")
        if only_operands or not word.text.startswith("-") or word.text == "-":
            operands.append(word)
        elif word.text == "--":
            only_operands = True
        else:
            yield from _option(name, program, word, due)
    yield from _operands(name, program, operands)


def _may_be_option(word: Word) -> bool:
    return bool(_GLOB.match(word.text)) or word.text.startswith("-")


def _option(name: str, program: Program, word: Word, due: list[Word]) -> Iterator[tuple[Word, Use]]:
    """One option; its value is taken from what is due where it has one."""
    text = word.text
    if text.startswith("--"):
        key, separator, value = text.partition("=")
        if key in program.flags and not separator:
            return
        if key in program.valued and separator:
            yield Word(value, word.expands), program.valued[key]
            return
        raise NotUnderstood(f"{name}: option {text!r} is not known")
    if name in ("head", "tail") and re.fullmatch(r"-\d+", text):
        return
    for place, letter in enumerate(text[1:], 1):
        if f"-{letter}" in program.valued:
            value = text[place + 1 :]
            if not value and not due:
                raise NotUnderstood(f"{name}: option -{letter} has no value")
            given = Word(value, word.expands) if value else due.pop(0)
            if given.expands and not value:
                raise NotUnderstood(f"{name}: {given.text!r} may expand to several words")
            yield given, program.valued[f"-{letter}"]
            return
        if f"-{letter}" not in program.flags:
            raise NotUnderstood(f"{name}: option -{letter} is not known")


def _operands(name: str, program: Program, operands: list[Word]) -> Iterator[tuple[Word, Use]]:
    kind = program.operands
    use: Use = "read" if program.effect == "read" else "write"
    if kind == "pattern":
        if not operands:
            raise NotUnderstood(f"{name} has no operand")
        _check_text(name, program, operands[0])
        operands = operands[1:]
    elif kind in ("last", "moved"):
        yield from _copied(name, operands, "write" if kind == "moved" else "read")
        return
    elif kind == "text":
        for word in operands:
            _check_text(name, program, word)
        return
    for word in operands:
        if word.text != "-" or name not in _STDIN:
            yield word, use


def _copied(name: str, operands: list[Word], use: Use) -> Iterator[tuple[Word, Use]]:
    """What is copied or moved, and where it may come to lie: at the last operand or inside."""
    if not operands:
        return
    *sources, target = operands
    if target.expands:
        raise NotUnderstood(f"{name}: {target.text!r} may expand to several words")
    for word in sources:
        yield word, use
        inside = f"{target.text}/{posixpath.basename(word.text.rstrip('/'))}"
        yield Word(inside, word.expands), "write"
    if posixpath.basename(target.text) not in (".", ".."):  # they are folders
        yield target, "write"


def _check_text(name: str, program: Program, word: Word) -> None:
    """An operand that is no path.

    Raises:
        NotUnderstood: it is none of the known forms, or stands for names of files.
    """
    if word.expands and not (program.harmless and program.operands == "text"):
        raise NotUnderstood(f"{name}: {word.text!r} may expand to names of files")
    if program.words is not None and not program.words.fullmatch(word.text):
        raise NotUnderstood(f"{name}: {word.text!r} is not one of the forms that are known")


def _find(arguments: Sequence[Word]) -> Iterator[tuple[Word, Use]]:
    due = list(arguments)
    while due and not due[0].text.startswith(("-", "!", "(", ")")):
        if due[0].expands and _may_be_option(due[0]):
            raise NotUnderstood(f"find: {due[0].text!r} may expand to an option")
        yield due.pop(0), "read"
    while due:
        word = due.pop(0)
        if word.expands or word.text not in _FIND_TESTS:
            raise NotUnderstood(f"find: {word.text!r} is not known")
        taken = _FIND_TESTS[word.text]
        if len(due) < taken or any(value.expands for value in due[:taken]):
            raise NotUnderstood(f"find: {word.text!r} has no plain value")
        del due[:taken]
