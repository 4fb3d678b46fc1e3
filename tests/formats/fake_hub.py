"""A hub on this machine: the part of the Hugging Face hub's HTTP interface that pushing and pulling a model needs.

Repositories have branches and commits, are public, private or gated, and keep large files apart by their SHA-256, as
the hub's LFS does. One token may do everything, another may only read what is public. The real client speaks to it,
pointed there by `HF_ENDPOINT`; `HF_HUB_DISABLE_XET=1` makes it use LFS instead of the hub's own chunk store.
"""

import base64
import hashlib
import json
import os
import re
import subprocess
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any
from urllib.parse import unquote, urlsplit

ROOT = Path(__file__).resolve().parents[2]
OWNER, GUEST = "hf_owner", "hf_guest"


@dataclass
class Repository:
    """Files of every commit, the newest commit of every branch, and who may see them."""

    private: bool = False
    gated: bool = False
    commits: dict[str, dict[str, bytes]] = field(default_factory=dict)
    branches: dict[str, str] = field(default_factory=dict)
    messages: list[str] = field(default_factory=list)

    def commit(self, branch: str, files: dict[str, bytes], message: str) -> str:
        """Make `files` the whole content of a branch."""
        digest = hashlib.sha1(repr((len(self.commits), branch, sorted(files))).encode()).hexdigest()
        self.commits[digest] = files
        self.branches[branch] = digest
        self.messages.append(message)
        return digest

    def revision(self, name: str) -> str | None:
        """The commit that a branch or a commit's own name means."""
        return self.branches.get(name, name if name in self.commits else None)

    def files(self, name: str = "main") -> dict[str, bytes]:
        """What a revision holds."""
        commit = self.revision(name)
        assert commit is not None
        return self.commits[commit]


class FakeHub:
    """The state behind the server: repositories by `owner/name`, uploaded large files, and every request made."""

    def __init__(self) -> None:
        self.repositories: dict[str, Repository] = {}
        self.large_files: dict[str, bytes] = {}
        self.requests: list[str] = []
        self.bytes_sent = 0
        self.url = ""

    def add(self, name: str, files: dict[str, bytes], *, private: bool = False, gated: bool = False) -> Repository:
        """A repository with one commit on main."""
        repository = self.repositories[name] = Repository(private, gated)
        repository.commit("main", files, "first")
        return repository


class RefusedError(Exception):
    """An answer other than success: status, the hub's error code, and a text."""

    def __init__(self, status: int, code: str = "", text: str = "") -> None:
        super().__init__(text)
        self.status, self.code, self.text = status, code, text or code


def handler_of(hub: FakeHub) -> type[BaseHTTPRequestHandler]:
    """The request handler class of one hub."""

    class Handler(_Handler):
        state = hub

    return Handler


