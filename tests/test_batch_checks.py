"""check_batch: every way in which a batch can point outside its pools gives one error that names the field."""

import pytest
import torch

from kimi_kernels.batch_checks import check_batch
from kimi_kernels.config import K3_MINI
from kimi_kernels.state import Batch, State

PAGE, PAGES = 4, 9


def state() -> State:
    return State.zeros(K3_MINI, slots=6, pages=PAGES, page_size=PAGE)


def batch(
    slots=(0, 5, -1), seq_lens=(7, 1, 0), page_table=((0, 1, 2), (3, 4, 5), (0, 0, 0)), first_valid_slot=0
) -> Batch:
    return Batch(
        slots=torch.tensor(slots, dtype=torch.int32),
        is_new=torch.zeros(len(slots), dtype=torch.bool),
        seq_lens=torch.tensor(seq_lens, dtype=torch.int32),
        page_table=torch.tensor(page_table, dtype=torch.int32),
        first_valid_slot=first_valid_slot,
    )


def test_a_good_batch_passes_and_padding_may_point_anywhere():
    check_batch(batch(), state(), rows=3)
    check_batch(batch(page_table=((0, 1, 99), (3, -7, 5), (99, 99, 99))), state(), rows=3)
    check_batch(batch(slots=(1, 5, 0), first_valid_slot=1), state(), rows=3)
    check_batch(batch(page_table=((0, 1, 2), (3, 4, 5), (0, 0, 0)), seq_lens=(7, 2, 0)), state(), rows=6)


BAD = {
    "slots must be below 6": dict(slots=(0, 6, -1)),
    r"slots of live sequences must differ, got \[5\]": dict(slots=(5, 5, -1)),
    r"seq_lens\[0\] must be in \[1, 12\]": dict(seq_lens=(13, 1, 0)),
    r"seq_lens\[1\] must be in \[1, 12\].*got 0": dict(seq_lens=(7, 0, 0)),
    r"seq_lens\[2\] must be in \[0, 0\] \(a padded sequence\), got 5": dict(seq_lens=(7, 1, 5)),
    r"must have one length, got \[3, 3, 2, 3\]": dict(seq_lens=(7, 1)),
    "first_valid_slot must be at least 0, got -1": dict(first_valid_slot=-1),
    r"page_table\[0\] must hold pages in \[0, 9\), got \[9\]": dict(page_table=((0, 9, 2), (3, 4, 5), (0, 0, 0))),
    "rows 0 and 1 both write page 1": dict(page_table=((0, 1, 2), (1, 4, 5), (0, 0, 0))),
}


@pytest.mark.parametrize("message", BAD)
def test_a_bad_batch_is_refused_by_name(message):
    with pytest.raises(ValueError, match=message):
        check_batch(batch(**BAD[message]), state(), rows=3)


def test_rows_must_be_whole_sequences():
    with pytest.raises(ValueError, match="R=4 must be a positive multiple of sequences B=3"):
        check_batch(batch(), state(), rows=4)
