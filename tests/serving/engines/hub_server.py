"""A hub on loopback that speaks what huggingface_hub's client asks for: revisions, trees, heads and files."""

import asyncio
import hashlib
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

from aiohttp import web

FIRST, SECOND = "a" * 40, "b" * 40


@dataclass
class Hub:
    """What it has, and how it misbehaves. Changes count at once."""

    commits: dict[str, dict[str, bytes]]
    """Files by commit."""
    branches: dict[str, str] = field(default_factory=lambda: {"main": FIRST})
    name: str = "org/tiny"
    token: str | None = None
    """Asked for of those who want files: the model is gated."""
    cut_bytes: int | None = None
    """A large file's connection ends after so many."""
    lie_bytes: int = 0
    """What the tree says more than a file has."""
    url: str = ""
    asked: list[str] = field(default_factory=list)
    """Method and path of every request."""
    tokens: set[str] = field(default_factory=set)

    def app(self) -> web.Application:
        app = web.Application(middlewares=[self._seen])
        app.router.add_get("/api/models/{org}/{name}/revision/{revision}", self._info)
        app.router.add_get("/api/models/{org}/{name}", self._info)
        app.router.add_get("/api/models/{org}/{name}/tree/{revision}", self._tree)
        app.router.add_get("/{org}/{name}/resolve/{revision}/{file:.+}", self._file)
        return app

    @web.middleware
    async def _seen(self, request: web.Request, handler: Any) -> web.StreamResponse:
        self.asked.append(f"{request.method} {request.path}")
        if "Authorization" in request.headers:
            self.tokens.add(request.headers["Authorization"])
        if f"{request.match_info.get('org')}/{request.match_info.get('name')}" != self.name:
            return self._failed(404, "RepoNotFound", "Repository not found")
        answer: web.StreamResponse = await handler(request)
        return answer

    def _failed(self, status: int, code: str, text: str) -> web.Response:
        return web.json_response(
            {"error": text}, status=status, headers={"X-Error-Code": code, "X-Error-Message": text}
        )

    def _commit(self, request: web.Request) -> str | None:
        revision = request.match_info.get("revision", "main")
        commit = self.branches.get(revision, revision)
        return commit if commit in self.commits else None

    async def _info(self, request: web.Request) -> web.Response:
        commit = self._commit(request)
        if commit is None:
            return self._failed(404, "RevisionNotFound", "Invalid rev id")
        siblings = [
            {"rfilename": name, "size": len(content) + self.lie_bytes, "blobId": _oid(content)}
            for name, content in self.commits[commit].items()
        ]
        return web.json_response({"id": self.name, "modelId": self.name, "sha": commit, "siblings": siblings})

    async def _tree(self, request: web.Request) -> web.Response:
        commit = self._commit(request)
        if commit is None:
            return self._failed(404, "RevisionNotFound", "Invalid rev id")
        files = [
            {"type": "file", "path": name, "size": len(content) + self.lie_bytes, "oid": _oid(content)}
            for name, content in self.commits[commit].items()
        ]
        return web.json_response(files)

    async def _file(self, request: web.Request) -> web.StreamResponse:
        if self.token is not None and request.headers.get("Authorization") != f"Bearer {self.token}":
            return self._failed(403, "GatedRepo", "Access to model is restricted")
        commit = self._commit(request)
        content = None if commit is None else self.commits[commit].get(request.match_info["file"])
        if commit is None or content is None:
            return self._failed(404, "EntryNotFound", "Entry not found")
        headers = {"X-Repo-Commit": commit, "ETag": f'"{_oid(content)}"', "Accept-Ranges": "bytes"}
        if request.method == "HEAD":
            return web.Response(headers={**headers, "Content-Length": str(len(content))})
        start = int(request.headers.get("Range", "bytes=0-").removeprefix("bytes=").split("-")[0])
        response = web.StreamResponse(status=206 if start else 200, headers=headers)
        response.content_length = len(content) - start
        await response.prepare(request)
        if self.cut_bytes is not None and len(content) > self.cut_bytes:
            await response.write(content[start : start + self.cut_bytes])
            assert request.transport is not None
            request.transport.abort()
            return response
        await response.write(content[start:])
        return response


def _oid(content: bytes) -> str:
    return hashlib.sha1(content).hexdigest()


@contextmanager
def serving(hub: Hub) -> Iterator[Hub]:
    """The hub at `hub.url`, in a thread."""
    loop = asyncio.new_event_loop()
    started = threading.Event()

    async def run() -> web.AppRunner:
        runner = web.AppRunner(hub.app())
        await runner.setup()
        site = web.TCPSite(runner, "127.0.0.1", 0)
        await site.start()
        hub.url = f"http://127.0.0.1:{runner.addresses[0][1]}"
        return runner

    runner = loop.run_until_complete(run())

    def turn() -> None:
        started.set()
        loop.run_forever()
        loop.run_until_complete(runner.cleanup())

    thread = threading.Thread(target=turn)
    thread.start()
    started.wait()
    try:
        yield hub
    finally:
        loop.call_soon_threadsafe(loop.stop)
        thread.join()
        loop.close()
