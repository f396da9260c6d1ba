"""WriteSet: what a task lets an agent change. Whatever else it changes is a side effect."""

from __future__ import annotations

from dataclasses import dataclass

from agentrl.errors import ContractError
from agentrl.safety.globs import any_matches, leads_to
from agentrl.types import relative_path


@dataclass(frozen=True, slots=True)
class WriteSet:
    """What may differ at the end of an episode. `WriteSet()` allows nothing; None measures nothing.

    An environment declares one as `writes`, or sets `self.writes` in `setup`, task by task.

    Attributes:
        files: patterns of paths in the work area, as `solution.py` or `out/**`; folders on the way
            to a file are allowed with it.
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
            try:
                relative_path(pattern)
            except ValueError:
                raise ContractError(
                    f"writes: files={pattern!r} leaves the work area: name paths relative to it,"
                    " without '..'"
                ) from None
        if empty := [name for name in ("state", "hosts") if "" in getattr(self, name)]:
            raise ContractError(f"writes: {empty[0]} holds an empty pattern: leave it out")

    def allows_file(self, path: str, kind: str) -> bool:
        """Whether this path may be another one than at the start."""
        on_the_way = kind == "dir" and any(leads_to(pattern, path) for pattern in self.files)
        return on_the_way or any_matches(self.files, path)

    def allows_state(self, place: str) -> bool:
        """Whether this place of the state may be another one than at the start."""
        return any_matches(self.state, place)
