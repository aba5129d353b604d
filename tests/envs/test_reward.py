"""The environment of reward functions: functions by row, weights, metrics."""

import pytest

from skyasync import load_config
from skyasync.envs import env_factory
from skyasync.envs.pool import local_pool
from skyasync.envs.reward import right_answer
from skyasync.errors import UserError
from skyasync.rewards import REWARDS
from skyasync.rewards.settings import RowChecks, env_settings, settle_references, short_names

pytestmark = pytest.mark.slow

HERE = "tests.rewards.functions"


def settings(*overrides):
    return load_config(
        ["trainer.policy.model.path=a/b", *(f"environment.{o}" for o in overrides)]
    ).environment


def rewarded(response, *overrides, **row):
    env = env_factory("reward")(env_settings(settings(*overrides)), row)
    env.init([{"role": "user", "content": "question"}])
    step = env.step(response)
    assert step["done"] and step["observations"] == []
    return step["reward"], env.get_metrics()


def test_weighted_rewards_are_summed_and_each_is_logged_unweighted():
    reward, metrics = rewarded(
        "7",
        f"reward_funcs=[exact_match,{HERE}:length]",
        "reward_weights=[2,-0.5]",
        label="7",
        domain="",
    )
    assert reward == 2 * 1.0 - 0.5 * 0.1
    assert metrics == {"exact_match": 1.0, "length": 0.1, "length/no_reward": 0.0}


def test_without_weights_all_weigh_one():
    assert rewarded("7", f"reward_funcs=[exact_match,{HERE}:length]", label="7")[0] == 1.1


def test_code_runs_where_the_run_says_whatever_a_row_or_a_function_that_takes_everything_says(
    tmp_path,
):
    (tmp_path / "file").write_text("read")
    label = {"inputs": [""], "outputs": ["read"]}
    code = f"print(open('{tmp_path}/file').read())"
    functions = f"reward_funcs=[code_tests,{HERE}:everything]"
    _, metrics = rewarded(
        code, functions, "code_sandbox=none", label=label, source="book", code_sandbox="landlock"
    )
    assert metrics["code_tests"] == 1.0
    assert metrics["everything/columns"] == 2.0
    assert (
        rewarded(code, functions, label=label, source="book", code_sandbox="none")[1]["code_tests"]
        == 0.0
    )


def test_where_code_cannot_run_the_run_is_refused_before_it_starts(capsys):
    gone = "code_sandbox=http://127.0.0.1:9"
    with pytest.raises(
        UserError, match=r"environment.code_sandbox=http://127.0.0.1:9 does not work here"
    ):
        settle_references(settings("reward_funcs=[code_tests]", gone))
    settle_references(settings("reward_funcs=[code_tests]"))
    (line,) = capsys.readouterr().err.splitlines()
    assert line.startswith("code_tests runs the model's code under ")
    rows = RowChecks(settings("reward_funcs=[exact_match]", gone))
    row = {"messages": [], "response": "", "label": {"inputs": [""], "outputs": [""]}}
    rows.check(row)
    with pytest.raises(UserError, match=r"does not work here"):
        rows.check({**row, "reward_funcs": ["code_tests"]})
    with pytest.raises(UserError, match=r"compares in a loop"):
        RowChecks(settings("reward_funcs=[code_tests]")).check(
            {**row, "label": ["assert all(f(i) > i for i in [1])"]}
        )


def test_further_numbers_of_a_reward_become_metrics():
    reward, metrics = rewarded("7", f"reward_funcs={HERE}:everything", label="7", source="book")
    assert (reward, metrics["everything/prompt_length"], metrics["everything/columns"]) == (
        1.0,
        8.0,
        2.0,
    )


def test_a_domain_has_functions_weights_and_scale_of_its_own():
    overrides = (
        "reward_funcs=[exact_match]",
        "domains.text.scale=0.5",
        f"domains.maths.reward_funcs=[math_verify,{HERE}:length]",
        "domains.maths.reward_weights=[1,0.1]",
        "domains.maths.scale=2",
    )
    assert rewarded("1/2", *overrides, label="0.5")[0] == 0.0
    assert rewarded("0.5", *overrides, label="0.5", domain="text")[0] == 0.5
    reward, metrics = rewarded("1/2", *overrides, label="0.5", domain="maths")
    assert reward == pytest.approx(2 * (1 + 0.1 * 0.3))
    assert metrics["maths/math_verify"] == metrics["math_verify"] == 1.0


def test_a_rows_own_functions_come_before_the_runs_and_after_its_domains():
    row = {"label": "7", "domain": "sums", "reward_funcs": ["exact_match"]}
    assert rewarded("7.0", "reward_funcs=[math_verify]", **row)[0] == 0.0
    assert rewarded("7.0", "domains.sums.reward_funcs=math_verify", **row)[0] == 1.0


def test_a_row_without_a_reward_function_is_an_error():
    with pytest.raises(UserError, match=r"a row without a domain: set environment.reward_funcs$"):
        rewarded("7")
    with pytest.raises(
        UserError, match=r"unknown domain 'math': did you mean 'maths'.*reward_funcs is empty"
    ):
        rewarded("7", "domains.maths.reward_funcs=[exact_match]", domain="math")


