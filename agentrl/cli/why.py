"""`agentrl why`: who waits for whom in a run."""

from __future__ import annotations

from dataclasses import asdict
from pathlib import Path
from typing import Annotated

import typer

from agentrl.cli.options import Json, print_json


def why(
    run: Annotated[Path, typer.Argument(help="Folder of a training run that is under way.")],
    as_json: Json = False,
) -> None:
    """Say what holds up a training run: who waits for whom, and for how long."""
    from agentrl.evaluation.why import explain_waits

    chain = explain_waits(run)
    if as_json:
        links = [asdict(link) for link in chain.links]
        print_json({"chain": links, "problem": chain.problem, "others": chain.others})
        return
    print(chain.in_words() or "nothing waits: every process is at work")
    if chain.others:
        counts = ", ".join(f"{n} for {what}" for what, n in chain.others.items())
        print(f"other episodes wait: {counts}")
