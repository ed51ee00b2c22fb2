"""The private MPS daemon on a real GPU: who is its client, and that it ends."""

from __future__ import annotations

import asyncio
import os
import signal
import sys

import pytest

from slipstream.cli.mps import CONTROL, MpsUnavailable, PrivateMps, client_environment
from slipstream.cli.up_devices import visible_gpus

pytestmark = [pytest.mark.gpu, pytest.mark.anyio]

CLIENT = """
import ctypes, sys, time
cuda = ctypes.CDLL("libcuda.so.1")
def call(name, *args):
    status = getattr(cuda, name)(*args)
    if status: sys.exit(f"{name}: {status}")
count, device, mps = (ctypes.c_int() for _ in "123")
context = ctypes.c_void_p()
call("cuInit", 0)
call("cuDeviceGetCount", ctypes.byref(count))
call("cuDeviceGet", ctypes.byref(device), 0)
call("cuDevicePrimaryCtxRetain", ctypes.byref(context), device)
call("cuDeviceGetAttribute", ctypes.byref(mps), %d, device)
print(count.value, mps.value, flush=True)
time.sleep(60)
"""

_MPS_ENABLED = 133  # CU_DEVICE_ATTRIBUTE_MPS_ENABLED


async def _client(environment: dict[str, str]) -> tuple[asyncio.subprocess.Process, list[str]]:
    """A process with a context on its device 0; and what it says: devices, whether under MPS."""
    process = await asyncio.create_subprocess_exec(
        *(sys.executable, "-S", "-c", CLIENT % _MPS_ENABLED),
        stdout=asyncio.subprocess.PIPE,
        env={**os.environ, **environment},
    )
    assert process.stdout is not None
    return process, (await asyncio.wait_for(process.stdout.readline(), 60)).decode().split()


async def test_its_clients_come_go_and_die() -> None:
    gpus = visible_gpus()
    assert gpus and gpus[0].uuid.startswith("GPU-")
    daemon = PrivateMps(gpus[0].uuid)
    try:
        await daemon.start()
    except MpsUnavailable as error:
        pytest.skip(f"{CONTROL} cannot be used here: {error}")
    folder = daemon.folder
    assert folder is not None
    clients = []
    try:
        environment = {**client_environment(gpus[0].uuid), **daemon.environment}
        for _ in range(2):
            process, said = await _client(environment)
            clients.append(process)
            assert said == ["1", "1"], "one device, under MPS"
        assert await daemon.healthy()
        clients[0].send_signal(signal.SIGKILL)
        await clients[0].wait()
        process, said = await _client(environment)
        clients.append(process)
        assert said == ["1", "1"]
        assert await daemon.healthy()
    finally:
        for process in clients:
            if process.returncode is None:
                process.kill()
            await process.wait()
        await daemon.stop()
    assert not folder.exists()
    plain, said = await _client(client_environment(gpus[0].uuid))
    plain.kill()
    await plain.wait()
    assert said == ["1", "0"], "the same device, without MPS"
