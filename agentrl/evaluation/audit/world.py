"""Rows about the agent's world: nothing hidden is in it, it begins and goes the same, tools do what
they say.
"""

from __future__ import annotations

import itertools
import json
import secrets
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from agentrl.env import ToolEnv
from agentrl.evaluation.audit.probes import probes
from agentrl.evaluation.audit.stage import AuditResult, AuditStage, broken, holds, not_applicable
from agentrl.evaluation.audit.variants import with_canary
from agentrl.evaluation.leaks import find_in, hashes_of, secrets_of, shown_secret
from agentrl.policies.base import Scripted, noop
from agentrl.records.rows import episode_row
from agentrl.runner import Runner, borrow
from agentrl.sandboxes.base import FileInfo, Sandbox
from agentrl.trajectory import Episode
from agentrl.types import BadCall, Message, Task, ToolCall, ToolSpec

_HOSTILE = """
umask 000
mkdir -p .cache/left .git/hooks
for name in .hidden conftest.py sitecustomize.py .cache/left/file .git/hooks/post-checkout; do
  echo left > $name
done
ln -s / everything; ln -s /proc/self self; mkfifo pipe; chmod 000 .hidden
export LEFT=1; echo 'export LEFT=1' > .bashrc
"""
_LASTING = """
for folder in /tmp /var/tmp /dev/shm "$HOME"; do echo left > "$folder/left"; done
for n in 1 2 3; do (trap '' TERM HUP; exec sleep 1000) >/dev/null 2>&1 & done
"""
_CANARY_TASKS = 2
_SEARCH_S = 20.0


async def hidden_is_absent(stage: AuditStage) -> AuditResult:
    """No long text of a hidden part or reference is in the task's view, the prompt, the sandbox or
    a tool's answer.
    """
    places = 0
    episodes = {episode.task.id: episode for episode in await stage.oracle()}
    for task in itertools.chain.from_iterable(stage.splits.values()):
        if shown := shown_secret(task):
            return broken(task.id, f"the task itself shows a hidden text of {len(shown)} letters")
    names = {spec.name for spec in stage.env.tools}  # told to every agent
    for task in stage.tasks:
        world = await _world(stage, task) | _answers(episodes[task.id])
        places += len(world)
        hidden = {text: what for text, what in secrets_of(task).items() if text not in names}
        if found := find_in(world, hidden):
            return broken(task.id, found, places=places)
    searched = sum(bool(secrets_of(task)) for task in stage.tasks)
    return holds(places=places, tasks=len(stage.tasks), tasks_with_long_texts=searched)


async def _world(stage: AuditStage, task: Task) -> dict[str, str]:
    """Where -> text, of all that is there before the agent acts."""
    env = stage.make()
    runner = Runner(env)
    async with borrow(env, stage.pool) as sandbox:
        opening = await stage.reset(runner, task, sandbox)
        places = {
            f"opening message {number}": message.content for number, message in enumerate(opening)
        }
        places["the description of the tools"] = json.dumps([spec.schema() for spec in env.tools])
        if sandbox is not None:
            places |= await _tree(sandbox, task)
        await runner.close()
    return places


async def _tree(sandbox: Sandbox, task: Task) -> dict[str, str]:
    hashes = hashes_of(task)
    places = {}
    for entry in (await sandbox.snapshot()).entries:
        if entry.kind == "file":
            places[f"file {entry.path}"] = entry.data.decode(errors="replace")
    for info in await sandbox.manifest():
        if info.sha256 in hashes:  # files too large for a snapshot are known by their hashes
            places[f"file {info.path} by its hash"] = "".join(secrets_of(task))
    shown = await sandbox.exec(["/usr/bin/env"])
    return places | {"the environment of commands": shown.stdout.decode(errors="replace")}


def _answers(episode: Episode) -> dict[str, str]:
    """What the world answered, without what the policy itself had said before."""
    places: dict[str, str] = {}
    said = ""
    for number, message in enumerate(episode.messages):
        if message.role == "assistant":
            calls = [call for call in message.tool_calls if isinstance(call, ToolCall)]
            said += message.content + "".join(
                json.dumps(dict(call.arguments), default=str) for call in calls
            )
        elif message.content and json.dumps(message.content)[1:-1] not in said:
            places[f"message {number} ({message.name or message.role})"] = _unsaid(
                message.content, said
            )
    return places


