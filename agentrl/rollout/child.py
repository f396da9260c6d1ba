"""Rollouts in a process of their own, so that playing and learning do not share an interpreter.

    trainer's process                      child process (python -m agentrl.rollout.child)
    ChildRollouts ── tasks, weights ──────> Rollouts: event loop, engine, sandboxes
                  <── episodes, groups ───

`ChildRollouts` is a `GroupStream`. The child builds everything from a `ChildPlan`, which is plain
data. Weights go through shared memory; everything else is pickled over one pipe. The child sends a
sign of life every second. If it dies or hangs, everything that waits for it fails with `ChildLost`,
whose message says how it ended and what it wrote last.
"""

from __future__ import annotations

import ctypes
import os
import pickle
import queue
import signal
import sys
import threading
import time
import traceback
from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from concurrent.futures import Future, TimeoutError
from contextlib import nullcontext, suppress
from dataclasses import dataclass
from itertools import count
from multiprocessing.connection import Connection
from pathlib import Path
from typing import TYPE_CHECKING, Any

from agentrl.chat.settings import ChatSettings
from agentrl.engines.base import Engine, Generation, Measured, Sampling, Weights
from agentrl.engines.own_process.carrier import (
    BEAT_S,
    CLOSE_S,
    SILENT_S,
    Carrier,
    Log,
    ProcessEnded,
)
from agentrl.errors import ChildLost, Unrecordable
from agentrl.policies.base import TokenPolicy
from agentrl.rollout.play import Setting
from agentrl.rollout.rollouts import Dispatch, Handle, Rollouts, without_content
from agentrl.specs import RunSpec
from agentrl.trajectory import Episode, Group
from agentrl.types import Task
from agentrl.waits import report_waits

if TYPE_CHECKING:
    from agentrl.engines.own_process.handover import TensorPlace

_EPISODE = -1
"""Number of a message that carries an episode and answers no call."""
_METRICS_S = 5.0
"""Seconds after which a round is logged without the engine's statistics."""
_PR_SET_PDEATHSIG = 1
_Place = tuple[str, int, int, str]
"""Phase, round, draw and task: what the episodes of a group have in common."""


@dataclass(frozen=True)
class ChildPlan:
    """What the child builds its rollouts from; it can be pickled.

    Attributes:
        spec: environments, sandboxes, guard and seeds.
        open_engine: builds the engine.
        model: folder or name of the model whose tokenizer and template are used.
        chat: how messages become tokens.
        sampling: how the policy samples.
        group_size: episodes per task.
        concurrency: episodes that play at the same time.
        folder: run folder in which the child reports what it waits for; None: nowhere.
    """

    spec: RunSpec
    open_engine: Callable[[], Engine]
    model: str
    chat: ChatSettings
    sampling: Sampling
    group_size: int
    concurrency: int
    folder: Path | None = None

    def open(self, on_episode: Callable[[Episode], None]) -> tuple[Rollouts, Engine]:
        """Build the rollouts and their engine."""
        from agentrl.engines.factory import open_chat

        engine = self.open_engine()
        policy = TokenPolicy(engine, open_chat(self.model, self.chat), self.sampling)
        rollouts = Rollouts(
            Setting.open(self.spec, policy=policy),
            group_size=self.group_size,
            concurrency=self.concurrency,
            owns_policy=True,
            on_episode=on_episode,
        )
        return rollouts, engine


# --- the trainer's side


