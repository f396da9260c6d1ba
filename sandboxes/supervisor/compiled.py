"""The archive of this program with its modules compiled by the Python that will run them: a sandbox
then starts in half of the time. Another Python takes the source, which stays beside them. Where
zipfile does not work, as in Debian's python3-minimal, all stays source.
"""

from __future__ import annotations

import importlib.util
import io
import marshal
from contextlib import suppress

# What stands before the code in a .pyc file (PEP 552): that there is no source to look at, and
# eight bytes for its hash or time, which nobody then reads.
_UNCHECKED = (1).to_bytes(4, "little") + bytes(8)


def write(source: str, target: str) -> None:
    """Write the archive at `source` to `target`, which may be the same file."""
    with open(source, "rb") as file:
        archive = file.read()
    with suppress(ImportError):
        archive = _compiled(archive)
    with open(target, "wb") as file:
        file.write(archive)


def _compiled(archive: bytes) -> bytes:
    import zipfile

    buffer = io.BytesIO()
    with zipfile.ZipFile(io.BytesIO(archive)) as given, zipfile.ZipFile(buffer, "w") as made:
        for name in (name for name in given.namelist() if name.endswith(".py")):
            text = given.read(name)
            code = marshal.dumps(compile(text, name, "exec", dont_inherit=True))
            head = importlib.util.MAGIC_NUMBER + _UNCHECKED
            made.writestr(zipfile.ZipInfo(name), text)
            made.writestr(zipfile.ZipInfo(name + "c"), head + code)
    return buffer.getvalue()