def _unsaid(text: str, said: str) -> str:
    """The lines that the policy did not write itself."""
    return "\n".join(
        line for line in text.splitlines() if json.dumps(line.strip())[1:-1] not in said
    )


async def hidden_is_not_told(stage: AuditStage) -> AuditResult:
    """A canary in the hidden part of a copy of a task comes back in no message, verdict, record or
    sandbox.
    """
    canary = f"canary-{secrets.token_hex(8)}"
    copies = [planted for task in stage.tasks if (planted := with_canary(task, canary))][
        :_CANARY_TASKS
    ]
    if not copies:
        return not_applicable("no hidden part has a place for a canary")
    told = [text for _, needles in copies for text in needles]
    copied = [task for task, _ in copies]
    oracle = await stage.play(Scripted("oracle", stage.env.oracle_actions), copied)
    episodes = oracle + await stage.play(noop(), copied)
    for episode in episodes:
        row = {name: value for name, value in episode_row(episode).items() if name != "task"}
        if place := next((name for name, value in row.items() if _holds(value, told)), ""):
            return broken(
                episode.task.id, f"the episode's record tells a hidden value in {place!r}"
            )
    for task in copied:
        for attack in probes(task):
            score = await stage.score(await stage.hand_in(task, attack))
            if _holds([score.why, dict(score.parts)], told):
                return broken(task.id, f"the verdict on {attack.name!r} tells a hidden value")
    if left := await _left(stage, canary):
        return broken(copied[0].id, f"a sandbox holds a hidden value after grading: {left}")
    return holds(tasks=len(copied), episodes=len(episodes))


def _holds(value: Any, needles: Sequence[str]) -> bool:
    text = json.dumps(value, ensure_ascii=False, default=str)
    return any(needle in text for needle in needles)


async def _left(stage: AuditStage, canary: str) -> str:
    """Where in the next sandboxes a canary of earlier gradings is; empty if nowhere."""
    if not stage.env.needs_sandbox or not stage.pool.backend.is_boundary:
        return ""
    for role in ("agent", "grader"):
        async with stage.pool.lease(role) as sandbox:
            found = await sandbox.exec(
                [
                    "/bin/sh",
                    "-c",
                    'grep -rlsI -- "$0" . /tmp /var/tmp /dev/shm "$HOME" | head -3',
                    canary,
                ],
                timeout_s=_SEARCH_S,
            )
            if found.stdout.strip():
                return f"{role}: {found.stdout.decode(errors='replace').split()[0]}"
    return ""


async def reset_is_complete(stage: AuditStage) -> AuditResult:
    """After a hostile episode the next one begins as if there had been none."""
    residue = 0
    for task in stage.tasks:
        before, _ = await _start(stage, task)
        await _hostile(stage, task)
        after, differs = await _start(stage, task)
        if differs:
            return broken(
                task.id, f"after a hostile episode the sandbox differs in {', '.join(differs)}"
            )
        if after != before:
            return broken(
                task.id, "after a hostile episode the start state has another fingerprint"
            )
        residue += 1
    return holds(hostile_episodes=residue, sandbox=stage.env.needs_sandbox)


async def _start(stage: AuditStage, task: Task) -> tuple[str, list[str]]:
    """The start's fingerprint, and how the sandbox differed from a clean one before it."""
    runner = Runner(stage.make())
    async with borrow(runner.env, stage.pool) as sandbox:
        differs = await sandbox.verify() if sandbox is not None else []
        await stage.reset(runner, task, sandbox)
        await runner.close()
    return runner.start, differs


async def _hostile(stage: AuditStage, task: Task) -> None:
    """One episode that leaves behind what it can: files, links, processes; and calls every tool
    with rubbish.
    """
    env = stage.make()
    runner = Runner(env)
    async with borrow(env, stage.pool) as sandbox:
        await stage.reset(runner, task, sandbox)
        if sandbox is not None:
            script = _HOSTILE + (_LASTING if stage.pool.backend.is_boundary else "")
            await sandbox.exec(["/bin/sh", "-c", script])
        for message in _rude(env, task):
            if (await runner.step(message)).end is not None:
                break
        await runner.collect()
        await runner.close()


def _rude(env: ToolEnv, task: Task) -> Iterator[Message]:
    for spec in env.tools:
        yield Message.assistant("", ToolCall(spec.name, _guesses(spec, "../../etc/passwd")))
        for path in ("everything/etc/passwd", *task.files):
            yield Message.assistant("", ToolCall(spec.name, _guesses(spec, path)))
    yield Message.assistant("\x00\ud83d", BadCall("{", "this is no JSON"))


