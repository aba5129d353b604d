"""The tables of other frameworks' keys contain facts that are true here, and hints come from them."""

import re
from pathlib import Path

import pytest

from skyasync import interop
from skyasync.config import Config, ConfigError, load_config
from skyasync.config.command_line import unknown_key
from skyasync.config.keys import Key, Keys
from skyasync.config.values import WrongTypeError, convert, free, parse
from skyasync.interop.conversion import (
    ConversionContext,
    NoCounterpartError,
    converted,
    key_hint,
    value_hint,
)
from skyasync.interop.system import TableRow, Target, expand, systems

KEYS = Keys.of(Config)
HERE = Path(__file__).parent
ROWS = [(name, row) for name, system in systems().items() for row in system.table.rows]
FLAGS = [line.split("\t") for line in (HERE / "flags.tsv").read_text().splitlines()[1:]]


def their_keys(system: str) -> list[str]:
    return (HERE / system / "keys.txt").read_text().split()


def refused(*overrides: str) -> list[str]:
    with pytest.raises(ConfigError) as refusal:
        load_config(list(overrides))
    return refusal.value.problems


def accepts(key: Key, text: str) -> bool:
    try:
        value = convert(
            parse(text), key.type if "." not in key.path or not key.is_mapping else object
        )
    except WrongTypeError:
        return False
    elements = value if isinstance(value, list) else [value]
    options = key.options()
    for element in elements:
        number = isinstance(element, int | float) and not isinstance(element, bool)
        if number and not key.allows(element):
            return False
        if options and element not in options and not (key.open_ended and ":" in str(element)):
            return False
    return True


@pytest.mark.parametrize("system", systems())
def test_a_table_has_five_columns_and_names_each_key_once(system: str) -> None:
    lines = (Path(interop.__path__[0]) / system / "settings.tsv").read_text().splitlines()
    assert [line for line in lines if line.count("\t") != 4] == []
    names = [name for row in systems()[system].table.rows for name in row.names]
    assert sorted({name for name in names if names.count(name) > 1}) == []


def test_every_key_of_ours_in_a_table_exists() -> None:
    wrong = [
        (name, str(target))
        for name, row in ROWS
        for target in row.targets
        if KEYS.holder(target.path) is None
    ]
    assert wrong == []


def test_every_value_of_ours_in_a_table_loads() -> None:
    wrong = []
    for name, row in ROWS:
        pairs = [
            (target, text)
            for target in row.free
            for text in row.aliases.values()
            if text not in "~-"
        ]
        pairs += [
            (target, target.fixed or "") for target in row.targets if target.fixed is not None
        ]
        wrong += [
            (name, str(t), text)
            for t, text in pairs
            if t.path in KEYS and not accepts(KEYS[t.path], text)
        ]
    assert wrong == []


def test_every_default_that_is_carried_over_has_a_value_here() -> None:
    context = ConversionContext(defaults={key.path: key.default for key in KEYS})
    wrong = []
    for name, row in ROWS:
        if not row.default or row.kind != "key":
            continue
        try:
            settings = converted(row, free(parse(row.default)), context) or {}
        except NoCounterpartError:
            continue  # a default without a counterpart here is left out
        for path, value in settings.items():
            key = KEYS.by_path.get(path)
            text = "[" + ",".join(map(str, value)) + "]" if isinstance(value, list) else str(value)
            if key and not accepts(key, text.lower() if isinstance(value, bool) else text):
                wrong.append((name, path, value))
    assert wrong == []


def test_a_reason_is_given_wherever_there_is_no_counterpart() -> None:
    assert [(name, row.names) for name, row in ROWS if row.kind != "key" and not row.note] == []


PATHS = {key.path for key in KEYS}
ENDINGS = {".".join(path.split(".")[at:]) for path in PATHS for at in range(path.count(".") + 1)}
GROUPS = {path.rpartition(".")[0] for path in PATHS} | set(KEYS.groups)
#: All that a configuration can set: ``key`` and ``key=choice``.
SAID = sorted(PATHS | {f"{key.path}={option}" for key in KEYS for option in key.options() or ()})
REASONS = dict(line.split("\t") for line in (HERE / "reasons.tsv").read_text().splitlines()[1:])
#: Their words that are ours with another meaning: in their framework (framework, word), here the value that means it.
FALSE_FRIENDS = {
    ("skyrl", "constant_with_warmup"): "constant",  # with num_warmup_steps
    ("areal", "auto"): "latest",
    ("verl", "auto"): "latest",
    ("verl", "vanilla"): "dual_clip",
    ("trl", "token_mask"): "icepop",
    ("trl", "sequence_mask"): "sequence_icepop",
}
#: Keys without a counterpart whose names are similar to one of ours.
FALSE_SOUNDS = {
    "generator.inference_engine.offload_kv_for_weight_sync", "actor.aux_loss_coef", "aux_loss_coef",
    "router_aux_loss_coef", "train_dataset.num_workers", "valid_dataset.num_workers", "valid_dataset.type",
    "saver.mode", "actor.request_timeout", "sync_ref_model", "entropy_coef_min", "entropy_coef_max",
    "entropy_coef_delta", "actor_train.name", "actor_train.opd_kl_coef", "critic.muon.no_nesterov",
    "max_tokens_per_gpu", "skip_mock_system_prompt", "actor.rejection_sampling.metric",
}  # fmt: skip
#: Words that many keys share.
COMMON = {
    "num", "max", "min", "size", "batch", "per", "the", "of", "path", "name", "type", "train", "eval", "args", "use",
    "enable", "key", "steps", "model",
}  # fmt: skip


