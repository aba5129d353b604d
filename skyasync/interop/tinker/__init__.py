"""The Tinker API on this machine: a server to which programs written for Tinker's SDK train and
sample.

    the SDK ── HTTP ──▶ server ──▶ training ──▶ policy ──▶ the policy's ranks, one adapter at a time
                          │                        └──▶ weight sync ──▶ engines
                          └──────▶ sampling ────────────────────────────▶ engines, one snapshot at a
                          time

Invariant: importing this package imports nothing. ``store`` holds what outlives the server,
``wire`` the messages of the protocol, ``losses`` its losses.
"""
