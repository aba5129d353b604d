"""How engines sample: settings, what they allow, and what is worth a warning."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from importlib.util import find_spec
from typing import TYPE_CHECKING, Any

from skyasync.config.frozen import SettingsGroup
from skyasync.config.keys import Keys, entry_problem, key
from skyasync.config.parts import engines, reads_behaviour, supported
from skyasync.config.values import written

if TYPE_CHECKING:
    from skyasync.config.schema import Config, GeneratorConfig


INT32 = 2**31 - 1
LARGEST_BIAS = 100  # of a token's logit; more decides alone, and OpenAI's API ends there too
EVALUATION_TEMPERATURE = 0.0  # greedy, unless ``generator.eval_sampling_params`` has another one

#: Those that look at the response so far, which a request that continues from its tokens takes for its prompt.
COUNTS_RESPONSE = ("presence_penalty", "frequency_penalty", "bad_words", "structured_outputs")
#: Those that the models can apply to their own logits (``trainer.algorithm.filter_logprobs``).
FILTERS = ("top_p", "top_k", "min_p", "logit_bias", "allowed_token_ids")
#: Those that depend on the tokens before, and are in the engine's log-probabilities alone. Of the ones that can change
#: every token, an objective that reads these log-probabilities cannot do right; ``HISTORY``: of a few tokens.
UNMIRRORED = (
    "presence_penalty",
    "frequency_penalty",
    "repetition_penalty",
    "bad_words",
    "structured_outputs",
)
HISTORY = ("min_tokens",)


@dataclass
class SamplingConfig(SettingsGroup):
    """The bounds hold for all requests: ``skyasync.inference.interface.SamplingParams`` and the
    requests of agent programs are checked by them. Within them int32 and float32 lose no number,
    and finite logits stay finite."""

    max_generate_length: int = key(256, low=1, high=INT32)
    """Maximum number of tokens of a response."""
    min_tokens: int = key(0, low=0, high=INT32)
    """Minimum number of tokens of a response."""
    temperature: float = key(1.0, low=0.01, high=100.0, also=(0.0,))
    """Sampling temperature; 0 is greedy."""
    top_p: float = key(1.0, above=0.0, high=1.0)
    """Sample from the smallest set of tokens whose probabilities sum to this."""
    top_k: int = key(-1, low=-1, high=INT32)
    """Sample from the k most likely tokens; -1 is off."""
    min_p: float = key(0.0, low=0.0, high=1.0)
    """Leave out tokens whose probability is below this times that of the most likely token."""
    presence_penalty: float = key(0.0, low=-2.0, high=2.0)
    """Subtracted from the logits of tokens that the response already contains."""
    frequency_penalty: float = key(0.0, low=-2.0, high=2.0)
    """Subtracted from the logit of a token once for each time that the response contains it."""
    repetition_penalty: float = key(1.0, low=0.01, high=100.0)
    """For tokens in prompt or response: positive logits are divided by it, negative ones
    multiplied."""
    stop: list[str] = key([])
    """Strings that end a response."""
    stop_token_ids: list[int] = key([], low=0, high=INT32)
    """Further tokens that end a response, in addition to the model's own."""
    include_stop_str_in_output: bool = key(True)
    """Responses that environments read include the stop string that ended them. Its tokens are
    trained in any case."""
    ignore_eos: bool = key(False)
    """Continue after the model's end-of-sequence token."""
    bad_words: list[str] = key([])
    """Words that are never generated."""
    logit_bias: dict[str, Any] = key({})
    """Added to the logits of these tokens: token id -> bias from -100 to 100."""
    allowed_token_ids: list[int] = key([], low=0, high=INT32)
    """Generate only these tokens; empty allows all."""
    skip_special_tokens: bool = key(True)
    """Remove special tokens from the text that environments read and stop strings are searched
    in."""
    seed: int = key(-1, low=-1, high=2**62)
    """Draw each response only from this seed and the response's identity; -1 uses the engine's own
    seed."""
    structured_outputs: dict[str, Any] = key({})
    """A grammar for the response: json, regex, choice, ... as in vLLM's StructuredOutputsParams
    (vllm only)."""
    repetition_detection: dict[str, Any] = key({})
    """End a response that repeats itself, as if cut by its length: max_pattern_size, min_count
    (vllm only)."""


