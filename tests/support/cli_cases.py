"""An environment in one file, whose reference answers are what stands for ORACLE."""

ENV = """
from agentrl import Limits, Task, ToolEnv, tool
from agentrl.verifiers.answers.text import exact_match

class Mine(ToolEnv):
    \"\"\"Say the word.\"\"\"

    id = "mine-v0"
    verifier = exact_match()
    limits = Limits(turns=2, turn_tokens=4)

    def tasks(self, split, seed):
        for word in ("one", "two", "three"):
            yield Task(id=f"{split}-{word}", instruction=f"{split}: say {word}",
                       hidden={"answer": word}, oracle={"answer": ORACLE})

    @tool
    async def look(self) -> str:
        \"\"\"Look.\"\"\"
        return self.task.instruction
"""
