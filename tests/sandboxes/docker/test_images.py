"""What an image and the system-call profile may hold."""

from __future__ import annotations

import io
import json
import tarfile

import pytest
from hypothesis import given
from hypothesis import strategies as st

from agentrl.errors import SandboxLost
from agentrl.sandboxes import DockerBackend, SandboxLimits, seccomp
from agentrl.sandboxes.docker import scan_image
from agentrl.sandboxes.docker.backend import first_daemon
from agentrl.sandboxes.docker.profile import profile
from agentrl.sandboxes.docker.scan import Needles, _look
from agentrl.types import Task

RULES = json.loads(profile(frozenset()))["syscalls"]
NUMBERS = (
    st.integers(0, 2**64 - 1)
    | st.integers(0, 5)
    | st.integers(0, 2**32 - 1).map(lambda high: (high << 32) + 1)
)
ORACLE = "def add(first, second):\n    return first + second\n"
TASK = Task(
    id="adder",
    instruction="add",
    hidden={
        "tests": {
            "test_add.py": (
                "from solution import add\n\ndef test_add():\n    assert add(2, 3) == 5\n"
            )
        }
    },
    oracle={"files": {"solution.py": ORACLE}},
)


def allowed(name, *arguments, rules=RULES):
    """Whether the profile lets a call pass, by its rules as they are written."""
    return any(
        rule["action"] == "SCMP_ACT_ALLOW"
        and name in rule["names"]
        and all(holds(arg, arguments) for arg in rule["args"])
        for rule in rules
    )


def holds(condition, arguments):
    value = arguments[condition["index"]]
    if condition["op"] == "SCMP_CMP_EQ":
        return value == condition["value"]
    assert condition["op"] == "SCMP_CMP_MASKED_EQ"
    return value & condition["value"] == condition["valueTwo"]


def test_what_bubblewrap_refuses_docker_refuses():
    zeros = (0, 0, 0)
    assert not [name for name in seccomp.DENIED if allowed(name, *zeros)]
    for name in (
        "shmat",
        "semop",
        "msgsnd",
        "mq_timedsend",
        "io_uring_enter",
        "memfd_secret",
        "fsmount",
        "kexec_load",
    ):
        assert not allowed(name, *zeros)
    assert not allowed("clone3", *zeros)


@given(NUMBERS, NUMBERS)
def test_no_call_can_be_made_to_name_process_one(first, second):
    def low(value):
        return value & 0xFFFFFFFF  # all that the kernel looks at

    for name in (
        "prlimit64",
        "sched_setaffinity",
        "sched_setattr",
        "sched_setparam",
        "sched_setscheduler",
    ):
        assert allowed(name, first, second) == (low(first) != 1)
    assert allowed("setpriority", first, second) == (first == 0 and low(second) != 1)
    assert allowed("ioprio_set", first, second) == (first == 1 and low(second) != 1)


@given(NUMBERS)
def test_a_sandbox_with_a_network_has_streams_alone(value):
    rules = json.loads(profile(frozenset(), streams_only=True))["syscalls"]
    for family in (2, 10):
        assert allowed("socket", family, value, 0, rules=rules) == (value & 15 == 1)
        assert allowed("socket", family, 1, value, rules=rules) == (value in (0, 6))
    assert allowed("socket", 1, 2, 0, rules=rules) and not allowed("socket", 17, 1, 0, rules=rules)


@given(NUMBERS)
def test_no_new_namespace_and_no_foreign_socket(value):
    assert allowed("clone", value) == (value & seccomp.NEW_NAMESPACES == 0)
    assert allowed("socket", value) == (value in seccomp.LOCAL_FAMILIES)
    assert not allowed("personality", 0x0040000)  # no address randomisation: a step of exploits


# ---- scan ----


def image(tag, *layers):
    """An image with one layer for each dictionary of path -> bytes (None: deleted)."""
    api = first_daemon().api()
    archive = io.BytesIO()
    with tarfile.open(fileobj=archive, mode="w") as tar:
        add(
            tar,
            "Dockerfile",
            f"FROM scratch\n{''.join(f'COPY {n} /{chr(10)}' for n in range(len(layers)))}".encode(),
        )
        for number, files in enumerate(layers):
            for path, data in files.items():
                add(tar, f"{number}/{path}", data)
    archive.seek(0)
    lines = list(api.build(fileobj=archive, custom_context=True, tag=tag, rm=True, decode=True))
    assert not any("error" in line for line in lines), lines


