"""The loss is one sum over one count: compared with float64 arithmetic done by hand or by torch."""

import math

import pytest
import torch
import torch.nn.functional as F
from torchtune.modules.loss import CEWithChunkedOutputLoss

from tests.tiny import ByteTokenizer, Sums, tiny_model
from torchtune_packing import PackedDataset, collate_packed
from torchtune_packing.loss import TrainedRows, loss_rows, sum_cross_entropy
from torchtune_packing.training.metrics import StepCounts
from torchtune_packing.training.parallel import Ranks


def nll(logits: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
    """Negative log likelihood of each target in float64, written out."""
    x = logits.double()
    return x.exp().sum(-1).log() - x.gather(-1, targets.unsqueeze(-1)).squeeze(-1)


def test_sum_equals_float64_written_out() -> None:
    logits, targets = torch.randn(10, 7), torch.randint(7, (10,))
    found = sum_cross_entropy(logits.unsqueeze(0), targets)
    assert found.item() == pytest.approx(nll(logits, targets).sum().item(), rel=1e-6)


@pytest.mark.parametrize("chunks", [1, 4, 7, 10])
def test_B17_chunks_do_not_change_the_value(chunks: int) -> None:
    """10 tokens, the first 5 not trained: the mean over the trained ones, whatever the chunks."""
    logits, labels = torch.randn(1, 10, 11), torch.randint(11, (1, 10))
    labels[0, :5] = -100
    right = F.cross_entropy(logits[0], labels[0], reduction="mean").item()
    rows = loss_rows(labels, torch.tensor([[10]]))
    kept = logits.flatten(0, 1)[rows.rows].unsqueeze(0)
    pieces = list(kept.chunk(chunks, dim=1)) + [kept[:, :0]]
    assert sum_cross_entropy(pieces, rows.targets).item() / rows.count == pytest.approx(right, 1e-6)
    # A loss that is divided per chunk would meet an empty one: 0 / 0.
    assert math.isfinite(sum_cross_entropy([kept[:, :0]], rows.targets[:0]).item())


def test_B6_micro_batches_weigh_by_their_targets() -> None:
    """(mean, n) = (2.0, 3) and (4.0, 5): 26 / 8; two ranks (10.0, 1) and (1.0, 9): 19 / 10."""
    for cuts, right in ((((2.0, 3), (4.0, 5)), 3.25), (((10.0, 1), (1.0, 9)), 1.9)):
        counts, total = StepCounts(), 0.0
        for mean, n in cuts:
            # Logits over two tokens whose cross entropy is exactly `mean` per row.
            wrong = math.log(math.exp(mean) - 1)
            logits = torch.tensor([[0.0, wrong]], dtype=torch.float64).expand(n, 2)
            total += sum_cross_entropy(logits, torch.zeros(n, dtype=torch.int64)).item()
            counts.add(StepCounts(divisor=n, trained=n))
        assert total / counts.divisor == pytest.approx(right, rel=1e-12)


def test_B16_tokens_weigh_alike_by_default_documents_on_request() -> None:
    """Documents with 6 and 1 trained targets: 1/7 each, or 1/12 and 1/2."""
    targets = torch.full((1, 10), -100)
    targets[0, 1:7] = 3  # document 1: positions 0 to 7
    targets[0, 8] = 3  # document 2: positions 8 to 9
    seq_lens = torch.tensor([[8, 2]], dtype=torch.int32)
    plain = loss_rows(targets, seq_lens)
    assert plain.count == 7 and plain.weights is None
    weighed = loss_rows(targets, seq_lens, "document")
    assert weighed.count == 2
    shares = (weighed.weights / weighed.count).tolist()
    assert shares == pytest.approx([1 / 12] * 6 + [1 / 2])
    logits = torch.randn(7, 5)
    each = nll(logits, weighed.targets)
    right = (each[:6].mean() + each[6]) / 2
    found = sum_cross_entropy(logits, weighed.targets, weighed.weights) / weighed.count
    assert found.item() == pytest.approx(right.item(), rel=1e-6)


def test_document_weights_are_the_same_in_other_batch_cuts() -> None:
    """Rows of a batch do not share document numbers; zero slots and padding are no documents."""
    one = torch.tensor([[-100, 1, 1, -100, 2, -100], [1, -100, -100, -100, 4, 4]])
    lens = torch.tensor([[3, 2, 1], [2, 4, 0]], dtype=torch.int32)
    both = loss_rows(one, lens, "document")
    apart = [loss_rows(one[i : i + 1], lens[i : i + 1], "document") for i in range(2)]
    assert both.count == sum(a.count for a in apart) == 4
    assert both.weights.tolist() == [*apart[0].weights.tolist(), *apart[1].weights.tolist()]
    assert both.weights.tolist() == [0.5, 0.5, 1.0, 1.0, 0.5, 0.5]


def test_unknown_reduction_is_refused_with_the_choices() -> None:
    with pytest.raises(ValueError, match='loss_reduction is \'mean\'.*"token".*"document"'):
        loss_rows(torch.zeros(1, 2), torch.tensor([[2]]), "mean")


def test_rows_and_targets_must_agree() -> None:
    with pytest.raises(ValueError, match="4 rows of logits for 3 targets"):
        sum_cross_entropy(torch.zeros(1, 4, 5), torch.zeros(3, dtype=torch.int64))


def packed_batch() -> dict[str, torch.Tensor]:
    packs = PackedDataset(Sums(ByteTokenizer(), num_samples=12), max_seq_len=64)
    return collate_packed([packs[0], packs[1]], shift_labels=True, mask="bool")


@pytest.mark.parametrize("chunks", [0, 3])
def test_trained_rows_leave_loss_and_gradients_as_they_are(chunks: int) -> None:
    """The narrowed model in float64 against all logits and torch's own ignore_index."""
    batch, grads, losses = packed_batch(), [], []
    labels = batch.pop("labels")
    for narrowed in (False, True):
        torch.manual_seed(3)
        model = tiny_model().double()
        if narrowed:
            model.set_num_output_chunks(chunks)
            rows = loss_rows(labels, torch.tensor([[64], [64]]))
            with TrainedRows(model).only(rows.rows):
                logits = model(**batch)
            shown = logits if isinstance(logits, torch.Tensor) else logits[0]
            assert shown.shape[1] < labels.numel() / 2
            loss = sum_cross_entropy(logits, rows.targets)
        else:
            loss = F.cross_entropy(model(**batch).flatten(0, 1), labels.flatten(), reduction="sum")
        loss.backward()
        losses.append(loss.item())
        grads.append({name: p.grad for name, p in model.named_parameters()})
    # The decoder hands its logits over in float32, in other groupings: that is the rounding left.
    assert losses[1] == pytest.approx(losses[0], rel=1e-6)
    for name, grad in grads[0].items():
        torch.testing.assert_close(grads[1][name], grad, rtol=1e-5, atol=1e-6)


def test_trained_rows_can_be_left_and_taken_off() -> None:
    batch, model = packed_batch(), tiny_model()
    batch.pop("labels")
    narrow = TrainedRows(model)
    with narrow.only(torch.tensor([5])):
        assert model(**batch).shape == (1, 1, 260)
    assert model(**batch).shape == (2, batch["tokens"].shape[1], 260)
    with pytest.raises(RuntimeError), narrow.only(torch.tensor([5])):
        raise RuntimeError
    narrow.remove()
    assert not model.norm._forward_pre_hooks


def test_same_value_as_torchtunes_chunked_loss() -> None:
    """A peer's implementation on the same logits: mean over trained targets."""
    logits, labels = torch.randn(2, 16, 50), torch.randint(50, (2, 16))
    labels[0, 3:9] = -100
    peer = CEWithChunkedOutputLoss(num_output_chunks=4)(list(logits.chunk(4, dim=1)), labels)
    rows = loss_rows(labels, torch.tensor([[16], [16]]))
    ours = sum_cross_entropy(logits.flatten(0, 1)[rows.rows], rows.targets) / rows.count
    assert ours.item() == pytest.approx(peer.item(), rel=1e-5)


def test_B8_count_of_packed_equals_unpacked() -> None:
    """[3, 2] in 6: three targets packed, and three alone; boundaries are not taken off twice."""
    from tests.helpers import D

    packs = PackedDataset(D([3, 2]), max_seq_len=6, strategy="sequential")
    batch = collate_packed([packs[0]], pad_to=6, shift_labels=True, mask=None)
    assert batch["labels"].tolist() == [[101, 102, -100, 201, -100, -100]]  # B1
    assert loss_rows(batch["labels"], batch["seq_lens"]).count == 3
    alone = sum(len(tokens) - 1 for tokens in ([100, 101, 102], [200, 201]))
    assert alone == 3


def test_B7_counts_of_a_step_are_made_anew() -> None:
    """Counting over the ranks gives a new object: a second reduction does not count twice."""
    ranks = Ranks(0, 1, torch.device("cpu"))
    own = StepCounts(divisor=4, trained=4)
    assert own.over_ranks(ranks).divisor == 4 and own.over_ranks(ranks).divisor == 4
    assert own.divisor == 4
