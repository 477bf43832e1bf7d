"""bf16 training on the GPU agrees with fp32 on the CPU, and a broken mixer does not."""

import os
import subprocess
import sys

import numpy as np
import pytest

FAULTS = ("zero_mixer", "swap_qk", "no_decay")

pytestmark = pytest.mark.gpu


@pytest.fixture(scope="module")
def results(tmp_path_factory):
    folder = tmp_path_factory.mktemp("parity")
    runs = {}
    for device, extra in (("cpu", []), ("gpu", ["--break", *FAULTS])):
        output = folder / f"{device}.npz"
        environment = {**os.environ, "LT2_FORCE_CPU": "1" if device == "cpu" else ""}
        command = [sys.executable, "-m", "tests.gpu.parity_run", str(output), *extra]
        subprocess.run(command, check=True, env=environment)
        runs[device] = dict(np.load(output))
    return runs


def disagreement(results, prefix=""):
    """Relative loss difference, and the worst relative gradient difference with its parameter."""
    cpu, gpu = results["cpu"], results["gpu"]
    loss = abs(gpu[f"{prefix}loss"] / cpu["loss"] - 1)
    errors = {
        name: np.linalg.norm(gpu[prefix + name] - cpu[name]) / np.linalg.norm(cpu[name])
        for name in cpu
        if name != "loss"
    }
    worst = max(errors, key=errors.__getitem__)
    print(f"{prefix or 'right: '}loss differs by {loss:.2e}, {worst} by {errors[worst]:.2e}")
    return loss, errors[worst]


def test_gpu_agrees_with_cpu(results):
    loss, gradient = disagreement(results)
    assert loss < 0.005
    assert gradient < 0.05


@pytest.mark.parametrize("fault", FAULTS)
def test_a_fault_is_seen(results, fault):
    loss, gradient = disagreement(results, f"{fault}/")
    assert loss > 0.005 or gradient > 0.05
