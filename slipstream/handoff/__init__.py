"""The direct path between target and draft: four verbs, two ends, several transports.

The target publishes context and awaits a proposal; the draft awaits context and publishes a
proposal. A transport gives one `TargetEnd` and one `DraftEnd` per session. What the peer wrote is
input, not truth: whoever takes a message checks it before use.
"""