def _guesses(spec: ToolSpec, text: str) -> dict[str, Any]:
    """Arguments that fit a tool's schema, as far as one can tell."""
    by_type = {
        "string": text,
        "integer": 1,
        "number": 1.0,
        "boolean": True,
        "array": [],
        "object": {},
    }
    properties: Mapping[str, Any] = spec.parameters.get("properties", {})
    required = spec.parameters.get("required", ())
    return {
        name: schema["enum"][0] if schema.get("enum") else by_type.get(schema.get("type", ""), text)
        for name, schema in properties.items()
        if name in required
    }


async def replays_are_equal(stage: AuditStage) -> AuditResult:
    """Three plays of the oracle on one task, with one seed, give the same start, observations and
    score.
    """
    groups: dict[str, list[Episode]] = {}
    for episode in await stage.oracle():
        groups.setdefault(episode.task.id, []).append(episode)
    differ: Counter[str] = Counter()
    first = ("", "")
    for task_id, group in groups.items():
        for name, seen in (
            ("start", {episode.start for episode in group}),
            ("messages", {episode.messages.__repr__() for episode in group}),
            ("ending", {episode.end for episode in group}),
            ("score", {episode.reward for episode in group}),
            ("artifacts", {repr(sorted(episode.artifacts.items())) for episode in group}),
        ):
            if len(seen) > 1:
                differ[name] += 1
                first = first if first[0] else (task_id, name)
    counts = {
        "tasks": len(groups),
        "episodes": sum(map(len, groups.values())),
        "differ": dict(differ),
    }
    if first[0]:
        return broken(
            first[0],
            f"{len(groups[first[0]])} equal plays of the oracle differ in {first[1]}",
            **counts,
        )
    return holds(**counts)


async def reading_changes_nothing(stage: AuditStage) -> AuditResult:
    """A tool whose declared effect is "read" leaves every file of the work area as it was."""
    if not stage.env.needs_sandbox:
        return not_applicable("the environment has no sandbox, so there are no files to change")
    if not any(spec.effect == "read" for spec in stage.env.tools):
        return not_applicable("no tool declares that it only reads")
    calls: Counter[str] = Counter()
    for task in stage.tasks:
        scripts: list[list[Message]] = [list(stage.env.oracle_actions(task))]
        known = [path for path in (*task.files, *task.artifacts)][:1] or ["."]
        reading = [spec for spec in stage.env.tools if spec.effect == "read"]
        scripts += [
            [Message.assistant("", ToolCall(spec.name, _guesses(spec, known[0])))]
            for spec in reading
        ]
        for script in scripts:
            if changed := await _changed_by_reading(stage, task, script, calls):
                return broken(task.id, changed, calls=dict(calls))
    return holds(tasks=len(stage.tasks), calls=dict(calls))


async def _changed_by_reading(
    stage: AuditStage, task: Task, script: Sequence[Message], calls: Counter[str]
) -> str:
    """What a call of a reading tool changed, in words; calls of one turn are made one by one."""
    env = stage.make()
    reads = {spec.name for spec in env.tools if spec.effect == "read"}
    runner = Runner(env)
    async with borrow(env, stage.pool) as sandbox:
        assert sandbox is not None
        await stage.reset(runner, task, sandbox)
        for call in [call for message in script for call in message.tool_calls]:
            before = await sandbox.manifest()
            end = (await runner.step(Message.assistant("", call))).end
            if isinstance(call, ToolCall) and call.name in reads:
                calls[call.name] += 1
                if changed := _changes(before, await sandbox.manifest()):
                    return f"tool {call.name!r} declares effect 'read' and changed {changed}"
            if end is not None:
                break
        await runner.close()
    return ""


def _changes(before: Sequence[FileInfo], after: Sequence[FileInfo]) -> str:
    old, new = ({info.path: info for info in infos} for infos in (before, after))
    paths = sorted(
        path
        for path in old.keys() | new.keys()
        if path != "." and _content(old, path) != _content(new, path)
    )
    return ", ".join(paths[:3])


def _content(files: Mapping[str, FileInfo], path: str) -> tuple[Any, ...] | None:
    info = files.get(path)
    return None if info is None else (info.kind, info.mode, info.sha256)
