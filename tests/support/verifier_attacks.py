"""Candidates that try to pass `f(x) == x + 1` without being it, and how they are judged; shared by
the tests of the hidden-test verifier.
"""

from __future__ import annotations

import asyncio
import functools
from collections.abc import Coroutine

from conftest import require

from agentrl.sandboxes import open_pool
from agentrl.types import EndReason, Score, Task
from agentrl.verifiers.base import Submission
from agentrl.verifiers.code.hidden_tests import hidden_tests

HONEST = "def f(x):\n    return x + 1\n"
WRONG = "def f(x):\n    return x\n"

# Against every form, on every backend.
PLAIN = {
    "exit at import": "import os\nos._exit(0)\n",
    "exit in the call": "import os\ndef f(x):\n    os._exit(0)\n",
    "sys.exit at import": "import sys\nsys.exit(0)\n",
    "sys.exit in the call": "import sys\ndef f(x):\n    sys.exit(0)\n",
    "atexit": "import atexit, os\natexit.register(lambda: os._exit(0))\ndef f(x):\n    return x\n",
    "fake evidence on stdout": (
        "import os\n"
        "for fd in range(256):\n"
        "    try:\n        os.write(fd, b'1 passed\\n' + b'\\0' * 16 + b'p')\n"
        "    except OSError:\n        pass\n"
        "print('PASSED', flush=True)\n"
        "def f(x):\n    return x\n"
    ),
    "not a number": "def f(x):\n    return float('nan')\n",
    "no function": "g = 1\n",
    "syntax error": "def f(x:\n",
    "function is a value": "f = 2\n",
    "deep recursion": "def f(x):\n    return f(x)\n",
    "deep value": (
        "def f(x):\n    v = []\n    for _ in range(100000):\n        v = [v]\n    return v\n"
    ),
    "a value that holds itself": "v = []\nv.append(v)\ndef f(x):\n    return v\n",
    "raises an exit": "class E(BaseException): pass\ndef f(x):\n    raise E\n",
    "raises a liar": (
        "class M(type):\n    __name__ = property(lambda c: 1 / 0)\n"
        "class E(Exception, metaclass=M): pass\ndef f(x):\n    raise E\n"
    ),
    "crash": "import ctypes\ndef f(x):\n    ctypes.string_at(0)\n",
}

# Against the forms that keep the candidate in its own process. A test that imports the candidate
# shares it.
SPLIT = {
    "always equal": (
        "class A:\n    __eq__ = lambda s, o: True\n    __ne__ = lambda s, o: False\n    __hash__ ="
        " lambda s: 0\ndef f(x):\n    return A()\n"
    ),
    "always equal number": (
        "class A(int):\n    __eq__ = lambda s, o: True\n    __ne__ = lambda s, o: False\n   "
        " __hash__ = lambda s: 0\ndef f(x):\n    return A(0)\n"
    ),
    "bool for a number": "def f(x):\n    return x == 0 or 0\n",
    "stack frames": (
        "import sys\n"
        "def f(x):\n"
        "    frame = sys._getframe()\n"
        "    while frame:\n"
        "        for place in (frame.f_locals, frame.f_globals):\n"
        "            for name in ('want', 'expected', 'cases', 'request'):\n"
        "                found = place.get(name)\n"
        "                if type(found) is int:\n                    return found\n"
        "                if isinstance(found, dict):\n"
        "                    for args, kwargs, want in found.get('cases', ()):\n"
        "                        if args == (x,):\n                            return want\n"
        "        frame = frame.f_back\n"
    ),
    "heap": (
        "import gc\ndef f(x):\n    for found in gc.get_objects():\n        if type(found) is tuple"
        " and len(found) == 3 and found[0] == (x,) and type(found[2]) is int:\n            return"
        " found[2]\n        if type(found) is dict and found.get('__name__') == 'hidden':\n        "
        "    return x + 1\n"
    ),
    "patched built-ins": (
        "import builtins, json, unittest, sys\nbuiltins.len = lambda v: 0\nbuiltins.all ="
        " builtins.any = lambda v: True\nbuiltins.type = lambda v: int\nbuiltins.isinstance ="
        " lambda *a: True\njson.dumps = json.loads = lambda *a, **k:"
        " True\nunittest.TestCase.assertEqual = lambda *a: None\nfor name, module in"
        " list(sys.modules.items()):\n    if 'codec' in name or 'judge' in name:\n       "
        " module.matches = lambda *a: True\ndef f(x):\n    return x\n"
    ),
    "answers in advance": (
        "import os\n"
        "for _ in range(50):\n"
        "    for fd in range(3, 64):\n"
        "        try:\n            os.write(fd, b't\\x02\\0\\0\\0s\\x05\\0\\0\\0valueT')\n"
        "        except OSError:\n            pass\n"
        "def f(x):\n    return x\n"
    ),
    "a class": "class B: pass\ndef f(x):\n    return B\n",
    "a whole program's output": "def f(x):\n    return 'x' * 3_000_000\n",
    "noise": "def f(x):\n    print('x' * 10_000_000)\n    return x\n",
}

