"""Loading and unloading adapters at run time, and the list of models."""

import json
import random

from fairlead.stub import fields
from fairlead.stub.api_errors import ApiError
from fairlead.stub.fields import Body
from fairlead.stub.plans import Models

_MAX_ADAPTERS = 1000


def load_adapter(body: Body, models: Models, now: int) -> str:
    """Returns the success message. Raises `ApiError`."""
    name, path = fields.string(body, "lora_name"), fields.string(body, "lora_path")
    if not name or not path:
        raise ApiError("Both 'lora_name' and 'lora_path' must be provided.")
    if len(models.loras) >= _MAX_ADAPTERS:
        raise ApiError(f"No more than {_MAX_ADAPTERS} adapters can be loaded.")
    if name in models.loras or name == models.base:
        raise ApiError(f"The lora adapter '{name}' has already been loaded.")
    models.loras[name] = (path, now)
    return f"Success: LoRA adapter '{name}' added successfully."


def unload_adapter(body: Body, models: Models) -> str:
    name = fields.string(body, "lora_name")
    if not name:
        raise ApiError("'lora_name' needs to be provided to unload a LoRA adapter.")
    if models.loras.pop(name, None) is None:
        raise ApiError(f"The lora adapter '{name}' cannot be found.", 404)
    return f"Success: LoRA adapter '{name}' removed successfully."


def model_list(models: Models, max_model_len: int, rng: random.Random) -> bytes:
    """/v1/models."""
    base = _card(models.base, models.base, None, max_model_len, models.created, rng)
    loras = [_card(name, path, models.base, None, created, rng) for name, (path, created) in models.loras.items()]
    return json.dumps({"object": "list", "data": [base, *loras]}, separators=(",", ":"), ensure_ascii=False).encode(
        "utf-8", "replace"
    )


def _card(
    name: str, root: str, parent: str | None, max_model_len: int | None, created: int, rng: random.Random
) -> dict[str, object]:
    permission = {
        "id": f"modelperm-{rng.getrandbits(64):016x}",
        "object": "model_permission",
        "created": created,
        "allow_create_engine": False,
        "allow_sampling": True,
        "allow_logprobs": True,
        "allow_search_indices": False,
        "allow_view": True,
        "allow_fine_tuning": False,
        "organization": "*",
        "group": None,
        "is_blocking": False,
    }
    return {
        "id": name,
        "object": "model",
        "created": created,
        "owned_by": "vllm",
        "root": root,
        "parent": parent,
        "max_model_len": max_model_len,
        "permission": [permission],
    }
