"""Trees go out of a work area and come back equal, whatever they hold, and never lead outside."""

from __future__ import annotations

import asyncio
import errno
import hashlib
import os
import shutil
import socket
import stat
import tempfile
from contextlib import contextmanager, suppress
from pathlib import Path

import pytest
from fake_sandboxes import FakePeer
from hypothesis import given, settings
from hypothesis import strategies as st

from agentrl.errors import SandboxLost
from agentrl.sandboxes import BubblewrapBackend, SandboxLimits, supervised
from agentrl.sandboxes.base import Snapshot, SnapshotEntry
from agentrl.sandboxes.contract.room import sh
from agentrl.sandboxes.supervisor import files, manifest, snapshot
from agentrl.sandboxes.supervisor.frames import Fatal

NAMES = st.one_of(
    st.sampled_from(
        [
            b"a",
            b"b",
            b"\xff\xfe",
            b" ",
            b"-rf",
            b"*",
            b"'\"",
            b"\n",
            b"...",
            b"\xc3\xa4",
            b"x" * 255,
        ]
    ),
    st.binary(min_size=1, max_size=8).filter(
        lambda name: name not in (b".", b"..") and not {0, 47} & set(name)
    ),
)
MODES = st.sampled_from(
    [0o644, 0o755, 0o000, 0o600, 0o777, 0o400, 0o200, 0o111, 0o1777, 0o2755, 0o4711]
)
LEAVES = st.one_of(
    st.tuples(st.just("file"), MODES, st.binary(max_size=200)),
    st.tuples(
        st.just("link"),
        st.just(0o777),
        st.one_of(NAMES, st.sampled_from([b"/etc/passwd", b"..", b"../../x"])),
    ),
)
TREES = st.recursive(
    st.dictionaries(NAMES, LEAVES, max_size=4),
    lambda inner: st.dictionaries(
        NAMES, st.one_of(LEAVES, st.tuples(st.just("dir"), MODES, inner)), max_size=4
    ),
    max_leaves=12,
)


@contextmanager
def folder():
    path = tempfile.mkdtemp(dir="/dev/shm")
    fd = os.open(path, files.DIRECTORY)
    try:
        yield fd
    finally:
        files.wipe(fd)
        os.close(fd)
        shutil.rmtree(path)


def plant(fd, tree):
    for name, (kind, mode, content) in tree.items():
        if kind == "link":
            os.symlink(content, name, dir_fd=fd)
        elif kind == "file":
            file = os.open(name, os.O_WRONLY | os.O_CREAT, dir_fd=fd)
            os.write(file, content)
            os.fchmod(file, mode)
            os.close(file)
        else:
            os.mkdir(name, dir_fd=fd)
            inner = os.open(name, files.DIRECTORY, dir_fd=fd)
            plant(inner, content)
            os.fchmod(inner, mode)
            os.close(inner)


def look(path):
    """What is there by the plainest means: kind, mode and content of each path."""
    found = {}
    for place, folders, names in os.walk(os.fsencode(path)):
        for name in folders + names:
            full = os.path.join(place, name)
            info = os.lstat(full)
            if stat.S_ISLNK(info.st_mode):
                found[os.path.relpath(full, os.fsencode(path))] = ("link", os.readlink(full))
            elif stat.S_ISREG(info.st_mode):
                with open(full, "rb") as file:
                    found[os.path.relpath(full, os.fsencode(path))] = (info.st_mode, file.read())
            else:
                found[os.path.relpath(full, os.fsencode(path))] = (info.st_mode,)
    return found


@settings(deadline=None, max_examples=150)
@given(TREES, MODES)
def test_a_tree_comes_back_equal(tree, mode):
    with folder() as source, folder() as target:
        plant(source, tree)
        os.fchmod(source, mode)
        before = snapshot.take(source, 1 << 20)
        assert snapshot.take(source, 1 << 20) == before
        snapshot.restore(target, before)
        assert snapshot.take(target, 1 << 20) == before
        assert stat.S_IMODE(os.fstat(target).st_mode) == mode
        if os.geteuid() == 0:  # who else could look into what is locked?
            assert look(f"/proc/self/fd/{source}/.") == look(f"/proc/self/fd/{target}/.")


