"""What is mended on an optimizer after megatron-core has loaded its state."""

import torch

from megatron_lt2.training.optimizer_state import finish_load


class _Loaded:
    """An optimizer as megatron-core 0.19.2 leaves it: one shared step, settings of the save."""

    def __init__(self) -> None:
        parameters = [torch.nn.Parameter(torch.ones(2)) for _ in range(3)]
        self.optimizer = torch.optim.AdamW(parameters, lr=0.1, betas=(0.9, 0.95))
        shared = torch.tensor(2.0)
        for parameter in parameters:
            parameter.grad = torch.ones(2)
            self.optimizer.state[parameter] = {
                "step": shared,
                "exp_avg": torch.zeros(2),
                "exp_avg_sq": torch.zeros(2),
            }
        self.optimizer.param_groups[0]["step"] = 2


def test_steps_count_each_for_itself():
    loaded = _Loaded()
    finish_load(loaded, betas=(0.9, 0.95), eps=1e-8)
    loaded.optimizer.step()
    assert [float(s["step"]) for s in loaded.optimizer.state.values()] == [3.0] * 3
    assert "step" not in loaded.optimizer.param_groups[0]


def test_betas_and_eps_are_those_of_now():
    loaded = _Loaded()
    finish_load(loaded, betas=(0.8, 0.9), eps=1e-3)
    group = loaded.optimizer.param_groups[0]
    assert (group["betas"], group["eps"]) == ((0.8, 0.9), 1e-3)
