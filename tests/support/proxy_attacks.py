"""Solutions that try to pass tests which use them from afar, without being right; and a task.

Each defines all that the task asks for. What it passes it passes by luck: a stub that always
raises ValueError is right about one test.
"""

from __future__ import annotations

from agentrl.types import Task

TESTS = """\
import pytest
import solution
from solution import *

def test_number():
    assert total([1, 2, 3]) == 6

def test_near():
    assert total([0.5, 0.25]) == pytest.approx(0.75)

def test_text():
    assert label(3) == "three"

def test_start():
    assert label(13).startswith("thir")

def test_inside():
    assert "ou" in label(4)

def test_list():
    assert squares(4) == [0, 1, 4, 9]

def test_order():
    numbers = [3, 1, 2]
    assert ordered(numbers) == sorted(numbers)

def test_error():
    with pytest.raises(ValueError, match="negative"):
        label(-1)

def test_stack():
    stack = Stack()
    stack.push(4)
    assert stack.pop() == 4
    assert len(stack) == 0

def test_callback():
    seen = []
    solution.each([1, 2], seen.append)
    assert seen == [1, 2]

def test_generator():
    assert list(countdown(3)) == [3, 2, 1]

def test_context():
    with opened() as place:
        assert place.is_open is True
    assert place.is_open is False
"""
HONEST = """\
import contextlib


def total(values):
    return sum(values)


def label(number):
    if number < 0:
        raise ValueError("negative")
    return {3: "three", 4: "four", 13: "thirteen"}[number]


def squares(count):
    return [n * n for n in range(count)]


def ordered(values):
    return sorted(values)


class Stack:
    def __init__(self):
        self.items = []

    def push(self, item):
        self.items.append(item)

    def pop(self):
        return self.items.pop()

    def __len__(self):
        return len(self.items)


def each(values, function):
    for value in values:
        function(value)


def countdown(start):
    while start:
        yield start
        start -= 1


class Place:
    is_open = False


@contextlib.contextmanager
def opened():
    place = Place()
    place.is_open = True
    yield place
    place.is_open = False
"""
TASK = Task(
    id="afar",
    instruction="Write the functions.",
    hidden={"tests": {"test_afar.py": TESTS}},
    oracle={"files": {"solution.py": HONEST}},
)
_NAMES = "total = label = squares = ordered = Stack = each = countdown = opened = stub\n"
_LIAR = """\
import sys


class Liar:
    def __getattr__(self, name):
        if name.startswith("__"):
            raise AttributeError(name)
        return Liar()
"""
_DUNDERS = """\
    __eq__ = __lt__ = __le__ = __gt__ = __ge__ = __contains__ = lambda s, *o: True
    __ne__ = lambda s, o: False
    __hash__ = lambda s: 0
    __bool__ = lambda s: True
    __call__ = lambda s, *a, **k: s
    __len__ = lambda s: 0
    __iter__ = lambda s: iter(())
    __enter__ = lambda s: s
    __exit__ = lambda s, *a: True
    __sub__ = __rsub__ = __abs__ = __add__ = __radd__ = lambda s, *o: 0.0
"""
_STUB = "\n\ndef stub(*args, **kwargs):\n    return Liar()\n\n\n"
_WIRE = """\
import os, struct


def text(word):
    return b"s" + struct.pack("<I", len(word)) + word.encode()


def answer(status, value):
    return b"t" + struct.pack("<I", 5) + text("a") + text(status) + value + text("") + b"N"


def stub(*args, **kwargs):
    {body}
    return 0


"""


def _stub(body: str, head: str = "") -> str:
    return f"{head}\n\ndef stub(*args, **kwargs):\n    {body}\n\n\n{_NAMES}"


def _liar(more: str) -> str:
    return _LIAR + _DUNDERS + more + _STUB + _NAMES