class _Handler(BaseHTTPRequestHandler):
    state: FakeHub
    protocol_version = "HTTP/1.1"

    def log_message(self, *_: object) -> None:
        """Say nothing."""

    def do_GET(self) -> None:
        self._answer()

    do_HEAD = do_POST = do_PUT = do_GET

    def _answer(self) -> None:
        self.path = unquote(urlsplit(self.path).path)
        self.state.requests.append(f"{self.command} {self.path}")
        body = self.rfile.read(int(self.headers.get("Content-Length") or 0))
        try:
            for pattern, methods, action in ROUTES:
                found = re.fullmatch(pattern, self.path)
                if found and self.command in methods:
                    getattr(self, action)(body, *found.groups())
                    return
            raise RefusedError(404, text=f"no such path {self.path}")
        except RefusedError as refusal:
            headers = {"X-Error-Code": refusal.code, "X-Error-Message": refusal.text}
            self._send(refusal.status, json.dumps({"error": refusal.text}).encode(), headers)

    def _send(self, status: int, content: bytes, headers: dict[str, str] | None = None) -> None:
        self.send_response(status)
        for name, value in {"Content-Length": str(len(content)), **(headers or {})}.items():
            self.send_header(name, value)
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(content)
            self.state.bytes_sent += len(content)

    def _json(self, value: object) -> None:
        self._send(200, json.dumps(value).encode(), {"Content-Type": "application/json"})

    @property
    def _token(self) -> str:
        return (self.headers.get("Authorization") or "").removeprefix("Bearer ")

    def _must_write(self) -> None:
        if self._token == GUEST:
            raise RefusedError(403, text="this token may only read")
        if self._token != OWNER:
            raise RefusedError(401, text="Invalid credentials in Authorization header")

    def _repository(self, name: str) -> Repository:
        repository = self.state.repositories.get(name)
        if repository is None or (repository.private and self._token != OWNER):
            raise RefusedError(404 if self._token else 401, "RepoNotFound", "Repository not found")
        return repository

    def _at(self, name: str, revision: str) -> tuple[Repository, str, dict[str, bytes]]:
        repository = self._repository(name)
        commit = repository.revision(revision)
        if commit is None:
            raise RefusedError(404, "RevisionNotFound", f"Invalid rev id: {revision}")
        return repository, commit, repository.commits[commit]

    def who_am_i(self, _: bytes) -> None:
        self._must_write()
        self._json({"name": "somebody", "type": "user", "orgs": []})

    def create(self, body: bytes) -> None:
        self._must_write()
        asked = json.loads(body)
        name = f"{asked.get('organization') or 'somebody'}/{asked['name']}"
        if name in self.state.repositories:
            raise RefusedError(409, text="You already created this model repo")
        private = asked.get("visibility") == "private" or bool(asked.get("private"))
        self.state.add(name, {".gitattributes": b""}, private=private)
        self._json({"url": f"{self.state.url}/{name}", "name": name})

    def info(self, _: bytes, name: str, revision: str | None = None) -> None:
        repository, commit, files = self._at(name, revision or "main")
        self._json(
            {
                "id": name,
                "modelId": name,
                "sha": commit,
                "private": repository.private,
                "gated": "auto" if repository.gated else False,
                "siblings": [{"rfilename": file} for file in sorted(files)],
            }
        )

    def tree(self, _: bytes, name: str, revision: str) -> None:
        _repository, _commit, files = self._at(name, revision)
        entries = []
        for file, content in sorted(files.items()):
            entry = {"type": "file", "path": file, "size": len(content), "oid": hashlib.sha1(content).hexdigest()}
            if file.endswith(".safetensors"):
                entry["lfs"] = {"oid": hashlib.sha256(content).hexdigest(), "size": len(content), "pointerSize": 130}
            entries.append(entry)
        self._json(entries)

    def branch(self, _: bytes, name: str, branch: str) -> None:
        self._must_write()
        repository = self._repository(name)
        if branch in repository.branches:
            raise RefusedError(409, text="Reference already exists")
        repository.branches[branch] = repository.branches["main"]
        self._json({})

    def preupload(self, body: bytes, name: str, revision: str) -> None:
        self._must_write()
        self._at(name, revision)
        files = [file["path"] for file in json.loads(body)["files"]]
        modes = {file: "lfs" if file.endswith(".safetensors") else "regular" for file in files}
        self._json({"files": [{"path": p, "uploadMode": mode, "shouldIgnore": False} for p, mode in modes.items()]})

    def validate_card(self, _: bytes) -> None:
        self._json({"errors": [], "warnings": []})

    def large_batch(self, body: bytes, name: str) -> None:
        self._must_write()
        self._repository(name)
        objects = []
        for asked in json.loads(body)["objects"]:
            answer = {"oid": asked["oid"], "size": asked["size"]}
            if asked["oid"] not in self.state.large_files:
                answer["actions"] = {"upload": {"href": f"{self.state.url}/lfs/{asked['oid']}"}}
            objects.append(answer)
        self._json({"transfer": "basic", "objects": objects})

    def large_file(self, body: bytes, oid: str) -> None:
        if hashlib.sha256(body).hexdigest() != oid:
            raise RefusedError(400, text="the content is not that of its SHA-256")
        self.state.large_files[oid] = body
        self._send(200, b"")

    def commit(self, body: bytes, name: str, revision: str) -> None:
        self._must_write()
        repository, _commit, before = self._at(name, revision)
        files, message = dict(before), ""
        for line in body.splitlines():
            item = json.loads(line)
            value = item["value"]
            if item["key"] == "header":
                message = value["summary"]
            elif item["key"] == "file":
                files[value["path"]] = base64.b64decode(value["content"])
            elif item["key"] == "lfsFile":
                files[value["path"]] = self.state.large_files[value["oid"]]
            elif item["key"] == "deletedFile":
                del files[value["path"]]
            else:
                raise RefusedError(400, text=f"unknown operation {item['key']}")
        digest = repository.commit(revision, files, message)
        self._json({"commitUrl": f"{self.state.url}/{name}/commit/{digest}", "commitOid": digest, "success": True})

    def resolve(self, _: bytes, name: str, revision: str, file: str) -> None:
        repository, commit, files = self._at(name, revision)
        if repository.gated and self._token != OWNER:
            raise RefusedError(403, "GatedRepo", "Access to this model is restricted")
        if file not in files:
            raise RefusedError(404, "EntryNotFound", f"{file} does not exist")
        content = files[file]
        headers = {
            "ETag": f'"{hashlib.sha256(content).hexdigest()}"',
            "X-Repo-Commit": commit,
            "Accept-Ranges": "bytes",
        }
        part = re.fullmatch(r"bytes=(\d+)-(\d*)", self.headers.get("Range") or "")
        if part is None:
            self._send(200, content, headers)
            return
        start, end = int(part[1]), min(int(part[2] or len(content)), len(content) - 1)
        headers["Content-Range"] = f"bytes {start}-{end}/{len(content)}"
        self._send(206, content[start : end + 1], headers)


