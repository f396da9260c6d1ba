"""What lies in the places that commands can write to: names, kinds, modes, sizes and hashes."""

from __future__ import annotations

import errno
import os
import stat

from agentrl.sandboxes.supervisor import files

_CHUNK = 1 << 20


def manifest(root: int, besides: bytes = b"", before: list[bytes] | None = None) -> list[bytes]:
    """Five fields (path, kind, mode, size, sha256) for each entry below a directory, as it is now.

    A directory that its owner locked is listed with that mode, and then unlocked to look inside.
    What is in the directory `besides` is left out.

    Args:
        before: fields of places that were read before, if the limits are on all together.

    Raises:
        OSError: EFBIG, more than MANIFEST_ENTRIES entries, MANIFEST_DEPTH levels or MANIFEST_BYTES
            of content.
    """
    fields: list[bytes] = []
    where = "in the work area" if before is None else "in the places that commands can write to"
    most = 5 * files.MANIFEST_ENTRIES - len(before or ())
    pending, left = [b""], files.MANIFEST_BYTES - _hashed(before or [])
    if stat.S_IMODE(os.fstat(root).st_mode) & 0o700 != 0o700:
        os.fchmod(root, 0o700)
    while pending:
        at = pending.pop()
        directory = files.descend(root, at)
        try:
            for text, is_directory in files.entries(directory, files.MANIFEST_ENTRIES):
                name = os.fsencode(text)
                path = at + b"/" + name if at else name
                if is_directory and path != besides:
                    pending.append(path)
                row = describe(directory, name, left)
                left -= int(row[2]) if row[3] else 0
                fields += [path, *row]
        finally:
            os.close(directory)
        if at.count(b"/") >= files.MANIFEST_DEPTH or len(fields) > most:
            limit = f"{files.MANIFEST_ENTRIES} entries or {files.MANIFEST_DEPTH} levels"
            raise OSError(errno.EFBIG, f"over {limit} {where}")
    return fields


def _hashed(fields: list[bytes]) -> int:
    """Bytes of content that were hashed for these fields."""
    sizes = zip(fields[3::5], fields[4::5], strict=True)
    return sum(int(size) for size, digest in sizes if digest)


def listing(root: int, path: bytes) -> list[bytes]:
    """Five fields, as in a manifest but without hashes, for each entry directly in a directory.

    Raises:
        OSError: there is no such directory, it is behind a link, or has more than MANIFEST_ENTRIES
            entries.
    """
    fields: list[bytes] = []
    directory = files.descend(root, path)
    try:
        for text, _ in files.entries(directory, files.MANIFEST_ENTRIES):
            name = os.fsencode(text)
            try:
                row = describe(directory, name)
            except FileNotFoundError:  # a process of the agent is at work meanwhile
                continue
            fields += [path + b"/" + name if path else name, *row]
    finally:
        os.close(directory)
    return fields


def describe(directory: int, name: bytes, cap: int | None = None) -> list[bytes]:
    """Kind, permission bits, size and, unless the cap is None, sha256 of one entry: of a file, or
    of where a link leads; else empty.

    Raises:
        OSError: EFBIG, a file of more bytes than the cap.
    """
    info = os.stat(name, dir_fd=directory, follow_symlinks=False)
    kind, digest = b"other", b""
    if stat.S_ISDIR(info.st_mode):
        kind = b"dir"
    elif stat.S_ISLNK(info.st_mode):
        kind, digest = b"link", b"" if cap is None else hash_link(directory, name)
    elif stat.S_ISREG(info.st_mode):
        kind, digest = b"file", b"" if cap is None else hash_file(directory, name, cap)
    return [kind, b"%d" % stat.S_IMODE(info.st_mode), b"%d" % info.st_size, digest]


def hash_file(directory: int, name: bytes, cap: int) -> bytes:
    """Hex sha256 of a regular file; empty if it cannot be read.

    Raises:
        OSError: EFBIG, it has more than `cap` bytes.
    """
    import hashlib  # loads OpenSSL, which most sandboxes never need

    try:
        fd = os.open(
            name, os.O_RDONLY | os.O_NOFOLLOW | os.O_CLOEXEC | os.O_NONBLOCK, dir_fd=directory
        )
    except PermissionError:
        return b""
    digest, length = hashlib.sha256(), 0
    try:
        size = os.fstat(fd).st_size
        while max(size, length) <= cap:
            # Making room for _CHUNK takes longer than all else of a small file.
            chunk = os.read(fd, _CHUNK if length > size else min(size - length + 1, _CHUNK))
            if not chunk:
                return digest.hexdigest().encode()
            digest.update(chunk)
            length += len(chunk)
    finally:
        os.close(fd)
    raise OSError(errno.EFBIG, f"over {files.MANIFEST_BYTES >> 20} MB of files")


def hash_link(directory: int, name: bytes) -> bytes:
    """Hex sha256 of where a link leads."""
    import hashlib

    return hashlib.sha256(os.readlink(name, dir_fd=directory)).hexdigest().encode()


def everywhere(work: int, places: dict[bytes, int]) -> list[bytes]:
    """The manifest of the work area, which is `.` itself, and of all else that commands can write
    to, by absolute paths.

    Args:
        work: the work area.
        places: absolute path -> directory. The first holds the work area and the temporary
            directory; that one is `/tmp`, unless another place has this path.

    Raises:
        OSError: EFBIG, over the limits of `manifest` in all places together.
    """
    fields = [b".", *_itself(work), *manifest(work, before=[])]
    home, *_ = places
    for place, directory in places.items():
        fields += [place, *_itself(directory)]
        has_work = place == home
        rows = manifest(directory, b"work" if has_work else b"", fields)
        for at in range(0, len(rows), 5):
            path = place + b"/" + rows[at]
            if has_work and rows[at] == b"work":
                continue
            if has_work and rows[at].partition(b"/")[0] == b"tmp" and b"/tmp" not in places:
                path = b"/" + rows[at]
            fields += [path, *rows[at + 1 : at + 5]]
    return fields


def _itself(directory: int) -> list[bytes]:
    """Kind, permission bits, and neither size nor hash, of an open directory."""
    return [b"dir", b"%d" % stat.S_IMODE(os.fstat(directory).st_mode), b"0", b""]
