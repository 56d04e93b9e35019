"""DocumentLayout: where the documents of a batch lie, worked out by hand."""

import pytest
import torch

from torchtune_packing.layout import DocumentLayout

SEQ_LENS = torch.tensor([[3, 2, 1], [4, 2, 0]], dtype=torch.int32)


def test_layout_of_two_rows_by_hand() -> None:
    layout = DocumentLayout.from_seq_lens(SEQ_LENS, 6)
    assert layout.cu_seqlens.tolist() == [0, 3, 5, 6, 10, 12, 12]
    assert layout.cu_seqlens.dtype == torch.int32
    assert layout.spans.tolist() == [[0, 3, 5, 6, 10, 12], [3, 2, 1, 4, 2, 0]]
    assert layout.lengths == [3, 2, 1, 4, 2]
    assert (layout.batch_size, layout.seq_len, layout.max_seqlen) == (2, 6, 6)


def test_known_padding_gets_no_span_but_stays_in_cu_seqlens() -> None:
    layout = DocumentLayout.from_seq_lens(SEQ_LENS, 6, real_lengths=torch.tensor([5, 6]))
    assert layout.spans[1].tolist() == [3, 2, 0, 4, 2, 0]
    assert layout.cu_seqlens.tolist() == [0, 3, 5, 6, 10, 12, 12]


def test_a_full_row_has_no_padding_tail() -> None:
    layout = DocumentLayout.from_seq_lens(torch.tensor([[4, 2]]), 6, real_lengths=torch.tensor([6]))
    assert layout.lengths == [4, 2]


def test_the_bound_on_lengths_is_taken_over() -> None:
    layout = DocumentLayout.from_seq_lens(torch.tensor([[4, 2]]), 6, max_seqlen=4)
    assert layout.max_seqlen == 4


def test_slots_fix_the_shapes() -> None:
    few = DocumentLayout.from_seq_lens(torch.tensor([[6]]), 6, num_slots=4)
    many = DocumentLayout.from_seq_lens(torch.tensor([[1, 2, 2, 1]]), 6, num_slots=4)
    assert few.cu_seqlens.tolist() == [0, 6, 6, 6, 6]
    assert many.cu_seqlens.tolist() == [0, 1, 3, 5, 6]
    assert few.spans.shape == many.spans.shape == (2, 4)


@pytest.mark.parametrize(
    ("seq_lens", "kwargs", "message"),
    [
        (torch.tensor([[3, 2]]), {}, "sum to s = 6; found sums \\[5\\]"),
        (torch.tensor([[7, -1]]), {}, "must be >= 0"),
        (torch.tensor([3, 3]), {}, "integer tensor \\[b, d\\]"),
        (torch.tensor([[3.0, 3.0]]), {}, "integer tensor"),
        (torch.tensor([[3, 3]]), {"num_slots": 1}, "num_slots = 1"),
        (torch.tensor([[4, 2]]), {"max_seqlen": 3}, "max_seqlen = 3 is less than .*, 4"),
    ],
)
def test_wrong_seq_lens_are_named(seq_lens, kwargs, message) -> None:
    with pytest.raises(ValueError, match=message):
        DocumentLayout.from_seq_lens(seq_lens, 6, **kwargs)


def test_seq_lens_on_a_device_are_refused_because_reading_them_waits() -> None:
    with pytest.raises(ValueError, match="meta.*wait for the device"):
        DocumentLayout.from_seq_lens(torch.empty(1, 2, dtype=torch.int32, device="meta"), 6)


def test_a_function_mapped_over_arguments_leaves_the_layout_alone() -> None:
    layout = DocumentLayout.from_seq_lens(SEQ_LENS, 6)
    mapped = torch.utils._pytree.tree_map_only(torch.Tensor, lambda t: t.double(), {"mask": layout})
    assert mapped["mask"] is layout
    assert layout.cu_seqlens.dtype == torch.int32
