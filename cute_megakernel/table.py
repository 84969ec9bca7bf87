"""The table in memory: 64 words a row for all SMs, and four words a row for each SM.

fields [rows, 64] int32      what the row does; 64-bit addresses take two words and start at an even place
work   [sms, rows, 4] int32  first and end unit of the SM, its cap of copies; first = end: nothing to do
"""

# "a/b": one word under two names, for rows of different codes
NAMES = (
    "code", "r0", "r1", "kind/second", "src/inner", "src_pitch/inner_pitch", "dst", "dst_pitch", "h/tap/ckv",
    "h_pitch/tap_pitch/ckv_pitch", "add1/gate", "add2/gate_pitch", "width/n_valid", "x_pitch", "group/batch_tiles",
    "group_pad/x_batch", "n_bank/kb/o", "scores/total/o_pitch", "pool_count/ppt", "page_size/piece", "f_a/span",
    "epilogue", "p0/scale", "p1", "eps/copy", "tap_o/group_pieces", "local", "tap_beta/x_at", "bank0/row_bytes",
    "bank1/pair", "bank2/copies", "bank3/copy_stride", "bank4/sub", "bank5/tpp", "bank6/part", "bank7/ml", "weight:",
    "", "weight2:", "", "norm:", "", "pool:", "", "pool_stride:", "", "expert_stride/A_log:", "", "out/window:", "",
    "groups/group_tiles", "vocab_start", "rope/beta/magic", "rope_pitch/pitch", "window_stride:", "", "f_b:", "",
    "g_b:", "", "tap_z", "tap_raw_decay", "tap_out_gate", "tap_log_decay",
)  # fmt: skip
FIELD = {name.rstrip(":"): i for i, names in enumerate(NAMES) for name in names.split("/") if name}
WIDE = {name for names in NAMES if names.endswith(":") for name in names.rstrip(":").split("/")}
ABSENT = -1  # an activation that the row does not have
assert len(NAMES) <= 64
assert all(FIELD[name] % 2 == 0 for name in WIDE)