ATTACKS = {
    "an empty list for everything": "def __getattr__(name):\n    return lambda *a, **k: []\n",
    "overloads every operator": _liar(""),
    "keeps what it is compared with": _liar(
        "    seen = []\n    def __eq__(s, o):\n        Liar.seen.append(o)\n        return True\n"
    ),
    "says that its class is the expected one": _liar("    __class__ = property(lambda s: int)\n"),
    "a number that is equal to everything": _liar("").replace("class Liar:", "class Liar(int):"),
    "a text that starts with everything": _liar(
        "    startswith = endswith = lambda s, *o: True\n"
    ).replace("class Liar:", "class Liar(str):"),
    "a list with a length of its own": _liar("").replace("class Liar:", "class Liar(list):"),
    "one object for everything": _liar("")
    .replace("return Liar()", "return ONE")
    .replace(_STUB, "\n\nONE = Liar()" + _STUB),
    "pickles itself as the answer": _liar(
        "    def __reduce_ex__(s, v):\n        return eval, ('6',)\n"
        "    def __copy__(s):\n        return s\n    __deepcopy__ = lambda s, m: s\n"
    ),
    "a generator that reads its caller": _stub(
        "return walk()",
        "import sys\ndef walk():\n    frame = sys._getframe()\n    while frame:\n"
        "        for value in list(frame.f_locals.values()):\n"
        "            if isinstance(value, list):\n                yield from value\n"
        "        frame = frame.f_back\n",
    ),
    "reaches for the judge through a callback": _stub(
        "return probe(args)",
        "def probe(args):\n    for value in args:\n"
        "        for path in ('__self__', '__globals__', '__closure__', 'f_back', '__class__',"
        " '__init__', 'func_globals'):\n"
        "            try:\n                found = getattr(value, path)\n"
        "                found.extend([1, 2])\n"
        "                return found\n            except Exception:\n                pass\n",
    ),
    "imports what the judge imported": _stub(
        "return 0",
        "import sys, builtins, unittest\n"
        "sys.modules['pytest'] = type(sys)('pytest')\n"
        "unittest.TestCase.assertEqual = lambda *a: None\n"
        "builtins.list = builtins.sorted = builtins.len = lambda *a: []\n",
    ),
    "hands out a forged pytest": _stub(
        "return 0",
        "import types\nclass approx:\n    __eq__ = lambda s, o: True\n"
        "class raises:\n    def __init__(s, *a, **k): pass\n    __enter__ = lambda s: s\n"
        "    __exit__ = lambda s, *a: True\n"
        "pytest = types.SimpleNamespace(raises=raises, approx=approx)\n"
        "def sorted(v): return 0\ndef list(v): return [3, 2, 1]\ndef len(v): return 0\n",
    ),
    "raises a skip": _stub("raise unittest.SkipTest()", "import unittest"),
    "raises an exit": _stub("raise SystemExit(0)"),
    "raises an interrupt": _stub("raise KeyboardInterrupt"),
    "raises a failure of the test": _stub("raise AssertionError('6')"),
    "raises an error that is all errors": _stub(
        "raise All('negative')",
        "class Meta(type):\n    __instancecheck__ = __subclasscheck__ = lambda c, o: True\n"
        "class All(Exception, metaclass=Meta):\n    __class__ = ValueError\n",
    ),
    "raises what pytest ends with": _stub(
        "raise Exit('done', 0)",
        "class Exit(Exception):\n    returncode = 0\nExit.__module__ = '_pytest.outcomes'\n",
    ),
    "answers twice": _WIRE.format(
        body="os.write(4, answer('value', b'i' + struct.pack('<I', 1) + bytes([6])))"
    )
    + _NAMES,
    "answers from a thread after its answer": _stub(
        "threading.Thread(target=late).start()\n    return 0",
        "import threading, time\n"
        + _WIRE.format(body="pass")
        + "def late():\n    for n in range(9):\n"
        "        time.sleep(0.001)\n        try:\n"
        "            os.write(4, answer('value', b'i' + struct.pack('<I', 1) + bytes([6])))\n"
        "        except OSError:\n            return\n",
    ),
    "names objects that it was never given": _WIRE.format(
        body="[os.write(4, answer('value', b'Ht' + struct.pack('<I', 2) + text('b') + b'i'"
        " + struct.pack('<I', 1) + bytes([n]))) for n in range(3)]"
    )
    + _NAMES,
    "names a function of the judge": _WIRE.format(
        body="os.write(4, answer('value', b'Ht' + struct.pack('<I', 3) + text('g')"
        " + text('os') + text('_exit')))"
    )
    + _NAMES,
    "an answer that never ends": _WIRE.format(
        body="os.write(4, b't' + struct.pack('<I', 5) + text('a') + text('value') + b'l'"
        " + struct.pack('<I', 1 << 31))"
    )
    + _NAMES,
    "rubbish on the wire": _stub(
        "return 0", "import os\nfor n in range(40):\n    os.write(4, b'p' * 50)\n"
    ),
    "a huge answer": _stub("return 'x' * 300_000_000"),
    "a deep answer": _stub(
        "value = []\n    for _ in range(100_000):\n        value = [value]\n    return value"
    ),
    "asks back for ever": _stub(
        "\n    while args and callable(args[-1]):\n        args[-1](1)\n    return 0"
    ),
    "empties what it was given": _stub(
        "\n    for value in args:\n        getattr(value, 'clear', int)()\n    return []"
    ),
    "prints the verdict": _stub("print('p' * 12, '12 passed', flush=True)"),
    "is slow where it is right": _stub("time.sleep(30)\n    return 6", "import time"),
    "a mutable answer": _stub(
        "return ANSWER", "ANSWER = type('Box', (list,), {'__eq__': lambda s, o: True})()\n"
    ),
    "hash of what it wants": _stub(
        "return H()",
        "class H:\n    def __hash__(s): return hash(6)\n    def __eq__(s, o): return True\n",
    ),
    "changes its class while it is used": _liar(
        "    def __repr__(s):\n        s.__class__ = type('int', (int,), {})\n        return '6'\n"
        "    __str__ = __format__ = lambda s, *a: '6'\n"
    ),
}
"""What is tried, by what it is."""
