"""Which user commands and file work run as: the supervisor's own, or one it steps down to."""

from __future__ import annotations

import os


class Rights:
    """`with rights:` acts as the agent's user; without one, it changes nothing. Not to be nested.

    A supervisor that is root keeps 0 as its saved uid, which is its way back. The kernel makes a
    process that changes its uid untraceable, and a program that it starts meanwhile has no way
    back: its saved uid is its effective one.
    """

    def __init__(self, uid: int | None = None) -> None:
        """Give up all supplementary groups, where there is a user to step down to.

        Raises:
            OSError: the capability SETGID is missing.
        """
        self.uid = uid
        if uid is not None:
            os.setgroups([])

    def __enter__(self) -> None:
        if self.uid is not None:
            os.setresgid(self.uid, self.uid, 0)
            os.setresuid(self.uid, self.uid, 0)

    def __exit__(self, *_: object) -> None:
        if self.uid is not None:
            os.setresuid(0, 0, 0)
            os.setresgid(0, 0, 0)

    def give(self, directory: int) -> None:
        """Let the agent's user own an open directory."""
        if self.uid is not None:
            os.fchown(directory, self.uid, self.uid)

    def take(self, directory: int) -> None:
        """Own an open directory again, so that nobody else can set its mode or attributes."""
        if self.uid is not None:
            os.fchown(directory, 0, 0)
