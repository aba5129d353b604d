"""Images of rows and messages are read, or rejected by name. The endpoint has tests of its own."""

from __future__ import annotations

import base64
import io
import json
import re
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import pytest
from PIL import Image as PIL

from skyasync.config.load import load_config
from skyasync.config.schema import Config
from skyasync.data.datasets import as_prompt
from skyasync.envs.base import InvalidEnvOutputError, check_step
from skyasync.envs.images import image_column, image_part
from skyasync.errors import UserError
from skyasync.models.images import Image
from skyasync.preflight.model import check_model
from skyasync.rollout.chat import ChatTokenizer
from tests.rollout.episodes import tokenizer

PICTURE = {"bytes": b"\x89PNG", "path": None}


@pytest.mark.parametrize(
    ("row", "column"),
    [
        ({"images": [PICTURE]}, "images"),
        ({"images": ["a.png"]}, "images"),
        ({"image": PICTURE}, "image"),
        ({"image": object()}, "image"),  # a decoded image
        ({"image": b"\x89PNG"}, "image"),
        ({"image": "data:image/png;base64,aGk="}, "image"),
        ({"video": "https://x.org/a.MP4?x=1"}, "video"),
        ({"multi_modal_data": {"image": [PICTURE]}}, "multi_modal_data"),
        ({"images": []}, ""),
        ({"images": None, "image": "", "multi_modal_data": {"image": None}}, ""),
        ({"image": "python:3.11-slim", "video": 3}, ""),  # a container's name
        ({"images": ["python:3.11-slim"]}, ""),
        ({"pictures": "a.png"}, ""),
    ],
)
def test_a_column_of_pictures_is_told_from_others_of_its_name(
    row: dict[str, Any], column: str
) -> None:
    assert image_column(row) == column


def test_a_part_of_a_message_is_a_picture_by_its_type() -> None:
    kinds = ["image", "image_url", "input_image", "video", "input_video"]
    assert [image_part({"type": kind}) for kind in kinds] == kinds
    assert [
        image_part(part)
        for part in ({"type": "text"}, {"text": "image"}, "image", None, {"type": 3})
    ] == [""] * 5


def reward_config() -> Config:
    cfg = Config()
    cfg.environment.env_class = "reward"
    return cfg


def png(colour: str) -> bytes:
    buffer = io.BytesIO()
    PIL.new("RGB", (2, 2), colour).save(buffer, "PNG")
    return buffer.getvalue()


@pytest.mark.parametrize(
    ("row", "problem"),
    [
        (
            {"extras": {"image": PICTURE}},
            "the row has image: images are read from the columns images and image only",
        ),
        ({"videos": ["a.mp4"]}, "the row has videos: images are read from the columns"),
        ({"images": ["missing.png"]}, "the image 'missing.png' cannot be read: No such file"),
        ({"images": [PICTURE]}, "of 4 bytes cannot be decoded"),
        (
            {"prompt": "<image> or <image>", "image": png("red")},
            "has 2 places for images, and the row has 1 images",
        ),
        (
            {"prompt": [{"role": "user", "content": [{"type": "video", "video": "a.mp4"}]}]},
            "parts of type video",
        ),
    ],
)
def test_a_row_whose_images_cannot_be_read_is_rejected(row: dict[str, Any], problem: str) -> None:
    with pytest.raises(UserError, match=rf"data row 7: .*{re.escape(problem)}"):
        as_prompt(7, {"prompt": "What is it?", **row}, reward_config())


def test_images_of_a_row_are_read_in_every_form_and_placed(tmp_path: Path) -> None:
    red, blue = png("red"), png("blue")
    (tmp_path / "red.png").write_bytes(red)
    url = f"data:image/png;base64,{base64.b64encode(red).decode()}"
    image, other = ({"type": "image", "image": Image(data)} for data in (red, blue))
    text = {"type": "text", "text": "What is it?"}
    same = [
        str(tmp_path / "red.png"),
        (tmp_path / "red.png").as_uri(),
        url,
        red,
        {"bytes": red, "path": None},
    ]
    for value in same:
        (message,) = as_prompt(
            7, {"prompt": "What is it?", "images": [value]}, reward_config()
        ).messages
        assert message["content"] == [image, text]
        part = {"type": "image_url", "image_url": {"url": value}}
        prompt = as_prompt(
            7, {"prompt": [{"role": "user", "content": [text, part]}]}, reward_config()
        )
        assert prompt.messages[0]["content"] == [text, image]
    row = {"prompt": "<image>, then <image>?", "images": [blue, PIL.open(io.BytesIO(red))]}
    prompt = as_prompt(7, row, reward_config())
    first, comma, _, mark = prompt.messages[0]["content"]
    assert (first, comma["text"], mark["text"]) == (other, ", then ", "?")
    assert "images" not in prompt.extras
    template = [{"role": "user", "content": [text, {"type": "image"}]}]
    assert as_prompt(7, {"prompt": template, "image": red}, reward_config()).messages[0][
        "content"
    ] == [text, image]


