"""The grader's first lines, run by `python3 -I -S -B -c`: load the runner's modules from standard
input, then judge.

The runner comes as code objects (or as source for another Python version), so nothing of it ever
lies on a disk. Input is read without a buffer: what follows the runner is hidden, and must stay in
the pipe until the
    candidate's process is
forked.
"""

import marshal
import os
import sys


def read_exactly(size: int) -> bytes:
    """Exactly `size` bytes of standard input."""
    data = bytearray()
    while len(data) < size:
        piece = os.read(0, size - len(data))
        if not piece:
            raise EOFError("standard input ended early")
        data += piece
    return bytes(data)


def load(packet: bytes) -> None:
    """Make the runner's modules importable under their own names."""
    magic, modules = marshal.loads(packet)
    same = magic == sys.modules["_frozen_importlib_external"].MAGIC_NUMBER
    for name, source, code in modules:
        module = sys.modules[name] = type(sys)(name)
        module.__path__ = []
        exec(marshal.loads(code) if same else compile(source, name, "exec"), module.__dict__)


if __name__ == "__main__":
    load(read_exactly(int.from_bytes(read_exactly(4), "little")))
    sys.modules["agentrl.verifiers.code.runner.judge"].main(read_exactly)
