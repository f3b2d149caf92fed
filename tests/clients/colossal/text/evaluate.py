"""A stand-in for the package evaluate, which downloads its metrics."""


class Accuracy:
    """The share of right predictions."""

    def __init__(self) -> None:
        self.right = self.all = 0

    def add_batch(self, predictions, references) -> None:
        self.right += int((predictions == references).sum())
        self.all += len(references)

    def compute(self) -> dict[str, float]:
        return {"accuracy": self.right / max(1, self.all)}


def load(*args, **options) -> Accuracy:
    return Accuracy()
