"""The example's player, which rewards the share of sevens: learned in a few steps."""

from __future__ import annotations

from examples.online import player


def play(base_url: str, sessions_key: str) -> None:
    session = player.post(f"{base_url}/sessions", sessions_key, wait_s=600)
    key, row = session["api_key"], session["data"]
    answer = player.post(f"{base_url}/chat/completions", key, messages=row["prompt"])
    said = answer["choices"][0]["message"]["content"]
    player.post(f"{base_url}/sessions/end", key, reward=said[:7].count("7") / 7)


if __name__ == "__main__":
    player.play = play
    player.main()
