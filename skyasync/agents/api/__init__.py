"""The APIs of the endpoint, one file each.

An API reads its requests into the one ``ModelRequest`` of ``types``, and writes the ``ModelReply``s to it in its own
schema. Nothing here touches an engine, a tokenizer or the network.
"""
