"""What KEDA is told over gRPC, by grpcio's client and messages that protoc made of KEDA's contract."""

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import grpc
import pytest
from google.protobuf import descriptor_pb2, descriptor_pool, message_factory

from fairlead.core.errors import Unavailable
from fairlead.server.external_scaler import ExternalScaler

STRING, BOOL, INT64, DOUBLE, MESSAGE = 9, 8, 3, 1, 11
#: Message → fields by number: name, type, the message of one (`*` = repeated). As in KEDA 2's `externalscaler.proto`.
CONTRACT: dict[str, dict[int, tuple[str, int, str]]] = {
    "Entry": {1: ("key", STRING, ""), 2: ("value", STRING, "")},  # as a map is sent
    "ScaledObjectRef": {
        1: ("name", STRING, ""),
        2: ("namespace", STRING, ""),
        3: ("scalerMetadata", MESSAGE, "Entry*"),
    },
    "GetMetricsRequest": {1: ("scaledObjectRef", MESSAGE, "ScaledObjectRef"), 2: ("metricName", STRING, "")},
    "IsActiveResponse": {1: ("result", BOOL, "")},
    "MetricSpec": {1: ("metricName", STRING, ""), 2: ("targetSize", INT64, ""), 3: ("targetSizeFloat", DOUBLE, "")},
    "GetMetricSpecResponse": {1: ("metricSpecs", MESSAGE, "MetricSpec*")},
    "MetricValue": {1: ("metricName", STRING, ""), 2: ("metricValue", INT64, ""), 3: ("metricValueFloat", DOUBLE, "")},
    "GetMetricsResponse": {1: ("metricValues", MESSAGE, "MetricValue*")},
}


def _messages() -> dict[str, Any]:
    file = descriptor_pb2.FileDescriptorProto(name="externalscaler.proto", package="externalscaler", syntax="proto3")
    for name, numbered in CONTRACT.items():
        message = file.message_type.add(name=name)
        for number, (field, kind, of) in numbered.items():
            label = 3 if of.endswith("*") else 1
            made = message.field.add(name=field, number=number, type=kind, label=label)  # type: ignore[arg-type]
            if of:
                made.type_name = f".externalscaler.{of.rstrip('*')}"
    pool = descriptor_pool.DescriptorPool()
    pool.Add(file)
    find = pool.FindMessageTypeByName
    return {name: message_factory.GetMessageClass(find(f"externalscaler.{name}")) for name in CONTRACT}


MESSAGES = _messages()


class Pool:
    def __init__(self) -> None:
        self.desired: int | None = None
        self.present = 3
        self.port = 0
        self.roles: list[str] = []
        self.by_role: dict[str, int | None] = {}
        self.scaler = ExternalScaler(
            lambda role: self.by_role[role] if role else self.desired,
            lambda role: self.present + len(role),
            lambda: self.roles,
        )

    @asynccontextmanager
    async def asked(self) -> AsyncIterator[Any]:
        self.port = await self.scaler.start("127.0.0.1", 0)
        async with grpc.aio.insecure_channel(f"127.0.0.1:{self.port}") as channel:
            yield channel
        await self.scaler.close()


def call(channel: Any, method: str, answer: str, stream: bool = False, **metadata: str) -> Any:
    make = channel.unary_stream if stream else channel.unary_unary
    entries = [
        MESSAGES["Entry"](key=key, value=value) for key, value in {"scalerAddress": "epp:9004", **metadata}.items()
    ]
    asked = MESSAGES["ScaledObjectRef"](name="vllm", namespace="serving", scalerMetadata=entries)
    if method == "GetMetrics":
        asked = MESSAGES["GetMetricsRequest"](scaledObjectRef=asked, metricName="fairlead_desired_replicas")
    kinds = {"request_serializer": type(asked).SerializeToString}
    kinds["response_deserializer"] = MESSAGES[answer].FromString
    return make(f"/externalscaler.ExternalScaler/{method}", **kinds)(asked)


async def test_keda_scales_by_the_desired_number() -> None:
    pool = Pool()
    async with pool.asked() as channel:
        (spec,) = (await call(channel, "GetMetricSpec", "GetMetricSpecResponse")).metricSpecs
        assert (spec.metricName, spec.targetSize, spec.targetSizeFloat) == ("fairlead_desired_replicas", 1, 1.0)
        for desired, active in ((0, False), (300, True)):
            pool.desired = desired
            (value,) = (await call(channel, "GetMetrics", "GetMetricsResponse")).metricValues
            read = value.metricName, value.metricValue, value.metricValueFloat
            assert read == (spec.metricName, desired, float(desired))
            assert (await call(channel, "IsActive", "IsActiveResponse")).result is active


