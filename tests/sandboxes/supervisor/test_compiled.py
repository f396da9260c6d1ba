"""The supervisor's archive, compiled by the Python that runs it."""

import asyncio
import io
import subprocess
import sys
import zipfile

import pytest
from conftest import require

from agentrl.sandboxes import BubblewrapBackend, DockerBackend, SandboxLimits
from agentrl.sandboxes.docker.images import ARCHIVE
from agentrl.sandboxes.launch import COMPILE, compiled, program


def test_python_runs_the_compiled_modules_and_not_the_source(tmp_path):
    archive = tmp_path / "supervisor.pyz"
    archive.write_bytes(compiled(sys.executable))
    look = (
        f"import sys; sys.path.insert(0, {str(archive)!r});"
        "from agentrl.sandboxes.supervisor import serve; print(serve.__cached__, serve.__file__)"
    )
    said = subprocess.run(
        [sys.executable, "-I", "-S", "-B", "-c", look], capture_output=True, text=True, check=True
    )
    assert said.stdout.split()[1].endswith("serve.pyc")


def test_another_pythons_modules_are_passed_over_for_the_source(tmp_path):
    archive, told = tmp_path / "supervisor.pyz", io.BytesIO()
    with (
        zipfile.ZipFile(io.BytesIO(compiled(sys.executable))) as made,
        zipfile.ZipFile(told, "w") as other,
    ):
        for name in made.namelist():
            data = made.read(name)
            other.writestr(name, b"\0\0\r\n" + data[4:] if name.endswith(".pyc") else data)
    archive.write_bytes(told.getvalue())
    look = (
        f"import sys; sys.path.insert(0, {str(archive)!r});"
        "from agentrl.sandboxes.supervisor import serve; print(serve.__file__)"
    )
    said = subprocess.run(
        [sys.executable, "-I", "-S", "-B", "-c", look], capture_output=True, text=True, check=True
    )
    assert said.stdout.strip().endswith("serve.py")


def test_where_zipfile_does_not_work_the_archive_stays_as_it_is(tmp_path):
    source, target = tmp_path / "source.pyz", tmp_path / "target.pyz"
    source.write_bytes(program())
    without = "import sys; sys.modules['zipfile'] = None; " + COMPILE
    subprocess.run([sys.executable, "-I", "-S", "-B", "-c", without, source, target], check=True)
    assert target.read_bytes() == program()


def test_where_compiling_fails_the_archive_stays_as_it_is_and_a_warning_says_so_once(recwarn):
    compiled.cache_clear()
    with pytest.warns(RuntimeWarning, match="/bin/false cannot compile"):
        assert compiled("/bin/false") == program()
    recwarn.clear()
    assert compiled("/bin/false") == program() and not recwarn


@pytest.mark.parametrize("kind", ["bubblewrap", "docker"])
def test_a_sandbox_has_the_program_compiled_for_its_python(kind):
    require(kind)
    backend, archive = {
        "bubblewrap": (BubblewrapBackend(), "/supervisor.pyz"),
        "docker": (DockerBackend(), ARCHIVE),
    }[kind]
    look = (
        f"import importlib.util as u, zipfile; made = zipfile.ZipFile({archive!r});"
        "codes = [made.read(n)[:4] for n in made.namelist() if n.endswith('c')];"
        "print(len(codes) > 15 and set(codes) == {u.MAGIC_NUMBER})"
    )

    async def said():
        box = await backend.open("agent", SandboxLimits(memory_mb=128, disk_mb=8))
        try:
            return (await box.exec(["/usr/bin/python3", "-c", look])).stdout
        finally:
            await box.close()

    assert asyncio.run(said()) == b"True\n"
