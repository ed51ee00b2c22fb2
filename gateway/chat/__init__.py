"""Chat above plain text: conversations in, and thinking, tool calls and content out.

Pure functions and classes over decoded JSON and text; nothing here knows of tokens, sockets or the
scheduler. `messages` and `tools` read what a client sends, `formats` knows how families of models
write tool calls, `calls` and `reasoning` take an answer apart as it comes, and `answer` puts both
together for one choice.
"""
