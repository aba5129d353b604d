"""What a plan says of devices, hosts and the keys that make a run fit."""

from __future__ import annotations

from dataclasses import replace

import pytest

from skyasync.config.check import check_config
from skyasync.config.schema import Config
from skyasync.planning import memory
from skyasync.planning.advice import advise
from skyasync.planning.plan import PART_BYTES, PROCESS, Machine, MemoryPlan, MemoryUse, make_plan, parse_size
from skyasync.planning.shape import shape_of
from skyasync.workers.roles import ROLES, Role, always, never
from tests.planning.models import as_json, configuration

GIB = 1 << 30
QWEN_7B = shape_of(
    {
        "model_type": "qwen2", "hidden_size": 3584, "intermediate_size": 18944, "num_hidden_layers": 28,
        "num_attention_heads": 28, "num_key_value_heads": 4, "vocab_size": 152064, "tie_word_embeddings": False,
    },
    "7B",
)  # fmt: skip
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
    plan = make_plan(cfg, QWEN_7B, EIGHT)
    assert not plan.fits and not place(plan, "policy").fits and place(plan, "engines").fits
    assert advise(cfg, plan, lambda c: make_plan(c, QWEN_7B, EIGHT)) == {
        "trainer.policy.gradient_checkpointing": "true"
    }


def test_activations_per_token_and_layer_are_what_a_gpu_run_was_seen_to_take() -> None:
    one = memory.Pass(tokens=1, width=1, loss_tokens=1)
    assert memory.layer_bytes(QWEN_7B, one, 2) == pytest.approx(225_000, rel=0.01)


def test_where_nothing_helps_no_key_is_named() -> None:
    machine, cfg = replace(EIGHT, gpu_memory=8 * GIB), settings()
    assert advise(cfg, make_plan(cfg, QWEN_7B, machine), lambda c: make_plan(c, QWEN_7B, machine)) == {}


@pytest.mark.parametrize("memory", [32, 40, 48])
def test_an_advice_fits_and_contradicts_nothing(memory: int) -> None:
    machine, cfg = replace(EIGHT, gpu_memory=memory * GIB), settings()

    def planned(c: Config) -> MemoryPlan:
        return make_plan(c, QWEN_7B, machine)

    advice = advise(cfg, planned(cfg), planned)
    for key, value in advice.items():
        group, _, name = key.rpartition(".")
        holder = cfg
        for part in group.split("."):
            holder = getattr(holder, part)
        setattr(holder, name, value)
    assert advice and planned(cfg).fits and not check_config(cfg)


def test_more_devices_than_there_are_do_not_fit() -> None:
    cfg = settings(ranks=8, engines=2)
    plan = make_plan(cfg, QWEN_7B, EIGHT)
    assert plan.gpus_requested == 10 and not plan.fits


def test_weights_gradients_and_moments_are_divided_by_the_ranks() -> None:
    one, four = (place(make_plan(settings(n, 1), QWEN_7B, EIGHT), "policy").lines for n in (1, 4))
    for what in ("weights", "moments"):
        assert one[what] == pytest.approx(4 * four[what], rel=1e-6)
    assert one["weights"] == 4 * QWEN_7B.parameters


def test_replicas_hold_whole_weights_among_as_many_ranks_as_shard_them() -> None:
    cfg = settings(4, 1)
    cfg.trainer.policy.fsdp_size = 2
    four = place(make_plan(cfg, QWEN_7B, EIGHT), "policy")
    two = place(make_plan(settings(2, 1), QWEN_7B, EIGHT), "policy")
    assert four.count == 4
    assert [four.lines[what] for what in ("weights", "moments")] == [two.lines[what] for what in ("weights", "moments")]
    cfg.trainer.policy.fsdp_size = 3
    assert any("fsdp_size=3" in problem and "1, 2, 4" in problem for problem in check_config(cfg))


