"""Keys and passwords of a run are in none of its files."""

from __future__ import annotations

import json
import stat
from dataclasses import asdict
from pathlib import Path
from typing import Any

import pytest

from skyasync.config import dump_config, load_config
from skyasync.config.secrets import Secrets, hidden, is_secret
from skyasync.errors import UserError
from skyasync.observability.run_dir import RunDirectory
from skyasync.run.logs import ProcessLogs
from skyasync.trainer.checkpoint.settings_check import CONFIG, check_recorded, record

KEY, PASSWORD, TOKEN, OF_ENVIRONMENT = (
    "sk-3f1c99a2b7",
    "pa55-word-xyz",
    "tok-8d77e6f1",
    "env-5ce9d1037a",
)
GIVEN = [
    "trainer.policy.model.path=/nowhere",
    f"environment.env_config={{api_key: {KEY}, size: 4, nested: {{password: {PASSWORD}}}, max_tokens: 7}}",
    f"environment.reward_funcs=['http://user:{PASSWORD}@judge:5000/get_reward?token={TOKEN}&n=1']",
    "environment.env_class=reward",
]


@pytest.mark.parametrize(
    "name", ["api_key", "API_KEY", "openai_api_key", "token", "hf_token", "db_password", "secret"]
)
def test_names_of_secrets(name: str) -> None:
    assert is_secret(name)


@pytest.mark.parametrize(
    "name", ["api_key_env", "max_tokens", "stop_token", "tokenizer", "keys", "key", "passes", ""]
)
def test_names_of_others(name: str) -> None:
    assert not is_secret(name)


def test_what_is_written_down_of_a_configuration_has_no_secret(tmp_path: Path) -> None:
    cfg = load_config(GIVEN)
    written = dump_config(cfg, secrets=False)
    (tmp_path / CONFIG).write_text(json.dumps(record(cfg), default=str))
    for text in (written, (tmp_path / CONFIG).read_text()):
        assert not [secret for secret in (KEY, PASSWORD, TOKEN) if secret in text]
        assert (
            "size" in text
            and "max_tokens" in text
            and "http://user:***@judge:5000/get_reward?token=***&n=1" in text
        )
    assert KEY in dump_config(cfg)
    assert check_recorded(tmp_path, cfg) == [], "a hidden secret is no change"

    file = tmp_path / "config.yaml"
    file.write_text(written)
    with pytest.raises(UserError) as refused:
        load_config([f"--config={file}"])
    for key in (
        "environment.env_config.api_key",
        "environment.env_config.nested.password",
        "environment.reward_funcs",
    ):
        assert f"{key} is a secret that a run's config.yaml does not hold" in str(refused.value)


def test_a_secret_variable_is_hidden_under_any_key_and_config_yaml_refers_to_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HF_TOKEN", OF_ENVIRONMENT)
    monkeypatch.setenv("SERPER_KEY", KEY)
    file = tmp_path / "user.yaml"
    file.write_text(
        "trainer: {policy: {model: {path: /nowhere}}, project_name: 'a-${oc.env:HF_TOKEN}'}\n"
        "environment: {env_config: {key: '${oc.env:SERPER_KEY}', n: 1}}\n"
    )
    cfg = load_config([f"--config={file}"])
    assert (cfg.trainer.project_name, cfg.environment.env_config["key"]) == (
        f"a-{OF_ENVIRONMENT}",
        KEY,
    )
    shown = dump_config(cfg, secrets=False)
    recorded = json.dumps(record(cfg), default=str)
    trackers = str(hidden(asdict(cfg)))
    for text in (shown, recorded, trackers):
        assert not [secret for secret in (KEY, OF_ENVIRONMENT) if secret in text]
    (tmp_path / "config.yaml").write_text(shown)
    again = load_config([f"--config={tmp_path / 'config.yaml'}"])
    assert again.trainer.project_name == f"a-{OF_ENVIRONMENT}"
    assert again.environment.env_config == {"key": KEY, "n": 1}


def test_what_is_no_secret_is_written_as_it_is() -> None:
    cfg = load_config(
        [
            "trainer.policy.model.path=/nowhere",
            "environment.env_config={a: '***', b: 'http://h:1/x?n=2'}",
        ]
    )
    assert dump_config(cfg, secrets=False) == dump_config(cfg)
    assert hidden({"a": [1, None, True, "x@y"]}) == {"a": [1, None, True, "x@y"]}


def test_text_has_none_either(tmp_path: Path, capsys: Any) -> None:
    environment = {
        "JUDGE": "judge-key-4242",
        "MY_TOKEN": OF_ENVIRONMENT,
        "SSH_AUTH_SOCK": "/tmp/agent",
        "X_KEY": "12345678",
        "TOKENIZERS_BACKEND": "huggingface",
        "AUTHOR": "somebody1",
    }
    asked = [
        *GIVEN,
        "environment.judges={j: {base_url: 'http://h/v1', model: m, api_key_env: JUDGE}}",
    ]
    secrets = Secrets.of(load_config(asked), environment)
    said = f"{KEY} {PASSWORD} {OF_ENVIRONMENT} judge-key-4242 at http://a:b@h/ ?"
    assert secrets.hide_all(said) == "*** *** *** *** at http://a:***@h/ ?"
    plain = "/tmp/agent 12345678 huggingface somebody1 short"
    assert secrets.hide_all(plain) == plain

    run = RunDirectory(tmp_path, "run")
    run.secrets = secrets
    run.save_error(f"ConnectionError: refused {OF_ENVIRONMENT}")
    run.write_samples(1, [{"prompt_id": "a", "response": f"the key is {KEY}", "reward": 1.0}])
    logs = ProcessLogs(run.logs, hide=secrets.hide_all)
    logs({"pid": 7, "actor_name": "RpcActor", "lines": [f"asking with {KEY}"], "is_err": False})
    files = [path for path in run.path.rglob("*") if path.is_file()]
    assert len(files) == 3
    for path in files:
        assert "***" in path.read_text()
        assert not [
            secret for secret in (KEY, PASSWORD, OF_ENVIRONMENT) if secret in path.read_text()
        ]
    assert capsys.readouterr().out == "asking with ***\n"
    assert stat.S_IMODE(run.path.stat().st_mode) == 0o700
