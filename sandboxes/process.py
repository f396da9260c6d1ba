"""No sandbox at all: commands run on this machine in a private directory, for trials."""

from __future__ import annotations

import os
import sys
import tempfile

from agentrl.errors import SandboxLost
from agentrl.sandboxes.base import Sandbox, SandboxLimits, SandboxRole
from agentrl.sandboxes.launch import Child, compiled, starting
from agentrl.sandboxes.supervised import COMMON_ENV, Place, SupervisedSandbox, rlimits
from agentrl.sandboxes.supervisor.files import DIRECTORY, wipe

_PATIENCE_S = 5.0
_warned = False


class ProcessBackend:
    """NO BOUNDARY: code runs as you, with your files, your network and your processes in reach.

    For code that you would run yourself: scripted demos, tests, machines without bubblewrap. What
    it does keep: a fresh work area per episode, an end of everything that a command started, limits
    per process.
    """

    name = "process"
    is_boundary = False

    async def open(self, role: SandboxRole, limits: SandboxLimits) -> Sandbox:
        """Start one; the first time, say on stderr that this is no boundary.

        Raises:
            SandboxLost: it could not be started.
        """
        _warn()
        area = tempfile.mkdtemp(prefix=f"agentrl-{role}-")
        path = os.pathsep.join(
            dict.fromkeys([os.path.dirname(sys.executable), *os.defpath.split(os.pathsep)])
        )
        place = Place(
            area=area,
            private=False,
            env=COMMON_ENV | {"PATH": path, "HOME": f"{area}/work", "TMPDIR": f"{area}/tmp"},
            rlimits=rlimits(limits),
            demands=frozenset({"adopts"}),
        )
        with tempfile.NamedTemporaryFile(prefix="agentrl-", suffix=".pyz") as archive:
            archive.write(compiled(sys.executable))
            archive.flush()
            child = _Tenant(starting(sys.executable, archive.name), area)
            return await SupervisedSandbox.open(child, place, limits)


class _Tenant(Child):
    """A supervisor that owns a directory of this machine; whichever of us ends last removes it."""

    def __init__(self, argv: list[str], area: str) -> None:
        self._area = area
        try:
            super().__init__(argv, env={}, patience_s=_PATIENCE_S)
        except SandboxLost:
            os.rmdir(area)
            raise

    async def gone(self) -> None:
        await super().gone()
        try:
            directory = os.open(self._area, DIRECTORY)
        except FileNotFoundError:  # the supervisor did it
            return
        try:
            wipe(directory)
        finally:
            os.close(directory)
        os.rmdir(self._area)


def _warn() -> None:
    global _warned
    if not _warned:
        _warned = True
        print(
            "warning: the process sandbox is no boundary: agent code runs with your rights, files"
            " and network; use --sandbox bubblewrap (Debian package bubblewrap) for code that you"
            " do not trust",
            file=sys.stderr,
        )