async def test_an_unknown_number_is_an_error_so_that_the_pool_is_kept() -> None:
    """The pods that are ready are no number to scale by: with it, the pods that still load would be removed."""
    pool = Pool()
    pool.desired = None
    async with pool.asked() as channel:
        with pytest.raises(grpc.aio.AioRpcError) as unknown:
            await call(channel, "GetMetrics", "GetMetricsResponse")
        assert unknown.value.code() is grpc.StatusCode.UNAVAILABLE and "not known" in (unknown.value.details() or "")
        assert (await call(channel, "IsActive", "IsActiveResponse")).result is True


async def test_each_role_is_scaled_by_its_own_number() -> None:
    pool = Pool()
    pool.roles, pool.desired, pool.by_role = ["prefill", "decode"], 7, {"prefill": 0, "decode": 2}
    async with pool.asked() as channel:
        for role, told in (("prefill", 0), ("decode", 2), ("", 7)):
            (spec,) = (await call(channel, "GetMetricSpec", "GetMetricSpecResponse", role=role)).metricSpecs
            (value,) = (await call(channel, "GetMetrics", "GetMetricsResponse", role=role)).metricValues
            assert (value.metricName, value.metricValue) == (spec.metricName, told)
            assert (await call(channel, "IsActive", "IsActiveResponse", role=role)).result is (told > 0)
        streams = [call(channel, "StreamIsActive", "IsActiveResponse", True, role=role) for role in pool.roles]
        assert [(await stream.read()).result for stream in streams] == [False, True]
        pool.by_role["prefill"] = 1
        assert (await streams[0].read()).result is True
        for stream in streams:
            stream.cancel()


@pytest.mark.parametrize("method", ["GetMetricSpec", "GetMetrics", "IsActive", "StreamIsActive"])
@pytest.mark.parametrize(
    ("roles", "why"), [(["prefill", "decode"], "known: prefill, decode"), ([], "the policy splits no requests")]
)
async def test_an_unknown_role_is_refused_with_what_is_known(method: str, roles: list[str], why: str) -> None:
    pool = Pool()
    pool.roles = roles
    async with pool.asked() as channel:
        stream = method == "StreamIsActive"
        answer = call(channel, method, "IsActiveResponse", stream, role="prefil")
        with pytest.raises(grpc.aio.AioRpcError) as refused:
            await (answer.read() if stream else answer)
        assert refused.value.code() == grpc.StatusCode.INVALID_ARGUMENT
        assert refused.value.details() == f"metadata of the trigger: unknown role 'prefil' ({why})"
        assert not pool.scaler.watchers


async def test_a_restart_does_not_wake_an_empty_pool() -> None:
    pool = Pool()
    pool.present = 0
    async with pool.asked() as channel:
        told = call(channel, "StreamIsActive", "IsActiveResponse", stream=True)
        assert (await told.read()).result is False
        assert (await call(channel, "IsActive", "IsActiveResponse")).result is False
        pool.desired = 1
        assert (await told.read()).result is True
        told.cancel()


async def test_a_change_of_activity_is_pushed() -> None:
    pool = Pool()
    pool.desired = 0
    async with pool.asked() as channel:
        told = call(channel, "StreamIsActive", "IsActiveResponse", stream=True)
        assert (await told.read()).result is False
        pool.desired = 1
        assert (await asyncio.wait_for(told.read(), 30)).result is True
        assert pool.scaler.watchers
        told.cancel()
        while pool.scaler.watchers:
            await asyncio.sleep(0.01)


async def test_an_unknown_method_and_a_taken_port_are_told() -> None:
    pool, other = Pool(), Pool()
    async with pool.asked() as channel:
        with pytest.raises(grpc.aio.AioRpcError) as unknown:
            await call(channel, "Other", "IsActiveResponse")
        assert unknown.value.code() == grpc.StatusCode.UNIMPLEMENTED
        with pytest.raises(Unavailable, match="autoscaling"):
            await other.scaler.start("127.0.0.1", pool.port)
        await other.scaler.close()