def test_what_the_host_holds_of_a_policy_is_not_its_devices() -> None:
    def on_device_and_host(kind: str) -> tuple[dict[str, int], dict[str, int]]:
        cfg = settings(4, 1)
        cfg.trainer.policy.cpu_offload = kind
        plan = make_plan(cfg, QWEN_7B, EIGHT)
        return place(plan, "policy").lines, place(plan, "host").lines

    (plain, host), (without_moments, moments), (bare, everything) = map(
        on_device_and_host, ("none", "optimizer", "parameters")
    )
    share = QWEN_7B.parameters // 4 * 4  # bytes of float32 on each of four ranks
    assert not any("on the host" in what for what in host)
    assert without_moments["weights"] == plain["weights"] and sum(without_moments.values()) < sum(plain.values())
    assert moments["policy: moments on the host"] == pytest.approx(4 * 2 * share, rel=1e-6)
    assert not {"weights", "moments"} & bare.keys()
    for what in ("weights", "gradients"):
        assert everything[f"policy: {what} on the host"] == pytest.approx(4 * share, rel=1e-6)


def test_the_token_cap_holds_whatever_the_rows() -> None:
    cfg = settings()
    cfg.trainer.micro_train_batch_size_per_gpu = 64
    cfg.trainer.micro_batch_tokens = 8192
    limit = cfg.trainer.micro_train_batch_size_per_gpu
    largest, count = memory.largest_micro_batch(cfg, QWEN_7B, gpus=True, ranks=4, rows_limit=limit)
    rows = cfg.trainer.train_batch_size * cfg.generator.n_samples_per_prompt / 4
    assert largest.tokens <= 8192 + 4096  # the last row of a shared prompt may reach beyond
    assert largest.loss_tokens * count >= rows * 4096


def test_a_tensor_parallel_engine_divides_weights_and_heads() -> None:
    alone, divided = settings(4, 1), settings(4, 1)
    divided.generator.inference_engine_tensor_parallel_size = 4
    first, second = (make_plan(cfg, QWEN_7B, EIGHT).engine for cfg in (alone, divided))
    assert first.weights == pytest.approx(4 * second.weights, rel=1e-6)
    assert memory.cache_bytes_per_token(QWEN_7B, 2, 1) == 4 * memory.cache_bytes_per_token(QWEN_7B, 2, 4)
    assert memory.cache_bytes_per_token(QWEN_7B, 2, 4) == memory.cache_bytes_per_token(QWEN_7B, 2, 8)


def test_the_axes_of_ranks_divide_what_they_split_and_nothing_else() -> None:
    """Tensor parallelism divides what FSDP gathers and heads and MLPs make, context parallelism the activations."""

    def policy(**sizes: int) -> dict[str, int]:
        cfg = settings(ranks=4)
        vars(cfg.trainer.parallel).update(sizes)
        cfg.trainer.micro_batch_tokens = 8192 // sizes.get("context", 1)  # of each rank: the group's stay the same
        return place(make_plan(cfg, QWEN_7B, EIGHT), "policy").lines

    plain, tensor, context = policy(), policy(tensor=2), policy(context=2)
    assert tensor["weights"] == pytest.approx(plain["weights"], rel=0.1), "the same ranks hold the model once"
    assert tensor["gathered"] < 0.75 * plain["gathered"]
    assert tensor["activations"] < 0.75 * plain["activations"]
    assert context["weights"] == plain["weights"] and context["gathered"] == plain["gathered"]
    assert context["activations"] == pytest.approx(plain["activations"] / 2, rel=0.01)


def test_an_advice_keeps_ranks_that_the_axes_divide() -> None:
    machine, cfg = replace(EIGHT, gpu_memory=48 * GIB), settings(ranks=2, engines=2)
    cfg.trainer.parallel.tensor = 2
    advice = advise(cfg, make_plan(cfg, QWEN_7B, machine), lambda c: make_plan(c, QWEN_7B, machine))
    assert advice["trainer.placement.policy_num_gpus_per_node"] % 2 == 0


def test_a_reference_on_the_policys_devices_adds_its_weights_there() -> None:
    cfg = settings()
    cfg.trainer.algorithm.use_kl_loss = True
    lines = place(make_plan(cfg, QWEN_7B, EIGHT), "policy").lines
    assert lines["reference: weights"] == pytest.approx(2 * QWEN_7B.parameters / 4, rel=1e-6)


def test_a_role_that_a_program_adds_is_counted_with_its_optimizer(monkeypatch: pytest.MonkeyPatch) -> None:
    critic = Role("critic", "not:imported", section="trainer.policy", trains=True, colocated_if=always)
    monkeypatch.setitem(ROLES, "critic", critic)
    plan = make_plan(settings(), QWEN_7B, EIGHT)
    assert plan.processes["critic"] == 4 and plan.gpus_requested == 8
    assert place(plan, "policy").lines["critic: moments"] == pytest.approx(8 * QWEN_7B.parameters / 4, rel=1e-6)
    monkeypatch.setitem(ROLES, "critic", replace(critic, colocated_if=never))
    plan = make_plan(settings(), QWEN_7B, EIGHT)
    assert plan.gpus_requested == 9 and place(plan, "critic").when == "update"