_REPO, _REV = r"([^/]+/[^/]+)", r"([^/]+)"
ROUTES: list[tuple[str, tuple[str, ...], str]] = [
    (r"/api/whoami-v2", ("GET",), "who_am_i"),
    (r"/api/repos/create", ("POST",), "create"),
    (r"/api/validate-yaml", ("POST",), "validate_card"),
    (rf"/api/models/{_REPO}", ("GET",), "info"),
    (rf"/api/models/{_REPO}/revision/{_REV}", ("GET",), "info"),
    (rf"/api/models/{_REPO}/tree/{_REV}", ("GET",), "tree"),
    (rf"/api/models/{_REPO}/branch/{_REV}", ("POST",), "branch"),
    (rf"/api/models/{_REPO}/preupload/{_REV}", ("POST",), "preupload"),
    (rf"/api/models/{_REPO}/commit/{_REV}", ("POST",), "commit"),
    (rf"/{_REPO}\.git/info/lfs/objects/batch", ("POST",), "large_batch"),
    (r"/lfs/([0-9a-f]{64})", ("PUT",), "large_file"),
    (rf"/{_REPO}/resolve/{_REV}/(.+)", ("GET", "HEAD"), "resolve"),
]


@contextmanager
def running_hub() -> Iterator[FakeHub]:
    """Serve a fresh hub on a free port of this machine until the block ends."""
    hub = FakeHub()
    server = ThreadingHTTPServer(("127.0.0.1", 0), handler_of(hub))
    hub.url = f"http://127.0.0.1:{server.server_address[1]}"
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.02})
    thread.start()
    try:
        yield hub
    finally:
        server.shutdown()
        server.server_close()
        thread.join()


PRELUDE = """
import json, sys
from pathlib import Path
from speculators.errors import SpeculatorsError
from speculators.formats.hub import describe, fetch_config, resolve
from speculators.formats.publish import prepare, publish
from speculators.models import family_config

found = {}

def attempt(name, action):
    try:
        found[name] = action()
    except SpeculatorsError as error:
        found[name] = {"error": str(error), "code": getattr(error, "code", None)}

"""


def with_client(hub: FakeHub, home: Path, code: str, *arguments: object, **environment: str) -> dict[str, Any]:
    """Run code in a fresh process whose hub is this one; its `attempt(name, action)` collects results and refusals.

    The client reads its settings once a process, hence the new one. `home` holds its cache, so that calls with one home
    share it. Results must be JSON.
    """
    settings = {
        "HF_ENDPOINT": hub.url,
        "HF_HOME": str(home),
        "HF_HUB_OFFLINE": "0",
        "HF_HUB_DISABLE_XET": "1",
        "HF_HUB_DISABLE_PROGRESS_BARS": "1",
        "OMP_NUM_THREADS": "1",
    }
    kept = {name: value for name, value in os.environ.items() if not name.startswith("HF_")}
    done = subprocess.run(
        [sys.executable, "-c", f"{PRELUDE}{code}\nprint(json.dumps(found))", *map(str, arguments)],
        env=kept | settings | environment,
        capture_output=True,
        text=True,
        cwd=ROOT,
    )
    assert done.returncode == 0, done.stderr
    answer: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return answer
