"""Devices and hosts in the plan, and the settings that make a run fit."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from skyasync.config.check import check_config
from skyasync.config.schema import Config
from skyasync.models.rank_memory import RankUse
from skyasync.planning import memory
from skyasync.planning.advice import advise
from skyasync.planning.command import parse_size
from skyasync.planning.plan import (
    PART_BYTES,
    PROCESS,
    Measure,
    MemoryPlan,
    MemoryUse,
    make_plan,
)
from skyasync.planning.shape import ModelShape
from skyasync.utils.machine import Machine
from skyasync.workers.roles import ROLES, VALUE, Role, always, never

GIB = 1 << 30
QWEN_7B = ModelShape(
    "7B", "", parameters=7_615_616_512, largest_tensor=152064 * 3584, layers=28, hidden=3584, heads=28, kv_heads=4,
    head_dim=128, intermediate=18944, vocabulary=152064,
)  # fmt: skip
HEAD = QWEN_7B.vocabulary * QWEN_7B.hidden
SMALL = replace(QWEN_7B, layers=4, parameters=2 * HEAD + (QWEN_7B.parameters - 2 * HEAD) // 7)
CRITIC = QWEN_7B.parameters - HEAD + QWEN_7B.hidden


def reckoned(shape: ModelShape = QWEN_7B, **shapes: ModelShape) -> Measure:
    """In place of a measurement: predictable numbers.

    Args:
        shapes: of roles that have models of their own.
    """

    def use(cfg: Config, role: Role, ranks: int) -> RankUse:
        own = shapes.get(role.name, shape)
        logits = 0 if role.head == VALUE else 2 * GIB
        share = (own.parameters - (0 if logits else HEAD - own.hidden)) // ranks
        resident = (
            {"weights": 4 * share, "moments": 8 * share} if role.trains else {"weights": 2 * share}
        )
        checkpointing = (
            str(role.settings(cfg).gradient_checkpointing).lower() == "true"
            if role.trains
            else False
        )
        tokens = cfg.trainer.micro_batch_tokens or 16384
        layers = 225_000 + own.layers * own.hidden * 2 if checkpointing else own.layers * 225_000
        lora = role.name == "policy" and cfg.trainer.policy.lora.rank
        return RankUse(
            resident=resident,
            scoring=resident | {"gathered": 4 * GIB, "activations": GIB, "logits": logits},
            updating=resident
            | {
                "gradients": 4 * share,
                "gathered": 4 * GIB,
                "activations": tokens * layers,
                "logits": logits,
            },
            stepping=resident | {"gradients": 4 * share},
            publishing=resident | {"gathered": GIB},
            gradients=share // 100 if lora else 4 * share,
            learnt=12 * share if role.trains else 0,
            tokens=tokens,
            micro_batches=40,
            checkpointing=checkpointing,
        ).offloaded(cfg.trainer.policy.cpu_offload if role.name == "policy" else "none")

    return use


EIGHT = Machine(gpus=8, gpu_memory=80 * GIB, host_memory=1024 * GIB)


def settings(ranks: int = 4, engines: int = 4) -> Config:
    cfg = Config()
    cfg.trainer.placement.policy_num_gpus_per_node = ranks
    cfg.generator.num_inference_engines = engines
    cfg.generator.backend = "vllm"
    cfg.generator.weight_sync_backend = "shared_memory"
    cfg.generator.sampling_params.max_generate_length = 4096
    cfg.trainer.policy.gradient_checkpointing = False
    return cfg


def place(plan: MemoryPlan, name: str) -> MemoryUse:
    return next(place for place in plan.devices if place.name == name)


def test_seven_billion_without_checkpointing_do_not_fit_and_the_key_is_named() -> None:
    cfg = settings()
    plan = make_plan(cfg, QWEN_7B, EIGHT, reckoned())
    assert not plan.fits and not place(plan, "policy").fits and place(plan, "engines").fits
    assert advise(cfg, plan, reckoned()) == {"trainer.policy.gradient_checkpointing": "true"}


def test_an_episode_of_many_turns_is_as_long_as_the_engine_allows(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(
        '{"model_type": "llama", "max_position_embeddings": 8192}'
    )
    cfg = settings()
    cfg.trainer.policy.model.path, cfg.generator.max_turns = str(tmp_path), 10
    assert memory.Lengths.of(cfg).total == 8192
    cfg.generator.max_turns = 1
    assert memory.Lengths.of(cfg).total == 512 + 4096
    cfg.generator.max_turns, cfg.generator.max_model_len = 3, 16384
    assert memory.Lengths.of(cfg).total == 512 + 3 * 4096


@pytest.mark.parametrize("setting", ["agent_program", "agent_func_path"])
def test_an_agent_without_a_limit_of_turns_is_planned_with_all_the_room_that_the_engine_has(
    setting: str,
) -> None:
    cfg = settings()
    cfg.generator.max_turns, cfg.generator.max_model_len = 0, 16384
    assert memory.Lengths.of(cfg).total == 512 + 4096
    setattr(cfg.generator, setting, "agents:play")
    assert memory.Lengths.of(cfg).total == 16384
    cfg.generator.max_turns = 1
    assert memory.Lengths.of(cfg).total == 512 + 4096


def test_where_nothing_helps_no_key_is_named() -> None:
    machine, cfg = replace(EIGHT, gpu_memory=8 * GIB), settings()
    assert advise(cfg, make_plan(cfg, QWEN_7B, machine, reckoned()), reckoned()) == {}


@pytest.mark.parametrize("memory", [32, 40, 48])
def test_an_advice_fits_and_contradicts_nothing(memory: int) -> None:
    machine, cfg = replace(EIGHT, gpu_memory=memory * GIB), settings()

    def planned(c: Config) -> MemoryPlan:
        return make_plan(c, QWEN_7B, machine, reckoned())

    advice = advise(cfg, planned(cfg), reckoned())
    for key, value in advice.items():
        group, _, name = key.rpartition(".")
        holder = cfg
        for part in group.split("."):
            holder = getattr(holder, part)
        setattr(holder, name, value)
    assert advice and planned(cfg).fits and not check_config(cfg)


def test_more_devices_than_there_are_do_not_fit() -> None:
    cfg = settings(ranks=8, engines=2)
    plan = make_plan(cfg, QWEN_7B, EIGHT, reckoned())
    assert plan.gpus_requested == 10 and not plan.fits


def test_ranks_that_shard_divide_the_ranks_there_are() -> None:
    cfg = settings(4, 1)
    cfg.trainer.policy.fsdp_size = 2
    assert place(make_plan(cfg, QWEN_7B, EIGHT, reckoned()), "policy").count == 4
    cfg.trainer.policy.fsdp_size = 3
    assert any("fsdp_size=3" in problem and "1, 2, 4" in problem for problem in check_config(cfg))


def test_what_the_host_holds_of_a_policy_is_not_its_devices() -> None:
    def on_device_and_host(kind: str) -> tuple[dict[str, int], dict[str, int]]:
        cfg = settings(4, 1)
        cfg.trainer.policy.cpu_offload = kind
        plan = make_plan(cfg, QWEN_7B, EIGHT, reckoned())
        return place(plan, "policy").lines, place(plan, "host").lines

    (plain, host), (without_state, host_state), (bare, everything) = map(
        on_device_and_host, ("none", "optimizer", "parameters")
    )
    share = QWEN_7B.parameters // 4 * 4  # bytes of float32 on each of four ranks
    assert not any("on the host" in what for what in host)
    assert without_state["weights"] == plain["weights"] and sum(without_state.values()) < sum(
        plain.values()
    )
    assert host_state["policy: moments on the host"] == pytest.approx(4 * 2 * share, rel=1e-6)
    assert not {"weights", "moments"} & bare.keys()
    for what in ("weights", "gradients"):
        assert everything[f"policy: {what} on the host"] == pytest.approx(4 * share, rel=1e-6)


def test_an_engines_workspace_is_that_of_the_tokens_it_computes_in_a_step() -> None:
    """On a GPU prompts are computed in chunks, on a CPU whole."""
    short, long = settings(4, 1), settings(4, 1)
    short.generator.max_model_len, long.generator.max_model_len = 8192, 131072
    assert (
        len({make_plan(cfg, QWEN_7B, EIGHT, reckoned()).engine.workspace for cfg in (short, long)})
        == 1
    )
    on_cpu = [
        make_plan(cfg, QWEN_7B, replace(EIGHT, gpus=0), reckoned()).engine.workspace
        for cfg in (short, long)
    ]
    assert on_cpu[1] > 10 * on_cpu[0]
    short.generator.max_num_batched_tokens = 16384
    assert make_plan(short, QWEN_7B, EIGHT, reckoned()).engine.workspace > on_cpu[0]


def test_a_tensor_parallel_engine_divides_weights_and_heads() -> None:
    alone, divided = settings(4, 1), settings(4, 1)
    divided.generator.inference_engine_tensor_parallel_size = 4
    eight = settings(4, 1)
    eight.generator.inference_engine_tensor_parallel_size = 8  # twice the KV heads
    first, second, third = (
        make_plan(cfg, QWEN_7B, EIGHT, reckoned()).engine for cfg in (alone, divided, eight)
    )
    assert first.weights == pytest.approx(4 * second.weights, rel=1e-6)
    assert first.least_cache == 4 * second.least_cache and second.least_cache == third.least_cache


def test_advice_keeps_ranks_that_the_mesh_divides() -> None:
    machine, cfg = replace(EIGHT, gpu_memory=48 * GIB), settings(ranks=2, engines=2)
    cfg.trainer.parallel.tensor = 2
    advice = advise(cfg, make_plan(cfg, QWEN_7B, machine, reckoned()), reckoned())
    assert advice["trainer.placement.policy_num_gpus_per_node"] % 2 == 0


def test_a_reference_on_the_policys_devices_adds_its_weights_there() -> None:
    cfg = settings()
    cfg.trainer.algorithm.use_kl_loss = True
    lines = place(make_plan(cfg, QWEN_7B, EIGHT, reckoned()), "policy").lines
    assert lines["reference: weights"] == pytest.approx(2 * QWEN_7B.parameters / 4, rel=1e-6)


def test_a_role_that_a_program_adds_is_counted_with_its_optimizer(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    critic = Role(
        "critic", "not:imported", section="trainer.policy", trains=True, colocated_if=always
    )
    monkeypatch.setitem(ROLES, "critic", critic)
    plan = make_plan(settings(), QWEN_7B, EIGHT, reckoned())
    assert plan.processes["critic"] == 4 and plan.gpus_requested == 8
    assert place(plan, "policy").lines["critic: moments"] == pytest.approx(
        8 * QWEN_7B.parameters / 4, rel=1e-6
    )
    monkeypatch.setitem(ROLES, "critic", replace(critic, colocated_if=never))
    plan = make_plan(settings(), QWEN_7B, EIGHT, reckoned())
    assert plan.gpus_requested == 9 and place(plan, "critic").when == "update"


def test_a_teacher_has_its_own_shape_colocated_with_the_policy_or_not() -> None:
    cfg = settings()
    cfg.trainer.teacher.model.path = "larger"
    plan = make_plan(cfg, SMALL, EIGHT, reckoned(SMALL, teacher=QWEN_7B))
    assert plan.processes["teacher"] == 4 and plan.gpus_requested == 8
    assert place(plan, "policy").lines["teacher: weights"] == pytest.approx(
        2 * QWEN_7B.parameters / 4, rel=1e-6
    )
    (
        cfg.trainer.placement.colocate_policy_teacher,
        cfg.trainer.placement.teacher_num_gpus_per_node,
    ) = False, 2
    plan = make_plan(cfg, SMALL, EIGHT, reckoned(SMALL, teacher=QWEN_7B))
    teacher = place(plan, "teacher")
    assert plan.gpus_requested == 10 and teacher.count == 2 and teacher.when == "log-probabilities"
    assert teacher.lines["weights"] == pytest.approx(QWEN_7B.parameters, rel=1e-6)


def test_a_critic_is_counted_without_a_vocabulary_head_colocated_with_the_policy_or_not() -> None:
    cfg = settings()
    cfg.trainer.algorithm.advantage_estimator = "gae"
    plan = make_plan(cfg, QWEN_7B, EIGHT, reckoned())
    assert plan.processes["critic"] == 4 and plan.gpus_requested == 8
    assert place(plan, "policy").lines["critic: moments"] == pytest.approx(8 * CRITIC / 4, rel=1e-6)
    cfg.trainer.placement.colocate_policy_critic, cfg.trainer.placement.critic_num_gpus_per_node = (
        False,
        2,
    )
    plan = make_plan(cfg, QWEN_7B, EIGHT, reckoned())
    assert plan.processes["critic"] == 2 and plan.gpus_requested == 10
    critic, policy = place(plan, "critic"), place(plan, "policy")
    assert critic.when == "update" and critic.count == 2
    assert critic.lines.get("logits", 0) < policy.lines["logits"] / 4
    assert critic.lines["weights"] == pytest.approx(2 * CRITIC, rel=1e-6)


def test_a_critic_on_the_policys_layers_is_no_process() -> None:
    cfg = settings()
    before = make_plan(cfg, QWEN_7B, EIGHT, reckoned())
    cfg.trainer.algorithm.advantage_estimator, cfg.trainer.critic.backbone = "gae", "shared"
    plan = make_plan(cfg, QWEN_7B, EIGHT, reckoned())
    assert plan.processes == before.processes and plan.gpus_requested == before.gpus_requested


def test_engines_that_share_a_device_with_the_policy_take_turns() -> None:
    cfg = settings(ranks=8, engines=8)
    cfg.trainer.placement.colocate_all = True
    cfg.trainer.policy.gradient_checkpointing = True
    plan = make_plan(cfg, QWEN_7B, EIGHT, reckoned())
    assert [p.name for p in plan.devices] == ["policy and engines", "host"]
    assert plan.gpus_requested == 8
    assert plan.devices[0].fits


def test_by_cuda_ipc_the_policy_stays_on_its_gpus_for_a_hand_over_and_the_host_has_no_weights_on_their_way() -> (
    None
):
    def plan_by(way: str) -> MemoryPlan:
        cfg = settings(ranks=8, engines=8)
        cfg.trainer.placement.colocate_all, cfg.generator.weight_sync_backend = True, way
        cfg.trainer.policy.gradient_checkpointing, cfg.generator.gpu_memory_utilization = True, 0.2
        return make_plan(cfg, QWEN_7B, EIGHT, reckoned())

    own, by_host = plan_by("cuda_ipc"), plan_by("shared_memory")
    lines = own.devices[0].lines
    assert own.devices[0].when == "weight sync" != by_host.devices[0].when
    assert lines["weights"] + lines["moments"] == pytest.approx(
        12 / 8 * QWEN_7B.parameters, rel=1e-3
    )
    assert lines["engines: weights"] == pytest.approx(2 * QWEN_7B.parameters, rel=1e-3)
    assert lines["parts"] == 2 * max(PART_BYTES, 2 * QWEN_7B.largest_tensor)
    less = sum(by_host.devices[-1].lines.values()) - sum(own.devices[-1].lines.values())
    assert less > 2 * QWEN_7B.parameters


def with_critic(**placement: object) -> Config:
    cfg = settings(ranks=8, engines=8)
    cfg.trainer.algorithm.advantage_estimator = "gae"
    vars(cfg.trainer.placement).update(placement)
    return cfg


def test_every_role_that_waits_for_the_engines_is_in_host_memory_and_in_the_checkpoint() -> None:
    def host(cfg: Config) -> dict[str, int]:
        cfg.trainer.placement.colocate_all = True
        cfg.trainer.ckpt_interval, cfg.trainer.ckpt_async = 10, True
        plan = make_plan(cfg, QWEN_7B, EIGHT, reckoned())
        assert plan.gpus_requested == 8
        return place(plan, "host").lines

    alone, colocated = host(settings(ranks=8, engines=8)), host(with_critic())
    policy, critic = (12 * parameters for parameters in (QWEN_7B.parameters, CRITIC))
    assert (
        colocated["offloaded policy"]
        == alone["offloaded policy"]
        == pytest.approx(policy, rel=1e-6)
    )
    assert colocated["offloaded critic"] == pytest.approx(critic, rel=1e-6)
    assert alone["checkpoint"] == pytest.approx(policy, rel=1e-6)
    assert colocated["checkpoint"] == pytest.approx(policy + critic, rel=1e-6)
    reference = with_critic()
    reference.trainer.algorithm.use_kl_loss = True
    asked = host(reference)
    assert asked["offloaded reference"] == pytest.approx(2 * QWEN_7B.parameters, rel=1e-6)
    assert asked["checkpoint"] == colocated["checkpoint"], "an untrained model has no checkpoint"


def test_roles_that_are_saved_in_turn_take_the_largest_ones_memory_and_at_once_that_of_all() -> (
    None
):
    policy = 12 * SMALL.parameters  # whose other phases are never the fullest of the host
    critic = policy - 12 * (HEAD - SMALL.hidden)

    def checkpoint(cfg: Config, machine: Machine, *, asynchronous: bool) -> int:
        cfg.trainer.ckpt_interval, cfg.trainer.ckpt_async = 10, asynchronous
        return place(make_plan(cfg, SMALL, machine, reckoned(SMALL)), "host").lines["checkpoint"]

    for separate in ({}, {"colocate_policy_critic": False, "critic_num_gpus_per_node": 4}):
        for asynchronous, expected in ((False, policy), (True, policy + critic)):
            found = checkpoint(
                with_critic(**separate), replace(EIGHT, gpus=20), asynchronous=asynchronous
            )
            assert found == pytest.approx(expected, rel=1e-6)
    assert checkpoint(with_critic(), replace(EIGHT, gpus=0), asynchronous=True) == pytest.approx(
        policy + critic, rel=1e-6
    )


def test_roles_on_devices_of_their_own_have_processes_on_the_hosts() -> None:
    lines = [
        place(make_plan(cfg, QWEN_7B, replace(EIGHT, gpus=20), reckoned()), "host").lines[
            "processes"
        ]
        for cfg in (
            settings(8, 8),
            with_critic(colocate_policy_critic=False, critic_num_gpus_per_node=4),
        )
    ]
    assert lines[1] - lines[0] == 4 * PROCESS[True]


def test_without_gpus_a_critic_that_learns_is_a_moment_of_its_own() -> None:
    """Larger than the policy, it takes most while it is trained; on separate devices that is while the policy is."""
    machine = replace(EIGHT, gpus=0)

    def host(**placement: object) -> MemoryUse:
        cfg = with_critic(**placement)
        cfg.trainer.critic.model.path = "larger"
        return place(make_plan(cfg, SMALL, machine, reckoned(SMALL, critic=QWEN_7B)), "host")

    colocated, separate = host(), host(colocate_policy_critic=False, critic_num_gpus_per_node=8)
    assert (
        colocated.when == "critic"
        and colocated.lines["critic: activations"]
        and "policy: activations" not in colocated.lines
    )
    assert (
        separate.when == "update"
        and separate.lines["critic: activations"] == colocated.lines["critic: activations"]
    )
    assert separate.lines["policy: activations"]


@pytest.mark.parametrize("gpus", [16, 0])
def test_while_a_critic_on_the_policys_devices_learns_the_policys_gradients_wait(gpus: int) -> None:
    """Both gradients exist before either model steps: the check for non-finite values covers both first."""
    cfg = with_critic()
    cfg.trainer.critic.model.path, cfg.trainer.critic.gradient_checkpointing = "larger", False
    plan = make_plan(cfg, SMALL, replace(EIGHT, gpus=gpus), reckoned(SMALL, critic=QWEN_7B))
    fullest = plan.devices[0]
    ranks = 1 if gpus else 8  # of a device
    assert fullest.when == "critic"
    assert fullest.lines["policy: gradients"] == pytest.approx(
        ranks * 4 * SMALL.parameters / 8, rel=1e-6
    )


def test_a_machine_without_gpus_holds_everything_in_its_memory() -> None:
    plan = make_plan(settings(1, 1), QWEN_7B, Machine(0, 0, 24 * GIB), reckoned())
    (host,) = plan.devices
    assert not plan.fits and host.lines["policy: weights"] == 4 * QWEN_7B.parameters


@pytest.mark.parametrize(("backend", "buffers", "copies"), [("transformers", 2, 0), ("vllm", 1, 4)])
@pytest.mark.parametrize("gpus", [8, 0])
def test_weights_that_engines_map_are_in_memory_all_the_time_once_for_all_engines(
    backend: str, buffers: int, copies: int, gpus: int
) -> None:
    cfg = settings(4, 4)
    cfg.generator.backend, cfg.trainer.ckpt_interval = backend, 10
    cfg.trainer.policy.model.dtype = "bfloat16"
    host = place(make_plan(cfg, QWEN_7B, replace(EIGHT, gpus=gpus), reckoned()), "host")
    assert host.when in ("checkpoint", "update")
    assert host.lines["weights in shared memory"] == buffers * 2 * QWEN_7B.parameters
    assert host.lines.get("engines: weights", 0) == (0 if gpus else copies * 2 * QWEN_7B.parameters)


def test_constants_are_those_of_the_parts_that_import_torch() -> None:
    from skyasync.inference.backends.transformers import model as embedded_model
    from skyasync.weight_sync.transfers import cuda_ipc

    assert PART_BYTES == cuda_ipc.PART_BYTES
    assert memory.FORWARD_TOKENS == embedded_model.FORWARD_TOKENS


@pytest.mark.parametrize(
    ("text", "size"),
    [
        ("80GiB", 80 << 30),
        ("80GB", 80 * 10**9),
        ("1.5T", 1.5e12),
        ("4096", 4096),
        ("64 mib", 64 << 20),
    ],
)
def test_sizes_are_read_with_their_units(text: str, size: float) -> None:
    assert parse_size(text, "--gpu-memory") == size


@pytest.mark.parametrize("machine", [EIGHT, replace(EIGHT, gpus=0)], ids=["gpus", "cpu"])
def test_an_asynchronous_checkpoint_is_in_memory_all_the_time(machine: Machine) -> None:
    def host(asynchronous: bool) -> dict[str, int]:
        cfg = settings()
        cfg.trainer.ckpt_interval, cfg.trainer.ckpt_async = 10, asynchronous
        return dict(place(make_plan(cfg, QWEN_7B, machine, reckoned()), "host").lines)

    assert host(True)["checkpoint"] > 80 * GIB
    more = sum(host(True).values()) - sum(host(False).values())
    assert more > 0
