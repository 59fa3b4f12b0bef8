"""use_cpu_offload: a role whose weights are in host memory while it is idle computes what it would have computed."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch import nn

from rlspeed.training import checkpoint
from rlspeed.training.roles import Resting
from tests.whole_update import WholeUpdate

# on a CPU nothing has to rest: the tests say that it does
DEVICES = ["cpu", pytest.param("cuda", marks=[pytest.mark.gpu])]
BOTH = ("devices.critic.use_cpu_offload=true", "devices.reference.use_cpu_offload=true")


def on_device(role: Resting) -> int:
    """Bytes of the weights that have memory of the device."""
    return sum(p.untyped_storage().nbytes() for p in role.model.parameters())


@pytest.mark.parametrize("device", DEVICES)
def test_resting_changes_no_number(device: str, tmp_path: Path) -> None:
    if device == "cuda" and not torch.cuda.is_available():
        pytest.skip("needs a CUDA device")
    plain, rested = WholeUpdate(device), WholeUpdate(device, *BOTH)
    critic, reference = rested.roles.critic, rested.roles.reference
    assert critic is not None
    assert reference is not None
    for role in (critic, reference):
        assert role.rests == (device == "cuda"), "there is no other memory than the host's"
        for parameter in role.model.parameters():
            parameter.data = parameter.data.clone()  # a file that was read stays in its pages
        role.rests = True
        role.leave()
    for step in (plain, rested):
        step.score()
        step.update()
    assert on_device(critic) == on_device(reference) == 0
    assert rested.numbers() == plain.numbers()
    state = checkpoint.RoleState(members=rested.world, role=critic)
    progress = checkpoint.Progress(step=1, kl_coef=0.0, optimizer_steps={}, policy_version=1, total_tokens=1)
    checkpoint.save(tmp_path, rested.world, {"critic": state}, progress, keep=1)
    assert plain.roles.critic is not None
    for mine, theirs in zip(critic.model.parameters(), plain.roles.critic.model.parameters()):
        assert torch.equal(mine, theirs)


def test_weights_that_share_a_storage_leave_and_come_back_together() -> None:
    """As the shards of FSDP2, which may be views of a longer storage."""
    flat = torch.arange(10.0)
    model = nn.Module()
    model.a, model.b = nn.Parameter(flat[:3]), nn.Parameter(flat[3:8].view(5, 1))
    role = Resting(model, rests=True)
    role.leave()
    role.leave()
    assert flat.untyped_storage().nbytes() == 0
    role.begin("work")
    role.wake()
    assert torch.equal(flat, torch.arange(10.0))
    assert torch.equal(model.b, torch.arange(3.0, 8.0).view(5, 1))