def backend(cfg: Config) -> str:
    """The engine that ``generator.backend`` stands for."""
    if cfg.generator.engines:
        declaration = engines().builtins().get(cfg.generator.backend)
        if declaration and declaration.can["elsewhere"]:
            return cfg.generator.backend
        return "vllm_server"
    if cfg.generator.backend != "auto":
        return cfg.generator.backend
    if find_spec("vllm"):
        return "vllm"
    return "transformers"


def evaluation(generator: GeneratorConfig) -> SamplingConfig:
    """The sampling of evaluation: training's, with what ``eval_sampling_params`` sets (by default
    the temperature)."""
    return dataclasses.replace(generator.sampling_params, **evaluation_overrides(generator))


def samples_as_scored(sampling: SamplingConfig) -> bool:
    """Whether tokens are drawn from the same distribution whose log-probabilities a weight sync
    compares."""
    return sampling.temperature == 1 and not _used(sampling, (*FILTERS, *UNMIRRORED, *HISTORY))


def sampling_groups(generator: GeneratorConfig) -> dict[str, SamplingConfig]:
    """The sampling of training and of evaluation, by the names of their groups, without null."""
    return {
        "sampling_params": generator.sampling_params,
        "eval_sampling_params": evaluation(generator),
    }


def check_sampling(cfg: Config) -> Iterator[str]:
    """Settings that the engine does not have, and distributions that the objective or the plan
    cannot handle."""
    generator = cfg.generator
    sampling = cfg.generator.sampling_params
    wrong = list(_wrong_overrides(generator))
    if wrong:
        yield from wrong
        return
    engine = backend(cfg)
    builtin_engines = engines().builtins()
    rare = {
        name for declaration in builtin_engines.values() for name in declaration.can["sampling"]
    }
    can = engines().about(engine).can
    foreign = sorted((rare - set(can["sampling"])) | set(can["lacks"]))
    lacking = False
    # Of evaluation what is set there: a wrong value is reported once, by the key that has it.
    groups = {
        "sampling_params": sampling,
        "eval_sampling_params": SamplingConfig(**evaluation_overrides(generator)),
    }
    for group, settings in groups.items():
        for token, bias in settings.logit_bias.items():
            path = f"generator.{group}.logit_bias"
            if not str(token).isdecimal():
                yield f"{path} has the token {token!r}: tokens are numbers, for example {{15: -2.0}}"
            elif (
                isinstance(bias, bool)
                or not isinstance(bias, int | float)
                or not abs(bias) <= LARGEST_BIAS
            ):
                yield f"{path}.{token}={bias} is not a number from -{LARGEST_BIAS} to {LARGEST_BIAS}"
        for name in _used(settings, foreign):
            able = [
                engine_name
                for engine_name, declaration in builtin_engines.items()
                if name not in declaration.can["lacks"]
                and (name in declaration.can["sampling"] or name not in rare)
            ]
            lacking = True
            yield (
                f"generator.{group}.{name} needs {supported(able)}: the {engine} engine does not have it; leave it "
                f"empty, or use that one"
            )
    reader = reads_behaviour(cfg.trainer.algorithm)
    if reader and sampling.temperature and not lacking:
        names = _used(sampling, UNMIRRORED)
    else:
        names = []
    if names:
        named = ", ".join(f"{name}={written(vars(sampling)[name])}" for name in names)
        yield (
            f"{unmirrored(f'generator.sampling_params ({named})', reader)}: leave "
            f"{'it' if len(names) == 1 else 'them'} out, or choose trainer.algorithm.off_policy_correction=none and a "
            f"loss without the behaviour policy (with trainer.allow_uncorrected=true where samples may be stale)"
        )
    overlap = cfg.trainer.eval_mode == "overlap"
    for group, settings in groups.items() if cfg.trainer.partial_rollout == "recompute" else ():
        for name in _used(settings, COUNTS_RESPONSE) if settings is sampling or overlap else ():
            yield (
                f"generator.{group}.{name} looks at the response so far, and trainer.partial_rollout=recompute cuts "
                f"responses, which would start over at each weight sync: set trainer.partial_rollout=keep"
            )
    samples = generator.eval_n_samples_per_prompt
    if samples > 1 and evaluation(generator).temperature == 0:
        if "temperature" not in evaluation_overrides(generator):
            yield (
                "generator.sampling_params.temperature=0 (greedy) draws the same response again and again, in "
                "training, where a group then teaches nothing, and in evaluation: raise it"
            )
        else:
            yield (
                f"generator.eval_n_samples_per_prompt={samples} draws the same response {samples} times with "
                f"generator.eval_sampling_params.temperature=0 (greedy): raise the temperature (null is that of "
                f"training), or set the number to 1"
            )


