"""The HTTP service in front of a router: the list of its endpoints.

Contract: a request is checked before anything is queued, and a bad one gets a 4xx that names the
field. The caller starts and stops the router.
"""

from __future__ import annotations

from fastapi import FastAPI

from specrouter.engine.serving import ServingRouter
from specrouter.http.chat import add_chat
from specrouter.http.completions import add_completions
from specrouter.http.drain import Drain
from specrouter.http.errors import add_error_handlers
from specrouter.http.generate import add_generate
from specrouter.http.live_feed import add_live_feed
from specrouter.http.live_page import add_docs_page, add_live_page
from specrouter.http.models import add_models
from specrouter.http.openapi import TAGS, with_shared_parts
from specrouter.http.prometheus import add_metrics
from specrouter.http.router_pages import add_router_pages
from specrouter.http.service import Service
from specrouter.http.tokens import add_tokens
from specrouter.request.fields import field_names
from specrouter.version import __version__

_DESCRIPTION = (
    "Field by field, with examples and errors: docs/api.md. Values of fields that are left out or "
    "null are the defaults."
)


def create_app(router: ServingRouter, drain: Drain | None = None) -> FastAPI:
    """Return the service in front of `router`, which must stay open as long as the app runs.

    Args:
        router: serves all requests.
        drain: `/health` answers 503 once it has begun.

    Raises:
        ConfigError: for an invalid chat template.
    """
    app = FastAPI(
        title="SpecRouter",
        summary="Routed speculative decoding",
        description=_DESCRIPTION,
        version=__version__,
        openapi_tags=TAGS,
        docs_url=None,  # FastAPI's pages load scripts from other hosts
        redoc_url=None,
        redirect_slashes=False,  # a redirect would lead to the host that the client named
    )
    service, drain = Service(router), drain or Drain()  # the default never drains
    add_error_handlers(app, frozenset(field_names()))
    add_completions(app, service)
    add_chat(app, service)
    add_tokens(app, service)
    add_models(app, service)
    add_generate(app, service)
    add_router_pages(app, router, drain)
    add_metrics(app, router)
    add_docs_page(app)
    if router.config.server.page:
        add_live_page(app)
        add_live_feed(app, router, drain)
    described = app.openapi
    app.openapi = lambda: with_shared_parts(described())  # type: ignore[method-assign]
    return app
