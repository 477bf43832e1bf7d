"""The trainer with faults, which the environment names; run by test_survival.py.

FAULT_NAN=FIRST:LAST:RANK   the mixer of layer 2 gives NaN in steps FIRST..LAST (from 0) on RANK
FAULT_GRADIENT=STEP:RANK    the gradient of layer 2's output is infinite at STEP on RANK
FAULT_BLIND=1               the free space of a disk is not looked at before a checkpoint is written
FAULT_HANG=STEP:RANK        RANK sleeps for ever at STEP
FAULT_PAUSE=S               between tries to write the last checkpoint
FAULT_SLOW_WRITES=S         every file of a background checkpoint takes S seconds longer
"""

import os
import sys
import time

from megatron_lt2.parallel import platform

platform.install()

import torch.distributed as dist  # noqa: E402

from megatron_lt2.training import checkpoint, loop  # noqa: E402


def numbers(name):
    return [int(part) for part in os.environ[name].split(":")] if name in os.environ else None


prepared = loop.Trainer.__init__


def with_faults(self, *args):
    prepared(self, *args)
    rank, beat = dist.get_rank(), self.heartbeat
    layer = self.parts.model.decoder.layers[1]
    if nan := numbers("FAULT_NAN"):

        def spoil(module, inputs, output):
            if nan[0] <= beat.step <= nan[1] and rank == nan[2] and module.training:
                return (output[0] * float("nan"), *output[1:])
            return None

        layer.self_attention.register_forward_hook(spoil)
    if gradient := numbers("FAULT_GRADIENT"):

        def explode(module, inputs, output):
            if beat.step == gradient[0] and rank == gradient[1] and module.training:
                output[0].register_hook(lambda grad: grad * float("inf"))

        layer.register_forward_hook(explode)
    if hang := numbers("FAULT_HANG"):
        step = loop.train_step

        def hanging(*arguments):
            if beat.step == hang[0] and rank == hang[1]:
                time.sleep(3600)
            return step(*arguments)

        loop.train_step = hanging


loop.Trainer.__init__ = with_faults
if "FAULT_PAUSE" in os.environ:
    loop.SAVE_PAUSE_S = float(os.environ["FAULT_PAUSE"])
if "FAULT_BLIND" in os.environ:
    checkpoint.room_problem = lambda folder, size: None
if "FAULT_SLOW_WRITES" in os.environ:
    write = checkpoint._write_as_child

    def slowly(*args, **kwargs):
        time.sleep(float(os.environ["FAULT_SLOW_WRITES"]))
        write(*args, **kwargs)

    checkpoint._write_as_child = slowly

if __name__ == "__main__":
    from megatron_lt2.train import main

    sys.exit(main())
