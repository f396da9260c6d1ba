"""`agentrl reward`: versions of a reward model, and the server that scores by them."""

from __future__ import annotations

import os
import time
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from agentrl.cli.options import Json, is_loopback, print_json
from agentrl.errors import ConfigError
from agentrl.records.plain import plain

if TYPE_CHECKING:
    from agentrl.verifiers.models.reward_store import RewardStore, Version

app = typer.Typer(
    help="Publish versions of a reward model, serve them, and go back to an older one.",
    no_args_is_help=True,
)

Store = Annotated[Path, typer.Argument(help="Folder of the versions.")]
Why = Annotated[str, typer.Option(help="Is recorded, and told to clients of that version.")]


@app.command()
def publish(
    model: Annotated[str, typer.Argument(help="Folder of a reward model, or ORG/NAME.")],
    store: Store,
    pairs: Annotated[
        Path | None,
        typer.Option(help="With the first version: held-out preferences to check all versions on."),
    ] = None,
    as_json: Json = False,
) -> None:
    """Copy a model into a store as its next version, score the store's pairs, and serve it from
    now on.
    """
    from agentrl.verifiers.models.reward_store import RewardStore

    found = RewardStore(store).publish(model, _read_pairs(pairs) if pairs else ())
    if as_json:
        print_json(_row(found))
        return
    print(f"published version {found.number}: {_checked(found)}")
    if found.agreement is None:
        print(f"serve it: agentrl reward serve {store}")


@app.command()
def serve(
    store: Store,
    host: Annotated[str, typer.Option(help="Address to listen at.")] = "127.0.0.1",
    port: Annotated[int, typer.Option(min=1, max=65535, help="Port to listen at.")] = 8100,
    window: Annotated[int, typer.Option(min=50, help="Last scores whose drift is told.")] = 1000,
) -> None:
    """Score conversations over HTTP by the newest version that was not withdrawn, until
    interrupted.

    Versions that are published or withdrawn meanwhile are seen at once.
    """
    from agentrl.verifiers.models.reward_server import RewardServer, application
    from agentrl.verifiers.models.reward_store import RewardStore
    from agentrl.verifiers.models.served_reward import KEY

    try:
        import uvicorn
    except ImportError as error:
        raise ConfigError(
            "serving a reward model needs starlette and uvicorn: pip install 'agentrl[serve]'"
        ) from error
    key = os.environ.get(KEY, "")
    if not is_loopback(host) and not key:
        raise ConfigError(
            f"--host {host} can be reached from other machines: set {KEY} to a secret that"
            " clients must send, or leave --host out"
        )

    def tell(sentence: str) -> None:
        print(f"{time.strftime('%H:%M:%S')}  {plain(sentence)}", flush=True)

    server = RewardServer(RewardStore(store), window, tell)
    tell(f"version {server.open()} of {store} at http://{host}:{port}")
    uvicorn.run(application(server, key), host=host, port=port, log_level="warning")


@app.command()
def status(
    where: Annotated[str, typer.Argument(help="Folder of the versions, or http://HOST:PORT.")],
    as_json: Json = False,
) -> None:
    """Say which versions there are and how good, or what a server serves and how far its scores
    moved.
    """
    from agentrl.verifiers.models.reward_store import RewardStore
    from agentrl.verifiers.models.served_reward import ServedReward

    if where.startswith(("http://", "https://")):
        found = ServedReward(where).status()
        if as_json:
            print_json(found)
            return
        print(f"serves version {found['served']}")
        for one in found["loaded"]:
            print(_drift(one))
        return
    store = RewardStore(where)
    served, versions = store.served(), store.versions()
    if as_json:
        rows = [_row(one) | {"withdrawn": store.withdrawn(one.number)} for one in versions]
        print_json({"served": served.number, "versions": rows})
        return
    for one in versions:
        print(
            f"version {one.number}  {one.published}  {_state(store, one, served)}: {_checked(one)}"
        )


@app.command()
def rollback(store: Store, why: Why, as_json: Json = False) -> None:
    """Withdraw the version that is served, and serve the one before it.

    Whoever trains against the withdrawn version stops with a sentence, since rewards of two
    versions cannot be compared; --resume goes on with the older one.
    """
    from agentrl.verifiers.models.reward_store import RewardStore

    bad, served = RewardStore(store).rollback(why)
    if as_json:
        print_json({"withdrawn": bad.number, "served": served.number, "why": why})
        return
    print(f"withdrew version {bad.number}; version {served.number} is served: {_checked(served)}")


def _read_pairs(path: Path) -> list[Any]:
    from agentrl.trainers.offline.data.files import read_examples
    from agentrl.verifiers.models.reward_store import Ranked

    found, _ = read_examples([path], "pairs")
    return [
        Ranked(one.prompt + one.chosen.messages, one.prompt + one.rejected.messages)
        for one in found
    ]


def _row(one: Version) -> dict[str, Any]:
    return {
        "version": one.number,
        "source": one.source,
        "published": one.published,
        "digest": one.digest,
        "accuracy": one.accuracy,
        "agreement": one.agreement,
        "pairs": len(one.scores) // 2,
    }


def _checked(one: Version) -> str:
    said = f"ranks {one.accuracy:.3f} of {len(one.scores) // 2} pairs rightly"
    if one.agreement is None:
        return said
    return f"{said}, and {one.agreement:.3f} of them as the version before it"


def _state(store: RewardStore, one: Version, served: Version) -> str:
    if (why := store.withdrawn(one.number)) is not None:
        return plain(f"withdrawn ({why})")
    return "served" if one.number == served.number else "kept"


def _drift(one: dict[str, Any]) -> str:
    said = f"version {one['version']}: scored {one['scored']}, too long {one['too_long']}"
    if one["psi"] is None:
        return f"{said}; too few for drift"
    return f"{said}; PSI {one['psi']:.3f}, {one['beyond']:.1%} beyond all of its pairs"