def test_what_is_kept_of_layers_and_gradients_that_are_added_up_once_are_counted() -> None:
    cfg = settings()
    plain, once = make_plan(cfg, QWEN_7B, EIGHT), settings()
    once.trainer.policy.reduce_gradients = "update"
    whole = place(make_plan(once, QWEN_7B, EIGHT), "policy").lines["gradients"]
    assert whole - place(plan=plain, name="policy").lines["gradients"] == pytest.approx(
        QWEN_7B.parameters * 4 * 3 / 4, rel=1e-6
    )
    sizes = []
    for how in (True, "selective", False):
        cfg.trainer.policy.gradient_checkpointing = how
        sizes.append(place(make_plan(cfg, QWEN_7B, EIGHT), "policy").lines["activations"])
    assert 2 * sizes[0] < sizes[1] < 0.7 * sizes[2]


def test_a_teacher_has_a_shape_of_its_own_beside_the_policy_or_apart() -> None:
    cfg, small = settings(), replace(QWEN_7B, layers=4)
    cfg.trainer.teacher.model.path = "larger"
    plan = make_plan(cfg, small, EIGHT, shapes={"teacher": QWEN_7B})
    assert plan.processes["teacher"] == 4 and plan.gpus_requested == 8
    assert place(plan, "policy").lines["teacher: weights"] == pytest.approx(2 * QWEN_7B.parameters / 4, rel=1e-6)
    cfg.trainer.placement.colocate_policy_teacher, cfg.trainer.placement.teacher_num_gpus_per_node = False, 2
    plan = make_plan(cfg, small, EIGHT, shapes={"teacher": QWEN_7B})
    teacher = place(plan, "teacher")
    assert plan.gpus_requested == 10 and teacher.count == 2 and teacher.when == "log-probabilities"
    assert teacher.lines["weights"] == pytest.approx(QWEN_7B.parameters, rel=1e-6)


def test_logits_that_are_capped_or_scaled_take_copies_of_them() -> None:
    config = configuration("gemma2", final_logit_softcapping=None)
    plain, scaled, capped = (
        shape_of(as_json(config) | more, "m") for more in ({}, {"logit_scale": 0.5}, {"final_logit_softcapping": 30.0})
    )
    rank = memory.RankMemory(1, 2, memory.Pass(tokens=64, width=64, loss_tokens=64))
    counts = [memory.logits_bytes(shape, rank, backward=True) for shape in (plain, scaled, capped)]
    logits = 64 * plain.vocabulary * 2
    assert counts == [counts[0], counts[0] + logits, counts[0] + 2 * logits]


def test_a_critic_is_counted_without_a_head_over_the_vocabulary_beside_the_policy_or_apart() -> None:
    cfg = settings()
    cfg.trainer.algorithm.advantage_estimator = "gae"
    plan = make_plan(cfg, QWEN_7B, EIGHT)
    parameters = QWEN_7B.parameters - QWEN_7B.vocabulary * QWEN_7B.hidden + QWEN_7B.hidden
    assert QWEN_7B.with_value_head.parameters == parameters and not QWEN_7B.tied
    assert plan.processes["critic"] == 4 and plan.gpus_requested == 8
    assert place(plan, "policy").lines["critic: moments"] == pytest.approx(8 * parameters / 4, rel=1e-6)
    cfg.trainer.placement.colocate_policy_critic, cfg.trainer.placement.critic_num_gpus_per_node = False, 2
    plan = make_plan(cfg, QWEN_7B, EIGHT)
    assert plan.processes["critic"] == 2 and plan.gpus_requested == 10
    critic, policy = place(plan, "critic"), place(plan, "policy")
    assert critic.when == "update" and critic.count == 2
    assert critic.lines.get("logits", 0) < policy.lines["logits"] / 4
    assert critic.lines["weights"] == pytest.approx(2 * parameters, rel=1e-6)


