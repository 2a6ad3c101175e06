"""The page at /, and the files that it loads from /page/: what lies in the folder `page`, and nothing else."""

from __future__ import annotations

from pathlib import Path

from fastapi import APIRouter
from starlette.responses import FileResponse, Response

from draftproof.serve.errors import ApiError

FOLDER = Path(__file__).parent / "page"
TYPES = {".html": "text/html", ".js": "text/javascript", ".css": "text/css", ".svg": "image/svg+xml"}
HEADERS = {"Cache-Control": "no-cache", "X-Content-Type-Options": "nosniff"}


def page_routes(folder: Path = FOLDER) -> APIRouter:
    router = APIRouter(include_in_schema=False)
    files = {path.name: path for path in folder.glob("*") if path.suffix in TYPES} if folder.is_dir() else {}

    @router.get("/")
    async def index() -> Response:
        return answer("index.html")

    @router.get("/page/{name}")
    async def file(name: str) -> Response:
        return answer(name)

    def answer(name: str) -> Response:
        if name not in files:
            raise ApiError(404, "there is no such page", code="not_found")
        path = files[name]
        return FileResponse(path, media_type=f"{TYPES[path.suffix]}; charset=utf-8", headers=HEADERS)

    return router
