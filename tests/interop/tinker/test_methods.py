"""Every public method of the SDK's clients is called against the server: it works, or explains why it does not."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

pytest.importorskip("tinker", reason="the extra tinker is not installed")

import tinker
from tinker import types
from tinker.lib.api_future_impl import QueueState

from skyasync.interop.tinker.server import NOT_SUPPORTED
from tests.inference.tiny_llama import save_tiny_llama
from tests.interop.tinker.local_server import KEY, tinker_server, with_sdk
from tests.interop.tinker.test_training import FIRST, datum

pytestmark = [pytest.mark.slow, pytest.mark.filterwarnings("ignore::FutureWarning")]
CLIENTS = (tinker.ServiceClient, tinker.TrainingClient, tinker.SamplingClient, tinker.RestClient)
REFUSED = "is not supported: "
Call = Callable[[Any], Any]


def custom(data: list[Any], logprobs: list[torch.Tensor]) -> tuple[torch.Tensor, dict[str, float]]:
    return -torch.cat(logprobs).sum(), {}


def per_datum(
    logprobs: torch.Tensor, weights: torch.Tensor
) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
    return -(logprobs * weights).sum(), {}


def calls(model: str) -> dict[str, Call]:
    """By class and method: a call with the clients of ``has``."""
    prompt, params = types.ModelInput.from_ints([5, 6]), types.SamplingParams(max_tokens=2)
    adam = types.AdamParams()
    return {
        "ServiceClient.holder": lambda has: has.service.holder.get_session_id(),
        "ServiceClient.get_server_capabilities": lambda has: has.service.get_server_capabilities(),
        "ServiceClient.create_lora_training_client": lambda has: has.service.create_lora_training_client(model, rank=2),
        "ServiceClient.create_training_client_from_state": lambda has: has.service.create_training_client_from_state(
            has.state),
        "ServiceClient.create_training_client_from_state_with_optimizer": lambda has: (
            has.service.create_training_client_from_state_with_optimizer(has.state)),
        "ServiceClient.create_sampling_client": lambda has: has.service.create_sampling_client(base_model=model),
        "ServiceClient.create_custom_loss": lambda has: has.service.create_custom_loss(
            per_datum, {"logprobs": 1, "weights": 1}),
        "ServiceClient.create_rest_client": lambda has: has.service.create_rest_client(),
        "ServiceClient.copy_weights": lambda has: has.service.copy_weights(has.state),
        "ServiceClient.get_console_url": lambda has: has.service.get_console_url(),
        "ServiceClient.get_telemetry": lambda has: has.service.get_telemetry(),
        "ServiceClient.close": lambda has: has.other.close("success"),
        "TrainingClient.forward": lambda has: has.client.forward([FIRST], "cross_entropy"),
        "TrainingClient.forward_backward": lambda has: has.client.forward_backward([FIRST], "cross_entropy"),
        "TrainingClient.forward_backward_custom": lambda has: has.client.forward_backward_custom([FIRST], custom),
        "TrainingClient.optim_step": lambda has: has.client.optim_step(adam),
        "TrainingClient.save_state": lambda has: has.client.save_state("state-2", ttl_seconds=3600),
        "TrainingClient.load_state": lambda has: has.client.load_state(has.state),
        "TrainingClient.load_state_with_optimizer": lambda has: has.client.load_state_with_optimizer(has.state),
        "TrainingClient.save_weights_for_sampler": lambda has: has.client.save_weights_for_sampler("for-sampler"),
        "TrainingClient.save_weights_external": lambda has: has.client.save_weights_external("external-2"),
        "TrainingClient.save_weights_and_get_sampling_client": lambda has: (
            has.client.save_weights_and_get_sampling_client()),
        "TrainingClient.create_sampling_client": lambda has: has.client.create_sampling_client(has.state),
        "TrainingClient.get_info": lambda has: has.client.get_info(),
        "TrainingClient.get_tokenizer": lambda has: has.client.get_tokenizer().encode("a"),
        "TrainingClient.get_console_url": lambda has: has.client.get_console_url(),
        "TrainingClient.get_telemetry": lambda has: has.client.get_telemetry(),
        "SamplingClient.create": lambda has: type(has.sampler).create(has.service.holder, base_model=model),
        "SamplingClient.sample": lambda has: has.sampler.sample(prompt, 2, params),
        "SamplingClient.compute_logprobs": lambda has: has.sampler.compute_logprobs(prompt),
        "SamplingClient.get_base_model": lambda has: has.sampler.get_base_model(),
        "SamplingClient.get_tokenizer": lambda has: has.sampler.get_tokenizer().encode("a"),
        "SamplingClient.get_telemetry": lambda has: has.sampler.get_telemetry(),
        "SamplingClient.get_sampler_handle": lambda has: has.sampler.get_sampler_handle(),
        "SamplingClient.from_sampler_handle": lambda has: type(has.sampler)
        .from_sampler_handle(has.sampler.get_sampler_handle(), api_key=KEY).sample(prompt, 1, params),
        "SamplingClient.on_queue_state_change": lambda has: has.sampler.on_queue_state_change(
            QueueState.ACTIVE, None),
        "RestClient.get_server_capabilities": lambda has: has.rest.get_server_capabilities(),
        "RestClient.get_training_run": lambda has: has.rest.get_training_run(has.run),
        "RestClient.get_training_run_by_tinker_path": lambda has: has.rest.get_training_run_by_tinker_path(has.state),
        "RestClient.list_training_runs": lambda has: has.rest.list_training_runs(),
        "RestClient.get_weights_info_by_tinker_path": lambda has: has.rest.get_weights_info_by_tinker_path(has.state),
        "RestClient.list_checkpoints": lambda has: has.rest.list_checkpoints(has.run),
        "RestClient.list_user_checkpoints": lambda has: has.rest.list_user_checkpoints(),
        "RestClient.get_external_weights_urls": lambda has: has.rest.get_external_weights_urls(has.external),
        "RestClient.set_checkpoint_ttl_from_tinker_path": lambda has: has.rest.set_checkpoint_ttl_from_tinker_path(
            has.state, 7200),
        "RestClient.delete_checkpoint": lambda has: has.rest.delete_checkpoint(has.run, "weights/one"),
        "RestClient.delete_checkpoint_from_tinker_path": lambda has: has.rest.delete_checkpoint_from_tinker_path(
            f"tinker://{has.run}/weights/two"),
        "RestClient.publish_checkpoint_from_tinker_path": lambda has: has.rest.publish_checkpoint_from_tinker_path(
            has.state),
        "RestClient.unpublish_checkpoint_from_tinker_path": lambda has: has.rest.unpublish_checkpoint_from_tinker_path(
            has.state),
        "RestClient.copy_weights": lambda has: has.rest.copy_weights(has.state, "project"),
        "RestClient.get_session": lambda has: has.rest.get_session(has.session),
        "RestClient.list_sessions": lambda has: has.rest.list_sessions(),
        "RestClient.search_sessions": lambda has: has.rest.search_sessions(
            types.SessionSearchRequest(display_name="a")),
        "RestClient.assign_session_project": lambda has: has.rest.assign_session_project(has.session, "project"),
        "RestClient.export_session_trace": lambda has: has.rest.export_session_trace(has.session),
        "RestClient.get_sampler": lambda has: has.rest.get_sampler(has.sampler._sampling_session_id),
        "RestClient.get_audit_log": lambda has: has.rest.get_audit_log(),
        "RestClient.get_billing_usage": lambda has: has.rest.get_billing_usage("2026-01-01", "2026-01-02"),
        "RestClient.get_current_checkpoint_storage_usage": lambda has: has.rest.get_current_checkpoint_storage_usage(),
        "RestClient.get_telemetry": lambda has: has.rest.get_telemetry(),
        "RestClient.whoami": lambda has: has.rest.whoami(),
    }  # fmt: skip


REJECTED = {
    "ServiceClient.copy_weights", "RestClient.copy_weights", "RestClient.publish_checkpoint_from_tinker_path",
    "RestClient.unpublish_checkpoint_from_tinker_path", "RestClient.search_sessions",
    "RestClient.assign_session_project", "RestClient.export_session_trace", "RestClient.get_audit_log",
    "RestClient.get_billing_usage", "RestClient.get_current_checkpoint_storage_usage",
}  # fmt: skip
BY_THE_CLIENT = {
    "RestClient.whoami": "JWT"
}  # which rejects keys that are no JWT, without a request


def public_methods() -> set[str]:
    """The deprecated variants of methods, ``_async``, call these."""
    return {
        f"{client.__name__}.{name}"
        for client in CLIENTS
        for name, value in inspect.getmembers(client)
        if not name.startswith("_")
        and not name.endswith("_async")
        and (callable(value) or isinstance(value, property))
    }


def test_every_public_method_is_called_here() -> None:
    assert public_methods() == set(calls(""))


class Clients:
    """The clients for the calls."""

    def __init__(self, service: Any, model: str, base_url: str) -> None:
        self.service, self.other = service, tinker.ServiceClient(base_url=base_url, api_key=KEY)
        self.other.holder.get_session_id()  # otherwise it has no session that could be closed
        self.client = service.create_lora_training_client(model, rank=2, seed=1).result()
        self.client.forward_backward([datum(1, 2, 3)], "cross_entropy").result()
        self.client.optim_step(types.AdamParams()).result()
        self.state, *_ = [
            self.client.save_state(name).result().path for name in ("state", "one", "two")
        ]
        self.external = self.client.save_weights_external("external").result().path
        self.sampler = service.create_sampling_client(base_model=model).result()
        self.rest = service.create_rest_client()
        self.run, self.session = self.client.model_id, service.holder.get_session_id()


async def test_every_public_method_answers_or_says_why_it_does_not(
    tmp_path: Path, tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(
        "TINKER_PROJECT_ID", "project"
    )  # otherwise the SDK itself refuses to copy weights
    model = save_tiny_llama(tmp_path_factory.mktemp("model"), tied=True)
    async with tinker_server(model, tmp_path) as up:

        def program(service: Any) -> dict[str, str]:
            has, outcomes = Clients(service, model, up.server.base_url), dict[str, str]()
            for name, call in calls(model).items():
                try:
                    answer = call(has)
                    outcomes[name] = (
                        "" if not hasattr(answer, "result") else str(answer.result())[:0]
                    )
                except Exception as error:
                    outcomes[name] = str(error)
            return outcomes

        outcomes = await with_sdk(up.server, program)
    errors = {name: text for name, text in outcomes.items() if text}
    reasons = set(NOT_SUPPORTED.values())
    assert errors.keys() == REJECTED | BY_THE_CLIENT.keys(), errors
    rejections = {name: errors[name] for name in REJECTED}
    assert {
        n: e for n, e in rejections.items() if REFUSED not in e or not any(r in e for r in reasons)
    } == {}
    for name, says in BY_THE_CLIENT.items():
        assert says in errors[name]
    external = list((tmp_path / "checkpoints").glob("*/config.json"))
    assert external, "a folder that transformers loads"
