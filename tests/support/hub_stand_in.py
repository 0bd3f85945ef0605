"""A small Hugging Face hub on loopback: what `huggingface_hub` asks it for when it reads, makes and fills repositories.

Large files go the way of git-lfs. The real hub also offers Xet, which clients then prefer: tests turn that off.
"""

from __future__ import annotations

import base64
import contextlib
import hashlib
import json
import threading
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

import pytest
import uvicorn
from prompt_server import PromptServer
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import JSONResponse, RedirectResponse, Response
from starlette.routing import Route

TOKEN = "hf_token_of_the_tests"


@dataclass
class Repository:
    """One repository. Its only branch is `main`; `commits` are all states that it had, the newest last."""

    commits: dict[str, dict[str, bytes]] = field(default_factory=dict)
    private: bool = False
    gated: bool = False  # everybody may look at it, and only some may download

    def commit(self, files: dict[str, bytes]) -> str:
        sha = hashlib.sha1(json.dumps([len(self.commits), sorted(files)]).encode()).hexdigest()
        self.commits[sha] = files
        return sha

    def find(self, revision: str) -> tuple[str, dict[str, bytes]] | None:
        if revision == "main":
            return next(reversed(self.commits.items()), None)
        files = self.commits.get(revision)
        return None if files is None else (revision, files)


class Hub:
    """The hub's repositories, and what it was asked for."""

    def __init__(self) -> None:
        self.repositories: dict[str, Repository] = {}
        self.asked: list[str] = []
        self.tokens: set[str | None] = set()
        self.url = ""
        self._uploaded: dict[str, bytes] = {}

    @property
    def app(self) -> Starlette:
        api, model = "/api/models/{owner}/{name}", "/{owner}/{name}"
        return Starlette(
            routes=[
                Route(api, self._info),
                Route(api + "/revision/{revision:path}", self._info),
                Route(api + "/tree/{revision:path}", self._tree),
                Route(model + "/resolve/{revision}/{path:path}", self._file),
                Route("/lfs/{oid}", self._large_file),
                Route("/api/repos/create", self._create, methods=["POST"]),
                Route("/api/validate-yaml", self._validate, methods=["POST"]),
                Route(api + "/preupload/{revision}", self._preupload, methods=["POST"]),
                Route("/{owner}/{name}.git/info/lfs/objects/batch", self._lfs_batch, methods=["POST"]),
                Route("/lfs/{oid}", self._lfs_put, methods=["PUT"]),
                Route(api + "/commit/{revision}", self._commit, methods=["POST"]),
            ]
        )

    def _found(self, request: Request) -> tuple[Repository, str, dict[str, bytes]] | Response:
        self._note(request)
        repository = self.repositories.get("{owner}/{name}".format(**request.path_params))
        token = self._token(request)
        if token not in (None, TOKEN):
            return refusal(401, None, "Invalid credentials in Authorization header")
        if repository is None or (repository.private and token is None):
            return refusal(404, "RepoNotFound") if token else refusal(401, None, "Invalid username or password.")
        found = repository.find(request.path_params.get("revision", "main"))
        return refusal(404, "RevisionNotFound") if found is None else (repository, *found)

    def _note(self, request: Request) -> None:
        self.asked.append(f"{request.method} {request.url.path}")
        self.tokens.add(self._token(request))

    @staticmethod
    def _token(request: Request) -> str | None:
        return request.headers.get("authorization", "").removeprefix("Bearer ") or None

    async def _info(self, request: Request) -> Response:
        if isinstance(found := self._found(request), Response):
            return found
        _, sha, files = found
        siblings = [{"rfilename": path, "size": len(data)} for path, data in files.items()]
        name = "{owner}/{name}".format(**request.path_params)
        return JSONResponse({"id": name, "modelId": name, "sha": sha, "siblings": siblings})

    async def _tree(self, request: Request) -> Response:
        if isinstance(found := self._found(request), Response):
            return found
        _, _, files = found
        rows = [
            {"type": "file", "path": path, "size": len(data), "oid": hashlib.sha1(data).hexdigest()}
            for path, data in files.items()
        ]
        return JSONResponse(rows)

    async def _file(self, request: Request) -> Response:
        if isinstance(found := self._found(request), Response):
            return found
        repository, sha, files = found
        if repository.gated:
            return refusal(403 if self._token(request) else 401, "GatedRepo")
        if (data := files.get(request.path_params["path"])) is None:
            return refusal(404, "EntryNotFound")
        headers = {"x-repo-commit": sha, "etag": f'"{hashlib.sha256(data).hexdigest()}"'}
        if request.path_params["path"].endswith(".safetensors"):
            oid = hashlib.sha256(data).hexdigest()
            self._uploaded[oid] = data
            headers |= {"x-linked-size": str(len(data)), "x-linked-etag": headers.pop("etag")}
            # At another host, as the hub's: clients do not follow it there before they have read these headers.
            return RedirectResponse(f"{self.url.replace('127.0.0.1', 'localhost')}/lfs/{oid}", 302, headers=headers)
        return Response(data, headers=headers)

    async def _large_file(self, request: Request) -> Response:
        self._note(request)
        return Response(self._uploaded[request.path_params["oid"]])

    async def _create(self, request: Request) -> Response:
        self._note(request)
        if self._token(request) != TOKEN:
            return refusal(401, None, "Invalid credentials in Authorization header")
        asked = await request.json()
        name = f"{asked['organization']}/{asked['name']}"
        if name in self.repositories:
            return JSONResponse({"error": "You already created this model repo"}, 409)
        private = asked.get("visibility") == "private" or asked.get("private") is True
        self.repositories[name] = Repository(private=private)
        self.repositories[name].commit({".gitattributes": b"*.safetensors filter=lfs\n"})
        return JSONResponse({"url": f"{self.url}/{name}", "name": name, "id": name})

    async def _validate(self, request: Request) -> Response:
        self._note(request)
        return JSONResponse({"errors": [], "warnings": []})

    async def _preupload(self, request: Request) -> Response:
        if isinstance(found := self._found(request), Response):
            return found
        files = [
            {
                "path": each["path"],
                "uploadMode": "lfs" if each["path"].endswith(".safetensors") else "regular",
                "shouldIgnore": False,
            }
            for each in (await request.json())["files"]
        ]
        return JSONResponse({"files": files})

    async def _lfs_batch(self, request: Request) -> Response:
        self._note(request)
        objects = [
            {**each, "actions": {"upload": {"href": f"{self.url}/lfs/{each['oid']}"}}}
            for each in (await request.json())["objects"]
        ]
        return JSONResponse({"transfer": "basic", "objects": objects})

    async def _lfs_put(self, request: Request) -> Response:
        self._note(request)
        data = await request.body()
        assert hashlib.sha256(data).hexdigest() == request.path_params["oid"]
        self._uploaded[request.path_params["oid"]] = data
        return Response()

    async def _commit(self, request: Request) -> Response:
        if isinstance(found := self._found(request), Response):
            return found
        repository, _, files = found
        new = dict(files)
        for line in (await request.body()).splitlines():
            said = json.loads(line)
            match said["key"], said["value"]:
                case "file", value:
                    new[value["path"]] = base64.b64decode(value["content"])
                case "lfsFile", value:
                    new[value["path"]] = self._uploaded[value["oid"]]
                case "deletedFile", value:
                    del new[value["path"]]
        sha = repository.commit(new)
        name = "{owner}/{name}".format(**request.path_params)
        return JSONResponse({"commitUrl": f"{self.url}/{name}/commit/{sha}", "commitOid": sha})


