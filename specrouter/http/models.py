"""`GET /v1/models`: the target alone, since its output is served. `GET /version`."""

from __future__ import annotations

from typing import Any

from fastapi import FastAPI
from fastapi.responses import JSONResponse, Response

from specrouter.http.answer_schemas import ModelList, ModelObject, VersionAnswer
from specrouter.http.openapi import MODELS, described
from specrouter.http.service import Service
from specrouter.version import __version__


def add_models(app: FastAPI, service: Service) -> None:
    @app.get("/v1/models", **described(MODELS, "What is served", ModelList))
    async def models() -> Response:
        return JSONResponse({"object": "list", "data": [_model(service)]})

    @app.get(
        "/v1/models/{model_id:path}", **described(MODELS, "One model", ModelObject, (401, 404))
    )
    async def model(model_id: str) -> Response:
        if not model_id:  # /v1/models/
            return await models()
        service.check_model(model_id)
        return JSONResponse(_model(service))

    @app.get("/version", **described(MODELS, "SpecRouter's version", VersionAnswer))
    async def show_version() -> Response:
        return JSONResponse({"version": __version__})


def _model(service: Service) -> dict[str, Any]:
    return {
        "id": service.model,
        "object": "model",
        "created": service.created,
        "owned_by": "specrouter",
        "root": service.model,
        "max_model_len": service.router.limits.max_tokens,
    }
