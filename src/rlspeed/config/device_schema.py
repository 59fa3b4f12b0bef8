"""The keys of device_mapping.yaml: which devices each role runs on."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import BaseModel, ConfigDict, Field, JsonValue

MOST_RANKS = 65536
"""More than any run has; so a slip of the hand is no list of a billion ranks."""

Position = Annotated[int, Field(lt=MOST_RANKS)]
Degree = Annotated[int, Field(ge=1, le=MOST_RANKS)]


class DeviceSection(BaseModel):
    """Base of the sections of the device mapping."""

    model_config = ConfigDict(
        extra="forbid", frozen=True, strict=True, protected_namespaces=(), use_attribute_docstrings=True
    )


class FSDPConfig(DeviceSection):
    """FSDP2 settings under FSDP's old names."""

    sharding_strategy: Literal["FULL_SHARD", "SHARD_GRAD_OP", "HYBRID_SHARD", "NO_SHARD"] = "FULL_SHARD"
    """Parameters, gradients and optimizer state sharded; parameters kept after forward; sharded in a node; not
    sharded.
    """
    cpu_offload: bool = False
    """Keep parameters and optimizer state in host memory."""


class VLLMConfig(BaseModel):
    """Engine arguments of vLLM; those not listed here are passed through."""

    model_config = ConfigDict(
        extra="allow", frozen=True, strict=True, allow_inf_nan=False, use_attribute_docstrings=True
    )
    __pydantic_extra__: dict[str, JsonValue] = Field(init=False)

    tensor_parallel_size: Degree = 1
    """Devices of one vLLM engine."""
    dtype: str = "auto"
    """Precision of vLLM's weights; auto: the run's."""


class RolePlacement(DeviceSection):
    """Where one role runs."""

    device_mesh: list[Position | Literal["cpu"]] | None = None
    """Positions in CUDA_VISIBLE_DEVICES, in any order, or [cpu]; null: all devices of the run, or of shares_with."""
    strategy: Literal["fsdp2", "none"] = "fsdp2"
    """How the model is spread over the role's devices."""
    fsdp_config: FSDPConfig = FSDPConfig()
    use_cpu_offload: bool = False
    """Weights rest in host memory while the role is idle; for critic, reference and reward model."""
    shares_with: str | None = None
    """Name of a role on the same devices, when that is meant."""
    sequence_parallel_size: Degree = 1
    """Ulysses sequence parallel degree."""
    tensor_parallel_size: Degree = 1
    """Tensor parallel degree in training."""


class ActorPlacement(RolePlacement):
    """Where the actor trains and generates."""

    use_vllm: bool | None = None
    """true: vLLM generates (as model.actor.use_vllm_for_generation), unless run.device is cpu; null: as there."""
    vllm_config: VLLMConfig = VLLMConfig()


class DeviceMapping(DeviceSection):
    """All roles; a role that is not named runs where the actor runs."""

    actor: ActorPlacement | None = None
    critic: RolePlacement | None = None
    reference: RolePlacement | None = None
    reward_model: RolePlacement | None = None
