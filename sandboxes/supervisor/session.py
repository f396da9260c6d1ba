"""A shell that stays, so that its directory, variables and functions last.

The shell reads its script from a pipe. After each command it writes a word that we drew for that
command, and the exit status, to a pipe of its own which the command does not inherit. What a
command could forge is the end of itself; the next one has another word. So nothing depends on what
is printed, nor on whether pipes are ever closed.
"""

from __future__ import annotations

import os
import time

from agentrl.sandboxes.supervisor.pipes import Clipped, Pipes
from agentrl.sandboxes.supervisor.processes import KILLED, Processes

SHELLS = ([b"bash", b"--noprofile", b"--norc"], [b"sh"])
CONTROL = 8  # sh knows descriptors of one digit only
LINE = 200


class Shell:
    """One shell; `run` starts it, and a new one where the last has ended.

    Attributes:
        outputs: of the last command.
        timed_out: whether the last command was ended, and the shell with it.
    """

    def __init__(self, processes: Processes, env: dict[bytes, bytes]) -> None:
        self._processes = processes
        self._env = env
        self._pipes: Pipes | None = None
        self._shell = self._script = 0
        self._line = b""
        self._word = b""
        self._heard: list[int] = []
        self.outputs = (Clipped(0), Clipped(0))
        self.timed_out = False

    @property
    def alive(self) -> bool:
        """Whether the shell still has what its last command left."""
        return self._pipes is not None

    @property
    def pid(self) -> int:
        """The process of the shell; 0 where there is none."""
        return self._shell if self.alive else 0

    def run(self, text: bytes, timeout_s: float, cap: int, host: int) -> int:
        """Run one command; returns its exit code, or the shell's if it ended (negative: a signal).

        When the time is over, or anything comes from the host, the shell is ended with all that
        this command started.

        Raises:
            OSError: no shell can be started.
        """
        deadline = time.monotonic() + timeout_s
        self.outputs, self.timed_out = (Clipped(cap), Clipped(cap)), False
        pipes = self._pipes or self._start()
        background = self._processes.background(besides=self._shell)
        self._heard.clear()
        self._word = os.urandom(12).hex().encode()
        pipes.feed(self._script, _script(text, self._word), last=False)
        watched = (self._processes.wakeup, host)
        pipes.watch(*watched)
        while not self._heard and (ended := self._processes.ended(self._shell)) is None:
            left = deadline - time.monotonic()
            if left <= 0 or host in pipes.serve(left):
                self.timed_out = True
                self._processes.kill(background)
            self._processes.reap()
        pipes.unwatch(*watched)
        if self._heard and not self.timed_out:
            pipes.sip()
            return self._heard[0]
        pipes.drain()
        self.close()
        return KILLED if self.timed_out or ended is None else ended

    def end(self) -> None:
        """End the shell with all that still descends from it; what has left it stays."""
        if self._pipes is not None:
            self._processes.kill(self._processes.background(besides=self._shell))
            self._processes.ended(self._shell)
            self.close()

    def close(self) -> None:
        """Close the shell's pipes; the caller ends its processes."""
        if self._pipes is not None:
            self._pipes.close()
            self._pipes = None

    def _start(self) -> Pipes:
        pipes = Pipes()
        theirs: list[int] = []
        try:
            self._script, stdin = pipes.input()
            theirs.append(stdin)
            theirs.append(pipes.output(lambda data: self.outputs[0].add(data)))
            theirs.append(pipes.output(lambda data: self.outputs[1].add(data)))
            theirs.append(pipes.output(self._hear))
            self._shell = self._spawn(dict(zip(theirs, (0, 1, 2, CONTROL), strict=True)))
        except OSError:
            pipes.close()
            raise
        finally:
            for fd in theirs:
                os.close(fd)
        self._line = b""
        self._pipes = pipes
        return pipes

    def _spawn(self, descriptors: dict[int, int]) -> int:
        for shell in SHELLS[:-1]:
            try:
                return self._processes.spawn(shell, self._env, descriptors)
            except FileNotFoundError:
                continue
        return self._processes.spawn(SHELLS[-1], self._env, descriptors)

    def _hear(self, data: bytes) -> None:
        """Look for the word of the current command in what the shell writes to its own pipe."""
        *lines, rest = (self._line + data).split(b"\n")
        self._line = rest[-LINE:]
        for line in lines:
            word, _, status = line.partition(b" ")
            if word == self._word and len(status) <= 3 and status.isdigit():
                self._heard.append(int(status))


def _script(text: bytes, word: bytes) -> bytes:
    quoted = b"'" + text.replace(b"'", b"'\\''") + b"'"
    return b"command eval %s </dev/null %d>&-\ncommand printf '%s %%d\\n' $? >&%d\n" % (
        quoted,
        CONTROL,
        word,
        CONTROL,
    )
