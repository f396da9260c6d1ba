"""`agentrl images`: the images that Docker sandboxes are made from."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Annotated

import typer

from agentrl.cli.options import Json, print_json
from agentrl.errors import ConfigError, SandboxLost

app = typer.Typer(
    help="Build the images of Docker sandboxes, and search an image for secrets.",
    no_args_is_help=True,
)


@contextmanager
def _as_bad_input() -> Iterator[None]:
    """Report a missing daemon or image as a user error."""
    try:
        yield
    except SandboxLost as error:
        raise ConfigError(str(error)) from error


@app.command()
def build(
    base: Annotated[str, typer.Option(help="Base image: a Debian, with or without python3.")] = "",
    as_json: Json = False,
) -> None:
    """Build agentrl-agent and agentrl-grader (with numpy and pytest)."""
    from agentrl.sandboxes.docker import DEFAULT_BASE, build_images, first_daemon

    with _as_bad_input():
        made = build_images(first_daemon(), base or DEFAULT_BASE)
    if as_json:
        print_json({"images": made})
        return
    for name, number in made.items():
        print(f"{name:<16} {number}")


@app.command()
def scan(
    image: Annotated[str, typer.Argument(help="Name of the image.")],
    tasks: Annotated[
        list[Path] | None, typer.Option(help="Task file whose secrets to search for; repeatable.")
    ] = None,
    as_json: Json = False,
) -> None:
    """Search all layers of an image for hidden tests, reference solutions and git history.

    The exit code is 1 if any is found.
    """
    from agentrl.records.taskfile import read_tasks
    from agentrl.sandboxes.docker import first_daemon, scan_image

    rows = [task for path in tasks or () for task in read_tasks(path)]
    with _as_bad_input():
        findings = scan_image(first_daemon(), image, rows)
    if as_json:
        print_json({"image": image, "findings": [vars(finding) for finding in findings]})
    else:
        for finding in findings:
            print(f"layer {finding.layer}  {finding.path}  {finding.why}")
        print(f"{image}: {len(findings)} findings" if findings else f"{image}: clean")
    raise typer.Exit(1 if findings else 0)