class ChildRollouts:
    """A `GroupStream` whose episodes play in a child process.

    Args:
        plan: what the child builds.
        on_episode: called on a thread of this object with every finished episode, retried ones
            included. What it raises ends all dispatches.
        log: file that the child's output is appended to; None: kept only for error messages.

    Raises:
        ChildLost: the child ended while it started.
        AgentRLError: what building the rollouts raised there.
    """

    def __init__(
        self,
        plan: ChildPlan,
        *,
        on_episode: Callable[[Episode], None] | None = None,
        log: Path | None = None,
    ) -> None:
        from agentrl.engines.own_process.handover import SharedWeights  # loads torch

        self._on_episode = on_episode or (lambda episode: None)
        self._weights = SharedWeights()
        self._log = Log(log)
        self._lock = threading.Lock()  # of the calls, the groups' queues and `_ending`
        self._writing = threading.Lock()  # the keeper must not close the memory meanwhile
        self._numbers = count()
        self._calls: dict[int, Future[Any]] = {}
        self._groups: dict[int, queue.SimpleQueue[Group | BaseException]] = {}
        self._episodes: dict[_Place, dict[int, Episode]] = defaultdict(dict)
        self._ending: BaseException | None = None
        self._carrier: Carrier | None = None
        self._is_open = self._is_closing = False
        started: Future[int] = Future()
        self._keeper = threading.Thread(
            target=self._keep, args=(plan, started), name="agentrl-rollouts-keeper", daemon=True
        )
        self._keeper.start()
        try:
            context_length = started.result()
        except BaseException:
            self.close()
            self._log.forget()
            raise
        self.engine = ChildEngine(self, context_length)

    def dispatch(self, tasks: Iterable[Task], work: Dispatch) -> Handle:
        """Start playing one group per task and return at once."""
        due = list(tasks)
        groups: queue.SimpleQueue[Group | BaseException] = queue.SimpleQueue()
        with self._lock:
            number = next(self._numbers)
            self._groups[number] = groups
            if self._ending is not None:
                groups.put(self._ending)
        self._send(number, "dispatch", due, work)
        return Handle(due, groups.get)

    def sync(self, weights: Weights, version: int) -> None:
        """Play with these weights from the next batch of the engine on.

        Raises:
            EngineError: the engine did not take them.
            ChildLost: the child has ended.
        """
        with self._writing:
            if self._ending is not None:
                raise self._ending
            places = self._weights.write(weights.tensors())
        self.ask("sync", places, version).result()
        self.engine.version = version

    def probe(
        self, prompt_ids: Sequence[int], sampling: Sampling, seeds: Sequence[int]
    ) -> tuple[Generation, ...]:
        """What the engine samples after a prompt, once for each seed.

        Raises:
            EngineError: sampling failed.
            ChildLost: the child has ended.
        """
        answers: tuple[Generation, ...] = self.ask(
            "probe", tuple(prompt_ids), sampling, tuple(seeds)
        ).result()
        return answers

    def cancel(self) -> None:
        """Stop what is playing, and wait until it has stopped."""
        if self._ending is None:
            self.ask("cancel").result()

    def close(self) -> None:
        """Free sandboxes and engine and end the child; safe to call twice."""
        self._is_closing = True
        if self._ending is None and self._is_open:
            with suppress(ChildLost, TimeoutError):
                self.ask("close").result(CLOSE_S)
        if self._carrier is not None:
            self._carrier.kill()
        if self._keeper.is_alive() and threading.current_thread() is not self._keeper:
            self._keeper.join()

    def tell(self, name: str, *arguments: Any) -> None:
        """Have the child do something that nobody waits for."""
        self._send(None, name, *arguments)

    def ask(self, name: str, *arguments: Any) -> Future[Any]:
        """Have the child do something, and get a future of its answer."""
        answer: Future[Any] = Future()
        with self._lock:
            number = next(self._numbers)
            if self._ending is not None:
                answer.set_exception(self._ending)
                return answer
            self._calls[number] = answer
        self._send(number, name, *arguments)
        return answer

    def _send(self, number: int | None, name: str, *arguments: Any) -> None:
        if self._carrier is not None and self._ending is None:
            self._carrier.send([(number, name, *arguments)])

    def _keep(self, plan: ChildPlan, started: Future[int]) -> None:
        """The keeper's thread: the child ends with it."""
        carrier: Carrier | None = None
        try:
            carrier = self._carrier = Carrier("rollouts", self._weights.fd, self._log, __name__)
            carrier.send([(0, "open", plan)])
            next(self._numbers)
            _, answer = carrier.receive()
            if isinstance(answer, BaseException):
                raise answer
            carrier.expect_life(SILENT_S)
            self._is_open = True
            started.set_result(answer)
            while True:
                self._take(*carrier.receive())
        except ProcessEnded as error:
            self._end(self._lost(error), started)
        except BaseException as error:  # noqa: BLE001 - raised where somebody waits
            self._end(error, started)
        finally:
            if carrier is not None:
                carrier.close()
            with self._writing:
                self._weights.close()
            self._log.close()

    def _lost(self, error: ProcessEnded) -> ChildLost:
        if self._is_closing:
            return ChildLost("the rollouts were closed")
        return ChildLost(
            f"the process that plays the episodes {error}; {self._log.tail()}; run the same command"
            " with --resume"
        )

    def _take(self, number: int, outcome: Any) -> None:
        """Take one message of the child."""
        if number == _EPISODE:
            self._take_episode(outcome)
        elif number in self._groups:
            groups = self._groups[number]
            if outcome is None:  # the dispatch is complete
                del self._groups[number]
            elif isinstance(outcome, BaseException):
                groups.put(outcome)
            else:
                groups.put(self._group(outcome))
        else:
            with self._lock:
                call = self._calls.pop(number)
            if isinstance(outcome, BaseException):
                call.set_exception(outcome)
            else:
                call.set_result(outcome)

    def _take_episode(self, episode: Episode) -> None:
        try:
            self._on_episode(episode)
        except Unrecordable as error:
            episode = without_content(episode, str(error))
            self._on_episode(episode)
        # A retried episode has the key of the one before it, but for the attempt, and replaces it.
        self._episodes[_place_of(episode)][episode.key.sample] = episode

    def _group(self, place: _Place) -> Group:
        episodes = self._episodes.pop(place)
        return Group(tuple(episodes[sample] for sample in sorted(episodes)))

    def _end(self, ending: BaseException, started: Future[int]) -> None:
        """Fail everything that waits."""
        with self._lock:
            self._ending = ending
            calls, self._calls = self._calls, {}
            groups_of_dispatches = list(self._groups.values())
        if not started.done():
            started.set_exception(ending)
        for groups in groups_of_dispatches:
            groups.put(ending)
        for call in calls.values():
            call.set_exception(ending)


