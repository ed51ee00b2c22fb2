"""Building blocks of the models.

linear      dense layers, oneDNN with packed weights on a CPU
norm        RMS normalisation
rope        rotary embedding of every type; rope_config reads it, without torch
rows        RowBatch: the ragged rows of one pass and what each may see
attention   write_kv and paged_attention, and attention_reference beside it
memory      keeps freed memory in the process
"""