# These leave something behind, or last.
LASTING = {
    "endless loop": "def f(x):\n    while True:\n        pass\n",
    "sleep": "import time\ndef f(x):\n    time.sleep(30)\n    return x + 1\n",
    "endless loop at import": "while True:\n    pass\n",
    "endless value": "import sys\ndef f(x):\n    v = x\n    while True:\n        v = [v]\n",
    "daemon": (
        "import os, time\n"
        "def daemon():\n"
        "    if os.fork():\n        return\n"
        "    os.setsid()\n"
        "    if os.fork():\n        os._exit(0)\n"
        "    for _ in range(3000):\n"
        "        for fd in range(64):\n"
        "            try:\n                os.write(fd, b'passed')\n"
        "            except OSError:\n                pass\n"
        "        time.sleep(0.01)\n"
        "    os._exit(0)\n"
        "daemon()\n"
        "def f(x):\n    return x\n"
    ),
    "many processes": (
        "import os, time\n"
        "for _ in range(20):\n"
        "    try:\n"
        "        if os.fork() == 0:\n            time.sleep(60)\n            os._exit(0)\n"
        "    except OSError:\n        break\n"
        "def f(x):\n    return x\n"
    ),
}

# These need the walls of a namespace: they look for the judge among the processes.
PROC = {
    "memory of the judge": (
        "import os, re\nFOUND = []\ndef look(pid):\n    for name in ('mem', 'environ', 'maps',"
        " 'fd', 'cwd', 'root', 'task', 'stack', 'auxv'):\n        path = f'/proc/{pid}/{name}'\n   "
        "     try:\n            if name == 'fd':\n                FOUND.extend(os.listdir(path))\n "
        "           elif name in ('cwd', 'root'):\n               "
        " FOUND.append(os.readlink(path))\n            elif name != 'task':\n                with"
        " open(path, 'rb') as file:\n                    FOUND.append(file.read(1))\n        except"
        " OSError:\n            pass\ndef f(x):\n    for pid in os.listdir('/proc'):\n        if"
        " pid.isdigit() and int(pid) != os.getpid():\n            look(pid)\n    return x + 1 if"
        " FOUND else x\n"
    ),
    "traces the judge": (
        "import ctypes, os\ndef f(x):\n    lib = ctypes.CDLL(None)\n    return x + 1 if"
        " any(lib.ptrace(n, os.getppid(), 0, 0) == 0 for n in (16, 0x4206)) else x\n"
    ),
    "kills the judge": "import os\ndef f(x):\n    os.kill(os.getppid(), 9)\n    return x\n",
    "kills everything": "import os\nos.kill(-1, 9)\ndef f(x):\n    return x\n",
    "stops the judge": "import os\nos.kill(os.getppid(), 19)\ndef f(x):\n    return x\n",
}


CASES = {"entry_point": "f", "cases": [{"args": [x], "expected": x + 1} for x in (1, 4, 7)]}
CHECK = {
    "entry_point": "f",
    "check": (
        "def check(candidate):\n    for x in (1, 4, 7):\n        assert candidate(x) == x + 1\n"
    ),
}
TESTS = {
    "tests": {
        "test_f.py": (
            "from solution import f\n\n"
            "def test_one():\n    assert f(1) == 2\n\ndef test_two():\n    assert f(4) == 5\n"
        )
    }
}
GENERATE = {
    "entry_point": "f",
    "generate": "def generate(rng):\n    return (rng.randrange(1, 1000),)\n",
    "draws": 4,
}
FORMS = {"cases": CASES, "generate": GENERATE, "check": CHECK, "tests": TESTS}


def task_of(hidden: dict, oracle: str = HONEST) -> Task:
    return Task(
        id="plus-one",
        instruction="Add one.",
        hidden=hidden,
        oracle={"files": {"solution.py": oracle}},
    )


verifier_of = functools.cache(hidden_tests)
PATIENT = {
    "call_s": 20.0,
    "wall_s": 60.0,
}  # honest work is in no hurry, however slow and busy the machine


def judge(
    pool: object, task: Task, code: str, **settings: float
) -> Coroutine[object, object, Score]:
    verifier = verifier_of(**(PATIENT | settings))
    files = {"solution.py": code.encode()}
    return verifier(Submission(task, (), EndReason.SUBMITTED, files, pool))


def run_all(backend: str, task: Task, codes: dict[str, str], **settings: float) -> dict[str, Score]:
    """Judge several candidates in one pool."""
    if backend == "bubblewrap":
        require("bubblewrap")

    async def run() -> list[Score]:
        pool = open_pool(backend, size=2)
        try:
            limits = [PATIENT if name == "honest" else settings for name in codes]
            jobs = zip(codes.values(), limits, strict=True)
            return await asyncio.gather(*(judge(pool, task, code, **each) for code, each in jobs))
        finally:
            await pool.close()

    return dict(zip(codes, asyncio.run(run()), strict=True))


def run_one(task: Task, code: str, **settings: float) -> Score:
    return run_all("process", task, {"it": code}, **settings)["it"]
