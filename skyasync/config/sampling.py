"""What sampling settings allow: contradictions with the rest, and what is worth a warning.

Invariant: each line names its keys and the way out; nothing here imports torch or an engine.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Sequence
from importlib.util import find_spec
from typing import Any

from skyasync.config.schema import Config, GeneratorConfig, SamplingConfig
from skyasync.config.values import written

#: Those that look at the response so far, which a request started over from its tokens takes for its prompt.
COUNTS_RESPONSE = ("presence_penalty", "frequency_penalty", "bad_words", "structured_outputs")
#: Those that the models can apply to their own logits (``trainer.algorithm.filter_logprobs``).
FILTERS = ("top_p", "top_k", "min_p", "logit_bias", "allowed_token_ids")
#: Those that depend on the tokens before, and are in the engine's log-probabilities alone. Of the ones that can change
#: every token, an objective that reads these log-probabilities cannot do right; ``HISTORY``: of a few tokens.
UNMIRRORED = ("presence_penalty", "frequency_penalty", "repetition_penalty", "bad_words", "structured_outputs")
HISTORY = ("min_tokens",)

_OFF = SamplingConfig()


def backend(cfg: Config) -> str:
    """The engine that ``generator.backend`` stands for."""
    if cfg.generator.engines:
        from skyasync.inference.interface import ENGINES

        about = ENGINES.builtins().get(cfg.generator.backend)
        return cfg.generator.backend if about and about.can["elsewhere"] else "vllm_server"
    if cfg.generator.backend != "auto":
        return cfg.generator.backend
    return "vllm" if find_spec("vllm") else "transformers"


def evaluation(generator: GeneratorConfig) -> SamplingConfig:
    """How evaluation samples: as training, but for what ``eval_sampling_params`` sets (by default the temperature)."""
    return dataclasses.replace(generator.sampling_params, **_own(generator))


def samples_as_scored(sampling: SamplingConfig) -> bool:
    """Whether tokens are drawn from the very distribution whose log-probabilities a weight sync's probe compares."""
    return sampling.temperature == 1 and not _used(sampling, (*FILTERS, *UNMIRRORED, *HISTORY))


def sampling_groups(generator: GeneratorConfig) -> dict[str, SamplingConfig]:
    """Both, by their name, with nothing left open."""
    return {"sampling_params": generator.sampling_params, "eval_sampling_params": evaluation(generator)}


def check_sampling(cfg: Config, *, reads_behaviour: str) -> Iterator[str]:
    """Contradictions.

    Args:
        reads_behaviour: the setting for which the objective reads the log-probabilities of sampling; "" if none does.
    """
    lacking: list[str] = []
    for group, sampling in _set_groups(cfg.generator):
        yield from _check_bias(f"generator.{group}.logit_bias", sampling)
        lacking += _check_engine(cfg, group, sampling)
    yield from lacking or _check_mirrored(cfg.generator.sampling_params, reads_behaviour)
    if cfg.trainer.partial_rollout == "recompute":
        for name in _used(cfg.generator.sampling_params, COUNTS_RESPONSE):
            yield (
                f"generator.sampling_params.{name} looks at the response so far, and trainer.partial_rollout=recompute "
                f"starts a response over with its tokens as a prompt: set trainer.partial_rollout=keep"
            )
    samples, temperature = cfg.generator.eval_n_samples_per_prompt, evaluation(cfg.generator).temperature
    if samples > 1 and temperature == 0 and cfg.generator.eval_sampling_params.temperature is None:
        yield (
            "generator.sampling_params.temperature=0 (greedy) draws the same response again and again, in training, "
            "where a group then teaches nothing, and in evaluation: raise it"
        )
    elif samples > 1 and temperature == 0:
        yield (
            f"generator.eval_n_samples_per_prompt={samples} draws the same response {samples} times with "
            f"generator.eval_sampling_params.temperature=0 (greedy): raise the temperature (null is that of training), "
            f"or set the number to 1"
        )


def unmirrored(what: str, reader: str) -> str:
    """Why a setting of ``UNMIRRORED`` does not go with the setting that reads log-probabilities of sampling."""
    return (
        f"{what} depends on the tokens before and is in the engine's log-probabilities alone, which {reader} reads as "
        f"if the trainer computed the same"
    )


