"""The OpenAPI document and the page that shows it, both without the internet."""

from pathlib import Path
from typing import Any

import fastapi_offline
from fastapi import FastAPI
from fastapi.openapi.docs import get_swagger_ui_html
from fastapi.openapi.utils import get_openapi
from fastapi.responses import HTMLResponse
from fastapi.staticfiles import StaticFiles
from pydantic import BaseModel
from pydantic.json_schema import models_json_schema

from app.api.edge import OPEN_PATHS
from app.api.schemas import BatchRequest
from app.prompts.spec import GenerateRequest

ASSETS = "/docs/assets"
REF = "#/components/schemas/{model}"


def body_of(model: type[BaseModel]) -> dict[str, Any]:
    """The ``openapi_extra`` of a route that parses its body itself."""
    schema = {"$ref": REF.format(model=model.__name__)}
    return {"requestBody": {"required": True, "content": {"application/json": {"schema": schema}}}}


def install(app: FastAPI) -> None:
    """Serve the page's assets and write the document."""
    folder = Path(fastapi_offline.__file__).parent / "static"
    app.mount(ASSETS, StaticFiles(directory=folder), name="docs-assets")
    app.openapi = lambda: _document(app)  # type: ignore[method-assign]


def page(root_path: str) -> HTMLResponse:
    """Swagger UI over ``/openapi.json``."""
    return get_swagger_ui_html(
        openapi_url=f"{root_path}/openapi.json",
        title="Batchserve",
        swagger_js_url=f"{root_path}{ASSETS}/swagger-ui-bundle.js",
        swagger_css_url=f"{root_path}{ASSETS}/swagger-ui.css",
        swagger_favicon_url=f"{root_path}{ASSETS}/favicon.png",
    )


def _document(app: FastAPI) -> dict[str, Any]:
    """FastAPI's document, with the bodies that the routes parse themselves."""
    if app.openapi_schema is None:
        document = get_openapi(
            title=app.title,
            version=app.version,
            description=app.description,
            routes=app.routes,
            tags=app.openapi_tags,
        )
        models = [(model, "validation") for model in (GenerateRequest, BatchRequest)]
        _, bodies = models_json_schema(models, ref_template=REF)  # type: ignore[arg-type]
        schemas = document["components"]["schemas"]
        document["components"]["schemas"] = dict(sorted({**schemas, **bodies["$defs"]}.items()))
        document["components"]["securitySchemes"] = {"bearer": {"type": "http", "scheme": "bearer"}}
        for path, operations in document["paths"].items():
            for operation in operations.values() if path not in OPEN_PATHS else ():
                operation["security"] = [{"bearer": []}, {}]  # the empty one: a service without keys asks for none
        app.openapi_schema = document
    return app.openapi_schema
