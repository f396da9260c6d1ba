"""WriteSet: what a task lets an agent change. Whatever else it changes is a side effect."""

from __future__ import annotations

from dataclasses import dataclass

from agentrl.errors import ContractError
from agentrl.safety.globs import any_matches, leads_to
from agentrl.types import relative_path

TEMPORARY = ("/tmp/", "/sandbox/tmp/", "/dev/shm/")
"""Where else commands may write; `/sandbox/tmp` is the temporary directory in Docker."""


@dataclass(frozen=True, slots=True)
class WriteSet:
    """What may differ at the end of an episode. `WriteSet()` allows nothing; None measures nothing.

    An environment declares one as `writes`, or sets `self.writes` in `setup`, task by task.

    Attributes:
        files: patterns of paths in the work area, as `solution.py` or `out/**`, and in places for
            what is temporary, as `/tmp/**`; folders on the way to a file are allowed with it.
        state: patterns of places in what `ToolEnv.state` returns, as `orders/W1/*`.
        hosts: hosts that may be asked for, where the sandbox has a network.
        processes: whether processes may be left running.

    Raises:
        ContractError: a pattern of files leaves the work area, or is empty.
    """

    files: tuple[str, ...] = ()
    state: tuple[str, ...] = ()
    hosts: tuple[str, ...] = ()
    processes: bool = False

    def __post_init__(self) -> None:
        for name in ("files", "state", "hosts"):
            if isinstance(getattr(self, name), str):
                raise ContractError(
                    f"writes: {name}={getattr(self, name)!r} must be a tuple of patterns"
                )
        for pattern in self.files:
            place = next((one for one in TEMPORARY if pattern.startswith(one)), "")
            try:
                relative_path(pattern.removeprefix(place))
            except ValueError:
                raise ContractError(
                    f"writes: files={pattern!r} leaves the work area: name paths relative to it,"
                    f" or begin with {' or '.join(TEMPORARY)}, without '..'"
                ) from None
        if empty := [name for name in ("state", "hosts") if "" in getattr(self, name)]:
            raise ContractError(f"writes: {empty[0]} holds an empty pattern: leave it out")

    def allows_file(self, path: str, kind: str) -> bool:
        """Whether this path may be another one than at the start.

        `**` at the start of a pattern stands for the work area, which is `.` itself.
        """
        if path == ".":
            return "**" in self.files
        if path.startswith("/"):
            patterns = tuple(one for one in self.files if one.startswith("/"))
            return any_matches(patterns, path)
        on_the_way = kind == "dir" and any(leads_to(pattern, path) for pattern in self.files)
        return on_the_way or any_matches(self.files, path)

    def allows_state(self, place: str) -> bool:
        """Whether this place of the state may be another one than at the start."""
        return any_matches(self.state, place)
