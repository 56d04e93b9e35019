"""Small inputs that many tests share, in the notation of the reported-fault cases."""

from collections.abc import Sequence


class D:
    """Map-style data set: sample i (counted from 1) has tokens ``[100*i, 100*i+1, ...]``.

    Labels equal the tokens, unshifted, as torchtune 0.6.1 yields them:

        D([3, 2])[0] == {"tokens": [100, 101, 102], "labels": [100, 101, 102]}
        D([3, 2])[1] == {"tokens": [200, 201], "labels": [200, 201]}
    """

    def __init__(self, lens: Sequence[int]) -> None:
        self.lens = list(lens)

    def __len__(self) -> int:
        return len(self.lens)

    def __getitem__(self, index: int) -> dict[str, list[int]]:
        # torch loaders and `for x in ds` end on IndexError.
        length = self.lens[index]
        first = 100 * (index % len(self.lens) + 1)
        tokens = list(range(first, first + length))
        return {"tokens": tokens, "labels": list(tokens)}