def names_ours(note: str) -> bool:
    """Whether a note names the key, group or command of ours that does the same."""
    words = re.findall(r"[\w.]*\w", note)
    return "skyasync " in note or any(
        word in GROUPS or word in PATHS or (word in ENDINGS and re.search(r"[._]", word))
        for word in words
    )


def test_what_is_denied_names_what_does_it_or_a_feature_that_is_missing() -> None:
    bare = {row.note for _, row in ROWS if row.kind == "-" and not names_ours(row.note)}
    assert bare - set(REASONS) == set()
    assert set(REASONS) - bare == set(), "reasons that no row gives"


@pytest.mark.parametrize("reason", REASONS)
def test_a_feature_that_is_said_to_be_missing_is(reason: str) -> None:
    assert [said for said in SAID if re.search(REASONS[reason], said)] == []


def test_keys_that_notes_name_exist() -> None:
    named = re.compile(r"\b(?:trainer|generator|environment|data|ray)\.[a-z]\w*(?:\.\w+)*")
    found = [(name, word) for name, row in ROWS for word in named.findall(row.note)]
    assert [
        (name, word) for name, word in found if word not in GROUPS and KEYS.holder(word) is None
    ] == []


def test_no_value_is_denied_or_changed_that_is_ours() -> None:
    wrong = []
    for name, row in ROWS:
        for target in row.free:
            options = (
                {str(option) for option in (KEYS[target.path].options() or ())}
                if target.path in KEYS
                else set()
            )
            wrong += [
                (name, row.names[0], theirs, ours)
                for theirs, ours in row.aliases.items()
                if theirs in options
                and ours not in (theirs, "~")
                and FALSE_FRIENDS.get((name, theirs)) != ours
            ]
    assert wrong == []


def test_a_key_without_a_counterpart_does_not_sound_like_one_of_ours() -> None:
    wrong = []
    for name, row in ROWS:
        for theirs in row.names if row.kind == "-" and not names_ours(row.note) else ():
            last = theirs.rpartition(".")[2]
            for path in PATHS:
                ours = path.rpartition(".")[2]
                shared = ({*last.split("_")} & {*ours.split("_")}) - COMMON
                if (last == ours or len(shared) > 1) and theirs not in FALSE_SOUNDS:
                    wrong.append((name, theirs, path))
    assert wrong == []


@pytest.mark.parametrize("system", systems())
def test_every_key_of_a_system_is_answered_by_its_table(system: str) -> None:
    table, keys = systems()[system].table, their_keys(system)
    assert [key for key in keys if table.find(key) is None] == []


@pytest.mark.parametrize("system", systems())
def test_no_key_of_a_system_gets_a_fuzzy_hint(system: str) -> None:
    unanswered = [key for key in their_keys(system) if key not in KEYS and not key_hint(key)]
    assert unanswered == []


@pytest.mark.parametrize(
    ("system", "theirs", "ours"), FLAGS, ids=[f"{flag[0]}:{flag[1]}" for flag in FLAGS]
)
def test_a_drawn_flag_has_the_answer_that_was_decided_by_hand(
    system: str, theirs: str, ours: str
) -> None:
    row = systems()[system].table.find(theirs)
    assert row is not None
    hint = unknown_key(theirs, KEYS)
    assert hint.startswith(f"unknown key {theirs!r}: ")
    if ours in ("-", "="):
        assert row.kind == ours
        assert row.note in hint
    else:
        assert [str(target) for target in row.free] == ours.split()
        assert all(path.partition("[")[0] in hint for path in ours.split())
        assert systems()[system].title in hint or "did you mean" in hint


def test_two_hundred_flags_have_an_answer() -> None:
    assert len(FLAGS) == len({(system, key) for system, key, _ in FLAGS}) == 200
    assert {system for system, *_ in FLAGS} == set(systems())