def refusal(status: int, code: str | None, message: str = "no") -> Response:
    headers = {"x-error-message": message} | ({"x-error-code": code} if code else {})
    return JSONResponse({"error": message}, status, headers=headers)


@contextlib.contextmanager
def reached(monkeypatch: pytest.MonkeyPatch, cache: Path) -> Iterator[Hub]:
    """Run a hub that this process's client asks, without a token and with a cache of its own."""
    from huggingface_hub import constants

    with running() as hub:
        changes = {
            "ENDPOINT": hub.url,
            "HUGGINGFACE_CO_URL_TEMPLATE": hub.url + "/{repo_id}/resolve/{revision}/{filename}",
            "HF_HUB_CACHE": str(cache),
            "HF_HUB_OFFLINE": False,
            "HF_HUB_DISABLE_XET": True,
        }
        for name, value in changes.items():
            monkeypatch.setattr(constants, name, value)
        monkeypatch.delenv("HF_TOKEN", raising=False)
        yield hub


@contextlib.contextmanager
def running() -> Iterator[Hub]:
    """Run a hub on a thread. Its `url` is what HF_ENDPOINT would say."""
    hub = Hub()
    server = PromptServer(uvicorn.Config(hub.app, port=0, log_level="error", lifespan="off"))
    config = server.config
    socket = config.bind_socket()
    socket.listen()  # else who asks before the thread runs is refused
    hub.url = f"http://127.0.0.1:{socket.getsockname()[1]}"
    thread = threading.Thread(target=server.run, kwargs={"sockets": [socket]}, name="hub")
    thread.start()
    try:
        yield hub
    finally:
        server.end()
        thread.join()
        socket.close()
