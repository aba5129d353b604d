"""Images that programs send to the endpoint, up to the trained model."""

from __future__ import annotations

import base64
import contextlib
import io
import resource
import threading
from collections.abc import AsyncIterator
from types import SimpleNamespace
from typing import Any

import openai
import pytest
import pytest_asyncio
import torch
from anthropic import AsyncAnthropic
from PIL import Image as PIL

from skyasync.agents.recorder import RecordedCall, sequences
from skyasync.arrays import ints
from skyasync.envs.images import read_messages, with_urls
from skyasync.models.heads import load_causal_lm
from skyasync.models.images import Image, data_url, read_image
from skyasync.models.token_model import TokenModel
from skyasync.rollout.collate import collate
from skyasync.rollout.tokenizer import load_tokenizer
from skyasync.rollout.types import Group, Prompt, PromptId, Segment, Trajectory, TrajectoryId
from tests.agents.endpoints import HELLO, chat, entered, real_endpoint, scripted, url
from tests.models.tiny_vision import logprobs, noise, save_tiny

pytestmark = [pytest.mark.asyncio(loop_scope="module"), pytest.mark.slow]


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def real(tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[SimpleNamespace]:
    folder = save_tiny("qwen3_vl", tmp_path_factory.mktemp("vision"))
    async with real_endpoint(folder, load_tokenizer(folder)) as found:
        yield found


def user(text: str, *images: Image) -> dict[str, Any]:
    parts = [{"type": "image_url", "image_url": {"url": data_url(image)}} for image in images]
    return {"role": "user", "content": [*parts, {"type": "text", "text": text}]}


async def test_a_conversation_with_images_is_trained_as_it_was_sampled(real: Any) -> None:
    first, second, other = noise(1), noise(2, 84, 56), noise(3)
    async with entered(real.endpoint) as (client, session):
        messages: list[Any] = [user("How many discs?", first)]
        for turn in (user("And now?", second, first), {"role": "user", "content": "Really?"}):
            messages += [(await chat(client, messages)).choices[0].message, turn]
        await chat(client, messages)
        await chat(
            client, [user("How many discs?", other), *messages[1:3]]
        )  # tokens of the second call, another image
    found = sequences(session.recorder.calls)
    assert [
        [segment.images for segment in sequence if segment.kind != "action"] for sequence in found
    ] == [
        [(first,), (second, first), ()],
        [(other, second, first)],
    ]
    identity = PromptId(0, 0)
    *branches, segments = found
    trajectory = Trajectory(TrajectoryId(identity, 0), segments, branches=branches)
    batch = collate([Group(Prompt(identity, [], ""), [trajectory])])
    with torch.no_grad():
        trained = logprobs(TokenModel(load_causal_lm(real.model, torch.float32)), batch, 400)
    assert (trained - batch.behaviour_logprobs)[batch.loss_mask].abs().max() < 1e-5


@pytest.mark.parametrize(
    ("given", "problem"),
    [
        (
            "https://example.org/a.png",
            r"an image here is a data:image/\.\.\.;base64,\.\.\. URL; found 'https",
        ),
        ("/etc/hostname", r"messages\[0\]\.content: an image here is a data:"),
        ("file:///etc/hostname", "an image here is a data:"),
        ("data:image/png;base64,aGk=", "of 2 bytes cannot be decoded"),
        ("data:image/png,aGk=", "is not data:image/...;base64"),
    ],
)
async def test_an_image_that_is_no_sound_data_url_is_rejected(
    real: Any, given: str, problem: str
) -> None:
    async with entered(real.endpoint) as (client, _):
        part = {"type": "image_url", "image_url": {"url": given}}
        with pytest.raises(openai.BadRequestError, match=problem):
            await chat(client, [{"role": "user", "content": [part]}])


def blank(width: int, height: int) -> str:
    """A small file of many pixels."""
    buffer = io.BytesIO()
    PIL.new("1", (width, height)).save(buffer, "PNG")
    assert buffer.tell() < 100_000
    return f"data:image/png;base64,{base64.b64encode(buffer.getvalue()).decode()}"


@pytest.mark.parametrize(("width", "count", "problem"), [
    (13_000, 1, r"13000 x 13000 pixels; 67108864 are the most"),
    (8_000, 3, r"the 3 images have 192000000 pixels together; 134217728 are the most"),
])  # fmt: skip
async def test_images_of_too_many_pixels_are_rejected_by_their_headers(
    real: Any, width: int, count: int, problem: str
) -> None:
    picture = blank(width, width)
    parts = [{"type": "image_url", "image_url": {"url": picture}}] * count
    async with entered(real.endpoint) as (client, _):
        peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
        with pytest.raises(openai.BadRequestError, match=problem):
            await chat(client, [{"role": "user", "content": parts}])
        assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - peak < 100_000, (
            "kilobytes: nothing was decoded"
        )


async def test_large_images_are_decoded_off_the_event_loop(
    real: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    threads = set()
    convert = PIL.Image.convert

    def watched(self: Any, *args: Any, **kwargs: Any) -> Any:
        threads.add(threading.current_thread().name)
        return convert(self, *args, **kwargs)

    monkeypatch.setattr(PIL.Image, "convert", watched)
    async with entered(real.endpoint) as (client, _):
        parts = [{"type": "image_url", "image_url": {"url": blank(4000, 3000)}}]
        with contextlib.suppress(openai.BadRequestError):  # more tokens than the model reads
            await chat(client, [{"role": "user", "content": parts}])
    assert threads and all(name.startswith("endpoint tokenizer") for name in threads)


async def test_a_model_of_text_rejects_images_before_they_are_decoded(
    tokenizer: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(PIL.Image, "convert", None)
    async with scripted(tokenizer) as (client, _, _):
        parts = [{"type": "image_url", "image_url": {"url": blank(8000, 8000)}}]
        with pytest.raises(
            openai.BadRequestError, match="reads only text: images need a vision-language model"
        ):
            await chat(client, [{"role": "user", "content": parts}])


async def test_all_apis_read_the_same_images(real: Any) -> None:
    first, second = noise(1), noise(2)
    source = {
        "type": "base64",
        "media_type": "image/png",
        "data": base64.b64encode(first.data).decode(),
    }
    picture = {"type": "image", "source": source}
    shot = {"type": "image", "source": {"type": "url", "url": data_url(second)}}
    text = "How many discs?"
    asked = [
        {"type": "input_image", "image_url": data_url(first), "detail": "auto"},
        {"type": "input_text", "text": text},
    ]
    async with entered(real.endpoint) as (client, session):
        await chat(client, [user(text, first)], temperature=0)
        await client.responses.create(
            model="any", input=[{"role": "user", "content": asked}], temperature=0
        )  # type: ignore[list-item]
        async with AsyncAnthropic(base_url=url(real.endpoint), api_key=session.api_key) as theirs:
            messages: Any = [{"role": "user", "content": [picture, {"type": "text", "text": text}]}]
            given: Any = {"model": "any", "max_tokens": 6, "extra_body": {"temperature": 0}}
            answer = await theirs.messages.create(messages=messages, **given)
            result = {"type": "tool_result", "tool_use_id": "a", "content": [shot]}
            turns = [
                {"role": "assistant", "content": answer.content},
                {"role": "user", "content": [result]},
            ]
            await theirs.messages.create(messages=[*messages, *turns], **given)
    *same, last = session.recorder.calls
    assert len({call.prompt.tobytes() for call in same}) == 1
    assert [call.images for call in same] == [(first,)] * 3
    assert last.images == (first, second)


async def test_a_model_of_text_rejects_images(tokenizer: Any) -> None:
    async with scripted(tokenizer) as (client, _, _):
        with pytest.raises(
            openai.BadRequestError, match="reads only text: images need a vision-language model"
        ):
            await chat(client, [user("What is it?", noise(1))])


async def test_equal_tokens_with_another_image_are_a_sequence_of_their_own() -> None:
    one, other = noise(1), noise(2)

    def call(prompt: list[int], *images: Image) -> RecordedCall:
        return RecordedCall(ints(prompt), Segment("action", [9], [-1.0], [0]), images=images)

    same = sequences([call([1, 2], one), call([1, 2, 9, 3], one, other)])
    assert [[segment.images for segment in sequence] for sequence in same] == [
        [(one,), (), (other,), ()]
    ]
    separate = sequences([call([1, 2], one), call([1, 2, 9, 3], other)])
    assert [[segment.images for segment in sequence] for sequence in separate] == [
        [(one,), ()],
        [(other,), ()],
    ]


async def test_programs_are_given_a_rows_images_as_data_urls() -> None:
    image = noise(1)
    messages = [
        {"role": "system", "content": "Count."},
        {"role": "user", "content": [{"type": "image", "image": image}]},
    ]
    sent = with_urls(messages)
    assert sent[0] == messages[0]
    assert read_image(sent[1]["content"][0]["image_url"]["url"]) is image
    assert read_messages(sent) == messages
    assert with_urls(HELLO) is HELLO