@settings(deadline=None, max_examples=100)
@given(TREES, st.data())
def test_whatever_is_restored_stays_inside(tree, data):
    """Entries in any order and any place: an error, or a tree; never a byte outside."""
    with folder() as source, folder() as target, folder() as outside:
        plant(source, tree)
        fields = snapshot.take(source, 1 << 20)
        path = os.readlink(f"/proc/self/fd/{outside}").encode()
        rows = [fields[at : at + 4] for at in range(0, len(fields), 4)]
        rows += [
            [b"way", b"link", b"511", path],
            [b"way/in", b"file", b"420", b"x"],
            [b"way/dir", b"dir", b"448", b""],
        ]
        kinds = st.sampled_from([b"dir", b"file", b"link", b"what"])
        for index in data.draw(st.lists(st.integers(0, len(rows) - 1), max_size=3)):
            rows[index] = [rows[index][0], data.draw(kinds), rows[index][2], path]
        mixed = data.draw(st.permutations(rows)) if data.draw(st.booleans()) else rows
        with suppress(OSError, Fatal):
            snapshot.restore(target, [field for row in mixed for field in row])
        assert os.listdir(outside) == []


def test_what_is_no_file_is_left_out_and_hard_links_part():
    with folder() as source, folder() as target:
        os.mkfifo("pipe", dir_fd=source)
        with socket.socket(socket.AF_UNIX) as server:
            server.bind(f"/proc/self/fd/{source}/socket")
        plant(source, {b"one": ("file", 0o644, b"same")})
        os.link("one", "two", src_dir_fd=source, dst_dir_fd=source)
        fields = snapshot.take(source, 1000)
        assert fields[0::4] == [b".", b"one", b"two"]
        snapshot.restore(target, fields)
        assert os.stat("one", dir_fd=target).st_nlink == 1
        assert os.stat("one", dir_fd=target).st_uid == os.geteuid()


def test_a_tree_that_is_too_large_is_an_error_of_its_own():
    with folder() as source:
        plant(source, {b"a": ("file", 0o644, b"x" * 1000), b"b": ("file", 0o000, b"x" * 1000)})
        assert len(snapshot.take(source, 2002)) == 12
        for cap in (2001, 1000, 999, 0):
            with pytest.raises(OSError, match="snapshot") as caught:
                snapshot.take(source, cap)
            assert caught.value.errno == errno.EFBIG
        assert stat.S_IMODE(os.stat("b", dir_fd=source).st_mode) == 0


def test_a_tree_that_is_too_deep_or_wide_is_an_error(monkeypatch):
    with folder() as source:
        tree = {b"f": ("file", 0o644, b"")}
        for _ in range(files.MANIFEST_DEPTH):
            tree = {b"d": ("dir", 0o755, tree)}
        plant(source, tree)
        assert len(snapshot.take(source, 1 << 20)) == 4 * (files.MANIFEST_DEPTH + 2)
        os.mkdir("more", dir_fd=source)
        os.rename("d", "more/d", src_dir_fd=source, dst_dir_fd=source)
        with pytest.raises(OSError, match="levels"):
            snapshot.take(source, 1 << 20)
        monkeypatch.setattr(files, "MANIFEST_ENTRIES", 10)
        with pytest.raises(OSError, match="entries"):
            snapshot.take(source, 1 << 20)


