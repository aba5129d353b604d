"""Vision-language models, one with M-RoPE and one without, against transformers' own processor and forward."""

from __future__ import annotations

import pickle
from collections.abc import AsyncIterator
from pathlib import Path

import pytest
import torch
from PIL import Image as PIL
from torch import Tensor

from skyasync.config.schema import Config
from skyasync.data.datasets import load_prompts
from skyasync.errors import UserError
from skyasync.inference.backends.transformers.engine import TransformersEngine
from skyasync.inference.interface import ENGINES, EngineConfig, GenerationRequest, SamplingParams
from skyasync.models.backend import OutputRequest
from skyasync.models.batch import TokenBatch
from skyasync.models.heads import load_causal_lm
from skyasync.models.images import Image, Images, read_image
from skyasync.models.packing import empty_micro_batch
from skyasync.models.token_model import TokenModel
from skyasync.models.vision import NEVER, decoded, processor_of
from skyasync.rollout.chat import ChatTokenizer
from skyasync.rollout.tokenizer import load_tokenizer
from tests.models.tiny_vision import (
    FAMILIES,
    OTHERS,
    UNUSED,
    answers_of,
    as_batch,
    conversation,
    logprobs,
    noise,
    prompt,
    save_tiny,
)

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module", params=[*FAMILIES, *OTHERS])
def folder(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> str:
    return save_tiny(request.param, tmp_path_factory.mktemp(request.param))


@pytest.fixture
async def engine(folder: str) -> AsyncIterator[TransformersEngine]:
    engine = ENGINES["transformers"](EngineConfig(folder, threads=1, max_model_len=200))
    await engine.start()
    yield engine
    await engine.shutdown()


CASES: list[Images] = [
    (noise(1),),
    (noise(2), noise(3, 84, 56)),
    (),
    (noise(4, 56, 112),),
    (noise(1),),
]


def by_transformers(
    folder: str, model: TokenModel, row: list[int], answer: int, images: Images
) -> Tensor:
    """Log-probabilities of the last ``answer`` tokens, from the processor's own tensors of the whole text."""
    processor = processor_of(folder)
    given = {}
    if images:
        text = processor._processor.apply_chat_template(
            conversation(len(images)), tokenize=False, add_generation_prompt=True
        )
        given = dict(
            processor._processor(
                text=[text], images=[[decoded(image) for image in images]], return_tensors="pt"
            )
        )
        prompt_length = given.pop("input_ids").shape[1]
        assert prompt_length == len(row) - answer
        given.pop("attention_mask")
        if "mm_token_type_ids" in given:
            given["mm_token_type_ids"] = torch.nn.functional.pad(
                given["mm_token_type_ids"], (0, answer)
            )
    logits = model.model(input_ids=torch.tensor([row]), **given).logits[0, -answer - 1 : -1]
    assert model.vision is not None
    scores = logits.index_fill(1, model.vision.banned, NEVER).log_softmax(1)
    return scores.gather(1, torch.tensor(row[-answer:])[:, None])[:, 0]


def test_tokens_of_images_are_those_of_the_processor(folder: str) -> None:
    processor, images = processor_of(folder), (noise(2), noise(3, 84, 56))
    template = processor._processor.apply_chat_template
    text = template(conversation(2), tokenize=False, add_generation_prompt=True)
    given = processor._processor(
        text=[text], images=[[decoded(i) for i in images]], return_tensors="pt"
    )
    expanded = prompt(folder, images)
    assert expanded == given["input_ids"][0].tolist()
    assert processor.collapse(expanded, images).count(processor.placeholder) == 2
    assert processor.expand(processor.collapse(expanded, images), images).tolist() == expanded
    for name, value in processor.features(images).items():
        assert torch.equal(value, given[name])
    with pytest.raises(UserError, match="has 2 placeholders for 1 images"):
        processor.expand(processor.collapse(expanded, images), images[:1])
    with pytest.raises(UserError, match="do not hold those of its 1 images"):
        processor.collapse(expanded, images[:1])


def test_a_text_with_a_placeholder_and_no_image_is_rejected(folder: str) -> None:
    chat, mark = ChatTokenizer(load_tokenizer(folder)), processor_of(folder)._processor.image_token
    assert chat.prompt([{"role": "user", "content": "How many?"}]).tolist()
    with pytest.raises(
        UserError, match=r"has 1 placeholders for 0 images: .* texts must not contain it"
    ):
        chat.prompt([{"role": "user", "content": f"How many {mark}?"}])
    cfg = Config()
    cfg.environment.reward_funcs = ["gsm8k"]
    cfg.data.train_data = ["rows.jsonl"]
    rows = {"rows.jsonl": [{"prompt": "1 + 1", "answer": "2"}, {"prompt": mark, "answer": "2"}]}
    with pytest.raises(UserError, match="data row 1: the prompt has 1 placeholders for 0 images"):
        load_prompts(cfg.data.train_data, cfg, load_tokenizer(folder), loaded_rows=rows)


def test_rows_with_images_have_the_gradient_of_each_row_alone(folder: str) -> None:
    model = TokenModel(load_causal_lm(folder, torch.float32))
    prompts = [prompt(folder, images) for images in CASES]
    answers = [[5, 6, 7], [8, 9], [10, 11, 12], [13], [5, 6, 7, 8]]
    batch = as_batch(prompts, answers, CASES)
    weights = torch.linspace(0.5, 1.5, batch.tokens.numel()).view(batch.tokens.shape)

    own = logprobs(model, batch)
    (own * weights).sum().backward()
    gradients = {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}
    used = {
        name for name, _ in model.named_parameters() if not any(part in name for part in UNUSED)
    }
    assert gradients.keys() == used
    model.zero_grad()
    for i, (p, answer, images) in enumerate(zip(prompts, answers, CASES, strict=True)):
        expected = by_transformers(folder, model, p + answer, len(answer), images)
        start = len(p)
        torch.testing.assert_close(own[i, start : start + len(answer)], expected, atol=1e-5, rtol=0)
        (expected * weights[i, start : start + len(answer)]).sum().backward()
    for name in used:
        parameter = model.get_parameter(name)
        assert parameter.grad is not None
        scale = parameter.grad.abs().max()
        assert (gradients[name] - parameter.grad).abs().max() <= 1e-5 * scale + 1e-6, name


def test_a_batch_of_text_calls_the_tower_and_changes_nothing(folder: str) -> None:
    model = TokenModel(load_causal_lm(folder, torch.float32))
    batch = as_batch([prompt(folder, ())] * 2, [[5, 6], [7]], [(), ()])
    own = logprobs(model, batch)
    own.sum().backward()
    named = [
        (name, p)
        for name, p in model.named_parameters()
        if not any(part in name for part in UNUSED)
    ]
    towers = [p for name, p in named if "visual" in name or "vision" in name]
    assert towers
    assert all(p.grad is not None and not p.grad.any() for p in towers)
    expected = by_transformers(folder, model, [*prompt(folder, ()), 5, 6], 2, ())
    torch.testing.assert_close(own[0, -2:], expected, atol=1e-5, rtol=0)
    empty = empty_micro_batch(as_batch([prompt(folder, CASES[0])], [[5]], [CASES[0]]))
    assert model(empty.layout, OutputRequest())["logprobs"].abs().sum() == 0


async def test_engine_and_trainer_agree_and_a_wrong_image_is_found(
    folder: str, engine: TransformersEngine
) -> None:
    model = TokenModel(load_causal_lm(folder, torch.float32))
    sampling = SamplingParams(max_tokens=16, ignore_eos=True)
    cases = [images for images in CASES for _ in range(3)]
    prompts = [prompt(folder, images) for images in cases]
    requests = [
        GenerationRequest(f"r{i}", p, sampling, images=images)
        for i, (p, images) in enumerate(zip(prompts, cases, strict=True))
    ]
    outputs = await answers_of(engine, requests)
    assert not any(output.error for output in outputs)
    answers = [output.token_ids.tolist() for output in outputs]
    sampled = torch.tensor([output.logprobs.tolist() for output in outputs]).flatten()
    batch = as_batch(prompts, answers, cases)
    with torch.no_grad():
        trained = logprobs(model, batch)[batch.loss_mask]
        assert (trained - sampled).abs().max() < 1e-5
        wrong = [tuple(noise(99, *decoded(image).size) for image in images) for images in cases]
        other = logprobs(model, as_batch(prompts, answers, wrong))[batch.loss_mask]
    seen = torch.tensor([bool(images) for images in cases for _ in range(16)])
    assert (other - sampled).abs()[seen].mean() > 0.1


async def test_engine_and_trainer_differ_by_rounding_in_bfloat16(folder: str) -> None:
    engine = ENGINES["transformers"](
        EngineConfig(folder, threads=1, max_model_len=200, dtype="bfloat16")
    )
    await engine.start()
    prompts = [prompt(folder, images) for images in CASES]
    sampling = SamplingParams(max_tokens=16, ignore_eos=True)
    requests = [
        GenerationRequest(f"r{i}", p, sampling, images=images)
        for i, (p, images) in enumerate(zip(prompts, CASES, strict=True))
    ]
    outputs = await answers_of(engine, requests)
    await engine.shutdown()
    batch = as_batch(prompts, [output.token_ids.tolist() for output in outputs], CASES)
    sampled = torch.tensor([output.logprobs.tolist() for output in outputs]).flatten()
    with torch.no_grad():
        trained = logprobs(TokenModel(load_causal_lm(folder, torch.bfloat16)), batch)[
            batch.loss_mask
        ]
    assert (trained - sampled).abs().mean() < 0.02


async def test_placeholders_are_never_sampled_and_wrong_prompts_are_rejected(
    folder: str, engine: TransformersEngine
) -> None:
    images, processor = (noise(1),), processor_of(folder)
    tokens = prompt(folder, images)
    hot = SamplingParams(max_tokens=100, temperature=50.0, ignore_eos=True)
    requests = [GenerationRequest(f"r{i}", tokens, hot, images=images) for i in range(20)]
    drawn = [t for output in await answers_of(engine, requests) for t in output.token_ids.tolist()]
    assert len(drawn) == 2000
    assert processor.placeholder not in drawn
    biased = SamplingParams(
        max_tokens=5, logit_bias={processor.placeholder: 100.0}, ignore_eos=True
    )
    short = processor.collapse(tokens, images)
    results = await answers_of(
        engine,
        [
            GenerationRequest("biased", tokens, biased, images=images),
            GenerationRequest("collapsed", short, hot, images=images),
            GenerationRequest("none", tokens, hot),
        ],
    )
    assert processor.placeholder not in results[0].token_ids
    assert all("do not hold those of its" in output.error for output in results[1:])


def test_equal_images_are_one_object_also_in_a_pickle() -> None:
    image = noise(7)
    assert read_image(image.data) is image
    one, two = pickle.loads(pickle.dumps([(image,), (Image(bytes(image.data)),)]))
    assert one[0] is two[0] is image
    assert len(pickle.dumps([image] * 50)) < len(image.data) + 1000


def test_what_is_no_image_is_rejected_in_words(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "a.png").write_bytes(b"no picture")
    large = PIL.new("L", (300, 300))
    monkeypatch.setattr(PIL, "MAX_IMAGE_PIXELS", 300 * 300 // 2 - 1)  # twice as many are an error
    for value, message in (
        (tmp_path / "a.png", "cannot be decoded"),
        (noise(1).data[:-100], r"an image of \d+ bytes cannot be decoded: image file is truncated"),
        (
            b"<svg xmlns='http://www.w3.org/2000/svg'/>",
            r"begins with b.<svg xmlns=.*, which is not an image format",
        ),
        (large, r"cannot be decoded: Image size \(90000 pixels\) exceeds limit of 89998 pixels"),
        (str(tmp_path / "b.png"), "cannot be read: No such file"),
        ("https://example.org/a.png", "not downloaded"),
        ("data:image/png,abc", "not data:image/...;base64"),
        (7, "found '7'"),
    ):
        with pytest.raises(UserError, match=message):
            read_image(value)


def test_an_image_whose_shape_the_processor_rejects_is_named(tmp_path: Path) -> None:
    line = read_image(PIL.new("RGB", (1, 300)))
    with pytest.raises(
        UserError, match="processor cannot read an image of 1 x 300 pixels: absolute aspect ratio"
    ):
        processor_of(save_tiny("qwen3_vl", tmp_path)).placeholders_in(line)


def test_prompts_with_too_many_or_too_large_images_are_left_out(
    folder: str, caplog: pytest.LogCaptureFixture, tmp_path: Path
) -> None:
    cfg, row = Config(), {"prompt": "How many?", "answer": "2"}
    cfg.environment.reward_funcs, cfg.data.train_data = ["gsm8k"], ["rows.jsonl"]
    many = row | {"images": [noise(1).data] * 9}
    tokenizer, chat = load_tokenizer(folder), ChatTokenizer(load_tokenizer(folder))
    one = [
        {
            "role": "user",
            "content": [
                {"type": "image", "image": noise(1)},
                {"type": "text", "text": "How many?"},
            ],
        }
    ]
    cfg.trainer.max_prompt_length = limit = len(chat.prompt(one))
    (kept,) = load_prompts(
        cfg.data.train_data,
        cfg,
        tokenizer,
        loaded_rows={"rows.jsonl": [row | {"image": noise(1).data}, many]},
    )
    assert kept.id.row == 0
    assert (
        f"1 of 2 prompts have more than trainer.max_prompt_length={limit} tokens and are left out"
        in caplog.text
    )
    with pytest.raises(
        UserError, match=f"no prompt has at most trainer.max_prompt_length={limit} tokens"
    ):
        load_prompts(cfg.data.train_data, cfg, tokenizer, loaded_rows={"rows.jsonl": [many]})


def test_batches_keep_the_images_of_their_rows(folder: str) -> None:
    batch = as_batch([[1, 2], [3], [4]], [[5], [6], [7]], [(noise(1),), (), (noise(2),)])
    assert batch.select(torch.tensor([2, 0])).images == ((noise(2),), (noise(1),))
    text = TokenBatch(batch.tokens, batch.attention_mask, batch.loss_mask, batch.group_ids)
    assert TokenBatch.concatenate([text, batch]).images == ((), (), (), *batch.images)
    assert TokenBatch.concatenate([text, text]).images is None
    assert batch.trim().images == batch.images