def unmirrored(setting: str, reader: str) -> str:
    """Why a setting of ``UNMIRRORED`` contradicts the setting that reads log-probabilities of
    sampling."""
    return (
        f"{setting} depends on the tokens before and is in the engine's log-probabilities alone, which {reader} reads as "
        f"if the trainer computed the same"
    )


def sampling_warnings(cfg: Config) -> Iterator[str]:
    """Settings that bias the ratio to the behaviour policy, if the objective uses it."""
    sampling = cfg.generator.sampling_params
    if not sampling.temperature or not reads_behaviour(cfg.trainer.algorithm):
        return
    filters = ", ".join(f"{name}={vars(sampling)[name]}" for name in _used(sampling, FILTERS))
    if filters and not cfg.trainer.algorithm.filter_logprobs:
        yield (
            f"generator.sampling_params ({filters}) samples from fewer tokens than the trainer's log-probabilities are "
            f"of, so the ratio to the behaviour policy is biased by the probability left out: set "
            f"trainer.algorithm.filter_logprobs=true, or trainer.algorithm.off_policy_correction=none where nothing is "
            f"stale"
        )
    history = ", ".join(f"{name}={vars(sampling)[name]}" for name in _used(sampling, HISTORY))
    if history:
        yield (
            f"generator.sampling_params ({history}) depends on the tokens before and is in the engine's "
            f"log-probabilities alone, so the ratio to the behaviour policy is biased where it acts"
        )


def evaluation_overrides(generator: GeneratorConfig) -> dict[str, Any]:
    """The settings of sampling that evaluation has instead of training's."""
    overrides = {"temperature": EVALUATION_TEMPERATURE} | generator.eval_sampling_params
    return {name: value for name, value in overrides.items() if value is not None}


def _wrong_overrides(generator: GeneratorConfig) -> Iterator[str]:
    """Entries of ``eval_sampling_params`` that ``sampling_params`` does not have, or that have
    another type."""
    path = "generator.eval_sampling_params"
    for name, value in generator.eval_sampling_params.items():
        if name not in Keys.of(SamplingConfig):
            yield path + entry_problem(SamplingConfig, name, value)
        elif value is not None:  # else it is the value of training
            problem = entry_problem(SamplingConfig, name, value)
            if problem:
                yield f"{path}.{name}{problem}"


def _used(sampling: SamplingConfig, names: Sequence[str]) -> list[str]:
    off = {**vars(SamplingConfig()), "top_k": -1}
    return [
        name
        for name in names
        if vars(sampling)[name] != off[name] and (name, vars(sampling)[name]) != ("top_k", 0)
    ]


def check_lengths(cfg: Config) -> Iterator[str]:
    """Sequences that are longer than the engine allows."""
    generator = cfg.generator
    for group, sampling in sampling_groups(generator).items():
        name = f"generator.{group}.max_generate_length"
        needed = cfg.trainer.max_prompt_length + sampling.max_generate_length
        if 0 < generator.max_model_len < needed:
            yield (
                f"generator.max_model_len={generator.max_model_len} is less than "
                f"trainer.max_prompt_length={cfg.trainer.max_prompt_length} plus {name}="
                f"{sampling.max_generate_length}: raise it to {needed}, or leave it at 0"
            )
        turns = generator.max_turns
        longest = cfg.trainer.max_prompt_length + turns * sampling.max_generate_length
        if turns > 1 and needed <= generator.max_model_len < longest:
            yield (
                f"generator.max_model_len={generator.max_model_len} has no room for generator.max_turns={turns} turns "
                f"of {name}={sampling.max_generate_length} behind a prompt of trainer.max_prompt_length="
                f"{cfg.trainer.max_prompt_length}: raise it to {longest} and what the environment says, or set "
                f"generator.max_turns=0, as many as there is room for"
            )
        if sampling.min_tokens > sampling.max_generate_length:
            yield (
                f"generator.{group}.min_tokens={sampling.min_tokens} is more than {name}="
                f"{sampling.max_generate_length}: lower the one or raise the other"
            )
