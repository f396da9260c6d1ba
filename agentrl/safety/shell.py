"""A command line for a shell as steps, each with its effect and the paths that it names.

The grammar is tree-sitter's for bash. Only constructs that stand in this file are understood:
simple commands of literal words, pipelines, lists, subshells, groups, redirections to literal
paths, `cd`. Anything else (expansions, substitutions, assignments, loops, functions, ANSI-C quotes,
here-documents, …) makes a step of the strictest class, of which nothing else is known.
"""

from __future__ import annotations

import posixpath
import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from itertools import pairwise
from typing import TYPE_CHECKING

from agentrl.safety.programs import NotUnderstood, Use, Word, uses_of
from agentrl.types import Effect

if TYPE_CHECKING:
    from tree_sitter import Node, Parser

UNKNOWN = "?"
"""Stands for a path that cannot be known: no permission covers it, every prohibition does."""
HERE = frozenset({"."})
WORK_AREA = "/sandbox/work"

_LISTS = {"program", "list", "pipeline", "subshell", "compound_statement", "negated_command"}
_MARKS = {"&&", "||", ";", "\n", "&", "|", "|&", "(", ")", "{", "}", "!", "comment"}
_WRITES = {">", ">>", ">|", "&>", "&>>", ">&"}
_PLAIN = re.compile(r"[A-Za-z0-9_./:=,@%+\-*?\[\]~^#!]*")
_EXPANDS = re.compile(r"[*?\[]")
_ODD = re.compile(r"[\x00-\x08\x0b-\x1f\x7f]")
_STREAMS = {"/dev/null", "/dev/stdout", "/dev/stderr"}
_ABOVE = len(WORK_AREA.split("/"))
_MOST_PLACES = 16
_LONGEST = 20_000


@dataclass(frozen=True, slots=True)
class Access:
    """A path that a step names.

    Attributes:
        path: relative to the work area and in its shortest form; one that begins with `/` or `..`
            lies outside; `UNKNOWN` may be anything.
        writes: whether it may be written.
        expands: whether `*`, `?` and `[` in it are the shell's, and not part of a name.
        deep: whether the same is done to what lies below it.
    """

    path: str
    writes: bool = False
    expands: bool = False
    deep: bool = False


@dataclass(frozen=True, slots=True)
class ShellStep:
    """One simple command of a command line.

    Attributes:
        argv: the words, as the program would get them; empty where that is not known.
        why: why the step has the strictest class; empty where it is understood.
    """

    argv: tuple[str, ...]
    effect: Effect
    accesses: tuple[Access, ...]
    why: str = ""


@dataclass(frozen=True, slots=True)
class CommandLine:
    """What is known of a command line.

    Attributes:
        places: directories, relative to the work area, in which a later line may begin.
    """

    steps: tuple[ShellStep, ...]
    places: frozenset[str]


ANYTHING = (Access(UNKNOWN), Access(UNKNOWN, writes=True))


def read_command(text: str, places: frozenset[str] = HERE) -> CommandLine:
    """The steps of a command line; never raises.

    Args:
        text: for bash or sh.
        places: directories in which it may begin, relative to the work area.
    """
    reading = _Reading(text.encode("utf-8", "replace"), places)
    if len(text) > _LONGEST:
        return CommandLine((_strict(f"it has more than {_LONGEST} characters"),), places)
    if _ODD.search(text) or _has_odd_space(text):
        return CommandLine((_strict("it holds control characters"),), places)
    try:
        # The tree is kept until it is read: nodes do not keep it alive, and reading freed memory
        # misjudged a command now and then, or ended the process.
        tree = _parser().parse(reading.source)
        reading.read(tree.root_node)
    except (NotUnderstood, RecursionError) as error:
        reading.steps.append(_strict(str(error) or "it is nested too deeply"))
        reading.places = frozenset({UNKNOWN})
    return CommandLine(tuple(reading.steps), reading.places)


def resolve(path: str, places: frozenset[str] = HERE) -> Iterator[str]:
    """What a path may be, from each of the places: see `Access.path`."""
    if path.startswith("~") or (UNKNOWN in places and not path.startswith("/")):
        yield UNKNOWN
        return
    for place in places:
        joined = posixpath.normpath(posixpath.join(WORK_AREA, place, path))
        if joined.startswith("//"):
            joined = joined[1:]
        inside = joined == WORK_AREA or joined.startswith(WORK_AREA + "/")
        climbs = posixpath.relpath(joined, WORK_AREA) if inside else joined
        yield climbs