def test_a_critic_on_the_policys_layers_is_one_vector_and_no_process() -> None:
    cfg = settings()
    before = make_plan(cfg, QWEN_7B, EIGHT)
    cfg.trainer.algorithm.advantage_estimator, cfg.trainer.critic.backbone = "gae", "shared"
    plan = make_plan(cfg, QWEN_7B, EIGHT)
    assert plan.processes == before.processes and plan.gpus_requested == before.gpus_requested
    policy, alone = place(plan, "policy").lines, place(before, "policy").lines
    assert policy["critic"] == 12 * QWEN_7B.hidden and "critic" not in alone
    assert policy["logits"] > alone["logits"]


def test_engines_that_share_a_device_with_the_policy_take_turns() -> None:
    cfg = settings(ranks=8, engines=8)
    cfg.trainer.placement.colocate_all = True
    cfg.trainer.policy.gradient_checkpointing = True
    plan = make_plan(cfg, QWEN_7B, EIGHT)
    assert [p.name for p in plan.devices] == ["policy and engines", "host"]
    assert plan.gpus_requested == 8
    assert plan.devices[0].fits


def test_by_cuda_ipc_the_policy_stays_on_its_gpus_for_a_hand_over_and_the_host_has_no_weights_on_their_way() -> None:
    def plan_by(way: str) -> MemoryPlan:
        cfg = settings(ranks=8, engines=8)
        cfg.trainer.placement.colocate_all, cfg.generator.weight_sync_backend = True, way
        cfg.trainer.policy.gradient_checkpointing, cfg.generator.gpu_memory_utilization = True, 0.2
        return make_plan(cfg, QWEN_7B, EIGHT)

    own, by_host = plan_by("cuda_ipc"), plan_by("shared_memory")
    lines = own.devices[0].lines
    assert own.devices[0].when == "weight sync" != by_host.devices[0].when
    assert lines["weights"] + lines["moments"] == pytest.approx(12 / 8 * QWEN_7B.parameters, rel=1e-3)
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
        plan = make_plan(cfg, QWEN_7B, EIGHT)
        assert plan.gpus_requested == 8
        return place(plan, "host").lines

    alone, beside = host(settings(ranks=8, engines=8)), host(with_critic())
    policy, critic = (12 * shape.parameters for shape in (QWEN_7B, QWEN_7B.with_value_head))
    assert beside["offloaded policy"] == alone["offloaded policy"] == pytest.approx(policy, rel=1e-6)
    assert beside["offloaded critic"] == pytest.approx(critic, rel=1e-6)
    assert alone["checkpoint"] == pytest.approx(policy, rel=1e-6)
    assert beside["checkpoint"] == pytest.approx(policy + critic, rel=1e-6)
    reference = with_critic()
    reference.trainer.algorithm.use_kl_loss = True
    asked = host(reference)
    assert asked["offloaded reference"] == pytest.approx(2 * QWEN_7B.parameters, rel=1e-6)
    assert asked["checkpoint"] == beside["checkpoint"], "what is not trained is not saved"


def test_roles_that_are_saved_in_turn_take_the_largest_ones_memory_and_at_once_that_of_all() -> None:
    small = replace(QWEN_7B, layers=4)  # whose other phases are never the host's fullest
    policy, critic = (12 * shape.parameters for shape in (small, small.with_value_head))

    def checkpoint(cfg: Config, machine: Machine, *, behind: bool) -> int:
        cfg.trainer.ckpt_interval, cfg.trainer.ckpt_async = 10, behind
        return place(make_plan(cfg, small, machine), "host").lines["checkpoint"]

    for apart in ({}, {"colocate_policy_critic": False, "critic_num_gpus_per_node": 4}):
        for behind, expected in ((False, policy), (True, policy + critic)):
            found = checkpoint(with_critic(**apart), replace(EIGHT, gpus=20), behind=behind)
            assert found == pytest.approx(expected, rel=1e-6)
    assert checkpoint(with_critic(), replace(EIGHT, gpus=0), behind=True) == pytest.approx(policy + critic, rel=1e-6)


def test_roles_on_devices_of_their_own_have_processes_on_the_hosts() -> None:
    lines = [
        place(make_plan(cfg, QWEN_7B, replace(EIGHT, gpus=20)), "host").lines["processes"]
        for cfg in (settings(8, 8), with_critic(colocate_policy_critic=False, critic_num_gpus_per_node=4))
    ]
    assert lines[1] - lines[0] == 4 * PROCESS[True]


