"""A network outside with one server, and the tools that an agent has in a sandbox."""

from __future__ import annotations

from contextlib import asynccontextmanager, contextmanager
from types import SimpleNamespace

from helpers import wait_for

from agentrl.sandboxes import Allow, DockerBackend, SandboxLimits
from agentrl.sandboxes.contract.room import python
from agentrl.sandboxes.docker.backend import first_daemon
from agentrl.sandboxes.docker.daemon import remove
from agentrl.sandboxes.docker.owner import LABEL, Owner

LIMITS = SandboxLimits(memory_mb=256, disk_mb=16, processes=48, open_files=64, output_bytes=16_000)
SERVER = """
import http.server, socket, threading
asked = []
def names():
    sock = socket.socket(socket.AF_INET, socket.SOCK_DGRAM)
    sock.bind(("", 53))
    while True:
        asked.append(sock.recv(512))
def echo():
    for client in iter(lambda: listener.accept()[0], None):
        threading.Thread(target=talk, args=(client,)).start()
def talk(client):
    try:
        while data := client.recv(65536):
            client.sendall(data)
    except OSError:
        pass
class Page(http.server.BaseHTTPRequestHandler):
    def do_GET(self):
        size = int(self.headers["Content-Length"] or 0)
        text = f"{self.command} {self.path} {self.headers['Host']} {len(asked)} ".encode()
        text += self.rfile.read(size)
        if self.path == "/large":
            text = b"x" * 3_000_000
        self.send_response(200)
        self.send_header("Content-Length", str(len(text)))
        self.end_headers()
        self.wfile.write(text)
    do_POST = do_GET
listener = socket.create_server(("", 443))
threading.Thread(target=names).start()
threading.Thread(target=echo).start()
print("ready", flush=True)
http.server.ThreadingHTTPServer(("", 80), Page).serve_forever()
"""
# What an agent has at hand: fetch through the proxy, a tunnel through it, a socket past it, a
# question to a resolver.
TOOLS = """
import os, socket, struct, urllib.request, urllib.error
PROXY = (os.environ["http_proxy"].split("/")[2].split(":")[0], 3128)
def fetch(url, data=None):
    try: return urllib.request.urlopen(url, data, timeout=60).read().decode()
    except urllib.error.HTTPError as error: return f"{error.code} {error.read().decode()}"
    except OSError as error: return f"failed: {error}"
def tunnel(target, data=b""):
    sock = socket.create_connection(PROXY, timeout=60)
    sock.sendall(b"CONNECT %s HTTP/1.1\\r\\n\\r\\n" % target.encode())
    head = sock.recv(1000)
    if b" 200 " not in head.split(b"\\r\\n")[0] or not data: return head.decode()
    sock.sendall(data)
    return sock.recv(1000).decode()
def direct(host, port, wait=1.0):
    try: socket.create_connection((host, port), timeout=wait).close()
    except OSError as error: return "failed"
    return "connected"
def ask(server, name, wait=1.5):
    parts = name.encode().split(b".")
    question = b"".join(bytes([len(part)]) + part for part in parts) + b"\\0\\0\\1\\0\\1"
    try:
        sock = socket.socket(socket.AF_INET, socket.SOCK_DGRAM)
        sock.settimeout(wait)
        sock.sendto(b"\\1\\1\\1\\0\\0\\1\\0\\0\\0\\0\\0\\0" + question, (server, 53))
        answer = sock.recv(512)
    except OSError: return "failed"
    return "answered" if struct.unpack(">H", answer[6:8])[0] else "failed"
"""


def left_behind(run_or_pid):
    """Containers and networks with a label of ours, by name."""
    api, wanted = first_daemon().api(), {"label": [LABEL, run_or_pid]}
    return [row["Id"][:12] for row in api.containers(all=True, filters=wanted)] + [
        row["Name"] for row in api.networks(filters=wanted)
    ]


@contextmanager
def outside_world():
    """A network outside with one server that has three names in it."""
    api, labels = first_daemon().api(), Owner.me().labels(3600) | {"agentrl.test": "world"}
    name = f"agentrl-test-{labels['agentrl.run']}"
    outside = api.create_network(name, driver="bridge", labels=labels)["Id"]
    server = None
    try:
        aliases = ["allowed.test", "other.test", "below.allowed.test"]
        server = api.create_container(
            "agentrl-agent",
            ["python3", "-c", SERVER],
            labels=labels,
            host_config=api.create_host_config(network_mode=name, mem_limit="128m", pids_limit=64),
            networking_config=api.create_networking_config(
                {name: api.create_endpoint_config(aliases=aliases)}
            ),
        )["Id"]
        api.start(server)
        wait_for(lambda: b"ready" in api.logs(server))
        net = api.inspect_container(server)["NetworkSettings"]["Networks"][name]
        yield SimpleNamespace(network=name, address=net["IPAddress"], gateway=net["Gateway"])
    finally:
        if server is not None:
            remove(api, server)
        api.remove_network(outside)


@asynccontextmanager
async def opened(world, *hosts, private=("allowed.test",), **options):
    allow = Allow(*hosts, private=private, outside=world.network, **options)
    box = await DockerBackend(network=allow).open("agent", LIMITS)
    try:
        yield box
    finally:
        await box.close()


async def run(box, code, timeout_s=100.0):
    done = await python(box, TOOLS + code, timeout_s=timeout_s)
    assert done.exit_code == 0, done.stderr.decode()
    return done.stdout.decode().splitlines()


def seen(rows):
    return [(row.method, row.host, row.port, row.allowed) for row in rows]