class ChildEngine:
    """The engine of a child, as far as the trainer needs it.

    Attributes:
        version: of the weights that were loaded last.
        context_length: of the model.
    """

    def __init__(self, rollouts: ChildRollouts, context_length: int) -> None:
        self._rollouts = rollouts
        self.version, self.context_length = 0, context_length

    def pause(self) -> None:
        """Start no further generation until `resume`."""
        self._rollouts.tell("pause")

    def resume(self) -> None:
        """Continue after `pause`."""
        self._rollouts.tell("resume")

    def metrics(self) -> dict[str, float]:
        """`engine/…` metrics since the last call; none if the child is too busy to answer."""
        try:
            metrics: dict[str, float] = self._rollouts.ask("metrics").result(_METRICS_S)
        except TimeoutError:
            return {}
        return metrics


# --- the child's side


@dataclass
class _Handed:
    """Weights that came through shared memory."""

    named: Mapping[str, Any]
    module: Any = None

    def tensors(self) -> Mapping[str, Any]:
        return self.named


class _Child:
    """The rollouts, and the pipe through which they are asked."""

    _rollouts: Rollouts
    _engine: Engine

    def __init__(self, pipe: Connection[Any, Any], weights_fd: int) -> None:
        self._pipe, self._weights_fd = pipe, weights_fd
        self._sending = threading.Lock()

    def serve(self) -> None:
        """Do what is asked until the pipe is closed."""
        threading.Thread(target=self._beat, daemon=True).start()
        ((number, _, plan),) = self._pipe.recv()
        try:
            self._rollouts, self._engine = plan.open(lambda episode: self._send(_EPISODE, episode))
        except BaseException as error:  # noqa: BLE001 - raised again where the rollouts were wanted
            self._send(number, portable(error))
            return
        self._send(number, self._engine.context_length)
        with report_waits(plan.folder, "rollouts") if plan.folder else nullcontext():
            while True:
                try:
                    packet = self._pipe.recv()
                except (EOFError, OSError):  # nobody is left to play for
                    return
                for number, name, *arguments in packet:
                    self._begin(number, name, arguments)

    def _begin(self, number: int | None, name: str, arguments: Sequence[Any]) -> None:
        """Do something without waiting for it; dispatches keep the order in which they came."""
        if name == "dispatch":
            try:
                handle = self._rollouts.dispatch(*arguments)
            except Exception as error:  # noqa: BLE001 - raised again where somebody waits
                self._send(number, portable(error))
                return
            self._work(self._deliver, number, handle)
        elif number is None:  # pause or resume
            getattr(self._engine, name)()
        else:
            self._work(self._answer, number, name, arguments)

    def _work(self, function: Callable[..., None], *arguments: Any) -> None:
        threading.Thread(target=function, args=arguments, daemon=True).start()

    def _deliver(self, number: int, handle: Handle) -> None:
        """Say which groups of a dispatch are complete; their episodes were sent before."""
        try:
            for group in handle:
                self._send(number, _place_of(group.episodes[0]))
        except BaseException as error:  # noqa: BLE001 - raised again where somebody waits
            self._send(number, portable(error))
        self._send(number, None)

    def _answer(self, number: int, name: str, arguments: Sequence[Any]) -> None:
        outcome: Any
        try:
            outcome = getattr(self, f"_{name}")(*arguments)
        except BaseException as error:  # noqa: BLE001 - raised again where somebody waits
            outcome = portable(error)
        self._send(number, outcome)

    def _sync(self, places: Mapping[str, TensorPlace], version: int) -> None:
        from agentrl.engines.own_process.handover import read

        self._rollouts.sync(_Handed(read(self._weights_fd, places)), version)

    def _probe(
        self, prompt_ids: Sequence[int], sampling: Sampling, seeds: Sequence[int]
    ) -> tuple[Generation, ...]:
        return self._rollouts.probe(prompt_ids, sampling, seeds)

    def _metrics(self) -> dict[str, float]:
        return self._engine.metrics() if isinstance(self._engine, Measured) else {}

    def _cancel(self) -> None:
        self._rollouts.cancel()

    def _close(self) -> None:
        self._rollouts.close()

    def _beat(self) -> None:
        while True:
            self._send(None, None)
            time.sleep(BEAT_S)

    def _send(self, number: int | None, outcome: Any) -> None:
        """Answer a call, or give a sign of life."""
        try:
            body = pickle.dumps(outcome)
        except Exception as error:  # noqa: BLE001 - raised again where somebody waits
            body = pickle.dumps(portable(error))
        with self._sending:  # episodes come from the loop's thread, answers from others
            try:
                self._pipe.send_bytes(pickle.dumps(number) + body)
            except OSError:  # the trainer is gone
                os._exit(0)


def portable(error: BaseException) -> BaseException:
    """An exception that can be raised in another process, with its traceback as a note."""
    trace = "".join(traceback.format_exception(error))
    try:
        copy: BaseException = pickle.loads(pickle.dumps(error))
    except Exception:  # noqa: BLE001 - its own constructor may raise anything
        copy = RuntimeError(f"{type(error).__name__}: {error}")
    copy.add_note(f"In the process that plays the episodes:\n{trace}")
    return copy


def _place_of(episode: Episode) -> _Place:
    key = episode.key
    return key.phase, key.round, key.draw, key.task


def main() -> None:
    """Serve until the trainer ends."""
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    _Child(Connection(int(sys.argv[2])), int(sys.argv[3])).serve()
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(0)  # exit handlers of libraries may hang, and nothing is left to be saved


if __name__ == "__main__":
    main()
