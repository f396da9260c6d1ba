"""Write an environment and play one episode of it through Gymnasium's interface."""

from __future__ import annotations

import random
from collections.abc import Iterator
from typing import Literal

from agentrl import Limits, Task, ToolEnv, make, register, tool
from agentrl.verifiers import numeric

Shelf = Literal["north", "south", "east"]


class Warehouse(ToolEnv):
    """Find out how many boxes stand on some shelves together."""

    id = "warehouse-v0"
    system = "Look at the shelves with the tool, then answer with the total alone."
    verifier = numeric()
    limits = Limits(turns=6, tool_calls=8)

    def tasks(self, split: str, seed: int) -> Iterator[Task]:
        rng = random.Random(f"{split}-{seed}")
        for number in range(100):
            shelves = {shelf: rng.randint(1, 99) for shelf in ("north", "south", "east")}
            wanted = rng.sample(sorted(shelves), k=2)
            names, total = " and ".join(wanted), sum(shelves[shelf] for shelf in wanted)
            calls = [{"name": "look", "arguments": {"shelf": shelf}} for shelf in wanted]
            yield Task(
                id=f"{split}-{seed}-{number}",
                instruction=f"Order {split}-{number}: how many boxes stand on the shelves {names}?",
                metadata={"shelves": shelves},
                hidden={"answer": total},
                oracle={"calls": calls, "answer": total},
            )

    @tool
    def look(self, shelf: Shelf) -> str:
        """Count the boxes on one shelf."""
        return f"{self.task.metadata['shelves'][shelf]} boxes"


if __name__ == "__main__":
    register(Warehouse)
    env = make("warehouse-v0")
    observation, info = env.reset(seed=0)
    print(observation)
    total = 0
    for shelf in observation.rpartition("shelves ")[2].rstrip("?").split(" and "):
        action = f'<tool_call>{{"name": "look", "arguments": {{"shelf": "{shelf}"}}}}</tool_call>'
        observation, reward, terminated, truncated, info = env.step(action)
        print(f"{shelf}: {observation}")
        total += int(observation.split()[0])
    observation, reward, terminated, truncated, info = env.step(f"There are {total}.")
    print(f"reward {reward}, {info['end_reason']}: {info['why']}")
    env.close()
