"""The assignment of devices, computed before anything starts."""

from collections import Counter

import pytest
from hypothesis import given
from hypothesis import strategies as st

from skyasync.config.schema import Config
from skyasync.run.placement import Placement, by_node, engine_start_limit, plan_slots, share_threads
from skyasync.workers.roles import ROLES


def config(nodes=1, ranks=1, engines=1, tp=1, ref=1, colocate_all=False, colocate_ref=True):
    cfg = Config()
    placement, generator = cfg.trainer.placement, cfg.generator
    placement.policy_num_nodes, placement.policy_num_gpus_per_node = nodes, ranks
    placement.ref_num_gpus_per_node = ref
    placement.colocate_all, placement.colocate_policy_ref = colocate_all, colocate_ref
    generator.num_inference_engines, generator.inference_engine_tensor_parallel_size = engines, tp
    return cfg


CONFIGS = st.builds(
    config, nodes=st.integers(1, 3), ranks=st.integers(1, 8), engines=st.integers(1, 9), ref=st.integers(1, 4),
    colocate_all=st.booleans(), colocate_ref=st.booleans(),
)  # fmt: skip


def plan(cfg, gpus=True, with_reference=True):
    roles = [ROLES["policy"], ROLES["reference"]] if with_reference else [ROLES["policy"]]
    return plan_slots(cfg, gpus=gpus, roles=roles)


def test_without_colocation_every_rank_and_every_engine_has_its_own_bundle():
    slots = plan(config(ranks=2, engines=3, ref=2, colocate_ref=False))
    assert (slots.by_role["policy"], slots.by_role["reference"], slots.by_role["engines"]) == (
        (0, 1),
        (2, 3),
        (4, 5, 6),
    )
    assert len(slots.bundles) == 7
    assert set(slots.share.values()) == {1.0}


def test_the_reference_shares_the_policys_devices():
    slots = plan(config(ranks=4, engines=4))
    assert slots.by_role["policy"] == slots.by_role["reference"] == (0, 1, 2, 3)
    assert slots.by_role["engines"] == (4, 5, 6, 7)
    assert slots.share == {"policy": 0.5, "reference": 0.5, "engines": 1.0}


def test_all_colocated_engines_are_spread_over_the_policys_bundles():
    slots = plan(config(ranks=2, engines=4, colocate_all=True), with_reference=False)
    assert slots.by_role["engines"] == (0, 1, 0, 1)
    assert len(slots.bundles) == 2
    assert slots.share["policy"] == slots.share["engines"] == pytest.approx(1 / 3, abs=1e-4)


def test_a_reference_that_nothing_needs_takes_no_place():
    for together in (True, False):
        slots = plan(config(ranks=2, engines=1, ref=2, colocate_ref=together), with_reference=False)
        assert "reference" not in slots.by_role
        assert len(slots.bundles) == 3
        assert slots.share["policy"] == 1.0


def test_an_engine_over_several_gpus_has_them_in_one_bundle_and_none_without_gpus():
    cfg = config(engines=2, tp=4)
    assert plan(cfg).bundles == (
        {"CPU": 1.0, "GPU": 1.0},
        {"CPU": 1.0, "GPU": 4.0},
        {"CPU": 1.0, "GPU": 4.0},
    )
    assert plan(cfg, gpus=False).bundles == ({"CPU": 1.0},) * 3


@given(cfg=CONFIGS, gpus=st.booleans(), with_reference=st.booleans())
def test_for_every_configuration_all_actors_fit_as_ray_counts_and_no_bundle_is_empty(
    cfg, gpus, with_reference
):
    """Ray counts resources in units of 0.0001, rounded to the nearest."""
    slots = plan(cfg, gpus, with_reference)
    placement, taken = cfg.trainer.placement, Counter()
    for role in ("policy", "reference", "engines"):
        for slot in slots.by_role.get(role, ()):
            taken[slot] += round(slots.share[role] * 10_000)
    assert sorted(taken) == list(range(len(slots.bundles)))
    assert max(taken.values()) <= 10_000
    assert (
        len(slots.by_role["policy"])
        == placement.policy_num_nodes * placement.policy_num_gpus_per_node
    )
    assert len(slots.by_role["engines"]) == cfg.generator.num_inference_engines
    assert ("reference" in slots.by_role) == with_reference
    if with_reference and placement.colocate_policy_ref:
        assert slots.by_role["reference"] == slots.by_role["policy"]
    else:
        assert not set(slots.by_role.get("reference", ())) & set(slots.by_role["policy"])
    if not placement.colocate_all:
        assert not set(slots.by_role["engines"]) & {
            *slots.by_role["policy"],
            *slots.by_role.get("reference", ()),
        }
    assert all(("GPU" in bundle) == gpus for bundle in slots.bundles)


