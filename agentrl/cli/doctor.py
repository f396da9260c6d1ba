"""`agentrl doctor`: which parts are here."""

from __future__ import annotations

from agentrl.cli.options import Json, print_json


def doctor(as_json: Json = False) -> None:
    """Say which parts are present on this machine, and how to get each missing one."""
    from agentrl.cli.parts import examine

    parts = examine()
    if as_json:
        print_json({"parts": parts})
        return
    for name, part in parts.items():
        print(f"{'ok     ' if part['ok'] else 'missing'}  {name:<14} {part['detail']}")
