"""What happens to the API server, and that the table is exactly right afterwards, with nothing told twice."""

import asyncio
from collections.abc import Callable
from pathlib import Path

import pytest
from kc_objects import Followed, pool, until
from kr_cluster import Cluster

from fairlead.pool.kube import client

COUNT, FEW = 30, 5


async def filled(cluster: Cluster, namespace: str, count: int = FEW) -> None:
    await asyncio.to_thread(cluster.namespace, namespace)
    await asyncio.to_thread(cluster.admin.apply, pool(), namespace)
    for i in range(count):
        await asyncio.to_thread(cluster.pod, namespace, f"p{i:02d}", f"10.1.0.{i + 1}", labels={"app": "vllm"})


async def test_pods_deleted_behind_a_killed_api_server_and_a_compacted_etcd(
    own_kube: Callable[..., Cluster], tmp_path: Path
) -> None:
    """etcd must outlive the server that we follow: that one is the twin, killed while the first one changes things."""
    first = await asyncio.to_thread(own_kube)
    await asyncio.to_thread(first.install_crds)
    await filled(first, "serving", COUNT)
    twin = await asyncio.to_thread(lambda: own_kube(twin_of=first))
    async with Followed(twin.kubeconfig(tmp_path / "kubeconfig"), "serving") as followed:
        await until(lambda: len(followed.up) == COUNT)
        followed.news()
        lists = followed.pods.reflectors["pods"].stats.lists
        await asyncio.to_thread(twin.kill)
        await until(lambda: not followed.pods.reflectors["pods"].stats.connected)
        for i in range(10):
            await asyncio.to_thread(first.delete_pod, "serving", f"p{i:02d}")
        for i in range(10, 15):
            await asyncio.to_thread(first.set_ready, "serving", f"p{i:02d}", False)
        for i in range(15, 20):  # unready and ready again: nothing happened, as far as we are concerned
            await asyncio.to_thread(first.set_ready, "serving", f"p{i:02d}", False)
            await asyncio.to_thread(first.set_ready, "serving", f"p{i:02d}", True)
        await asyncio.to_thread(first.pod, "serving", "new", "10.1.0.99", labels={"app": "vllm"})
        await asyncio.to_thread(first.compact)
        assert len(followed.up) == COUNT, "what was last known stays"
        assert followed.news() == []
        await asyncio.to_thread(twin.start)
        took = await until(lambda: len(followed.up) == COUNT - 14, "right again", 10.0)
        print(f"right again {took:.2f} s after /readyz")
        assert sorted(followed.table) == sorted([*(f"p{i}/0" for i in range(15, COUNT)), "new/0"])
        await asyncio.to_thread(first.set_ready, "serving", "p29", False)
        await until(lambda: "p29/0" not in followed.table)
        wanted = [*(f"-p{i:02d}/0" for i in range(15)), "+new/0", "-p29/0"]
        assert followed.news() == sorted(wanted)
        assert followed.pods.reflectors["pods"].stats.lists >= lists


async def test_restart_of_the_api_server_moves_nothing(own_kube: Callable[..., Cluster], tmp_path: Path) -> None:
    cluster = await asyncio.to_thread(own_kube)
    await asyncio.to_thread(cluster.install_crds)
    await filled(cluster, "serving")
    async with Followed(cluster.kubeconfig(tmp_path / "kubeconfig"), "serving") as followed:
        await until(lambda: len(followed.up) == FEW)
        followed.news()
        await asyncio.to_thread(lambda: cluster.restart(kill=True))
        await asyncio.to_thread(cluster.set_ready, "serving", "p00", False)
        took = await until(lambda: "p00/0" not in followed.table, "a change after the restart", 10.0)
        print(f"a change after the restart was seen after {took:.2f} s")
        assert followed.news() == ["-p00/0"]
        await until(lambda: all(one.stats.connected for one in followed.pods.reflectors.values()))


async def test_a_frozen_api_server_is_told_left_alone_and_found_again(
    own_kube: Callable[..., Cluster], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its kernel keeps the connections; with the times as they are this is said after 18 s."""
    monkeypatch.setattr(client, "QUIET_S", 0.5)
    monkeypatch.setattr(client, "ANSWER_S", 0.5)
    cluster = await asyncio.to_thread(own_kube)
    await asyncio.to_thread(cluster.install_crds)
    await filled(cluster, "serving")
    async with Followed(cluster.kubeconfig(tmp_path / "kubeconfig"), "serving") as followed:
        await until(lambda: len(followed.up) == FEW)
        followed.news()
        await asyncio.sleep(1.5)
        assert all(one.stats.connected for one in followed.pods.reflectors.values()), "silent, and alive"
        cluster.process.freeze()
        try:
            await until(lambda: not any(one.stats.connected for one in followed.pods.reflectors.values()))
            assert "the API server has not answered for 1 s" in followed.troubles
            assert len(followed.up) == FEW
        finally:
            cluster.process.thaw()
        await asyncio.to_thread(cluster.set_ready, "serving", "p00", False)
        await until(lambda: "p00/0" not in followed.table, seconds=10.0)
        assert followed.news() == ["-p00/0"]
        await until(lambda: all(one.stats.connected for one in followed.pods.reflectors.values()))


async def test_a_token_that_is_revoked_is_read_anew(own_kube: Callable[..., Cluster], tmp_path: Path) -> None:
    cluster = await asyncio.to_thread(own_kube)
    await asyncio.to_thread(cluster.install_crds)
    await filled(cluster, "serving")
    rules = [
        {"apiGroups": [""], "resources": ["pods"], "verbs": ["get", "list", "watch"]},
        {
            "apiGroups": ["inference.networking.k8s.io"],
            "resources": ["inferencepools"],
            "verbs": ["get", "list", "watch"],
        },
    ]
    secret = tmp_path / "token"
    secret.write_text(await asyncio.to_thread(cluster.account, "serving", "epp", rules))
    config = cluster.kubeconfig(tmp_path / "kubeconfig", token="replaced")
    config.write_text(config.read_text().replace("token: replaced", f"tokenFile: {secret}"))
    async with Followed(config, "serving") as followed:
        await until(lambda: len(followed.up) == FEW)
        followed.news()
        # The account comes back under its name with another identity: the old token is dead for good.
        await asyncio.to_thread(cluster.revoke, "serving", "epp")
        fresh = await asyncio.to_thread(cluster.account, "serving", "epp", rules)
        secret.write_text(fresh)
        await asyncio.to_thread(lambda: cluster.restart(kill=True))  # forgets that the old one was good
        await asyncio.to_thread(cluster.set_ready, "serving", "p00", False)
        await until(lambda: "p00/0" not in followed.table, f"troubles: {followed.troubles}", 15.0)
        assert followed.news() == ["-p00/0"]
