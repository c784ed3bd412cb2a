"""Fixtures for all tests."""

import importlib.util
import sys
from pathlib import Path
from types import ModuleType

import pytest

PROTOS = Path(__file__).parent / "protos"


@pytest.fixture(scope="session")
def pb(tmp_path_factory: pytest.TempPathFactory) -> ModuleType:
    """The generated classes of `protos/ext_proc_subset.proto`: an independent codec to check ours against."""
    from grpc_tools import protoc

    out = tmp_path_factory.mktemp("protos")
    include = Path(importlib.util.find_spec("grpc_tools").origin).parent / "_proto"  # type: ignore[union-attr,arg-type]
    arguments = ["protoc", f"-I{PROTOS}", f"-I{include}", f"--python_out={out}", "ext_proc_subset.proto"]
    assert protoc.main(arguments) == 0
    spec = importlib.util.spec_from_file_location("ext_proc_subset_pb2", out / "ext_proc_subset_pb2.py")
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module
    spec.loader.exec_module(module)
    return module