@pytest.mark.parametrize(
    ("override", "hint"),
    [
        ("critic.model_name_or_path=x", "OpenRLHF means: here it is trainer.critic.model.path=x"),
        ("eval.n_samples_per_prompt=4", "here it is generator.eval_n_samples_per_prompt=4"),
        ("ds.tensor_parallel_size=2", "here it is trainer.parallel.tensor=2"),
        ("ds.ring_attn_head_stride=2", "no counterpart here: no such stride"),
        ("ckpt.path=/tmp/x", "here it is trainer.ckpt_path=/tmp/x"),
        ("train.async_enable=true", "here it is trainer.plan=one_step_off"),
        (
            "eps_clip_low_high=[0.2,0.27]",
            "trainer.algorithm.eps_clip_low=0.2 and trainer.algorithm.eps_clip_high=0.27",
        ),
        ("rollout.max_head_offpolicyness=0", "stays at its default for 0"),
        (
            "actor.optimizer.lr_scheduler_type=cosine",
            "trainer.policy.optimizer_config.scheduler=cosine",
        ),
        ("algorithm.adv_estimator=remax", "without a counterpart for remax"),
        ("per_device_train_batch_size=4", "trainer.micro_train_batch_size_per_gpu=4"),
        (
            "actor_rollout_ref.actor.fsdp_config.wrap_policy.min_num_params=0",
            "FSDP2 wraps and shards by itself",
        ),
        (
            "clip_ratio_low=0.1",
            "that is how verl spells it; here it is trainer.algorithm.eps_clip_low=0.1",
        ),
        ("no_advantage_std_norm=true", "trainer.algorithm.extra.scale=false"),
    ],
)
def test_a_hint_says_the_whole_setting(override: str, hint: str) -> None:
    [problem] = refused(override)
    assert hint in problem


def test_a_key_that_two_systems_mean_differently_names_both() -> None:
    [problem] = refused("l2=0.01")
    assert (
        "OpenRLHF means: here it is trainer.policy.optimizer_config.weight_decay=0.01; ROLL means: "
        in problem
    )
    [problem] = refused("rollout_batch_size=64")
    assert problem.count("trainer.train_batch_size=64") == 2
    assert "ROLL means" in problem


def test_a_key_that_two_systems_mean_alike_names_them_once() -> None:
    assert (
        "that is how ROLL and TRL spell it; here it is trainer.runs_dir=x"
        in refused("output_dir=x")[0]
    )
    assert (
        "that is OpenRLHF and TRL's; it needs no setting here"
        in refused("attn_implementation=eager")[0]
    )


def test_a_key_that_ours_ends_in_is_suggested_only_if_the_value_is_the_same() -> None:
    assert "did you mean generator.sampling_params.top_k?" in refused("top_k=5")[0]
    assert (
        "that is how TRL spells it; here it is generator.sampling_params.top_k=-1"
        in refused("top_k=0")[0]
    )


def test_responses_are_said_as_prompts_with_the_number() -> None:
    assert "trainer.policy_mini_batch_size=128" in refused("train.batch_size=1024")[0]
    assert "1024 over 8 samples per prompt" in refused("train.batch_size=1024")[0]
    mixed = refused("train.batch_size=1024", "generator.n_samples_per_prompt=16")
    assert "trainer.policy_mini_batch_size=64" in mixed[0]
    flags = refused("--train.batch_size", "1024", "--rollout.n_samples_per_prompt", "4")
    assert "trainer.policy_mini_batch_size=256" in flags[0]
    assert "not a multiple of the group size" in refused("generation_batch_size=12")[0]


def test_a_name_with_the_ending_of_one_of_ours_is_distinguished() -> None:
    [problem] = refused("train_batch_size=128")
    assert "trainer.policy_mini_batch_size=16" in problem
    assert "trainer.train_batch_size is another key" in problem


@pytest.mark.parametrize(
    ("override", "hint"),
    [
        ("trainer.algorithm.policy_loss_type=regular", "SkyRL's regular is ppo here"),
        (
            "trainer.policy.optimizer_config.scheduler=cosine_with_warmup",
            "cosine_with_warmup is cosine here",
        ),
        ("trainer.resume_mode=null", "null is none here"),
        ("trainer.ckpt_interval=-1", "-1 is 0 here"),
        ("trainer.algorithm.advantage_estimator=group_norm", "OpenRLHF's group_norm is grpo here"),
        ("trainer.algorithm.loss_reduction=seq-mean-token-mean", "is sequence_mean here"),
        ("trainer.policy.model.dtype=bf16", "bf16 is bfloat16 here"),
    ],
)
def test_a_value_of_another_system_is_answered_with_ours(override: str, hint: str) -> None:
    [problem] = refused(override)
    assert hint in problem


def test_an_unknown_value_gets_no_such_hint() -> None:
    assert value_hint("trainer.seed", "abc") == ""


def test_braces_are_spelled_out_and_the_longest_pattern_decides() -> None:
    assert expand("a.{b,c}.{d,e}") == ["a.b.d", "a.b.e", "a.c.d", "a.c.e"]
    table = systems()["areal"].table
    assert table.find("ref.path").targets == (Target("trainer.ref.model.path"),)  # type: ignore[union-attr]
    assert table.find("ref.anything").kind == "-"  # type: ignore[union-attr]


def test_a_row_reads_its_parts() -> None:
    row = TableRow.read("a b\t1\tx.y[1] z.w=on\tnull=~ @list\tsaid")
    assert (row.names, row.default, row.function, row.note) == (("a", "b"), "1", "list", "said")
    assert [str(target) for target in row.free] == ["x.y[1]"]
    assert [(target.path, target.fixed) for target in row.targets if target.fixed is not None] == [
        ("z.w", "on")
    ]


def test_a_value_of_the_wrong_form_is_answered_too() -> None:
    assert "the range is symmetric here" in key_hint("reward_clip_range", 3)
