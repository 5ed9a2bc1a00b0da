"""The OpenAPI document as a whole: /schema is a page, /schema/openapi.json and .yaml are for programs."""

from litestar.openapi import OpenAPIConfig
from litestar.openapi.plugins import JsonRenderPlugin, YamlRenderPlugin
from litestar.openapi.spec import Components, SecurityScheme

from gateway.openapi.operations import SECURITY_SCHEME
from gateway.openapi.page import PlainPage


def openapi_config() -> OpenAPIConfig:
    key = SecurityScheme(type="http", scheme="bearer", description="An API key of this server")
    return OpenAPIConfig(
        title="tpugate",
        version="1",
        description="Unmodified Hugging Face models on TorchTPU behind OpenAI's HTTP API",
        path="/schema",
        components=Components(security_schemes={SECURITY_SCHEME: key}),
        render_plugins=[PlainPage(), JsonRenderPlugin(), YamlRenderPlugin()],
    )
