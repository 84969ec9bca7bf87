"""The decode step as one persistent CuTe DSL launch: recorded from `decode_step`, scheduled, compiled, launched.

    recording.py   the op calls of one step, from the one statement of it
    lowering.py    calls -> rows: what is done together, in which order; `rows.py` says what a row is
    schedule.py    rows, the share of each SM, and where every activation lives
    encode.py      rows as the words of `table.py` that the kernel reads
    images.py      weights as they are streamed: rows in place, MXFP4 in blocks
    kernel.py      the kernel; `core.py`, `stream*.py` and `stages/` are its parts, `ptx.py` its instructions
    build.py       compiles it and proves the schedule, once: `cache.py` keeps both; `launch.py` launches it
    megakernel.py  one instance: memory, kernel, steps, errors; `alone.py` makes one op a launch of its own

All but the parts of the kernel imports without the DSL and without a GPU.
"""
