from dataclasses import replace

from skyasync.config.schema import Config, SamplingConfig
from skyasync.rollout.generator_api import eval_prompts, generator_input, rollout_requests
from tests.rollout.episodes import prompt


def lists(*arguments, **options):
    return generator_input(rollout_requests(*arguments, **options))


def test_a_training_request_lists_the_samples_group_by_group():
    cfg = Config().generator
    cfg.n_samples_per_prompt, cfg.sampling_params.max_generate_length = 2, 9
    found = lists([prompt(0, "a", answer=1), prompt(1, "b")], cfg)
    assert [str(i) for i in found["trajectory_ids"]] == [
        "e0-i0-r0",
        "e0-i0-r1",
        "e0-i1-r0",
        "e0-i1-r1",
    ]
    assert found["env_classes"] == ["a", "a", "b", "b"]
    assert found["env_extras"][:2] == [{"answer": 1}] * 2
    assert found["sampling_params"].max_tokens == 9
    assert not found["is_eval"]


def test_an_evaluation_has_its_own_sampling_number_and_identities():
    cfg = Config().generator
    cfg.eval_n_samples_per_prompt = 3
    cfg.eval_sampling_params = {"temperature": 0.0}
    found = lists(eval_prompts([prompt(5)]), cfg, is_eval=True)
    assert [str(i) for i in found["trajectory_ids"]] == ["eval-i5-r0", "eval-i5-r1", "eval-i5-r2"]
    assert found["sampling_params"].temperature == 0.0
    assert found["is_eval"]


def test_every_sampling_setting_reaches_the_engine():
    cfg = Config().generator
    chosen = cfg.sampling_params
    chosen.min_tokens, chosen.temperature, chosen.top_p, chosen.top_k, chosen.min_p = (
        1,
        0.5,
        0.9,
        7,
        0.1,
    )
    chosen.stop = ["\n"]
    found = lists([prompt(0)], cfg)["sampling_params"]
    assert (found.min_tokens, found.temperature, found.top_p, found.top_k, found.min_p) == (
        1,
        0.5,
        0.9,
        7,
        0.1,
    )
    assert found.stop == ("\n",)


def test_an_evaluation_samples_as_training_does_but_greedily_where_nothing_else_is_said():
    cfg = Config().generator
    cfg.sampling_params = SamplingConfig(
        max_generate_length=1024, top_p=0.9, temperature=0.7, stop=["###"], seed=3
    )
    found = lists([prompt(0)], cfg, is_eval=True)["sampling_params"]
    assert found == replace(lists([prompt(0)], cfg)["sampling_params"], temperature=0.0)
    cfg.eval_sampling_params = {"temperature": None, "top_p": 1.0}
    found = lists([prompt(0)], cfg, is_eval=True)["sampling_params"]
    assert (found.temperature, found.top_p, found.max_tokens, found.stop) == (
        0.7,
        1.0,
        1024,
        ("###",),
    )


def test_every_row_is_told_how_many_turns_an_episode_may_have_if_there_is_a_limit():
    cfg = Config().generator
    assert lists([prompt(0, answer=1)], cfg)["env_extras"] == [{"answer": 1}] * 8
    cfg.max_turns, cfg.n_samples_per_prompt = 6, 1
    assert lists([prompt(0, answer=1)], cfg)["env_extras"] == [{"answer": 1, "max_turns": 6}]
    assert lists([prompt(0, max_turns=2)], cfg, is_eval=True)["env_extras"] == [{"max_turns": 6}]