def test_a_timed_out_reward_is_counted_or_ends_the_run():
    short = (f"reward_funcs={HERE}:hangs", "reward_timeout_s=0.5")
    assert rewarded("hang", *short) == (0.0, {"hangs": 0.0, "hangs/no_reward": 1.0})
    with pytest.raises(
        TimeoutError,
        match=r"functions:hangs gave no reward within 0.5 s \(environment.reward_timeo",
    ):
        rewarded("hang", *short, "reward_on_timeout=raise")


@pytest.mark.parametrize(
    ("row", "label"),
    [
        ({"label": 0, "answer": 1}, 0),
        ({"reward_spec": {"ground_truth": "72"}, "answer": 1}, "72"),
        ({"reward_spec": None, "answer": 1}, 1),
        ({"question": "?"}, None),
    ],
)
def test_the_right_answer_of_a_row(row, label):
    assert right_answer(row) == label


def test_a_metric_bears_the_functions_short_name_where_it_is_the_only_one():
    assert short_names(["gsm8k", "a.b:f", "c:g"]) == ["gsm8k", "f", "g"]
    assert short_names(["a.b:f", "c:f"]) == ["a.b:f", "c:f"]


def test_functions_are_found_before_anything_starts(tmp_path, monkeypatch):
    (tmp_path / "mine.py").write_text("def good(response):\n    return 1.0\n")
    monkeypatch.chdir(tmp_path)
    environment = settings("reward_funcs=mine.py:good", "domains.a.reward_funcs=mine.py:good")
    settle_references(environment)
    assert (
        environment.reward_funcs
        == [f"{tmp_path}/mine.py:good"]
        == environment.domains["a"]["reward_funcs"]
    )
    for wrong in ("reward_funcs=mine.py:god", "domains.a.reward_funcs=[mine.py:god]"):
        with pytest.raises(UserError, match="did you mean 'good'"):
            settle_references(settings(wrong))
    with pytest.raises(UserError, match=r"mne.py does not exist; did you mean mine.py"):
        settle_references(settings("reward_funcs=mne.py:good"))


async def test_a_function_that_the_program_registers_is_the_environments_too():
    def mine(response):
        return float(response == "mine")

    REWARDS["of_a_test"] = mine
    try:
        pool = local_pool(
            env_settings(settings("reward_funcs=[of_a_test]", "env_config.colour=red"))
        )
    finally:
        del REWARDS["of_a_test"]  # as in another process, where it is not registered
    await pool.init("e", "reward", {}, [{"role": "user", "content": "q"}])
    step = await pool.step("e", "mine")
    assert (step["reward"], step["metrics"]) == (
        1.0,
        {"of_a_test": 1.0, "of_a_test/no_reward": 0.0},
    )


@pytest.mark.parametrize(
    ("funcs", "instant"), [("[exact_match]", True), (f"[exact_match,{HERE}:length]", False)]
)
def test_a_row_with_quick_functions_only_is_rewarded_without_a_process(funcs, instant):
    config = env_settings(settings(f"reward_funcs={funcs}"))
    assert env_factory("reward").instant(config, {"label": "7"}) is instant


def test_a_judges_files_are_found_before_anything_starts(tmp_path, monkeypatch):
    (tmp_path / "ask.txt").write_text("Good? {response}")
    (tmp_path / "blind.txt").write_text("Good? {question}")
    (tmp_path / "mine.py").write_text("def read(text):\n    return 1.0\n")
    monkeypatch.chdir(tmp_path)
    judge = "judges.j.engine=policy"
    environment = settings(
        judge, "judges.j.prompt=ask.txt", "judges.j.parser=mine.py:read", "reward_funcs=judge:j"
    )
    settle_references(environment)
    assert environment.judges["j"]["prompt"] == f"{tmp_path}/ask.txt"
    assert environment.judges["j"]["parser"] == f"{tmp_path}/mine.py:read"
    for wrong, line in (
        (
            "prompt=aks.txt",
            r"judges.j.prompt=.*aks.txt: there is no such file; did you mean 'ask.txt'",
        ),
        (
            "prompt='Rate it'",
            r"Rate it: there is no such file \(to write the prompt itself here, include",
        ),
        ("prompt=blind.txt", r"judges.j.prompt does not show the judge the response"),
        ("parser=mine.py:raed", "did you mean 'read'"),
    ):
        with pytest.raises(UserError, match=line):
            settle_references(settings(judge, f"judges.j.{wrong}"))


def test_judges_are_left_to_those_who_play_the_episode():
    overrides = (
        "judges.j.engine=policy",
        "reward_funcs=[exact_match, judge:j]",
        "reward_weights=[1, 2]",
    )
    assert rewarded("7", *overrides, label="7") == (1.0, {"exact_match": 1.0})
    config = env_settings(settings(*overrides))
    assert env_factory("reward").instant(config, {"label": "7"})
    assert env_factory("reward").graded_by(config, {"label": "7"}) == [
        ("exact_match", 1.0),
        ("judge:j", 2.0),
    ]
    assert env_factory("reward").graded_by(config, {"reward_funcs": ["gsm8k"]}) == []