@pytest.mark.parametrize("size", [0, 1, (1 << 20) - 1, 1 << 20, (1 << 20) + 1, (2 << 20) + 5])
def test_the_hash_is_of_all_of_a_file(size):
    content = (b"all of it, " * (size // 11 + 1))[:size]
    with folder() as work:
        plant(work, {b"file": ("file", 0o644, content)})
        assert (
            manifest.hash_file(work, b"file", size).decode() == hashlib.sha256(content).hexdigest()
        )
        if size:
            with pytest.raises(OSError, match="MB of files"):
                manifest.hash_file(work, b"file", size - 1)


def test_the_hash_is_of_all_of_a_file_that_does_not_say_its_size():
    place = os.open("/proc/self", os.O_RDONLY)
    try:
        whole = Path("/proc/self/limits").read_bytes()
        assert os.stat("/proc/self/limits").st_size == 0 < len(whole)
        found = manifest.hash_file(place, b"limits", 1 << 20).decode()
        assert found == hashlib.sha256(whole).hexdigest()
    finally:
        os.close(place)


def test_all_places_share_one_limit_of_entries(monkeypatch):
    """Work area and other places together: each alone is under it, and the answer fits a frame."""
    monkeypatch.setattr(files, "MANIFEST_ENTRIES", 10)
    with folder() as work, folder() as other:
        for place, count in ((work, 4), (other, 3)):
            plant(place, {b"f%d" % n: ("file", 0o644, b"x") for n in range(count)})
        assert len(manifest.everywhere(work, {b"/box": other})) == 5 * 9
        plant(other, {b"g%d" % n: ("file", 0o644, b"x") for n in range(3)})
        with pytest.raises(OSError, match=r"over 10 entries .* in the places that commands can"):
            manifest.everywhere(work, {b"/box": other})
        assert len(manifest.manifest(work)) == 5 * 4 and len(manifest.manifest(other)) == 5 * 6
        monkeypatch.setattr(files, "MANIFEST_ENTRIES", 100)
        monkeypatch.setattr(files, "MANIFEST_BYTES", 9)
        with pytest.raises(OSError, match="MB of files"):
            manifest.everywhere(work, {b"/box": other})


@pytest.mark.parametrize("fields", [[b"."], [b"a", b"fifo", b"1", b""], [b"a", b"file", b"1"]])
def test_entries_that_are_none_are_refused(fields):
    with folder() as target, pytest.raises(Fatal):
        snapshot.restore(target, fields)


def test_equal_trees_have_equal_digests_and_others_do_not():
    entries = [SnapshotEntry(".", "dir", 0o755, b""), SnapshotEntry("a", "file", 0o644, b"12")]
    same, digest = Snapshot(tuple(entries)), Snapshot(tuple(entries)).digest
    assert (same.digest, same.size) == (digest, 2)
    others = [("b", "file", 0o644, b"12"), ("a", "link", 0o644, b"12"), ("a", "file", 0o600, b"12")]
    others.append(("a", "file", 0o644, b"1"))
    assert (
        len({digest, *(Snapshot((entries[0], SnapshotEntry(*other))).digest for other in others)})
        == 5
    )


def inside(body):
    async def main():
        box = await BubblewrapBackend().open("agent", SandboxLimits(disk_mb=16))
        try:
            await body(box)
        finally:
            await box.close()

    asyncio.run(main())


def test_a_fork_in_the_middle_of_an_episode(bubblewrap):
    async def body(box):
        await box.put({"state": b"0"})
        session = await box.open_session()
        await session.run("echo 1 > state; mkdir built; echo result > built/out")
        middle = await box.snapshot()
        outcomes = []
        for step in ("echo 2 >> state", "rm -r built", "chmod 0 built; touch new"):
            await sh(box, step)
            outcomes.append((await box.snapshot()).digest)
            await session.run("cd built; x=1")
            await box.restore(middle)
            assert not session.alive
            assert (await session.run("echo $x.")).stdout == b".\n", "the old shell lives on"
            assert (await session.run("cat state built/out")).stdout == b"1\nresult\n"
            assert (await box.snapshot()).digest == middle.digest
        assert len({middle.digest, *outcomes}) == 4

    inside(body)


def test_a_full_disk_and_a_large_snapshot_are_values(bubblewrap, monkeypatch):
    async def body(box):
        await sh(box, "head -c 9000000 /dev/zero > big")
        whole = await box.snapshot()
        doubled = Snapshot(
            (*whole.entries, SnapshotEntry("big2", "file", 0o644, whole.entries[1].data))
        )
        with pytest.raises(OSError, match="space"):
            await box.restore(doubled)
        await box.restore(whole)
        monkeypatch.setattr(supervised, "SNAPSHOT_BYTES", 1000)
        with pytest.raises(OSError, match="snapshot"):
            await box.snapshot()
        with pytest.raises(ValueError, match="1000"):
            await box.restore(whole)
        await box.reset()

    inside(body)


def test_a_supervisor_that_lies_about_its_tree_is_lost():
    from agentrl.sandboxes.supervised import SupervisedSandbox
    from agentrl.sandboxes.supervisor.frames import encode

    root = [b".", b"dir", b"493", b""]
    lies = [
        [],
        root[:3],
        [b"a", b"file", b"420", b""],
        [*root, b"../a", b"file", b"420", b""],
        [*root, b"/a", b"file", b"420", b""],
        [*root, b"a", b"other", b"420", b""],
        [*root, b"a", b"file", b"x", b""],
        [*root, b"a\0", b"file", b"420", b""],
    ]

    async def main(answer):
        peer = FakePeer()
        box = SupervisedSandbox(peer, SandboxLimits())
        peer.other.send(encode(1, [b"ok", *answer]))
        with pytest.raises(SandboxLost, match="protocol"):
            await box.snapshot()
        await box.close()

    for answer in lies:
        asyncio.run(main(answer))
