"""megatron-core's AdamW: made fast, and saved and loaded without what 0.19.2 gets wrong.

Saving: its distributed optimizer joins the gradient buckets without the padding at their ends, and
then looks up each parameter where it lies with the padding. So from the second bucket on it saves
shifted values, unless every bucket happens to be a multiple of 128. Several buckets come with
overlapped gradients, and with tied embeddings on a pipeline, which have one of their own.

Loading where neither Transformer Engine nor Apex brings an Adam of its own: it then uses torch's
AdamW, whose state has a `step` tensor a parameter. The distributed optimizer trips over that in two
places:

- the reader copies every tensor of a parameter's state out of the checkpoint and looks for "step"
  there, where it is not (it was restored before, from the parameter groups);
- that restoring gives all parameters one shared tensor, which every parameter's update then
  increments.
"""

import contextlib
import functools
from collections.abc import Iterator
from typing import Any

import torch


def _inner(optimizer: Any) -> Iterator[Any]:
    yield from getattr(optimizer, "chained_optimizers", [optimizer])


@contextlib.contextmanager
def keeping_padding(optimizer: Any) -> Iterator[None]:
    """While it lasts, `optimizer.sharded_state_dict` joins buckets with their padding."""
    with contextlib.ExitStack() as stack:
        for inner in _inner(optimizer):
            for buffer in getattr(inner, "buffers", []):
                parts = [(buffer, buffer.numel)]
                parts += [(bucket, bucket.grad_data.numel()) for bucket in buffer.buckets]
                for part, numel in parts:
                    stack.callback(setattr, part, "numel_unpadded", part.numel_unpadded)
                    part.numel_unpadded = numel
        yield


def prepare_for_load(optimizer: Any) -> None:
    """Make `optimizer.sharded_state_dict(is_loading=True)` and `load_state_dict` work."""
    for inner in _inner(optimizer):
        if not hasattr(inner, "_set_main_param_and_optimizer_states"):
            continue
        # An Adam that has never stepped has no state to load into.
        inner._init_optimizer_states_with_dummy_values()
        original = inner._set_main_param_and_optimizer_states
        inner._set_main_param_and_optimizer_states = functools.partial(
            _set_states_keeping_step, inner, original
        )


def _set_states_keeping_step(
    inner: Any, original: Any, parameter: torch.nn.Parameter, tensors: dict[str, Any]
) -> Any:
    group, order = inner.model_param_group_index_map[parameter]
    main = inner.optimizer.param_groups[group]["params"][order]
    step = inner.optimizer.state[main].get("step")
    if torch.is_tensor(step) and "step" not in tensors:
        tensors = {**tensors, "step": step}
    return original(parameter, tensors)


def fuse(optimizer: Any) -> None:
    """Have torch's AdamW update all parameters of a GPU in one kernel.

    megatron-core takes it where neither Transformer Engine nor Apex is installed, and has no way to
    ask it for that; one operation after another, an update reads and writes everything four times.
    """
    for inner in _inner(optimizer):
        adam = inner.optimizer
        if not isinstance(adam, torch.optim.Adam | torch.optim.AdamW):
            continue
        for group in adam.param_groups:
            group["fused"] = all(parameter.is_cuda for parameter in group["params"])
            if group["fused"]:
                group["foreach"] = False


def finish_load(optimizer: Any, *, betas: tuple[float, float], eps: float) -> None:
    """Give every parameter its own step counter, and the groups none.

    megatron-core restores betas and eps of a group as they were saved; what is set now counts.
    """
    for inner in _inner(optimizer):
        inner.__dict__.pop("_set_main_param_and_optimizer_states", None)
        states = []
        for parameter, state in inner.optimizer.state.items():
            if torch.is_tensor(state.get("step")):
                # A fused update counts on the GPU, a plain one on the CPU.
                state["step"] = state["step"].detach().clone().to(parameter.device)
                states.append(state)
        for group in inner.optimizer.param_groups:
            group["betas"], group["eps"] = betas, eps
            if states:
                group.pop("step", None)
    fuse(optimizer)
