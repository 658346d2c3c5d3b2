"""`GET /v1/models`: the target alone, since its output is served. `GET /version`."""

from __future__ import annotations

from typing import Any

from fastapi import FastAPI
from fastapi.responses import JSONResponse, Response

from specrouter.http.answer_schemas import ModelList, ModelObject, VersionAnswer
from specrouter.http.openapi import MODELS, answers
from specrouter.http.service import Service
from specrouter.version import __version__


def add_models(app: FastAPI, service: Service) -> None:
    @app.get(
        "/v1/models", tags=[MODELS], summary="What is served", responses=answers(ModelList, 401)
    )
    async def models() -> Response:
        return JSONResponse({"object": "list", "data": [_model(service)]})

    @app.get(
        "/v1/models/{model_id:path}",
        tags=[MODELS],
        summary="One model",
        responses=answers(ModelObject, 401, 404),
    )
    async def model(model_id: str) -> Response:
        if not model_id:  # /v1/models/
            return await models()
        service.check_model(model_id)
        return JSONResponse(_model(service))

    @app.get(
        "/version",
        tags=[MODELS],
        summary="SpecRouter's version",
        responses=answers(VersionAnswer, 401),
    )
    async def show_version() -> Response:
        return JSONResponse({"version": __version__})


def _model(service: Service) -> dict[str, Any]:
    return {
        "id": service.model,
        "object": "model",
        "created": service.created,
        "owned_by": "specrouter",
        "root": service.model,
        "max_model_len": service.router.max_request_tokens,
    }