def add(tar, name, data):
    member = tarfile.TarInfo(name)
    member.size = len(data)
    tar.addfile(member, io.BytesIO(data))


def test_secrets_are_found_in_every_layer(docker):
    hidden, oracle = TASK.hidden["tests"]["test_add.py"], TASK.oracle["files"]["solution.py"]
    image(
        "agentrl-test-scan",
        {
            "app/ok.py": b"def add(first, second):\n    return 0\n",
            "repo/.git/HEAD": b"ref: refs/heads/main\n",
        },
        {"deep/notes.txt": f"by the way:\n{hidden}\nthat is all".encode()},
        {"deep/notes.txt": b"nothing to see here", "old.py": oracle.encode()},
        {"tasks.jsonl": TASK.model_dump_json().encode()},
    )
    try:
        found = scan_image(first_daemon(), "agentrl-test-scan", [TASK])
        assert [(one.layer, one.path, one.why) for one in found] == [
            (1, "repo/.git/HEAD", "git history"),
            (2, "deep/notes.txt", "hidden part of task 'adder'"),
            (3, "old.py", "reference solution of task 'adder'"),
            (4, "tasks.jsonl", "a task file with its hidden part"),
        ]
        assert len(scan_image(first_daemon(), "agentrl-test-scan", [])) == 2
    finally:
        first_daemon().api().remove_image("agentrl-test-scan", force=True)


def saved(files, settings):
    """An image as a daemon saves it, with one layer."""
    layer, archive = io.BytesIO(), io.BytesIO()
    with tarfile.open(fileobj=layer, mode="w") as tar:
        for path, data in files.items():
            add(tar, path, data)
    with tarfile.open(fileobj=archive, mode="w") as tar:
        add(
            tar,
            "manifest.json",
            json.dumps([{"Config": "c.json", "Layers": ["layer.tar"]}]).encode(),
        )
        add(tar, "c.json", json.dumps(settings).encode())
        add(tar, "layer.tar", layer.getvalue())
    archive.seek(0)
    return archive


@pytest.mark.parametrize(
    ("files", "settings", "why"),
    [
        ({"a.py": ORACLE.replace("\n", "\r\n").encode()}, {}, "reference solution of task 'adder'"),
        (
            {"a.py": ORACLE.replace("\n", " \n\t").encode()},
            {},
            "reference solution of task 'adder'",
        ),
        (
            {"a.bin": b"#" * (65 << 20) + b"\n" + ORACLE.encode()},
            {},
            "reference solution of task 'adder'",
        ),
        (
            {"a.bin": b"\n" * ((64 << 20) - 9) + ORACLE.encode()},
            {},
            "reference solution of task 'adder'",
        ),
        ({}, {"config": {"Labels": {"solution": ORACLE}}}, "reference solution of task 'adder'"),
        ({}, {"config": {"Env": [f"SOLUTION={ORACLE}"]}}, "reference solution of task 'adder'"),
        (
            {},
            {"history": [{"created_by": f"RUN cat >a <<E\n{ORACLE}E"}]},
            "reference solution of task 'adder'",
        ),
        ({"t.json": b'{"hidden": {}, "oracle": {}}'}, {}, "a task file with its hidden part"),
        ({f"srv/x.git/objects/ab/{'0' * 38}": b"x"}, {}, "git history"),
        ({"x.bundle": b"# v2 git bundle\n"}, {}, "git history"),
    ],
)
def test_what_changed_on_its_way_into_an_image_is_found(files, settings, why):
    assert [one.why for one in _look(saved(files, settings), Needles([TASK]))] == [why]


def test_our_own_images_are_clean(docker):
    assert scan_image(first_daemon(), "agentrl-agent", [TASK]) == []
    with pytest.raises(SandboxLost, match="docker pull agentrl-test-none"):
        scan_image(first_daemon(), "agentrl-test-none", [])


def test_a_grader_has_numpy_and_pytest(docker):
    import asyncio

    async def main():
        box = await DockerBackend().open("grader", SandboxLimits())
        try:
            done = await box.exec(
                ["/usr/bin/python3", "-c", "import numpy, pytest; print(numpy.arange(3).sum())"]
            )
            assert done.stdout == b"3\n", done
        finally:
            await box.close()

    asyncio.run(main())