def test_an_environments_image_is_read_or_ends_its_episode() -> None:
    url = f"data:image/png;base64,{base64.b64encode(png('red')).decode()}"
    for given, problem in (
        (url, ""),
        ("data:image/png;base64,aGk=", "observations: an image of 2 bytes cannot"),
    ):
        content = [
            {"type": "text", "text": "Look."},
            {"type": "image_url", "image_url": {"url": given}},
        ]
        output = {
            "observations": [{"role": "user", "content": content}],
            "reward": 0.0,
            "done": False,
        }
        with pytest.raises(InvalidEnvOutputError, match=problem) if problem else nullcontext():
            step = check_step(output, raw=False, most_chars=200)  # an image has no characters
            assert step["observations"][0]["content"][1] == {
                "type": "image",
                "image": Image(png("red")),
            }


def test_a_row_without_images_is_as_it_was() -> None:
    cfg = reward_config()
    assert as_prompt(7, {"prompt": "What is it?", "image": "ubuntu"}, cfg).extras == {
        "image": "ubuntu"
    }


def test_a_message_with_an_image_needs_a_model_that_reads_images() -> None:
    parts = [{"type": "text", "text": "What?"}, {"type": "image", "image": Image(png("red"))}]
    with pytest.raises(UserError, match="reads only text: images need a vision-language model"):
        ChatTokenizer(tokenizer()).prompt([{"role": "user", "content": parts}])  # type: ignore[typeddict-item]


@pytest.mark.parametrize("mark", ["vision_config", "audio_config"])
def test_a_model_of_another_type_is_rejected_before_it_is_loaded(tmp_path: Path, mark: str) -> None:
    shape = {"model_type": "gemma3", "text_config": {"num_attention_heads": 4}, mark: {"depth": 2}}
    (tmp_path / "config.json").write_text(json.dumps(shape))
    with pytest.raises(
        UserError, match=f"has a {mark}.*its type is gemma3; types that read images.*: qwen2_5_vl"
    ):
        check_model(str(tmp_path), Config())


@pytest.mark.parametrize(
    "setting",
    ["trainer.dump_trajectories=true", "trainer.policy.lora.base_dtype=int8", "trainer.policy.torch_compile=true"],
)  # fmt: skip
def test_settings_that_are_not_supported_with_images_are_rejected(
    tmp_path: Path, setting: str
) -> None:
    (tmp_path / "config.json").write_text(
        json.dumps({"model_type": "qwen3_vl", "vision_config": {"depth": 2}})
    )
    given = [
        "trainer.policy.model.path=x",
        "data.train_data=[x.jsonl]",
        "generator.backend=transformers",
        setting,
    ]
    given += ["trainer.policy.lora.rank=4"] if "lora" in setting else []
    with pytest.raises(
        UserError,
        match=f"reads images: {setting.split('=')[0]}.* is not supported for such a model",
    ):
        check_model(str(tmp_path), load_config(given))


def test_roles_and_engines_that_do_not_read_a_models_images_are_named(tmp_path: Path) -> None:
    for name, shape in (
        ("llava", {"model_type": "llava", "vision_config": {"depth": 2}}),
        ("gemma", {"model_type": "gemma3", "vision_config": {"depth": 2}}),
        ("text", {"model_type": "llama"}),
    ):
        (tmp_path / name).mkdir()
        (tmp_path / name / "config.json").write_text(json.dumps(shape))
    cfg = load_config(
        ["trainer.policy.model.path=x", "data.train_data=[x.jsonl]", "generator.backend=vllm"]
    )
    with pytest.raises(
        UserError, match=r"generator.backend=vllm, which has other names for LLaVA's weights"
    ):
        check_model(str(tmp_path / "llava"), cfg)
    servers = [
        "trainer.policy.model.path=x",
        "data.train_data=[x.jsonl]",
        "generator.engines=[http://127.0.0.1:8000]",
    ]
    with pytest.raises(
        UserError, match=r"generator.backend=vllm_server, which has other names for LLaVA's weights"
    ):
        check_model(str(tmp_path / "llava"), load_config(servers))
    with pytest.raises(
        UserError, match=r"reads images: generator.backend=sglang_server is not supported"
    ):
        check_model(
            str(tmp_path / "llava"), load_config([*servers, "generator.backend=sglang_server"])
        )
    with pytest.raises(
        UserError, match=r"the tokens of Gemma 3's images depend on the text around them"
    ):
        check_model(str(tmp_path / "gemma"), cfg)
    cfg.generator.backend, cfg.trainer.policy.model.path = "transformers", str(tmp_path / "llava")
    with pytest.raises(
        UserError, match=r"only the policy, its reference and its critic read images"
    ):
        check_model(str(tmp_path / "llava"), cfg, key="trainer.reward.models.judge.path")
    with pytest.raises(
        UserError, match=r"trainer.critic.model.path=.*text reads only text, and the policy"
    ):
        check_model(str(tmp_path / "text"), cfg, key="trainer.critic.model.path")


@pytest.mark.parametrize(
    "key",
    ["data.image_key=images", "data.max_images_per_prompt=2", "data.return_multi_modal_inputs=true",
     "generator.vision_language_generator=true"],
)  # fmt: skip
def test_other_systems_keys_for_pictures_are_answered_so(key: str) -> None:
    with pytest.raises(
        UserError, match=r"images are read from the columns|vision models are detected"
    ):
        load_config(["trainer.policy.model.path=x", "data.train_data=[x.jsonl]", key])
