"""The catalogue of known exploits as data: each is aimed at a task, and must earn nothing.

An attack is files and, for some, a script that the agent runs in its sandbox. It needs no knowledge
of the verifier; some are aimed at the runner of this library, whose source everybody can read.
"""

from __future__ import annotations

from agentrl.types import Task, TaskView
from agentrl.verifiers.attacks.base import Attack, Payload, Target, target_of
from agentrl.verifiers.attacks.behaviour import BEHAVIOUR
from agentrl.verifiers.attacks.controls import CONTROLS
from agentrl.verifiers.attacks.reading import READING
from agentrl.verifiers.attacks.runner import RUNNER
from agentrl.verifiers.attacks.verdict import VERDICT

__all__ = ["CATALOGUE", "Attack", "Payload", "Target", "attacks_for", "target_of"]

CATALOGUE = tuple(
    sorted(
        (*RUNNER, *READING, *VERDICT, *BEHAVIOUR, *CONTROLS),
        key=lambda attack: (attack.number, attack.name),
    )
)
"""All attacks, those that cannot be run (`reason`) included, by number."""


def attacks_for(task: TaskView) -> tuple[tuple[Attack, Payload], ...]:
    """Every attack that can be run, aimed at a task by its visible part alone.

    Raises:
        ValueError: the task declares no artifact, so no file can carry an attack.
    """
    target = target_of(task.view() if isinstance(task, Task) else task)
    return tuple((attack, attack.build(target)) for attack in CATALOGUE if not attack.reason)
