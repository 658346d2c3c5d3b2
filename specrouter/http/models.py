"""`GET /v1/models`, which has only the target since its output is served; `GET /version`."""

from __future__ import annotations

from fastapi import FastAPI
from fastapi.responses import JSONResponse, Response

from specrouter.http.answers import AnswerModel
from specrouter.http.openapi import MODELS, described
from specrouter.http.service import Service
from specrouter.version import __version__


class ModelObject(AnswerModel):
    id: str
    """Name of the model, as requests may send it in `model`."""
    object: str
    """Always `model`."""
    created: int
    """Start of the service, in seconds since 1970."""
    owned_by: str
    """Always `specrouter`."""
    root: str
    """Same as `id`."""
    max_model_len: int
    """Maximum tokens of a request, prompt and output."""
    loading: list[str]
    """Names of drafters that are still being loaded; texts do not depend on them."""


class ModelList(AnswerModel):
    object: str
    """Always `list`."""
    data: list[ModelObject]
    """The target, as the only model."""


class VersionAnswer(AnswerModel):
    version: str
    """Version of SpecRouter."""


def add_models(app: FastAPI, service: Service) -> None:
    @app.get("/v1/models", **described(MODELS, "List of models: the target", ModelList))
    async def models() -> Response:
        return _answer(ModelList(object="list", data=[_model(service)]))

    @app.get(
        "/v1/models/{model_id:path}",
        **described(MODELS, "A model by its id", ModelObject, refusals=(401, 404)),
    )
    async def model(model_id: str) -> Response:
        if not model_id:  # /v1/models/
            return await models()
        service.check_model(model_id)
        return _answer(_model(service))

    @app.get("/version", **described(MODELS, "SpecRouter's version", VersionAnswer))
    async def show_version() -> Response:
        return _answer(VersionAnswer(version=__version__))


def _model(service: Service) -> ModelObject:
    return ModelObject(
        id=service.model,
        object="model",
        created=service.created,
        owned_by="specrouter",
        root=service.model,
        max_model_len=service.router.limits.max_tokens,
        loading=list(service.router.health().loading),
    )


def _answer(answer: AnswerModel) -> Response:
    return JSONResponse(answer.model_dump())