def test_without_gpus_a_critic_that_learns_is_a_moment_of_its_own() -> None:
    """Larger than the policy, it takes most while it is trained; on devices of its own that is while the policy is."""
    small, machine = replace(QWEN_7B, layers=4), replace(EIGHT, gpus=0)

    def host(**placement: object) -> MemoryUse:
        cfg = with_critic(**placement)
        cfg.trainer.critic.model.path = "larger"
        return place(make_plan(cfg, small, machine, shapes={"critic": QWEN_7B}), "host")

    beside, apart = host(), host(colocate_policy_critic=False, critic_num_gpus_per_node=8)
    assert beside.when == "critic" and beside.lines["critic: activations"] and "policy: activations" not in beside.lines
    assert apart.when == "update" and apart.lines["critic: activations"] == beside.lines["critic: activations"]
    assert apart.lines["policy: activations"]


@pytest.mark.parametrize("gpus", [16, 0])
def test_while_a_critic_on_the_policys_devices_learns_the_policys_gradients_wait(gpus: int) -> None:
    """Both gradients are there before either model steps: what is not finite is told of both first."""
    cfg, small = with_critic(), replace(QWEN_7B, layers=4)
    cfg.trainer.critic.model.path, cfg.trainer.critic.gradient_checkpointing = "larger", False
    plan = make_plan(cfg, small, replace(EIGHT, gpus=gpus), shapes={"critic": QWEN_7B})
    fullest = plan.devices[0]
    ranks = 1 if gpus else 8  # of a place
    assert fullest.when == "critic"
    assert fullest.lines["policy: gradients"] == pytest.approx(ranks * 4 * small.parameters / 8, rel=1e-6)


def test_a_machine_without_gpus_holds_everything_in_its_memory() -> None:
    plan = make_plan(settings(1, 1), QWEN_7B, Machine(0, 0, 24 * GIB))
    (host,) = plan.devices
    assert not plan.fits and host.lines["policy: weights"] == 4 * QWEN_7B.parameters


def test_constants_are_those_of_the_parts_that_import_torch() -> None:
    from skyasync.inference.backends.transformers import model as embedded_model
    from skyasync.weight_sync.transfers import cuda_ipc

    assert PART_BYTES == cuda_ipc.PART_BYTES
    assert memory.FORWARD_TOKENS == embedded_model.FORWARD_TOKENS


@pytest.mark.parametrize(
    ("text", "size"),
    [("80GiB", 80 << 30), ("80GB", 80 * 10**9), ("1.5T", 1.5e12), ("4096", 4096), ("64 mib", 64 << 20)],
)
def test_sizes_are_read_with_their_units(text: str, size: float) -> None:
    assert parse_size(text, "--gpu-memory") == size


@pytest.mark.parametrize("machine", [EIGHT, replace(EIGHT, gpus=0)], ids=["gpus", "cpu"])
def test_a_checkpoint_written_behind_training_is_in_memory_all_the_while(machine: Machine) -> None:
    def host(behind: bool) -> dict[str, int]:
        cfg = settings()
        cfg.trainer.ckpt_interval, cfg.trainer.ckpt_async = 10, behind
        return dict(place(make_plan(cfg, QWEN_7B, machine), "host").lines)

    assert host(True)["checkpoint"] > 80 * GIB
    more = sum(host(True).values()) - sum(host(False).values())
    assert more > 0


def test_muon_keeps_one_moment_of_the_layers_matrices() -> None:
    cfg = settings(1, 1)
    adam = place(make_plan(cfg, QWEN_7B, EIGHT), "policy").lines["moments"]
    cfg.trainer.policy.optimizer_config.name = "muon"
    muon = place(make_plan(cfg, QWEN_7B, EIGHT), "policy").lines["moments"]
    assert adam - muon == 4 * QWEN_7B.layers * QWEN_7B.layer


def test_replayed_experts_are_counted_in_batches_and_micro_batches() -> None:
    cfg, shape = settings(), shape_of(as_json(configuration("qwen3_moe")), "moe")
    plain = make_plan(cfg, shape, EIGHT)
    cfg.trainer.policy.router_replay = "R3"
    found = make_plan(cfg, shape, EIGHT)
    each = shape.layers * shape.experts_per_token
    assert memory.scoring(shape, found.rank)["replayed experts"] == found.rank.work.tokens * each
    before, after = (place(plan, "host").lines["batch"] for plan in (plain, found))
    assert before * (memory.BYTES_PER_CELL + each) == after * memory.BYTES_PER_CELL