@lru_cache(maxsize=1)
def _parser() -> Parser:
    import tree_sitter_bash
    from tree_sitter import Language, Parser

    return Parser(Language(tree_sitter_bash.language()))


def _strict(why: str) -> ShellStep:
    return ShellStep((), "irreversible", ANYTHING, why)


def _has_odd_space(text: str) -> bool:
    return any(char.isspace() and char not in " \t\n" for char in text)


def _may_climb(name: str) -> bool:
    """Whether the shell may expand one part of a path to `.` or `..`.

    dash does so for `.?` and `.*`; neither it nor bash lets `*` or `?` stand for a first dot.
    """
    if name.startswith("["):
        return True
    if not name.startswith(".") or not _EXPANDS.search(name):
        return False
    return len(name) == 1 or name[1] in ".*?["


class _Reading:
    """Walks a syntax tree and gathers its steps."""

    def __init__(self, source: bytes, places: frozenset[str]) -> None:
        self.source = source
        self.places = places
        self.steps: list[ShellStep] = []

    def read(self, node: Node) -> None:
        """Add the steps of a statement, in order.

        Raises:
            NotUnderstood: it is none of the constructs that are modelled.
        """
        if node.has_error or node.is_missing:
            raise NotUnderstood("it cannot be parsed")
        self._check_gaps(node)
        if node.type in _LISTS:
            for child in node.children:
                if child.type not in _MARKS:
                    self.read(child)
        elif node.type == "command":
            self._command(node)
        elif node.type == "redirected_statement":
            self._redirected(node)
        else:
            raise NotUnderstood(f"{node.type.replace('_', ' ')} is not modelled")

    def _redirected(self, node: Node) -> None:
        redirects = [child for child in node.children if child.type == "file_redirect"]
        for child in node.children:
            if child not in redirects:
                self.read(child)
        for child in redirects:  # last: bash may apply them after a `cd` of the same statement
            self._redirect(child)

    def _command(self, node: Node) -> None:
        words: list[Word] = []
        for child in node.children:
            if child.type == "file_redirect":
                self._redirect(child)
            elif child.type == "command_name":
                words.append(self._word(child.children[0]))
            else:
                words.append(self._word(child))
        argv = tuple(word.text for word in words)
        if argv[0] == "cd":
            self._cd(words)
            return
        try:
            effect, named, deep = uses_of(words)
        except NotUnderstood as error:
            self.steps.append(ShellStep(argv, "irreversible", ANYTHING, str(error)))
            return
        if deep and argv[0] in ("cp", "mv") and self._may_copy_links(named):
            self.steps.append(_strict(f"{argv[0]} may bring in a link from outside the work area"))
            return
        if not named and argv[0] in ("ls", "find", "grep", "du", "egrep", "fgrep"):
            named = [(Word("."), "read")]
        accesses = tuple(
            replace(access, deep=deep)
            for word, use in named
            if word.text not in _STREAMS or (use == "write" and argv[0] != "tee")
            for access in self._accesses(word, use == "write")
        )
        self.steps.append(ShellStep(argv, effect, accesses))

    def _may_copy_links(self, named: Sequence[tuple[Word, Use]]) -> bool:
        """Whether a source of a copy or a move may be a link, or a folder with links in it.

        The system has links (/proc/self/cwd, /tmp in some sandboxes). A copy of one in the work
        area would lead later writes past the patterns of a policy. The known programs make no other
        links, so what lies in the work area or below /tmp has none.
        """
        sources = named[: len(named) // 2 * 2 : 2]  # each is followed by its place in the target
        return any(
            path == UNKNOWN or (path.startswith(("/", "..")) and not path.startswith("/tmp/"))
            for word, _ in sources
            for path in resolve(word.text, self.places)
        )

    def _cd(self, words: Sequence[Word]) -> None:
        if len(words) != 2 or words[1].expands or words[1].text.startswith("-"):
            raise NotUnderstood("cd is modelled with one literal directory")
        accesses = tuple(self._accesses(words[1], False))
        self.steps.append(ShellStep(("cd", words[1].text), "read", accesses))
        # It may fail, run in a subshell, or not be reached: the old places stay possible.
        self.places |= {access.path for access in accesses}
        if len(self.places) > _MOST_PLACES:
            self.places = frozenset({UNKNOWN})

    def _redirect(self, node: Node) -> None:
        """Add what a redirection reads or writes."""
        if node.has_error:
            raise NotUnderstood("it cannot be parsed")
        self._check_gaps(node)
        parts = [child for child in node.children if child.type != "file_descriptor"]
        if len(parts) != 2 or parts[0].type not in _WRITES | {"<"}:
            raise NotUnderstood("a redirection of this kind is not modelled")
        word = self._word(parts[1])
        if parts[0].type == ">&" and re.fullmatch(r"\d", word.text):
            return
        if word.expands:
            raise NotUnderstood("a redirection to an expanded path is not modelled")
        if word.text in _STREAMS:
            return
        writes = parts[0].type != "<"
        accesses = tuple(self._accesses(word, writes))
        argv = (parts[0].type, word.text)
        self.steps.append(ShellStep(argv, "write" if writes else "read", accesses))

    def _accesses(self, word: Word, writes: bool) -> Iterator[Access]:
        if word.expands and any(_may_climb(name) for name in word.text.split("/")):
            yield Access(UNKNOWN, writes)
            return
        for path in resolve(word.text, self.places):
            above = path.split("/")[:_ABOVE] if path.startswith("/") and word.expands else []
            inside = _EXPANDS.search("/".join(above))  # `/sandbox/w*/x` may be in the work area
            yield Access(UNKNOWN if inside else path, writes, word.expands)

    def _word(self, node: Node) -> Word:
        """A literal word.

        Raises:
            NotUnderstood: it holds an expansion, or its quoting is not modelled.
        """
        if node.has_error or node.is_missing:
            raise NotUnderstood("it cannot be parsed")
        self._check_gaps(node)
        text = (node.text or b"").decode("utf-8", "replace")
        if node.type in ("word", "number") and not node.named_children:
            if not _PLAIN.fullmatch(text):
                raise NotUnderstood(f"the word {text!r} is not plain")
            return Word(text, bool(_EXPANDS.search(text)))
        if node.type == "raw_string":
            return Word(text[1:-1])
        if node.type == "string":
            return Word(self._quoted(node, text))
        if node.type == "concatenation":
            parts = [self._word(child) for child in node.children]
            if any(child.end_byte != after.start_byte for child, after in _pairs(node.children)):
                raise NotUnderstood("the parts of a word do not meet")
            joined = Word("".join(part.text for part in parts), any(p.expands for p in parts))
            if joined.expands and any(
                not part.expands and _EXPANDS.search(part.text) for part in parts
            ):
                raise NotUnderstood("a word is quoted and expanded")
            return joined
        raise NotUnderstood(f"{node.type.replace('_', ' ')} is not modelled")

    def _quoted(self, node: Node, text: str) -> str:
        if any(child.type not in ('"', "string_content") for child in node.children):
            raise NotUnderstood("an expansion inside of quotes is not modelled")
        inner = text[1:-1]
        if re.search(r"[$`]|\\[\n$`]|\\$", inner):
            raise NotUnderstood("an expansion inside of quotes is not modelled")
        return re.sub(r'\\(["\\])', r"\1", inner)

    def _check_gaps(self, node: Node) -> None:
        """Between the parts of a node there must be nothing but blanks.

        Raises:
            NotUnderstood: the grammar passed over something else, as a joined line.
        """
        if not node.children:
            return
        allowed = b" \t\n" if node.type in _LISTS else b" \t"
        edges = [(node.start_byte, node.children[0].start_byte)]
        edges += [(one.end_byte, two.start_byte) for one, two in _pairs(node.children)]
        edges.append((node.children[-1].end_byte, node.end_byte))
        if node.type == "program":
            edges += [(0, node.start_byte), (node.end_byte, len(self.source))]
        if node.type in ("string", "raw_string"):
            return
        for start, end in edges:
            if self.source[start:end].strip(allowed):
                raise NotUnderstood("it holds text that the grammar passes over")


def _pairs(nodes: Sequence[Node]) -> Iterator[tuple[Node, Node]]:
    return pairwise(nodes)
