"""`--cluster`: the cells of a comparison on a Dask cluster that is running already. Needs the extra `cluster`."""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from importlib import import_module
from typing import Any

from fairlead.sim.grid import Cell, CellResult, Runner, run_cell, version

#: Seconds to wait for the scheduler.
_TIMEOUT_S = 10.0


@contextmanager
def on_cluster(address: str) -> Iterator[Runner]:
    """Runs cells on the workers of the scheduler at `address`, e.g. tcp://host:8786.

    Raises `ValueError` when Dask is not installed, nothing answers, there are no workers, or a worker has other code:
    results are kept under the version of the code here.
    """
    try:
        dask = import_module("distributed")
    except ImportError:
        raise ValueError(
            "--cluster needs Dask, here and on the workers: pip install distributed, or fairlead[cluster]"
        ) from None
    try:
        client = dask.Client(address, timeout=_TIMEOUT_S)
    except (OSError, ValueError) as error:
        raise ValueError(f"no Dask scheduler answers at {address}: {error}") from None
    try:
        _check(client, address)
        yield lambda cells: _run(dask, client, cells)
    finally:
        client.close()


def _check(client: Any, address: str) -> None:
    found = client.run(version, on_error="return")
    if not found:
        raise ValueError(f"the cluster at {address} has no workers: dask worker {address}")
    here = version()
    for worker, code in found.items():
        if isinstance(code, Exception):
            raise ValueError(f"worker {worker} cannot run simulations, is Fairlead installed there? {code}")
        if code != here:
            raise ValueError(f"worker {worker} has another version of Fairlead than this machine; install the same")


def _run(dask: Any, client: Any, cells: Sequence[tuple[Cell, str]]) -> Iterator[CellResult]:
    """Results as they come. Cells of a worker that dies go to another; what no worker can run becomes an error."""
    futures = {client.submit(run_cell, cell, key, pure=False): (cell, key) for cell, key in cells}
    for future in dask.as_completed(list(futures)):
        cell, key = futures.pop(future)
        error = future.exception()
        if error is None:
            yield future.result()
        else:
            name, text = cell.scenario.name, f"{type(error).__name__}: {error}"
            yield CellResult(key=key, scenario=name, policy=cell.policy, seed=cell.seed, error=text)
