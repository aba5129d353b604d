"""The Tinker API on this machine: a server that programs for Tinker's SDK train and sample with.

    the SDK ── HTTP ──▶ server ──▶ training ──▶ policy ──▶ the policy's ranks
                          │                        └──▶ weight sync ──▶ engines
                          └──────▶ sampling ──────────────────────────▶ engines

The ranks have one adapter at a time, the engines one snapshot at a time. ``store`` has the state
that the next server continues, ``wire`` the messages of the protocol, ``losses`` its losses.

Invariant: importing this package imports nothing.
"""