def _check_mirrored(sampling: SamplingConfig, reads_behaviour: str) -> Iterator[str]:
    """Distributions that the trainer cannot compute, and an objective that takes its own for them."""
    names = _used(sampling, UNMIRRORED) if reads_behaviour and sampling.temperature else []
    if names:
        said = ", ".join(f"{name}={written(getattr(sampling, name))}" for name in names)
        yield (
            f"{unmirrored(f'generator.sampling_params ({said})', reads_behaviour)}: leave "
            f"{'it' if len(names) == 1 else 'them'} out, or choose trainer.algorithm.off_policy_correction=none and a "
            f"loss without the behaviour policy (with trainer.allow_uncorrected=true where samples may be stale)"
        )


def supported(backends: Sequence[str]) -> str:
    """Engines that can do what another cannot, as one would choose them."""
    others = f" (supported backends: {', '.join(backends)})" if len(backends) > 1 else ""
    return f"generator.backend={backends[0]}{others}"


def _check_engine(cfg: Config, group: str, sampling: SamplingConfig) -> Iterator[str]:
    """Settings that the chosen engine does not have, and another one has."""
    from skyasync.inference.interface import ENGINES

    engine, others = backend(cfg), ENGINES.builtins()
    rare = {name for about in others.values() for name in about.can["sampling"]}
    can = ENGINES.about(engine).can
    foreign = (rare - set(can["sampling"])) | set(can["lacks"])
    for name in _used(sampling, tuple(sorted(foreign))):
        able = supported(
            [
                other
                for other, about in others.items()
                if name not in about.can["lacks"] and (name in about.can["sampling"] or name not in rare)
            ]
        )
        yield (
            f"generator.{group}.{name} needs {able}: the {engine} engine does not have it; leave it "
            f"empty, or use that one"
        )


def sampling_warnings(cfg: Config, *, reads_behaviour: bool) -> Iterator[str]:
    """What biases the ratio to the behaviour policy.

    Args:
        reads_behaviour: the objective has that ratio.
    """
    sampling = cfg.generator.sampling_params
    if not reads_behaviour or not sampling.temperature:
        return
    filters = ", ".join(f"{name}={getattr(sampling, name)}" for name in _used(sampling, FILTERS))
    if filters and not cfg.trainer.algorithm.filter_logprobs:
        yield (
            f"generator.sampling_params ({filters}) samples from fewer tokens than the trainer's log-probabilities are "
            f"of, so the ratio to the behaviour policy is biased by the probability left out: set "
            f"trainer.algorithm.filter_logprobs=true, or trainer.algorithm.off_policy_correction=none where nothing is "
            f"stale"
        )
    history = ", ".join(f"{name}={getattr(sampling, name)}" for name in _used(sampling, HISTORY))
    if history:
        yield (
            f"generator.sampling_params ({history}) depends on the tokens before and is in the engine's "
            f"log-probabilities alone, so the ratio to the behaviour policy is biased where it acts"
        )


def _set_groups(generator: GeneratorConfig) -> Iterator[tuple[str, SamplingConfig]]:
    """Each with what was set there, so that a wrong value is told once, by the key that has it."""
    yield "sampling_params", generator.sampling_params
    yield "eval_sampling_params", SamplingConfig(**_own(generator))


def _own(generator: GeneratorConfig) -> dict[str, Any]:
    """What evaluation sets itself."""
    asked = generator.eval_sampling_params
    values = {item.name: getattr(asked, item.name) for item in dataclasses.fields(asked)}
    return {name: value for name, value in values.items() if value is not None}


def _used(sampling: SamplingConfig, names: tuple[str, ...]) -> list[str]:
    off = {"top_k": (-1, 0)}
    return [name for name in names if getattr(sampling, name) not in off.get(name, (getattr(_OFF, name),))]


def _check_bias(path: str, sampling: SamplingConfig) -> Iterator[str]:
    from skyasync.inference.interface import LARGEST_BIAS

    for token, bias in sampling.logit_bias.items():
        if not str(token).isdecimal():
            yield f"{path} has the token {token!r}: tokens are numbers, for example {{15: -2.0}}"
        elif isinstance(bias, bool) or not isinstance(bias, int | float) or not abs(bias) <= LARGEST_BIAS:
            yield f"{path}.{token}={bias} is not a number from -{LARGEST_BIAS} to {LARGEST_BIAS}"
