"""An independent codec for the messages of vLLM's gRPC engine service, and recorded exchanges."""

from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace

import pytest
from google.protobuf import descriptor_pb2, descriptor_pool, message_factory

DATA = Path(__file__).parents[2] / "data"
F = descriptor_pb2.FieldDescriptorProto

#: Message → field → (number, type, repeated). In the newer layout of the responses, and in the older one.
NEWER = {
    "TokenizedInput": {"original_text": (1, "string", False), "input_ids": (2, "uint32", True)},
    "SamplingParams": {
        "temperature": (1, "float", False),
        "max_tokens": (8, "uint32", False),
        "stop": (10, "string", True),
        "n": (15, "uint32", False),
    },
    "MultimodalInputs": {"pixel_values": (2, "bytes", False), "mm_hashes": (6, "string", True)},
    "MediaRef": {"modality": (1, "uint32", False), "url": (2, "string", False)},
    "MediaRefs": {"items": (1, "MediaRef", True)},
    "GenerateRequest": {
        "request_id": (1, "string", False),
        "tokenized": (2, "TokenizedInput", False),
        "text": (3, "string", False),
        "sampling_params": (4, "SamplingParams", False),
        "stream": (5, "bool", False),
        "mm_inputs": (7, "MultimodalInputs", False),
        "data_parallel_rank": (9, "int32", False),
        "media_refs": (10, "MediaRefs", False),
        "extra_mm_inputs": (11, "MultimodalInputs", True),
    },
    "EmbedRequest": {"request_id": (1, "string", False), "tokenized": (2, "TokenizedInput", False)},
    "Chunk": {
        "token_ids": (1, "uint32", True),
        "prompt_tokens": (2, "uint32", False),
        "completion_tokens": (3, "uint32", False),
        "cached_tokens": (4, "uint32", False),
    },
    "Complete": {
        "output_ids": (1, "uint32", True),
        "finish_reason": (2, "string", False),
        "prompt_tokens": (3, "uint32", False),
        "completion_tokens": (4, "uint32", False),
        "cached_tokens": (5, "uint32", False),
    },
    "Response": {"chunk": (1, "Chunk", False), "complete": (2, "Complete", False)},
    "EmbedResponse": {"embedding": (1, "float", True), "prompt_tokens": (2, "uint32", False)},
}
OLDER = NEWER | {
    "Error": {"message": (1, "string", False), "http_status_code": (2, "string", False)},
    "Response": {
        "request_id": (1, "string", False),
        "chunk": (2, "Chunk", False),
        "complete": (3, "Complete", False),
        "error": (4, "Error", False),
    },
    "EmbedComplete": {"embedding": (1, "float", True), "prompt_tokens": (2, "uint32", False)},
    "EmbedResponse": {
        "request_id": (1, "string", False),
        "complete": (2, "EmbedComplete", False),
        "error": (3, "Error", False),
    },
}


def _classes(package: str, messages: dict[str, dict[str, tuple[int, str, bool]]]) -> SimpleNamespace:
    file = descriptor_pb2.FileDescriptorProto(name=f"{package}.proto", package=package, syntax="proto3")
    for name, fields in messages.items():
        message = file.message_type.add(name=name)
        for field, (number, kind, repeated) in fields.items():
            label = F.LABEL_REPEATED if repeated else F.LABEL_OPTIONAL
            added = message.field.add(name=field, number=number, label=label)
            if kind in messages:
                added.type, added.type_name = F.TYPE_MESSAGE, f".{package}.{kind}"
            else:
                added.type = F.Type.Value(f"TYPE_{kind.upper()}")
    pool = descriptor_pool.DescriptorPool()
    pool.Add(file)
    names = {name: pool.FindMessageTypeByName(f"{package}.{name}") for name in messages}
    return SimpleNamespace(**{name: message_factory.GetMessageClass(found) for name, found in names.items()})


@pytest.fixture(scope="session")
def newer() -> SimpleNamespace:
    return _classes("newer", NEWER)


@pytest.fixture(scope="session")
def older() -> SimpleNamespace:
    return _classes("older", OLDER)


@pytest.fixture(scope="session")
def exchange() -> Callable[[str], tuple[str, str, bytes, str, bytes]]:
    """Of a recorded case: path, content type, body; content type and body of the response."""

    def split(message: bytes) -> tuple[str, str, bytes]:
        head, _, body = message.partition(b"\r\n\r\n")
        lines = head.decode().split("\r\n")
        headers = {name.lower(): value for name, _, value in (line.partition(": ") for line in lines[1:])}
        pieces = []
        while headers.get("transfer-encoding") == "chunked" and body:
            size, _, body = body.partition(b"\r\n")
            pieces.append(body[: int(size, 16)])
            body = body[int(size, 16) + 2 :]
        return lines[0], headers.get("content-type", ""), b"".join(pieces) or body

    def load(case: str) -> tuple[str, str, bytes, str, bytes]:
        folder = next(f for f in sorted(DATA.glob("vllm-0.32-*")) if (f / f"{case}.request.bin").exists())
        line, kind, body = split((folder / f"{case}.request.bin").read_bytes())
        _, response_kind, response = split((folder / f"{case}.response.bin").read_bytes())
        return line.split(" ")[1], kind, body, response_kind, response

    return load
