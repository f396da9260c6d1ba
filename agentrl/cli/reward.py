"""`agentrl reward`: versions of a reward model, and the server that scores by them."""

from __future__ import annotations

import socket
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from statistics import fmean
from typing import TYPE_CHECKING, Annotated, Any

import typer

from agentrl.cli.options import Json, is_loopback, print_json
from agentrl.errors import ConfigError
from agentrl.records.plain import plain

if TYPE_CHECKING:
    from agentrl.verifiers.models.reward_service import Version

app = typer.Typer(
    help="Publish versions of a reward model, serve them, and go back to an older one.",
    no_args_is_help=True,
)

Store = Annotated[Path, typer.Argument(help="Folder of the versions.")]
Why = Annotated[str, typer.Option(help="The reason, shown to clients of that version.")]


@app.command()
def publish(
    model: Annotated[str, typer.Argument(help="Folder of a reward model, or ORG/NAME.")],
    store: Store,
    pairs: Annotated[
        Path | None,
        typer.Option(
            help="With the first version: held-out preferences to check all versions on, as"
            " RUN/held_out.jsonl of the stage that trained it."
        ),
    ] = None,
    anyway: Annotated[
        bool,
        typer.Option(
            "--anyway", help="Publish even if it ranks clearly worse or was published before."
        ),
    ] = False,
    as_json: Json = False,
) -> None:
    """Copy a model into a store as its next version, score the store's pairs, and serve it from
    now on.
    """
    from agentrl.verifiers.models.reward_service import RewardStore

    versions = RewardStore(store)
    before = versions.served() if versions.numbers() else None
    version = versions.publish(model, _read_pairs(pairs) if pairs else (), anyway=anyway)
    if as_json:
        print_json(_row(version))
    elif before is None:
        print(f"published version {version.number}: {_describe(version)}")
        print(f"serve it: agentrl reward serve {store}")
    else:
        agreement = f"{version.agrees(before):.3f} of them as version {before.number}"
        print(f"published version {version.number}: {_describe(version)}, {agreement}")


@app.command()
def serve(
    store: Store,
    host: Annotated[str, typer.Option(help="Address to listen on.")] = "127.0.0.1",
    port: Annotated[int, typer.Option(min=1, max=65535, help="Port to listen on.")] = 8100,
    window: Annotated[
        int,
        typer.Option(min=200, max=100_000, help="Last scores whose drift is reported."),
    ] = 1000,
) -> None:
    """Serve the newest version that was not withdrawn over HTTP, until interrupted.

    Versions that are published or withdrawn meanwhile take effect at once.
    """
    from agentrl.verifiers.models.reward_service import (
        RewardServer,
        RewardStore,
        application,
        http_protocol,
    )
    from agentrl.verifiers.models.served_reward import KEY, reward_key

    try:
        import uvicorn
    except ImportError as error:
        raise ConfigError(
            "serving a reward model needs starlette and uvicorn: pip install 'agentrl[serve]'"
        ) from error
    key = reward_key()
    if not is_loopback(host) and not key:
        raise ConfigError(
            f"--host {host} can be reached from other machines: set {KEY} to a secret that"
            " clients must send, or leave --host out"
        )

    def tell(sentence: str) -> None:
        print(f"{time.strftime('%H:%M:%S')}  {plain(sentence)}", flush=True)

    server = RewardServer(RewardStore(store), window, tell)
    with _listening(host, port) as listener:
        tell(f"version {server.open()} of {store} at http://{host}:{port}")
        asgi = application(server, key, host)
        config = uvicorn.Config(asgi, log_level="warning", http=http_protocol())
        uvicorn.Server(config).run(sockets=[listener])


@app.command()
def status(
    where: Annotated[str, typer.Argument(help="Folder of the versions, or http://HOST:PORT.")],
    as_json: Json = False,
) -> None:
    """List the versions and how well they rank, or what a server serves and how far its scores
    have drifted.
    """
    from agentrl.verifiers.models.reward_service import RewardStore
    from agentrl.verifiers.models.served_reward import ServedReward, is_address

    if is_address(where):
        status = ServedReward(where).status()
        if as_json:
            print_json(status)
            return
        for row in status["versions"]:
            state = _state(row["version"], status["served"], row["withdrawn"])
            print(f"version {row['version']}  {state}: {_drift(row)}")
        return
    store = RewardStore(where)
    served, versions = store.served().number, store.versions()
    if as_json:
        rows = [_row(each) | {"withdrawn": store.withdrawn(each.number)} for each in versions]
        print_json({"served": served, "versions": rows})
        return
    for each in versions:
        state = _state(each.number, served, store.withdrawn(each.number))
        print(f"version {each.number}  {each.published}  {state}: {_describe(each)}")


@app.command()
def rollback(
    store: Store,
    why: Why,
    version: Annotated[int, typer.Option(min=0, help="Which to withdraw; 0: the served one.")] = 0,
    as_json: Json = False,
) -> None:
    """Withdraw the version that is served, or another one; the newest that is left is served.

    Whoever trains against the withdrawn version stops with a sentence, since rewards of two
    versions cannot be compared; --resume goes on with the one that is served then.
    """
    from agentrl.verifiers.models.reward_service import RewardStore

    bad, served = RewardStore(store).rollback(why, version)
    if as_json:
        print_json({"withdrawn": bad.number, "served": served.number, "why": why})
        return
    print(f"withdrew version {bad.number}; version {served.number} is served: {_describe(served)}")


@contextmanager
def _listening(host: str, port: int) -> Iterator[socket.socket]:
    """A socket at an address, before a model is loaded for it."""
    try:
        family = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0][0]
        listener = socket.socket(family)
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listener.bind((host, port))  # the server listens once it can answer
    except OSError as error:
        raise ConfigError(
            f"--host {host} --port {port} cannot be listened at ({error.strerror}): choose another"
            " --port"
        ) from error
    with listener:
        yield listener


def _read_pairs(path: Path) -> list[Any]:
    from agentrl.trainers.offline.files import read_examples
    from agentrl.verifiers.models.reward_service import Ranked

    pairs, _ = read_examples([path], "pairs")
    return [
        Ranked(pair.prompt + pair.chosen.messages, pair.prompt + pair.rejected.messages)
        for pair in pairs
    ]


def _row(version: Version) -> dict[str, Any]:
    return {
        "version": version.number,
        "source": version.source,
        "published": version.published,
        "digest": version.digest,
        "accuracy": version.accuracy,
        "margin": fmean(version.margins),
        "pairs": len(version.margins),
    }


def _describe(version: Version) -> str:
    pairs, margin = len(version.margins), fmean(version.margins)
    return f"ranks {version.accuracy:.3f} of {pairs} pairs rightly, mean margin {margin:.2f}"


def _state(number: int, served: int, withdrawn: str | None) -> str:
    if withdrawn is not None:
        return plain(f"withdrawn ({withdrawn})")
    return "served" if number == served else "kept"


def _drift(row: dict[str, Any]) -> str:
    if "scored" not in row:
        return "not in memory"
    said = f"scored {row['scored']}, too long {row['too_long']}"
    if row["psi"] is None:
        return f"{said}; drift is told from 200 scores on"
    return f"{said}; PSI {row['psi']:.3f}, {row['beyond']:.1%} beyond those of all its pairs"
