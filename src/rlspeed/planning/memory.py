"""Memory of one device in each phase of a step, predicted from sizes alone.

The unit is what torch's allocator holds; CUDA context, captured graphs and NCCL take about 1 GiB beside it. The
activation formula counts what autograd saves in the blocks of the transformers implementation, tensor by tensor; a
test compares it with the real modules.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Literal

from rlspeed.config.schema import Profile
from rlspeed.planning.devices import DeviceMap, Placement, Role
from rlspeed.planning.shape import ModelShape
from rlspeed.planning.transition import takes_whole

Phase = Literal["generation", "log-probs", "update critic", "update actor", "transition"]
PHASES: tuple[Phase, ...] = ("generation", "log-probs", "update critic", "update actor", "transition")

# the fused head's buffers: tokens x words, fp32 forward, fp32 + half backward (engine/head.py HeadPlan)
HEAD_TOKENS, HEAD_WORDS_FORWARD, HEAD_WORDS_BACKWARD = 8192, 8448, 16896


@dataclass(frozen=True, slots=True, kw_only=True)
class RunSize:
    """The numbers of a run that memory and time depend on.

    element_bytes: of weights and activations (2 for bf16 and fp16, 4 for fp32). micro_tokens: tokens of one
    micro-batch on one data parallel rank, padding included. recompute: blocks compute their activations again in the
    backward pass, all but kept_blocks. longest: tokens of the longest sequence. new_tokens: of
    the longest answer.
    sequences: answers in one step over all ranks. concurrent: answers in flight on one rank of the built-in generator.
    bucket_bytes: of one of the mover's flat buffers.
    """

    element_bytes: int
    micro_tokens: int
    padded: bool
    longest: int
    new_tokens: int
    sequences: int
    concurrent: int
    recompute: bool
    vllm: bool
    hybrid_engine: bool
    lightweight: bool
    epochs: int = 1
    reuses_generation: bool = True
    vllm_share: float | None = None
    kept_blocks: int = 0
    bucket_bytes: int = 256 << 20
    actor_optimizer: str = "adamw"
    critic_optimizer: str = "adamw"

    @property
    def prompt_tokens(self) -> int:
        """Longest prompt."""
        return max(self.longest - self.new_tokens, 1)


def run_size(profile: Profile, *, element_bytes: int, vllm: bool) -> RunSize:
    """The sizes of a profile, taking every sequence to be as long as it may be."""
    rows = profile.packing.micro_batch_size
    packed = profile.model.use_remove_padding
    capacity = profile.packing.capacity or max(4096, profile.data.max_length)
    algorithm = profile.algorithm
    extra = profile.devices.actor.vllm_config.model_extra if profile.devices.actor else None
    share = (extra or {}).get("gpu_memory_utilization")
    single = algorithm.epochs == 1 and algorithm.mini_batch_size is None and algorithm.kl.where != "reward"
    return RunSize(
        element_bytes=element_bytes,
        micro_tokens=capacity if packed else rows * profile.data.max_length,
        padded=not packed,
        longest=profile.data.max_length,
        new_tokens=min(profile.rollout.max_new_tokens, profile.data.max_length - 1),
        sequences=profile.data.batch_size * profile.rollout.n,
        concurrent=profile.rollout.max_concurrent,
        recompute=profile.model.activation_checkpointing is not False,
        vllm=vllm,
        hybrid_engine=profile.model.actor.use_3d_hybrid_engine,
        lightweight=profile.model.actor.use_lightweight_sharding_for_generation,
        epochs=algorithm.epochs,
        reuses_generation=single,
        vllm_share=float(share) if isinstance(share, (int, float)) else None,
        bucket_bytes=profile.model.actor.sync_bucket_mb << 20,
        actor_optimizer=profile.optim.actor.kind,
        critic_optimizer=profile.optim.critic.kind,
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class Memory:
    """Bytes on one device in one phase, by what they are for."""

    phase: Phase
    weights: int = 0
    gradients: int = 0
    optimizer: int = 0
    activations: int = 0
    kv_cache: int = 0
    logits: int = 0
    buffers: int = 0

    @property
    def peak(self) -> int:
        """All of it together."""
        parts = (self.weights, self.gradients, self.optimizer, self.activations, self.kv_cache, self.logits)
        return sum(parts) + self.buffers


def predict_memory(
    devices: DeviceMap, shapes: Mapping[Role, ModelShape], size: RunSize, rank: int, *, device_bytes: int | None = None
) -> tuple[Memory, ...]:
    """What `rank`'s GPU holds in each phase that it takes part in; empty when it has no role with a known model.

    device_bytes: memory of the device, for an engine that takes a share of it (vLLM's gpu_memory_utilization).
    """
    here = {
        role: (place, shapes[role])
        for role, place in devices.roles.items()
        if place.device == "cuda" and rank in place.ranks and role in shapes
    }
    if not here:
        return ()
    out = []
    for phase in PHASES:
        active = _active(phase, here, size)
        if not active:
            continue
        memory = Memory(phase=phase)
        for role, (place, shape) in here.items():
            memory = _add(memory, _at_rest(role, place, shape, size, phase, active))
        working = [_working(role, *here[role], size, phase, device_bytes) for role in active]
        out.append(_add(memory, max(working, key=lambda m: m.peak)))
    return tuple(out)


def layer_activation_bytes(shape: ModelShape, element_bytes: int, *, tp: int = 1) -> int:
    """Bytes that autograd keeps of one block for each token, without recomputation, on one of `tp` ranks.

    Each RMSNorm keeps its input in fp32, the normalized input and (as the next product's input) its output, and one
    fp32 number; attention keeps q, k, v, its output and one fp32 number per head; the MLP keeps gate, silu(gate), up
    and their product. Norms on q and k (Qwen3) keep their input in fp32 and the normalized input.
    """
    e = element_bytes
    q, kv = shape.heads * shape.head_dim // tp, max(shape.kv_heads // tp, 1) * shape.head_dim
    norms = 2 * ((4 + 2 * e) * shape.hidden + 4)
    attention = e * (2 * q + 2 * kv) + 4 * shape.heads // tp
    if shape.qk_norm:
        attention += (4 + e) * (q + kv) + 4 * (q + kv) // shape.head_dim
    return norms + attention + 4 * e * shape.intermediate // tp


def activation_bytes(shape: ModelShape, size: RunSize, *, tp: int = 1, sp: int = 1, trains: bool) -> int:
    """Bytes of activations at the peak of a pass over one micro-batch.

    With gradients: everything saved, and the gradients of one MLP while they are computed. Recomputation keeps a
    block's input and, while one is computed again, one whole block. Without gradients: the largest block's temporaries.
    """
    tokens, e = -(-size.micro_tokens // sp), size.element_bytes
    width, inner = shape.hidden, shape.intermediate // tp
    around = tokens * ((4 + 2 * e) * width + e * width)  # embedding output, last norm
    mask = size.micro_tokens * size.longest * e if size.padded else 0
    if not trains:
        return tokens * (3 * e * inner + (4 + 2 * e) * width) + tokens * e * width + mask
    layer = layer_activation_bytes(shape, e, tp=tp)
    again = max(shape.layers - size.kept_blocks, 0) if size.recompute else 0
    kept = (shape.layers - again) * layer + again * e * width + (layer if again else 0)
    return tokens * (kept + e * (3 * inner + 2 * width)) + around + mask


def head_bytes(shape: ModelShape, size: RunSize, *, tp: int = 1, sp: int = 1, trains: bool) -> int:
    """Bytes of the fused head's buffers: never [tokens, vocabulary]."""
    tokens = -(-size.micro_tokens // sp)
    if shape.kind != "lm":
        return 8 * tokens
    rows, vocab, e = min(tokens, HEAD_TOKENS), -(-shape.vocab // tp), size.element_bytes
    if e == 4:  # the torch path: chunks of 64 MiB
        return 4 * (64 << 20)
    if not trains:
        return rows * min(vocab, HEAD_WORDS_FORWARD) * 4 + 16 * tokens
    words = min(vocab, HEAD_WORDS_BACKWARD)
    several = 4 * words * shape.hidden if tokens > HEAD_TOKENS else 0
    return rows * words * (4 + e) + several + tokens * shape.hidden * (4 + e)


def optimizer_bytes(kind: str, element_bytes: int) -> float:
    """Bytes on the device for each parameter: its master, unless fp32 weights are their own, and Adam's two moments.

    In 8 bits a block of 256 has one fp32 scale beside it; on the host nothing is left.
    """
    masters = 4 if element_bytes < 4 else 0
    return {"adamw": masters + 8.0, "adamw8bit": masters + 2 * (1 + 4 / 256), "adamw_offload": 0.0}[kind]


def state_shards(role: Role, place: Placement) -> int:
    """Over how many devices a role's weights are cut; each rank scores its own answers with a whole reward model."""
    return 1 if role is Role.REWARD else place.dp_shard * place.tp


def _active(phase: Phase, here: Mapping[Role, object], size: RunSize) -> list[Role]:
    """Roles that compute in a phase."""
    table: dict[Phase, tuple[Role, ...]] = {
        "generation": (Role.ROLLOUT,),
        "log-probs": tuple(
            r
            for r in (Role.ACTOR, Role.REFERENCE, Role.CRITIC, Role.REWARD)
            if r is not Role.ACTOR or not size.reuses_generation
        ),
        "update critic": (Role.CRITIC,),
        "update actor": (Role.ACTOR,),
        "transition": (Role.ROLLOUT,),
    }
    return [role for role in table[phase] if role in here]


def _at_rest(
    role: Role, place: Placement, shape: ModelShape, size: RunSize, phase: Phase, active: list[Role]
) -> Memory:
    """What a role keeps on the device whether it computes or not."""
    if role is Role.ROLLOUT:
        return Memory(phase=phase, weights=_generator_weights(place, shape, size, phase))
    share = shape.num_params // state_shards(role, place)
    idle = role not in active and not (role is Role.ACTOR and phase in ("generation", "transition"))
    weights = 0 if place.host_params or (place.rests_on_host and idle) else size.element_bytes * share
    optimizer = 0
    if role in (Role.ACTOR, Role.CRITIC) and not place.host_params:
        kind = size.actor_optimizer if role is Role.ACTOR else size.critic_optimizer
        optimizer = int(optimizer_bytes(kind, size.element_bytes) * share)
        if role is Role.ACTOR and phase in ("generation", "transition") and size.lightweight:
            optimizer = 0  # freed or on the host meanwhile
    return Memory(phase=phase, weights=weights, optimizer=optimizer)


def _generator_weights(place: Placement, shape: ModelShape, size: RunSize, phase: Phase) -> int:
    """The generator's own copy of the weights: none where it reads the actor's, or while it has let go of them."""
    alone = len(place.ranks) == 1 and size.hybrid_engine and not place.host_params
    dropped = phase not in ("generation", "transition") and (size.lightweight or not size.hybrid_engine)
    return 0 if alone or dropped else size.element_bytes * shape.num_params // place.tp


def _working(
    role: Role, place: Placement, shape: ModelShape, size: RunSize, phase: Phase, device_bytes: int | None
) -> Memory:
    """What a role adds while it computes."""
    if phase == "generation":
        return _generating(place, shape, size, device_bytes)
    if phase == "transition":
        whole = takes_whole(vllm=size.vllm, hybrid_engine=size.hybrid_engine)
        brought = size.element_bytes * shape.num_params // (1 if whole else place.tp)
        # two buffers to send and two to receive; where the old weights stay in force, all that is received; in the
        # classic way the full tensors, before they are copied into the second model
        buffers = 4 * size.bucket_bytes if size.lightweight else 2 * size.bucket_bytes + brought
        if size.vllm:  # what has arrived, before vLLM loads it into tensors of its own
            buffers = 4 * size.bucket_bytes + brought
        buffers = buffers if size.hybrid_engine else brought
        return Memory(phase=phase, buffers=0 if len(place.ranks) == 1 else buffers)
    trains = phase.startswith("update")
    tp, sp, e = place.tp, place.sp, size.element_bytes
    share = shape.num_params // state_shards(role, place)
    return Memory(
        phase=phase,
        gradients=_gradient_bytes(place, shape, size, share) if trains else 0,
        activations=activation_bytes(shape, size, tp=tp, sp=sp, trains=trains),
        logits=head_bytes(shape, size, tp=tp, sp=sp, trains=trains),
        buffers=_gathered(role, place, shape, e, trains=trains),
    )


def _gradient_bytes(place: Placement, shape: ModelShape, size: RunSize, share: int) -> int:
    """fp32 sums of all gradients, and the largest low-precision gradient on its way there."""
    sums = 0 if place.host_params else 4 * share
    if size.element_bytes == 4:
        return sums
    largest = max(shape.head_params, shape.vocab * shape.hidden if shape.tied else 0) // place.tp
    return sums + size.element_bytes * largest


def _gathered(role: Role, place: Placement, shape: ModelShape, element_bytes: int, *, trains: bool) -> int:
    """FSDP2's whole parameters: the root (embedding and head), two blocks, and in training a block's fp32 gradients."""
    if state_shards(role, place) == place.tp and not place.host_params:
        return 0
    block = shape.layer_matmul_params // place.tp
    root = (shape.num_params - shape.layers * shape.layer_matmul_params) // place.tp
    return element_bytes * (root + 2 * block) + (4 * (block + root) if trains else 0)


def _generating(place: Placement, shape: ModelShape, size: RunSize, device_bytes: int | None) -> Memory:
    """KV cache and logits of the generator."""
    e, tp = size.element_bytes, place.tp
    weights = e * shape.num_params // tp
    if size.vllm and size.vllm_share is not None and device_bytes is not None:
        return Memory(phase="generation", kv_cache=max(int(size.vllm_share * device_bytes) - weights, 0))
    replicas = max(len(place.ranks) // tp, 1)
    rows = min(size.concurrent, -(-size.sequences // replicas))
    heads = max(shape.kv_heads // tp, 1)
    cache = rows * size.longest * 2 * shape.layers * heads * shape.head_dim * e
    logits = rows * shape.vocab * (e + 8)
    prefill = min(rows * size.prompt_tokens, 16384) * e * (3 * shape.intermediate // tp + 4 * shape.hidden)
    return Memory(phase="generation", kv_cache=cache, logits=logits, activations=prefill)


def _add(a: Memory, b: Memory) -> Memory:
    return replace(
        a,
        weights=a.weights + b.weights,
        gradients=a.gradients + b.gradients,
        optimizer=a.optimizer + b.optimizer,
        activations=a.activations + b.activations,
        kv_cache=a.kv_cache + b.kv_cache,
        logits=a.logits + b.logits,
        buffers=a.buffers + b.buffers,
    )
