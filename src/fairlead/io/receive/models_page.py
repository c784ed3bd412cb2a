"""`GET /v1/models` of a pool whose model names are defined: what clients may ask for, not what is behind it."""

from collections.abc import Mapping
from urllib.parse import unquote

from msgspec.json import encode

from fairlead.io.receive.answers import client_error
from fairlead.parse.api import MODELS, api_of
from fairlead.route.models import MODEL_NOT_FOUND, Catalogue, Listed
from fairlead.wire import ext_proc

_ONE = "/v1/models/"
_JSON = {"content-type": "application/json"}


def models_page(catalogue: Catalogue, headers: Mapping[str, str]) -> bytes | None:
    """ImmediateResponse for the list, or for one model of it; `None` if the request is for the model servers.

    One that is not defined is an error where only defined names are served. Elsewhere some model server may know it.
    """
    if headers.get(":method") != "GET":
        return None
    path = headers.get(":path", "").partition("?")[0]
    if not (path.startswith(_ONE) or api_of(path) == MODELS):
        return None
    listed = catalogue.listed
    if not listed:
        return None
    if not path.startswith(_ONE) or path == _ONE:
        body = encode({"object": "list", "data": [_shape(one) for one in listed]})
    else:
        wanted = unquote(path.removeprefix(_ONE))
        found = next((one for one in listed if one.name == wanted), None)
        if found is None:
            return (
                client_error(MODELS, 404, f"The model `{wanted}` does not exist.", "model", MODEL_NOT_FOUND)
                if catalogue.strict
                else None
            )
        body = encode(_shape(found))
    return ext_proc.immediate(200, _JSON, body, details="fairlead.models")


def _shape(one: Listed) -> dict[str, object]:
    return {"id": one.name, "object": "model", "created": one.created, "owned_by": "fairlead"}