def test_ranks_say_where_a_model_goes():
    placement = Placement(plan(config(ranks=2, engines=1)), group="group")
    ranks = placement.ranks("reference")
    assert (ranks.bundles, ranks.num_cpus, ranks.num_gpus) == ([0, 1], 0.5, 0.5)
    assert Placement(plan(config(), with_reference=False), "group").ranks("reference") is None


def test_neighbouring_ranks_are_on_one_node_in_whatever_order_ray_numbers_its_bundles():
    """Ray 2.60 numbered 32 equal bundles on 4 nodes of 8 GPUs in this order."""
    nodes = dict(enumerate("a" + 8 * "b" + 7 * "a" + "c" + 8 * "d" + 7 * "c"))
    slots = plan(config(nodes=3, ranks=8, engines=8), with_reference=False)
    placement = Placement(slots, "group", by_node(slots.bundles, nodes))
    policy = placement.ranks("policy").bundles
    assert all(
        len({nodes[bundle] for bundle in policy[first : first + 8]}) == 1 for first in (0, 8, 16)
    )
    engines = {
        placement.options("engines", i)["scheduling_strategy"].placement_group_bundle_index
        for i in range(8)
    }
    assert sorted({*policy, *engines}) == list(range(32))


@given(cfg=CONFIGS, data=st.data())
def test_every_slot_gets_a_bundle_of_its_own_with_its_resources(cfg, data):
    bundles = plan(cfg).bundles
    nodes = dict(
        enumerate(
            data.draw(
                st.lists(st.sampled_from("abc"), min_size=len(bundles), max_size=len(bundles))
            )
        )
    )
    found = by_node(bundles, nodes)
    assert sorted(found) == list(range(len(bundles)))
    assert all(bundles[bundle] == own for bundle, own in zip(found, bundles, strict=True))


def test_an_actors_options_are_its_share_of_its_bundle():
    options = Placement(plan(config(engines=2, tp=2)), group="group").options("engines", 1)
    assert (options["num_cpus"], options["num_gpus"]) == (1.0, 2.0)
    assert options["scheduling_strategy"].placement_group_bundle_index == 2


@pytest.mark.parametrize(
    ("cores", "overlap", "ranks", "engines", "threads"),
    [
        (2, False, 1, 1, (2, 2)),
        (2, True, 1, 1, (2, 1)),
        (8, True, 2, 2, (4, 2)),
        (8, False, 2, 4, (4, 2)),
        (1, True, 4, 4, (1, 1)),
    ],
)
def test_alternating_phases_use_all_cores_and_a_concurrent_policy_those_that_engines_leave_idle(
    cores, overlap, ranks, engines, threads
):
    assert share_threads(config(ranks=ranks, engines=engines), cores, overlap=overlap) == threads


def test_threads_that_are_set_are_kept():
    cfg = config()
    cfg.trainer.policy.threads, cfg.generator.threads = 5, 3
    assert share_threads(cfg, 16, overlap=False) == (5, 3)


@pytest.mark.parametrize(
    ("processes", "cores", "gpus", "address", "limit_s"),
    [
        (2, 2, False, "", 300.0),
        (1, 2, False, "", 300.0),
        (12, 2, False, "", 1800.0),
        (12, 2, True, "", 300.0),
        (12, 2, False, "10.0.0.1:6379", 300.0),
    ],
)
def test_the_limit_of_an_engines_start_grows_with_the_processes_that_share_the_cores(
    processes, cores, gpus, address, limit_s
):
    cfg = Config()
    cfg.ray.address = address
    assert engine_start_limit(cfg, processes, cores, gpus=gpus) == limit_s
